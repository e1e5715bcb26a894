"""Authentication and authorization: API keys, rate limits, quotas, and the check before every route."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import ceil, inf
from pathlib import Path
from typing import Final, NamedTuple

from ..config.config import Config, is_loopback
from ..model.access import ApiKey, Right, hash_of, is_token
from ..model.clock import Clock
from ..model.errors import ConfigError, StoreError
from ..model.limits import MAX_PAYLOAD_BYTES
from ..store.access import list_keys
from ..store.limits import count_pending, counts_until_ms
from ..store.store import Store
from .asgi import Headers, Problem

log = logging.getLogger("mainspring.api")

FRESH_S: Final = 1.0
"""Seconds that a revoked key may still be valid on a node that has just read the keys."""


_SETTING: Final = "api_key_file (MAINSPRING_API_KEY_FILE)"
_MAKE_ONE: Final = "Write a key into it: mainspring key generate"


class KeyRing:
    """Finds the key of a text. Reads the store at most once a second, and only when a request comes."""

    def __init__(self, namespace: str, file: Path | None, now: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._of_file = {} if file is None else {key.hash: key for key in _read(file)}
        self._stored: dict[str, ApiKey] = {}
        self._now = now
        self._fresh_until = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, store: Store, token: str) -> ApiKey | None:
        """Return the key; None if it is unknown, revoked or expired."""
        hashed = hash_of(token)
        if hashed not in self._of_file:
            await self._freshen(store)
        return self._known(hashed, store.clock.now_ms())

    async def holds(self, store: Store, key: ApiKey) -> bool:
        """Return whether a key that was found before is still valid."""
        if key.hash not in self._of_file:
            await self._freshen(store)
        return self._known(key.hash, store.clock.now_ms()) is not None

    def at_hand(self, token: str, now_ms: int) -> ApiKey | None:
        """Return the key if it was read within the last second; None also if it has to be looked up."""
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
        """Read the store at the next request."""
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
        raise ConfigError(f"{_SETTING}: {file} is not UTF-8 text. {_MAKE_ONE}") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{_SETTING}: {file} is empty, or holds comments only. {_MAKE_ONE}")
    if not all(map(is_token, tokens)):
        raise ConfigError(
            f"{_SETTING}: {file} must hold API keys, one per line: msk_ and at least 22 letters and digits. {_MAKE_ONE}"
        )
    return [_key(n, hash_of(one)) for n, one in enumerate(tokens, 1)]


def _key(number: int, hashed: str) -> ApiKey:
    """Return a key whose id depends on its text: rates and `Idempotency-Key`s use the id, and lines may change."""
    return ApiKey(f"file-{hashed[:10]}", f"key {number} of the file", "admin", hashed, 0)


MOST_CLIENTS: Final = 10_000
FAILURES_A_SECOND: Final = 1.0
FAILURES_AT_ONCE: Final = 20.0
"""Wrong keys an address may send in a row; a person who mistypes one never reaches that."""


class Rates:
    """Token buckets by client. The bucket unused for longest is forgotten first: it is full again anyway."""

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
        """Count up to `wanted` requests while there is room; return how many were counted.

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
"""The key of callers without one, where none is needed."""


def client_of(key: ApiKey, address: str) -> str:
    """Return the name under which requests are counted together: the key or, without one, the address."""
    return f"at {address}" if key is OPEN else f"key {key.id}"


class Slots:
    """Bounds the requests in progress, in all and of one client, so that no client takes all places."""

    def __init__(self, most: int, most_of_one: int, what: str) -> None:
        self._most, self._most_of_one, self._what = most, most_of_one, what
        self.taken: Counter[str] = Counter()

    @contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """Take a place until the end of the block; refuse one too many."""
        if self.taken.total() >= self._most:
            raise Problem("rate", f"{self._most} {self._what} at one time already", retry_after="1")
        if self.taken[client] >= self._most_of_one:
            detail = f"{self._most_of_one} {self._what} for this client already; ask for fewer at a time"
            raise Problem("rate", detail, retry_after="1")
        self.taken[client] += 1
        try:
            yield
        finally:
            self.taken[client] -= 1
            if not self.taken[client]:
                del self.taken[client]


COUNT_S: Final = 1.0
"""Seconds between writes of a process's additions to the counts of quotas."""
_STOP_S: Final = 1.0
"""Seconds that a stop waits for the last such write."""
_WARN_S: Final = 60.0


class Quota(NamedTuple):
    """Limits on what a key may have pending in one namespace."""

    tasks: float
    payload_bytes: float

    @property
    def is_none(self) -> bool:
        return self.tasks == self.payload_bytes == inf


@dataclass(slots=True, eq=False)
class _Pending:
    """Pending tasks and bytes of one key in one namespace, as this process knows them."""

    key_id: str
    store: Store
    tasks: int = 0
    payload_bytes: int = 0
    added: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tasks and bytes the server does not know yet, by when they stop counting. They are part of the sums."""
    until_ms: float = inf
    """When the sums become outdated because something is due."""
    seen_s: float = -inf
    """When the server was last asked."""
    warned_s: float = -inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class Quotas:
    """Counts the pending tasks of keys.

    All processes add to the same counts once a second, and use the last known sums in between. Together they may
    exceed a quota by what they accept within a second or two.
    """

    def __init__(self, config: Config, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now = now
        self._pending: dict[tuple[str, str], _Pending] = {}
        """By namespace and key: as many as there are keys."""
        self._counting: set[asyncio.Task[None]] = set()

    def of(self, key: ApiKey) -> Quota:
        """Return the quota of a key. Callers without a key have none: every caller is trusted then."""
        if key is OPEN:
            return Quota(inf, inf)
        tasks = self._config.api_pending_tasks if key.max_pending is None else key.max_pending
        payload_bytes = self._config.api_pending_bytes if key.max_bytes is None else key.max_bytes
        return Quota(tasks or inf, payload_bytes or inf)

    def has_room(self, key: ApiKey, store: Store) -> bool:
        """Return whether one more tick is within the key's quota, by the last known sums."""
        quota, known = self.of(key), self._pending.get((store.keys.namespace, key.id))
        if known is None or known.seen_s == -inf:
            return quota.is_none or not key.may("submit")  # refused for the missing right instead
        return known.tasks < quota.tasks and known.payload_bytes + MAX_PAYLOAD_BYTES <= quota.payload_bytes

    async def check(self, key: ApiKey, store: Store, payload_bytes: int) -> None:
        """Refuse a task beyond the key's quota."""
        for problem in (await self.refusals(key, store, [payload_bytes])).values():
            raise problem

    async def refusals(self, key: ApiKey, store: Store, sizes: Sequence[int]) -> dict[int, Problem]:
        """Return which of some tasks, given by the bytes of their payloads, are beyond the key's quota."""
        quota = self.of(key)
        if quota.is_none:
            return {}
        known = self._of(key, store)
        if known.seen_s == -inf:
            await self._count(known)
        refused = _beyond(known, quota, sizes)
        if refused and (self._now() - known.seen_s >= COUNT_S or store.clock.now_ms() >= known.until_ms):
            await self._count(known)
            refused = _beyond(known, quota, sizes)
        if not refused:
            return {}
        problem = _over_quota(key, known, quota)
        if self._now() - known.warned_s >= _WARN_S:
            known.warned_s = self._now()
            log.warning("key %s (%s), namespace %s: %s", key.id, key.name, store.keys.namespace, problem)
        return dict.fromkeys(refused, problem)

    def add(self, key: ApiKey, store: Store, stored: Iterable[tuple[int, int]]) -> None:
        """Count stored tasks by due time and bytes of payload. Tasks that are already due are not pending."""
        if self.of(key).is_none:
            return
        known, now_ms = self._of(key, store), store.clock.now_ms()
        for due_ms, size in stored:
            if due_ms > now_ms:
                until_ms = counts_until_ms(due_ms, now_ms)
                count, payload_bytes = known.added.get(until_ms, (0, 0))
                known.added[until_ms] = count + 1, payload_bytes + size
                known.tasks += 1
                known.payload_bytes += size
        if known.added and known.timer is None:
            known.timer = asyncio.get_running_loop().call_later(COUNT_S, self._begin_count, known)

    async def flush(self) -> None:
        """Write what this process has added, if the server answers soon."""
        unwritten = [known for known in self._pending.values() if known.added]
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*map(self._count_later, unwritten))
        except TimeoutError:
            log.warning("the server does not answer: tasks put within the last second are missing from quotas")

    def _of(self, key: ApiKey, store: Store) -> _Pending:
        name = store.keys.namespace, key.id
        known = self._pending.get(name)
        if known is None:
            known = self._pending[name] = _Pending(key.id, store)
        known.store = store  # the store of the node's current client
        return known

    def _begin_count(self, known: _Pending) -> None:
        counting = asyncio.create_task(self._count_later(known), name="mainspring-quota")
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)

    async def _count_later(self, known: _Pending) -> None:
        try:
            await self._count(known)
        except StoreError as error:
            log.warning("key %s: tasks put within the last second are missing from its quota: %s", known.key_id, error)

    async def _count(self, known: _Pending) -> None:
        asked_s = self._now()
        async with known.lock:
            if known.seen_s > asked_s and not known.added:
                return  # another caller has just asked
            if known.timer is not None:
                known.timer.cancel()
                known.timer = None
            added, known.added = known.added, {}
            found = await count_pending(known.store, known.key_id, added, known.store.clock.now_ms())
            known.seen_s = self._now()
            known.until_ms = found.until_ms or inf
            known.tasks = found.tasks + sum(tasks for tasks, _ in known.added.values())
            known.payload_bytes = found.payload_bytes + sum(size for _, size in known.added.values())


def _beyond(known: _Pending, quota: Quota, sizes: Sequence[int]) -> list[int]:
    """Return which of some tasks exceed the quota."""
    tasks, payload_bytes = known.tasks, known.payload_bytes
    if tasks + len(sizes) <= quota.tasks and payload_bytes + sum(sizes) <= quota.payload_bytes:
        return []
    refused = []
    for index, size in enumerate(sizes):
        if tasks < quota.tasks and payload_bytes + size <= quota.payload_bytes:
            tasks, payload_bytes = tasks + 1, payload_bytes + size
        else:
            refused.append(index)
    return refused


def _over_quota(key: ApiKey, known: _Pending, quota: Quota) -> Problem:
    limits = []
    if quota.tasks < inf:
        source = "api_pending_tasks" if key.max_pending is None else "the key's max_pending"
        limits.append(f"{known.tasks:,} tasks pending of {quota.tasks:,} ({source})")
    if quota.payload_bytes < inf:
        source = "api_pending_bytes" if key.max_bytes is None else "the key's max_bytes"
        limits.append(f"{known.payload_bytes:,} bytes of {quota.payload_bytes:,} ({source})")
    return Problem(
        "quota",
        f"beyond what this key may have pending: it has {', and '.join(limits)}. Put more when some of them are due, or"
        " have the limit raised",
    )


_HOSTS_KEPT: Final = 100


class Authenticator:
    """Authenticates callers by their key; without one only if the settings allow it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._needs_keys = config.needs_keys
        self.ring = KeyRing(config.namespace, config.api_key_file)
        self._rates = Rates(processes=config.processes)
        self._hosts: set[bytes] = set()
        self.free = not config.needs_keys and not config.api_rate
        """True if callers without a key are not even counted."""

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

    async def still_admits(self, store: Store, key: ApiKey) -> bool:
        """Return whether a key that was admitted has been neither revoked nor expired since."""
        return key is OPEN or await self.ring.holds(store, key)

    def key_at_hand(self, headers: Headers, clock: Clock) -> ApiKey | None:
        """Return the caller's key if it is known without a lookup; not admitted yet."""
        shown = headers.get(b"authorization")
        if shown is None:
            return OPEN
        token = _bearer(shown)
        return None if token is None else self.ring.at_hand(token, clock.now_ms())

    def let_in(self, key: ApiKey, headers: Headers, address: str) -> None:
        """Do the rest of `admit` for a key that was at hand."""
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
        """Refuse requests from web pages in a browser: without keys, anyone who reaches the port may do everything.

        Origin reveals a page of another site; Host reveals one that points its own name at this address.
        """
        host = headers.get(b"host", b"localhost").lower()
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
        if origin is not None and origin.partition(b"://")[2].lower() != host:
            raise Problem("forbidden", "a page of another site may not call this API; set access to keys")

    def _answers_to(self, name: str) -> bool:
        if is_loopback(name) or name.lower() in self._config.api_hosts:
            return True
        return self._config.access == "open" and _cannot_be_registered(name.lower())


def _cannot_be_registered(name: str) -> bool:
    """Return whether a host is a private address or name: no page can come from it through public DNS."""
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith((".internal", ".local", ".localhost", ".svc"))
    return True


def _bearer(shown: bytes) -> str | None:
    """Return the key in an Authorization header, if its text has the form of one."""
    scheme, _, token = shown.decode("latin-1").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and is_token(token) else None


def _name_of(host: bytes) -> str:
    """Return `127.0.0.1:8000` or `[::1]:8000` without the port."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def check_target(key: ApiKey, target: str) -> None:
    if not key.sees(target):
        raise Problem("forbidden", f"this key may not use the target {target[:200]!r}")


def check_lane(key: ApiKey, lane: str | None) -> None:
    """Refuse another tenant's lane to a key bound to targets: a failing task of the key would block that lane."""
    if lane is not None and key.targets is not None and not lane.startswith(f"{key.id}/"):
        raise Problem(
            "forbidden",
            f"this key is bound to targets, and may use only lanes that begin with '{key.id}/'",
        )


def check_right(key: ApiKey, right: Right | None) -> None:
    if right is not None and not key.may(right):
        raise Problem("forbidden", f"the key's role is {key.role}, which does not have the right {right!r}")
