"""Retry policies as tables, such as TOML and JSON have them, and as one line of text."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, cast

from .errors import InvalidInput
from .known_names import check_known
from .retry import RetryPolicy
from .retry_rule import Rule
from .times import delay_ms, delay_text

MAX_TEXT_BYTES: Final = 1024


def read_policy(table: Mapping[str, Any]) -> RetryPolicy:
    """The policy a table describes; what it leaves out has its default. What is wrong or unknown is named."""
    if not isinstance(table, Mapping):
        raise InvalidInput(f"expected a table of settings, not {type(table).__name__}")
    check_known(table, _FIELDS, "a retry policy")
    fields: dict[str, Any] = {}
    for name, value in table.items():
        field, read = _FIELDS[name]
        if field in fields:
            raise InvalidInput("retries and max_attempts are both set; keep one")
        fields[field] = read(name, value)
    return RetryPolicy(**fields)


@lru_cache(maxsize=4096)
def parse_policy(text: str) -> RetryPolicy:
    """A policy in one line: settings `name=value` and rules `429=retry:30s` with spaces between; a bare number counts
    attempts."""
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InvalidInput(f"a retry policy has at most {MAX_TEXT_BYTES} bytes")
    table: dict[str, Any] = {}
    rules: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, given, value = ("max_attempts", "=", part) if part.isdigit() else part.partition("=")
        if not given:
            raise InvalidInput(f"retry {text[:80]!r}: {part!r} is no name=value")
        if not value.startswith(("retry", "dead")):
            check_known([name], _FIELDS, "a retry policy", ", and rules such as 429=retry:30s")
        into = table if name in _FIELDS else rules
        if name in into:
            raise InvalidInput(f"retry {text[:80]!r}: {name} is given twice")
        into[name] = value
    return read_policy(table | ({"on": rules} if rules else {}))


def read_retry(value: object) -> RetryPolicy:
    """A table, or one line."""
    return parse_policy(value) if isinstance(value, str) else read_policy(cast("Mapping[str, Any]", value))


def retry_line(retry: RetryPolicy | str) -> str:
    """What an entry keeps of a task's own policy; refuses what is none."""
    if isinstance(retry, str):
        return policy_text(parse_policy(retry))
    if not isinstance(retry, RetryPolicy):
        raise InvalidInput(f"retry is a {type(retry).__name__}; give a RetryPolicy or a line such as '5 base=200ms'")
    return policy_text(retry)


def policy_text(policy: RetryPolicy) -> str:
    """The shortest line that says this policy."""
    parts = [str(policy.max_attempts)]
    if policy.base_ms != _DEFAULT.base_ms:
        parts.append(f"base={delay_text(policy.base_ms)}")
    if policy.factor != _DEFAULT.factor:
        parts.append(f"factor={policy.factor!r}".removesuffix(".0"))
    if policy.cap_ms != _DEFAULT.cap_ms:
        parts.append(f"cap={delay_text(policy.cap_ms)}")
    if policy.jitter != _DEFAULT.jitter:
        parts.append(f"jitter={policy.jitter}")
    if policy.max_age_ms is not None:
        parts.append(f"max_age={delay_text(policy.max_age_ms)}")
    return " ".join([*parts, *(f"{rule.when}={rule.action}" for rule in policy.on)])


def policy_table(policy: RetryPolicy) -> dict[str, Any]:
    """The table from which `read_policy` makes this policy again."""
    table: dict[str, Any] = {
        "max_attempts": policy.max_attempts,
        "base": delay_text(policy.base_ms),
        "factor": policy.factor,
        "cap": delay_text(policy.cap_ms),
        "jitter": policy.jitter,
    }
    if policy.max_age_ms is not None:
        table["max_age"] = delay_text(policy.max_age_ms)
    return table | ({"on": {rule.when: rule.action for rule in policy.on}} if policy.on else {})


def read_rules(name: str, value: object) -> tuple[Rule, ...]:
    """A table of rules, or the same as a text: `429=retry:30s 4xx=dead`."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.replace(",", " ").split()]
        value = {when: action for when, _, action in pairs}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table of rules such as {{'429' = 'retry 30s'}}")
    return tuple(Rule.read(str(when), action) for when, action in value.items())


def _whole(name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name}: expected a whole number, not {value!r}")
    return value


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise InvalidInput(f"{name}: expected a number, not {value!r}")


def _ms(name: str, value: object) -> int:
    # A bare number is refused: seconds and milliseconds are too easily mistaken for each other.
    if isinstance(value, (int, float)):
        raise InvalidInput(f"{name}: expected a duration with its unit such as '5s', not {value!r}")
    return delay_ms(value, field=name)  # type: ignore[arg-type]  # it refuses what is neither text nor timedelta


def _jitter(name: str, value: object) -> str:
    return value if isinstance(value, str) else delay_text(_ms(name, value))


_DEFAULT: Final = RetryPolicy()
_FIELDS: Final[dict[str, tuple[str, Callable[[str, object], Any]]]] = {
    "max_attempts": ("max_attempts", _whole),
    "retries": ("max_attempts", lambda name, value: _whole(name, value) + 1),
    "base": ("base_ms", _ms),
    "factor": ("factor", _number),
    "cap": ("cap_ms", _ms),
    "jitter": ("jitter", _jitter),
    "max_age": ("max_age_ms", _ms),
    "on": ("on", read_rules),
}
