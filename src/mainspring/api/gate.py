"""The gate before every route: who calls, and may they?"""

from typing import Final

from ..config import Config, is_loopback
from ..model.access import ApiKey, Right, is_token
from ..model.clock import Clock
from ..model.errors import ConfigError
from ..store.store import Store
from .asgi import Headers
from .keyring import KeyRing
from .problems import Problem
from .rates import FAILURES_A_SECOND, FAILURES_AT_ONCE, Rates

OPEN: Final = ApiKey("open", "anybody", "admin", "", 0, None, ("*",))
"""Whoever comes without a key where none is needed."""

_HOSTS_KEPT: Final = 100


class Gate:
    """Lets callers in by their key; without one only where the settings say so."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._needs_keys = config.needs_keys
        self._local_only = config.access == "auto"
        self.ring = KeyRing(config.namespace, config.api_key_file)
        self._rates = Rates(processes=config.processes)
        self._hosts: set[bytes] = set()
        self.free = not config.needs_keys and not config.api_rate
        """Callers without a key are not even counted."""

    async def check_start(self, store: Store) -> None:
        """Refuse to open a door that nobody could pass: most likely a key was forgotten."""
        if self._needs_keys and await self.ring.is_empty(store):
            where = f"host {self._config.host}" if self._config.access == "auto" else "access keys"
            raise ConfigError(
                f"{where}: callers need an API key, and there is none. Make one with `mainspring key add --role admin`"
                " (with the same --redis-url or --data-dir, and --namespace), or name a file of keys in"
                " MAINSPRING_API_KEY_FILE, or say --insecure if the network itself is guarded"
            )

    def stranger(self, headers: Headers) -> ApiKey:
        """A caller without a key."""
        if self._needs_keys:
            raise Problem(
                "unauthenticated", "an API key is needed: Authorization: Bearer msk_…", www_authenticate="Bearer"
            )
        if self._local_only:
            self._check_origin(headers)
        return OPEN

    async def admit(self, store: Store, headers: Headers, address: str) -> ApiKey:
        """Who calls. A key that is shown is judged, also where none is needed."""
        shown = headers.get(b"authorization")
        if shown is None:
            key = self.stranger(headers)
        else:
            key = await self._judge(store, shown, address)
        self._count(key, address)
        return key

    def key_at_hand(self, headers: Headers, clock: Clock) -> ApiKey | None:
        """Who calls, where that can be said at once. Not let in yet."""
        shown = headers.get(b"authorization")
        if shown is None:
            return OPEN
        token = _bearer(shown)
        return None if token is None else self.ring.at_hand(token, clock.now_ms())

    def let_in(self, key: ApiKey, headers: Headers, address: str) -> None:
        """The rest of `admit`, for a key that was at hand."""
        if key is OPEN:
            self.stranger(headers)
        self._count(key, address)

    async def _judge(self, store: Store, shown: bytes, address: str) -> ApiKey:
        token = _bearer(shown)
        if token is not None:
            key = await self.ring.find(store, token)
            if key is not None:
                return key
        self._rates.take(f"failed {address}", FAILURES_A_SECOND, FAILURES_AT_ONCE)
        raise Problem(
            "unauthenticated",
            "the API key is unknown, expired or revoked; send Authorization: Bearer msk_…",
            www_authenticate='Bearer error="invalid_token"',
        )

    def _count(self, key: ApiKey, address: str) -> None:
        rate = self._config.api_rate if key.rate is None else key.rate
        if rate:
            self._rates.take(f"at {address}" if key is OPEN else f"key {key.id}", rate, max(1.0, rate))

    def _check_origin(self, headers: Headers) -> None:
        """On loopback without keys a web page in a browser on this machine must not reach the API.

        A page of another site is known by its Origin, one that points its own name at 127.0.0.1 by the Host.
        """
        host = headers.get(b"host", b"localhost")
        if host not in self._hosts:
            if not is_loopback(_name_of(host)):
                raise Problem(
                    "forbidden",
                    f"the host {host.decode('latin-1')[:80]!r} is not this machine's; without keys only loopback is"
                    " answered. Set access to keys (or open, behind a proxy that guards it)",
                )
            if len(self._hosts) < _HOSTS_KEPT:
                self._hosts.add(host)
        origin = headers.get(b"origin")
        if origin is not None and origin.rpartition(b"/")[2] != host:
            raise Problem("forbidden", "a page of another site may not call this API; set access to keys")


def _bearer(shown: bytes) -> str | None:
    """The key in an Authorization header, if it is the text of one."""
    scheme, _, token = shown.decode("latin-1").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and is_token(token) else None


def _name_of(host: bytes) -> str:
    """`127.0.0.1:8000` and `[::1]:8000` without their port."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def check_target(key: ApiKey, target: str) -> None:
    if not key.sees(target):
        raise Problem("forbidden", f"this key may not use the target {target[:200]!r}")


def check_right(key: ApiKey, right: Right | None) -> None:
    if right is not None and not key.may(right):
        raise Problem("forbidden", f"the key's role is {key.role}, which does not have the right {right!r}")
