"""Making an API key: what is asked for, checked, and what may be shown of one. Pure: nothing here reads a store."""

from typing import Any, Final

import msgspec

from .access import ApiKey, Role, check_key_name, check_namespaces, check_patterns, check_role, hash_of
from .errors import InvalidInput
from .times import check_horizon, delay_ms, instant_ms

MAX_RATE: Final = 1e6


class KeyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`expires` is a time (ISO 8601 or epoch milliseconds) or a delay such as `90d`; without it the key never ends.
    `also` are other namespaces, `*` all; `targets` are patterns; `rate` is requests a second."""

    role: Role
    name: str = ""
    expires: str | int | None = None
    also: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    rate: float | None = None


class KeyShown(msgspec.Struct, frozen=True):
    """All of a key but its text and the hash of it."""

    id: str
    name: str
    role: Role
    created_ms: int
    expires_ms: int | None
    also: tuple[str, ...]
    targets: tuple[str, ...] | None
    rate: float | None

    @classmethod
    def of(cls, key: ApiKey) -> "KeyShown":
        return cls(key.id, key.name, key.role, key.created_ms, key.expires_ms, key.namespaces, key.targets, key.rate)

    @property
    def fields(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def make_key(order: KeyOrder, *, key_id: str, token: str, now_ms: int) -> ApiKey:
    """The record of a new key; of its text only the hash."""
    return ApiKey(
        key_id,
        check_key_name(order.name or order.role),
        check_role(order.role),
        hash_of(token),
        now_ms,
        _expires_ms(order.expires, now_ms),
        check_namespaces(order.also),
        None if order.targets is None else check_patterns(order.targets),
        _checked_rate(order.rate),
    )


def _expires_ms(given: str | int | None, now_ms: int) -> int | None:
    if given is None:
        return None
    text = str(given)
    if text.isascii() and text.isdigit():
        expires_ms = int(text)
    elif text[:4].isdigit() and "-" in text:
        expires_ms = instant_ms(text, field="expires")
    else:
        expires_ms = now_ms + delay_ms(text, field="expires")
    check_horizon(expires_ms, now_ms, field="expires")
    if expires_ms <= now_ms:
        raise InvalidInput(f"expires: {text} has passed; the key would open nothing")
    return expires_ms


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise InvalidInput(f"rate is {rate:g}; give requests a second, up to 1,000,000")
    return rate
