"""API keys, their roles and bindings, and making new ones. Pure: nothing here reads a store."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from .errors import InvalidInput
from .ids import check_name
from .limits import MAX_PENDING, MAX_PENDING_BYTES
from .targets.names import BEAT, known_scheme
from .task import fits_one
from .times import check_horizon, delay_ms, instant_ms, is_delay

Right = Literal["read", "submit", "operate", "admin"]
Role = Literal["reader", "submit-only", "operator", "admin"]

RIGHTS: Final[dict[Role, frozenset[Right]]] = {
    "reader": frozenset({"read"}),
    "submit-only": frozenset({"submit"}),
    "operator": frozenset({"read", "submit", "operate"}),
    "admin": frozenset({"read", "submit", "operate", "admin"}),
}
ROLES: Final = tuple(RIGHTS)

PREFIX: Final = "msk_"
SECRET_BYTES: Final = 32
"""256 bits cannot be guessed, so a plain hash is enough to store."""

_TOKEN: Final = re.compile(r"msk_[A-Za-z0-9_-]{22,256}")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}|\*")
MAX_BINDINGS: Final = 100


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key as it is stored: the hash of its text, never the text."""

    id: str
    name: str
    role: Role
    hash: str
    created_ms: int
    expires_ms: int | None = None
    namespaces: tuple[str, ...] = ()
    """Namespaces besides the one the key was made in; `*` means all."""
    targets: tuple[str, ...] | None = None
    """Patterns the key is bound to; None means every target."""
    rate: float | None = None
    """Requests per second; None means the node's setting."""
    max_pending: int | None = None
    """Tasks of the key that may be pending; None means the node's setting, 0 means no limit."""
    max_bytes: int | None = None
    """Bytes of payload of its pending tasks; None and 0 as for `max_pending`."""

    def may(self, right: Right) -> bool:
        return right in RIGHTS[self.role]

    def reaches(self, namespace: str) -> bool:
        return namespace in self.namespaces or "*" in self.namespaces

    def expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms

    def sees(self, target: str | None) -> bool:
        """Return whether the key may see tasks for this target: a bound key sees only those that fit its patterns."""
        if self.targets is None:
            return True
        return target is not None and fits_one(self.targets, target)


def new_token() -> str:
    """Return the text of a new key. It is shown once and never stored."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def is_token(text: str) -> bool:
    return _TOKEN.fullmatch(text) is not None


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def check_role(role: str) -> Role:
    if role not in ROLES:
        raise InvalidInput(f"role {role!r}: use one of {', '.join(get_args(Role))}")
    return role


def check_key_name(name: str) -> str:
    check_name(name, "name")
    if not name.isprintable():
        raise InvalidInput("name: use printable characters; the name is shown in lists")
    return name


def check_namespaces(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise InvalidInput(f"namespace {name!r}: use 1 to 64 of A-Z a-z 0-9 _ -, or * for all")
    return _bounded("namespaces", names)


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Check the patterns a key is bound to; a pattern for URLs must name its host in full."""
    for pattern in patterns:
        scheme, colon, rest = pattern.partition(":")
        if not colon or not (known_scheme(scheme) or scheme == BEAT) or "*" in pattern[:-1]:
            raise InvalidInput(f"target pattern {pattern!r}: write a whole target, or the beginning of one and a *")
        if scheme in ("http", "https") and not re.fullmatch(r"//[^/?#@*\\]+(?:/.*)", rest):
            raise InvalidInput(
                f"target pattern {pattern!r}: name the host in full with a / after it,"
                " as in https://hooks.example.com/*; otherwise it would fit other hosts as well"
            )
    return _bounded("targets", patterns)


def _bounded(what: str, values: Sequence[str]) -> tuple[str, ...]:
    if len(values) > MAX_BINDINGS:
        raise InvalidInput(f"{len(values)} {what}; a key has at most {MAX_BINDINGS}")
    return tuple(dict.fromkeys(values))


MAX_RATE: Final = 1e6


class KeyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`expires` is a time (ISO 8601 or epoch milliseconds) or a delay such as `90d`; without it the key never expires.
    `also` are other namespaces, `*` all; `targets` are patterns; `rate` is requests a second. `max_pending` tasks of
    the key may be pending, with payloads of `max_bytes` in all; 0 is no limit."""

    role: Role
    name: str = ""
    expires: str | int | None = None
    also: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    rate: float | None = None
    max_pending: int | None = None
    max_bytes: int | None = None


class KeyShown(msgspec.Struct, frozen=True):
    """A key without its text and its hash."""

    id: str
    name: str
    role: Role
    created_ms: int
    expires_ms: int | None
    also: tuple[str, ...]
    targets: tuple[str, ...] | None
    rate: float | None
    max_pending: int | None = None
    max_bytes: int | None = None

    @classmethod
    def of(cls, key: ApiKey) -> "KeyShown":
        return cls(
            key.id,
            key.name,
            key.role,
            key.created_ms,
            key.expires_ms,
            key.namespaces,
            key.targets,
            key.rate,
            key.max_pending,
            key.max_bytes,
        )

    @property
    def fields(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def make_key(order: KeyOrder, *, key_id: str, token: str, now_ms: int) -> ApiKey:
    """Return the record of a new key; it holds only the hash of the key's text."""
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
        _checked_quota("max_pending", order.max_pending, MAX_PENDING),
        _checked_quota("max_bytes", order.max_bytes, MAX_PENDING_BYTES),
    )


def _expires_ms(given: str | int | None, now_ms: int) -> int | None:
    if given is None:
        return None
    if isinstance(given, str) and is_delay(given):
        expires_ms = now_ms + delay_ms(given, field="expires")
    else:
        expires_ms = instant_ms(given, field="expires")
    check_horizon(expires_ms, now_ms, field="expires")
    if expires_ms <= now_ms:
        raise InvalidInput(f"expires: {given} has passed; give a time in the future or a delay such as 90d")
    return expires_ms


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise InvalidInput(f"rate is {rate:g}; give requests a second, up to 1,000,000")
    return rate


def _checked_quota(field: str, limit: int | None, most: int) -> int | None:
    if limit is not None and not 0 <= limit <= most:
        raise InvalidInput(f"{field} is {limit}; give a whole number up to {most:,}, or 0 for no limit")
    return limit
