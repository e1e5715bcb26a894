"""Authentication and authorization: API keys, rate limits, and the check before every route."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Final

from ..config.config import Config, is_loopback
from ..model.access import ApiKey, Right, hash_of, is_token
from ..model.clock import Clock
from ..model.errors import ConfigError
from ..store.access import list_keys
from ..store.store import Store
from .asgi import Headers, Problem

FRESH_S: Final = 1.0
"""How long a revoked key may still open on a node that has just looked."""


_SETTING: Final = "api_key_file (MAINSPRING_API_KEY_FILE)"
_MAKE_ONE: Final = "Write a key into it: mainspring key generate"


class KeyRing:
    """Finds the key behind a text. The store is asked once a second at most, and only when somebody calls."""

    def __init__(self, namespace: str, file: Path | None, now: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._of_file = {} if file is None else {key.hash: key for key in _read(file)}
        self._stored: dict[str, ApiKey] = {}
        self._now = now
        self._fresh_until = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, store: Store, token: str) -> ApiKey | None:
        """None for a key that is unknown, revoked or over."""
        hashed = hash_of(token)
        if hashed not in self._of_file:
            await self._freshen(store)
        return self._known(hashed, store.clock.now_ms())

    def at_hand(self, token: str, now_ms: int) -> ApiKey | None:
        """The same by what was read within the last second; None also for one that has to be looked for."""
        hashed = hash_of(token)
        fresh = hashed in self._of_file or self._now() < self._fresh_until
        return self._known(hashed, now_ms) if fresh else None

    def _known(self, hashed: str, now_ms: int) -> ApiKey | None:
        key = self._of_file.get(hashed) or self._stored.get(hashed)
        return None if key is None or key.expired(now_ms) else key

    async def is_empty(self, store: Store) -> bool:
        """True if no key could authenticate."""
        await self._freshen(store)
        now_ms = store.clock.now_ms()
        return not self._of_file and all(key.expired(now_ms) for key in self._stored.values())

    def forget(self) -> None:
        """Ask the store at the next call."""
        self._fresh_until = float("-inf")

    async def _freshen(self, store: Store) -> None:
        if self._now() < self._fresh_until:
            return
        async with self._lock:
            if self._now() >= self._fresh_until:
                self._stored = {key.hash: key for key in await list_keys(store)}
                self._fresh_until = self._now() + FRESH_S


def _read(file: Path) -> list[ApiKey]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {file}: {error.strerror}. {_MAKE_ONE}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{_SETTING}: {file} is no text in UTF-8. {_MAKE_ONE}") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{_SETTING}: {file} is empty, or holds comments only. {_MAKE_ONE}")
    if not all(map(is_token, tokens)):
        raise ConfigError(
            f"{_SETTING}: {file} must hold API keys, one a line: msk_ and at least 22 letters and digits. {_MAKE_ONE}"
        )
    return [_key(n, hash_of(one)) for n, one in enumerate(tokens, 1)]


def _key(number: int, hashed: str) -> ApiKey:
    """Its id is its own: rates and `Idempotency-Key`s go by it. Not by the line, where another may stand soon."""
    return ApiKey(f"file-{hashed[:10]}", f"key {number} of the file", "admin", hashed, 0)


MOST_CLIENTS: Final = 10_000
FAILURES_A_SECOND: Final = 1.0
FAILURES_AT_ONCE: Final = 20.0
"""Wrong keys an address may show; a person who mistypes one never gets there."""


class Rates:
    """Buckets by client. The one that was quiet for longest is forgotten first: its bucket is full again anyway."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, processes: int = 1) -> None:
        self._now = now
        self._processes = max(1, processes)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, rate: float, burst: float) -> None:
        """Count one more request; raise a Problem that says when to retry if there are too many."""
        if not self.take_some(client, rate, burst, 1):
            level, _ = self._buckets[client]
            raise Problem(
                "rate",
                f"more than {rate:g} requests a second; wait as Retry-After says",
                retry_after=str(max(1, ceil((1 - level) * self._processes / rate))),
            )

    def take_some(self, client: str, rate: float, burst: float, wanted: int) -> int:
        """Count as many of `wanted` requests as there is room for, and return their number.

        Each of several processes on one port admits its share: connections spread over them, and counts are not shared.
        """
        now = self._now()
        rate, burst = rate / self._processes, max(1.0, burst / self._processes)
        level, at = self._buckets.pop(client, (burst, now))
        level = min(burst, level + (now - at) * rate)
        granted = min(wanted, int(level))
        self._buckets[client] = (level - granted, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return granted


OPEN: Final = ApiKey("open", "anybody", "admin", "", 0, None, ("*",))
"""Whoever comes without a key where none is needed."""


def client_of(key: ApiKey, address: str) -> str:
    """Whose requests are counted together: those of a key, or without one those of an address."""
    return f"at {address}" if key is OPEN else f"key {key.id}"


_HOSTS_KEPT: Final = 100


class Authenticator:
    """Lets callers in by their key; without one only where the settings say so."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._needs_keys = config.needs_keys
        self.ring = KeyRing(config.namespace, config.api_key_file)
        self._rates = Rates(processes=config.processes)
        self._hosts: set[bytes] = set()
        self.free = not config.needs_keys and not config.api_rate
        """Callers without a key are not even counted."""

    async def check_start(self, store: Store) -> None:
        """Refuse to listen when no key exists: the API would reject every request."""
        if self._needs_keys and await self.ring.is_empty(store):
            where = f"host {self._config.host}" if self._config.access == "auto" else "access keys"
            raise ConfigError(
                f"{where}: callers need an API key, and there is none. Make one with `mainspring key add --role admin`"
                " (with the same --redis-url or --data-dir, and --namespace), or name a file of keys in"
                " MAINSPRING_API_KEY_FILE, or say --insecure if the network itself is guarded"
            )

    def without_key(self, headers: Headers) -> ApiKey:
        """Return the open key for a caller without one, or refuse."""
        if self._needs_keys:
            raise Problem(
                "unauthenticated", "an API key is needed: Authorization: Bearer msk_…", www_authenticate="Bearer"
            )
        self._check_origin(headers)
        return OPEN

    async def admit(self, store: Store, headers: Headers, address: str) -> ApiKey:
        """Return the caller's key. A key that is sent is always checked, even where none is needed."""
        shown = headers.get(b"authorization")
        if shown is None:
            key = self.without_key(headers)
        else:
            key = await self._judge(store, shown, address)
        self._count(key, address)
        return key

    def key_at_hand(self, headers: Headers, clock: Clock) -> ApiKey | None:
        """Return the caller's key if it is known without a lookup; not admitted yet."""
        shown = headers.get(b"authorization")
        if shown is None:
            return OPEN
        token = _bearer(shown)
        return None if token is None else self.ring.at_hand(token, clock.now_ms())

    def let_in(self, key: ApiKey, headers: Headers, address: str) -> None:
        """The rest of `admit`, for a key that was at hand."""
        if key is OPEN:
            self.without_key(headers)
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
        if rate := self._rate_of(key):
            self._rates.take(client_of(key, address), rate, max(1.0, rate))

    def count_lines(self, key: ApiKey, address: str, lines: int) -> int:
        """Count lines of a batch as requests; return how many of them the caller's rate allows now."""
        rate = self._rate_of(key)
        return self._rates.take_some(client_of(key, address), rate, max(1.0, rate), lines) if rate else lines

    def _rate_of(self, key: ApiKey) -> float:
        return self._config.api_rate if key.rate is None else key.rate

    def _check_origin(self, headers: Headers) -> None:
        """Refuse what a web page in a browser sends: without keys, whoever reaches the port may do everything.

        A page of another site is known by its Origin, one that points its own name at this address by the Host.
        """
        host = headers.get(b"host", b"localhost")
        if host not in self._hosts:
            if not self._answers_to(_name_of(host)):
                raise Problem(
                    "forbidden",
                    f"the host {host.decode('latin-1')[:80]!r} is not one of this API's. Name it in api_hosts if a"
                    " proxy that guards the API passes it on, or set access to keys",
                )
            if len(self._hosts) < _HOSTS_KEPT:
                self._hosts.add(host)
        origin = headers.get(b"origin")
        if origin is not None and origin.rpartition(b"/")[2] != host:
            raise Problem("forbidden", "a page of another site may not call this API; set access to keys")

    def _answers_to(self, name: str) -> bool:
        if is_loopback(name) or name.lower() in self._config.api_hosts:
            return True
        return self._config.access == "open" and _cannot_be_registered(name.lower())


def _cannot_be_registered(name: str) -> bool:
    """Whether a host is an address or a name of a private network: no page can come from it by way of public DNS."""
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith((".internal", ".local", ".localhost", ".svc"))
    return True


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


def check_lane(key: ApiKey, lane: str | None) -> None:
    """Refuse a lane of somebody else to a key bound to targets: a task of its own that fails would block that lane."""
    if lane is not None and key.targets is not None and not lane.startswith(f"{key.id}/"):
        raise Problem(
            "forbidden",
            f"this key is bound to targets, and may use only lanes that begin with '{key.id}/'",
        )


def check_right(key: ApiKey, right: Right | None) -> None:
    if right is not None and not key.may(right):
        raise Problem("forbidden", f"the key's role is {key.role}, which does not have the right {right!r}")
