"""A webhook as a table of settings, such as TOML and JSON have them, and back."""

from collections.abc import Mapping
from typing import Any, Final

from .errors import InvalidInput
from .known_names import check_known
from .rate import Rate
from .times import delay_ms
from .webhook import RESPONSE_BYTES, Basic, Bearer, Webhook


def read_webhook(table: Mapping[str, object]) -> Webhook:
    """The webhook a table describes; what is wrong or unknown is named."""
    check_known(table, _FIELDS, "a webhook")
    fields = {}
    for name, value in table.items():
        field, read = _FIELDS[name]
        fields[field] = read(name, value)
    return Webhook(**fields)


def webhook_table(hook: Webhook) -> dict[str, Any]:
    """The table from which `read_webhook` makes this webhook again."""
    table: dict[str, Any] = {"url": hook.url, "method": hook.method, "gone_disables": hook.gone_disables}
    if hook.headers:
        table["headers"] = dict(hook.headers)
    if hook.timeout_s is not None:
        table["timeout"] = f"{round(hook.timeout_s * 1000)}ms"
    if isinstance(hook.auth, Basic):
        table["auth"] = {"user": hook.auth.user, "password": hook.auth.password}
    elif hook.auth is not None:
        table["auth"] = {"bearer": hook.auth.token}
    if hook.secrets:
        table["secrets"] = list(hook.secrets)
    if hook.response_bytes != RESPONSE_BYTES:
        table["response_bytes"] = hook.response_bytes
    if hook.result_ttl_s is not None:
        table["result_ttl"] = f"{round(hook.result_ttl_s * 1000)}ms"
    rest = {
        "ca_file": hook.ca_file,
        "concurrency": hook.concurrency,
        "rate": None if hook.rate is None else str(hook.rate),
    }
    return table | {name: value for name, value in rest.items() if value is not None}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected a text, not {type(value).__name__}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: expected true or false, not {value!r}")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name}: expected a whole number, not {value!r}")
    return value


def _rate(name: str, value: object) -> Rate:
    del name  # what is no rate says so itself
    return Rate.read(value)


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected a duration with its unit such as '5s', not {value!r}")
    return delay_ms(value, field=name) / 1000


def _headers(name: str, value: object) -> tuple[tuple[str, str], ...]:
    return tuple((key, _text(f"{name}.{key}", text)) for key, text in _table(name, value).items())


def _secrets(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(f"{name}: expected a list of texts")
    return tuple(_text(name, one) for one in value)


def _auth(name: str, value: object) -> Basic | Bearer:
    table = _table(name, value)
    if set(table) == {"user", "password"}:
        return Basic(_text(f"{name}.user", table["user"]), _text(f"{name}.password", table["password"]))
    if set(table) == {"bearer"}:
        return Bearer(_text(f"{name}.bearer", table["bearer"]))
    raise InvalidInput(f"{name}: give user and password, or bearer; not {', '.join(sorted(table)) or 'nothing'}")


def _table(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table, not {type(value).__name__}")
    return value


_FIELDS: Final[dict[str, Any]] = {
    "url": ("url", _text),
    "method": ("method", _text),
    "headers": ("headers", _headers),
    "timeout": ("timeout_s", _seconds),
    "auth": ("auth", _auth),
    "ca_file": ("ca_file", _text),
    "secrets": ("secrets", _secrets),
    "response_bytes": ("response_bytes", _whole),
    "result_ttl": ("result_ttl_s", _seconds),
    "gone_disables": ("gone_disables", _flag),
    "concurrency": ("concurrency", _whole),
    "rate": ("rate", _rate),
}
WEBHOOK_SETTINGS: Final = tuple(_FIELDS)
