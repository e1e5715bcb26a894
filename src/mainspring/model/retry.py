"""When a failed delivery is retried: rules, policies, their text form, and the worst case they allow."""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple, cast

from .delivery import Body, Dead, Retry
from .errors import InvalidInput
from .text import check_known
from .times import delay_ms, delay_text, in_seconds

_CODES: Final = re.compile(r"([1-9])xx|([1-9]\d\d)(?:-([1-9]\d\d))?", re.IGNORECASE)
_TYPE: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_WORST_RANK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RetryRule:
    """A rule for one kind of failure. `when` is a status (`429`), a range (`500-599`, `5xx`), or an exception type."""

    when: str
    dead: bool = False
    """Make no further attempt; otherwise retry, even if the sink would not."""
    wait_ms: int | None = None
    """Wait to use instead of the policy's."""

    def __post_init__(self) -> None:
        _codes(self.when)
        if self.dead and self.wait_ms is not None:
            raise InvalidInput(f"on {self.when}: dead has no wait")
        if self.wait_ms is not None and self.wait_ms < 1:
            raise InvalidInput(f"on {self.when}: the wait is {self.wait_ms} ms; it must be at least 1")

    @classmethod
    def read(cls, when: str, action: object) -> "RetryRule":
        """Read a setting: `dead`, `retry`, or `retry 30s`."""
        match re.split(r"[\s:]+", action.strip(), maxsplit=1) if isinstance(action, str) else ():
            case ["dead"]:
                return cls(when, dead=True)
            case ["retry"]:
                return cls(when)
            case ["retry", wait]:
                return cls(when, wait_ms=delay_ms(wait, field=f"on {when}"))
        raise InvalidInput(f"on {when}: {action!r} is not an action; write 'dead', 'retry' or 'retry 30s'")

    @property
    def action(self) -> str:
        """The text from which `read` makes this rule again."""
        if self.dead:
            return "dead"
        return "retry" if self.wait_ms is None else f"retry:{delay_text(self.wait_ms)}"

    def rank(self, status: int | None, types: list[str]) -> int:
        """Return how narrowly the rule fits, less is narrower; `_WORST_RANK` if it does not fit."""
        codes = _codes(self.when)
        if codes is None:
            return types.index(self.when) if self.when in types else _WORST_RANK
        return len(codes) if status is not None and status in codes else _WORST_RANK


def rule_for(rules: Iterable[RetryRule], outcome: Retry | Dead) -> RetryRule | None:
    """Return the narrowest rule for an outcome: a status before a range, a type before its base types."""
    if not rules:
        return None
    status = None if outcome.response is None else outcome.response.status
    types = _names(outcome.error)
    rank, rule = min(((rule.rank(status, types), rule) for rule in rules), key=lambda pair: pair[0])
    return rule if rank < _WORST_RANK else None


def _names(error: BaseException | None) -> list[str]:
    """Return plain and full names of an error's types, the most derived first."""
    if error is None:
        return []
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return [name for kind in kinds for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]


def _codes(when: str) -> range | None:
    """Return the statuses that a rule covers; None for the name of a type."""
    found = _CODES.fullmatch(when)
    if found is None:
        if not _TYPE.fullmatch(when):
            raise InvalidInput(
                f"on {when!r}: give a status such as '429', a range such as '5xx' or '400-499', or the name of an error"
            )
        return None
    hundred, first, last = found.groups()
    if hundred:
        return range(int(hundred) * 100, int(hundred) * 100 + 100)
    codes = range(int(first), int(last or first) + 1)
    if not codes:
        raise InvalidInput(f"on {when!r}: the range is empty")
    return codes


Jitter = str
"""`full`, `equal`, `none`, or a duration such as `500ms`, of which a random part is added to each wait."""

MAX_ATTEMPTS: Final = 10_000
MAX_WAIT_MS: Final = 366 * 86_400_000
MAX_RULES: Final = 32
_WORDS: Final = ("full", "equal", "none")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: after the n-th failure wait up to `base_ms * factor**(n - 1)`, never over `cap_ms`."""

    max_attempts: int = 6
    """Including the first attempt."""
    base_ms: int = 1_000
    factor: float = 2.0
    cap_ms: int = 300_000
    jitter: Jitter = "equal"
    max_age_ms: int | None = None
    """No attempt begins later than this after the original due time."""
    on: tuple[RetryRule, ...] = ()
    """Rules for certain failures; the narrowest that fits applies."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise InvalidInput(f"max_attempts is {self.max_attempts}; it must be at least 1, at most {MAX_ATTEMPTS}")
        if not 1 <= self.base_ms <= self.cap_ms <= MAX_WAIT_MS:
            raise InvalidInput(
                f"the retry policy has a base of {in_seconds(self.base_ms)} and a cap of {in_seconds(self.cap_ms)};"
                " the base must be at least 1 ms, the cap no less than the base, and a year at most"
            )
        if not 1.0 <= self.factor <= 100.0:
            raise InvalidInput(f"factor is {self.factor}; it must lie between 1 and 100")
        added_ms(self.jitter)
        if self.max_age_ms is not None and not 1 <= self.max_age_ms <= MAX_WAIT_MS:
            raise InvalidInput(f"max_age_ms is {self.max_age_ms}; it must be at least 1, and a year at most")
        if len(self.on) > MAX_RULES or len({rule.when for rule in self.on}) < len(self.on):
            raise InvalidInput(f"on: at most {MAX_RULES} rules, each for a different failure")

    @classmethod
    def of(cls, **settings: Any) -> "RetryPolicy":
        """Make a policy from settings: `RetryPolicy.of(max_attempts=5, base="200ms", on={"429": "retry 30s"})`.

        `retries=5` is the same as `max_attempts=6`.
        """

        return read_policy(settings)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "RetryPolicy":
        """Read a table such as `[targets.<name>.retry]`."""

        return read_policy(settings)

    @classmethod
    def parse(cls, text: str) -> "RetryPolicy":
        """Read one line: `5 base=200ms jitter=full 429=retry:30s 4xx=dead`."""

        return parse_policy(text)

    def __str__(self) -> str:
        """Return the line from which `parse` makes this policy again, without settings that have their default."""

        return policy_text(self)

    def backoff_ms(self, failed_attempts: int) -> int:
        """Return the wait after the n-th failure, before jitter."""
        # The exponent is bounded: 2.0 ** 5000 overflows a float.
        return int(min(self.cap_ms, self.base_ms * self.factor ** min(failed_attempts - 1, 64)))

    def wait_ms(self, failed_attempts: int) -> int | None:
        """Return the wait after the n-th failure; None if there is no further attempt."""
        if failed_attempts >= self.max_attempts:
            return None
        whole = self.backoff_ms(failed_attempts)
        if self.jitter == "full":
            return max(1, int(random.uniform(0, whole)))
        if self.jitter == "equal":
            return max(1, int(whole / 2 + random.uniform(0, whole / 2)))
        return whole + random.randint(0, added_ms(self.jitter))

    def worst_case_ms(self, timeout_ms: int = 0) -> int:
        """Return how long one task may take if every attempt takes `timeout_ms` and fails, and every wait is the
        longest."""

        return worst_case(self, timeout_ms).ms

    def check_against(self, interval_ms: int, timeout_ms: int = 0) -> None:
        """Refuse a policy by which a run may last longer than until the next one is due."""

        check_against(self, interval_ms, timeout_ms)


@lru_cache(maxsize=1024)
def added_ms(jitter: Jitter) -> int:
    """Return the most that jitter adds to a wait; refuse an invalid jitter."""
    if jitter in _WORDS:
        return 0
    if jitter[:1].isdigit() and (ms := delay_ms(jitter, field="jitter")) <= MAX_WAIT_MS:
        return ms
    raise InvalidInput(f"jitter is {jitter!r}; use 'full', 'equal', 'none', or a duration to add such as '500ms'")


class RetryWait(NamedTuple):
    """Decision for another attempt after this wait."""

    ms: int


class GiveUp(NamedTuple):
    """No further attempt: the task goes to the dead letters."""

    reason: str


def in_time_ms(wait_ms: int, expires_ms: int | None, now_ms: int) -> int:
    """Return the wait, cut where the task expires: expiry is then recorded at once, and the tasks behind it in its lane
    wait no longer."""
    return wait_ms if expires_ms is None else min(wait_ms, max(0, expires_ms + 1 - now_ms))


def decide(
    policy: RetryPolicy,
    attempt: int,
    outcome: Retry | Dead,
    original_due_ms: int,
    now_ms: int,
    expires_ms: int | None = None,
) -> RetryWait | GiveUp:
    """Decide about a task whose `attempt`-th attempt failed.

    A time that the target named (`Retry(after_ms=…)`) takes precedence over the wait of a rule, and that over the
    policy's. An `untried` outcome is not a failed attempt and must not be passed here.
    """
    rule = rule_for(policy.on, outcome)
    if rule.dead if rule is not None else isinstance(outcome, Dead):
        return GiveUp(outcome.reason)
    wait_ms = policy.wait_ms(attempt)
    if wait_ms is None:
        return GiveUp(outcome.reason)
    if isinstance(outcome, Retry) and outcome.after_ms is not None:
        wait_ms = outcome.after_ms
    elif rule is not None and rule.wait_ms is not None:
        wait_ms = rule.wait_ms
    if policy.max_age_ms is not None and now_ms + wait_ms > original_due_ms + policy.max_age_ms:
        return GiveUp(f"{outcome.reason} (no further attempt: it would come later than max_age allows)")
    return RetryWait(in_time_ms(wait_ms, expires_ms, now_ms))


MAX_TEXT_BYTES: Final = 1024


def read_policy(table: Mapping[str, Any]) -> RetryPolicy:
    """Return the policy that a table describes, with defaults for missing settings; errors name wrong or unknown
    ones."""
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
    """Read a policy in one line: settings `name=value` and rules `429=retry:30s` separated by spaces; a bare number is
    the number of attempts."""
    if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InvalidInput(f"a retry policy has at most {MAX_TEXT_BYTES} bytes")
    table: dict[str, Any] = {}
    rules: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, given, value = ("max_attempts", "=", part) if part.isdigit() else part.partition("=")
        if not given:
            raise InvalidInput(f"retry {text[:80]!r}: {part!r} is not name=value")
        if not value.startswith(("retry", "dead")):
            check_known([name], _FIELDS, "a retry policy", ", and rules such as 429=retry:30s")
        into = table if name in _FIELDS else rules
        if name in into:
            raise InvalidInput(f"retry {text[:80]!r}: {name} is given twice")
        into[name] = value
    return read_policy(table | ({"on": rules} if rules else {}))


def read_retry(value: object) -> RetryPolicy:
    """Read a table, or one line."""
    return parse_policy(value) if isinstance(value, str) else read_policy(cast("Mapping[str, Any]", value))


def retry_line(retry: RetryPolicy | str) -> str:
    """Return the text of a task's own policy for its entry; refuse an invalid policy."""
    if isinstance(retry, str):
        return policy_text(parse_policy(retry))
    if not isinstance(retry, RetryPolicy):
        raise InvalidInput(
            f"retry is of type {type(retry).__name__}; give a RetryPolicy or a line such as '5 base=200ms'"
        )
    return policy_text(retry)


def policy_of(retries: int | None, retry: RetryPolicy | str | None) -> RetryPolicy | None:
    """Return the policy of both. `retries` alone means the usual waits, and so many further attempts."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        retry = RetryPolicy.parse(retry_line(retry))
    if retries is None:
        return retry
    if type(retries) is not int or retries < 0:
        raise InvalidInput(f"retries is {retries!r}; give 0 or a larger whole number")
    return replace(retry or RetryPolicy(), max_attempts=retries + 1)


def policy_line(retries: int | None, retry: RetryPolicy | str | None) -> str | None:
    """Return the policy of both as the line that an entry keeps, or None if neither is given."""
    if retries is None:
        return None if retry is None else retry_line(retry)
    policy = policy_of(retries, retry)
    return None if policy is None else policy_text(policy)


def policy_text(policy: RetryPolicy) -> str:
    """Return the shortest line for this policy."""
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
    """Return the table from which `read_policy` makes this policy again."""
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


def read_rules(name: str, value: object) -> tuple[RetryRule, ...]:
    """Read a table of rules, or the same as a string: `429=retry:30s 4xx=dead`."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.replace(",", " ").split()]
        value = {when: action for when, _, action in pairs}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table of rules such as {{'429' = 'retry 30s'}}")
    return tuple(RetryRule.read(str(when), action) for when, action in value.items())


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
    # Refuse a bare number: seconds and milliseconds are too easily confused.
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


class WorstCase(NamedTuple):
    """How long one task may take at most, as a sum in words and in milliseconds."""

    ms: int
    text: str
    """The sum, written out."""


def worst_case(policy: RetryPolicy, timeout_ms: int = 0) -> WorstCase:
    """Return the longest run. `timeout_ms` limits each attempt; with 0 only the waits are added.

    A time that a target names (`Retry-After`) is unknown in advance: it can make a run longer, up to `max_age`.
    """
    if timeout_ms < 0:
        raise InvalidInput(f"the timeout is {timeout_ms} ms; it must not be negative")
    retries = policy.max_attempts - 1
    longest_rule_ms = max((rule.wait_ms or 0 for rule in policy.on), default=0)
    added = added_ms(policy.jitter)
    # A rule's wait has no jitter: the longer of the two counts.
    waits = [policy.backoff_ms(failed) for failed in range(1, policy.max_attempts)]
    plain = [wait if wait + added >= longest_rule_ms else longest_rule_ms for wait in waits]
    jittered = sum(wait + added >= longest_rule_ms for wait in waits) if added else 0
    total = policy.max_attempts * timeout_ms + sum(plain) + jittered * added
    terms = [_times(policy.max_attempts, timeout_ms)] if timeout_ms else []
    terms += [_times(len(list(run)), wait) for wait, run in groupby(plain)]
    if jittered:
        terms.append(_times(jittered, added))
    if policy.max_age_ms is not None and retries and policy.max_age_ms + timeout_ms < total:
        # No attempt begins later than that.
        total = policy.max_age_ms + timeout_ms
        terms = [f"max_age {in_seconds(policy.max_age_ms)}", *([_times(1, timeout_ms)] if timeout_ms else [])]
    return WorstCase(total, f"{' + '.join(terms) or '0 ms'} = {in_seconds(total)}")


def check_against(policy: RetryPolicy, interval_ms: int, timeout_ms: int = 0) -> None:
    """Refuse a policy by which a run may last longer than until the next one is due."""
    worst = worst_case(policy, timeout_ms)
    if worst.ms > interval_ms:
        sooner = "give a shorter timeout, " if timeout_ms else ""
        raise InvalidInput(
            f"one run may take {worst.text} with its retries, and the next is due after {in_seconds(interval_ms)};"
            f" {sooner}retry less, wait less, or run less often"
        )


def _times(count: int, ms: int) -> str:
    return f"{count} x {in_seconds(ms)}" if count > 1 else in_seconds(ms)


class Policies:
    """The retry policies of a node. The nearest one applies as a whole: its missing settings have their defaults."""

    def __init__(
        self,
        default: RetryPolicy,
        by_target: Mapping[str, RetryPolicy] | None = None,
        by_queue: Mapping[str, RetryPolicy] | None = None,
    ) -> None:
        self.default = default
        self._by_target = dict(by_target or {})
        """By target as named in tasks, `target:<name>`."""
        self._by_queue = dict(by_queue or {})

    def of(self, body: Body, nearer: RetryPolicy | None = None, queue: str | None = None) -> RetryPolicy:
        """Return the policy of a task: its own, otherwise `nearer` (the handler's), otherwise those of queue and
        target."""
        if body.retry is not None:
            try:
                return RetryPolicy.parse(body.retry)
            except InvalidInput:
                # Written by a newer version, or by hand: do not lose the task, use the next policy.
                pass
        if nearer is None and queue is not None:
            nearer = self._by_queue.get(queue)
        return nearer or self._by_target.get(body.target, self.default)
