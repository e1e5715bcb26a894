"""The servers: who is primary, the connections to each, which primary holds what, and sharded pub/sub.

Nothing here repeats a command. On "moved", "clusterdown" or "readonly" the caller calls `refresh()` and repeats
commands that are safe to repeat; on Unavailable it calls `suspect()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import hiredis

from mainspring.model.errors import InvalidInput, Refused, StoreError, Unavailable
from mainspring.model.metrics import Histogram
from mainspring.store.redis.connection import Connection, RedisCommand
from mainspring.store.redis.url import (
    AnyEndpoint,
    ClusterEndpoint,
    CredentialProvider,
    Endpoint,
    SentinelEndpoint,
    Tls,
    parse_url,
    signed,
)

SLOTS = 16384
# After the first answer the others get this long: long enough to hear a fresher view,
# short enough that a dead node does not hold up a failover.
_GRACE_S = 0.25

ServerAddress = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotMap:
    """One node's view of the cluster; a higher epoch is a fresher view."""

    healthy: bool
    epoch: int
    ranges: tuple[tuple[int, int, ServerAddress], ...]
    nodes: tuple[ServerAddress, ...] = ()
    """Primaries and replicas: every node that can be asked for the topology."""

    @property
    def freshness(self) -> tuple[bool, int]:
        return (self.healthy, self.epoch)


def key_slot(key: bytes) -> int:
    """Return the cluster slot of a key or channel: crc16 of its hash tag if it has one, otherwise of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def read_slot_map(info: Any, slots: Any, asked: ServerAddress) -> SlotMap:
    """Read the replies of CLUSTER INFO and CLUSTER SLOTS. INFO may be denied; SLOTS is needed."""
    if isinstance(slots, hiredis.ReplyError):
        raise Refused(f"CLUSTER SLOTS was refused: {slots}")
    fields = {} if isinstance(info, hiredis.ReplyError) else info_fields(info)
    ranges = tuple((row[0], row[1], _node(row[2], asked)) for row in slots)
    nodes = tuple(dict.fromkeys(_node(node, asked) for row in slots for node in row[2:]))
    healthy = fields.get("cluster_state", "ok") == "ok"
    return SlotMap(healthy, int(fields.get("cluster_current_epoch", "0")), ranges, nodes)


def read_redirect(error: hiredis.ReplyError, asked: ServerAddress) -> tuple[int, ServerAddress]:
    """Read "MOVED 15891 host:port" and "ASK …": return the slot and the server to ask for it."""
    _, slot, address = str(error).split(" ")[:3]
    host, _, port = address.rpartition(":")
    # A server that does not know its own host name omits it: then it is the server we asked.
    return int(slot), (asked[0] if host in ("", "?") else host, int(port))


def _node(row: Sequence[Any], asked: ServerAddress) -> ServerAddress:
    # A node that does not know its own host name returns nothing or "?": then it is the node we asked.
    host = (row[0] or b"").decode()
    return (asked[0] if host in ("", "?") else host, int(row[1]))


def read_sentinel_master(reply: Any) -> tuple[int, ServerAddress]:
    """Read SENTINEL MASTER: (config epoch, address). A higher epoch is a later failover."""
    if isinstance(reply, hiredis.ReplyError):
        raise Refused(f"the sentinel answered: {reply}")
    fields = {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    return int(fields.get("config-epoch", "0")), (fields["ip"], int(fields["port"]))


def info_fields(reply: bytes) -> dict[str, str]:
    """Read an INFO-like reply: lines of name:value."""
    rows = (line.partition(":") for line in reply.decode().splitlines() if line[:1] != "#")
    return {name: value for name, colon, value in rows if colon}


async def answers(questions: Sequence[Awaitable[T]]) -> tuple[list[T], list[StoreError]]:
    """Ask all at once; return the answers that came within a short grace after the first, and the errors."""
    waiting = {asyncio.ensure_future(question) for question in questions}
    good: list[T] = []
    bad: list[StoreError] = []
    try:
        while waiting:
            timeout = _GRACE_S if good else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                error = task.exception()
                if error is None:
                    good.append(task.result())
                elif isinstance(error, StoreError):
                    bad.append(error)
                else:
                    raise error
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return good, bad


# Sharded pub/sub that resubscribes after a lost connection, a moved slot or a failover.
#
# Messages are hints, never data: those published while the connection was down are lost. `on_connect` is therefore
# called after every subscription, so that the caller checks for work itself.

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
# A silent server is detected after two of these: an unplugged cable does not close a connection.
_PING_S = 5.0


class Subscription:
    """Keeps `channels` subscribed until closed."""

    def __init__(
        self,
        channels: Sequence[str],
        on_message: Callable[[str, bytes], None],
        on_connect: Callable[[], None],
        *,
        route: Callable[[str], Primary],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._channels = tuple(channels)
        self._on_message = on_message
        self._on_connect = on_connect
        self._route = route
        self._refresh = refresh
        self._listeners: dict[Primary, _Listener] = {}
        self._task = asyncio.create_task(self._run(), name="mainspring-subscription")

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                if await self._listen():
                    delay_s = _FIRST_DELAY_S
                    await _first_end(self._listeners.values())
                # Spread the delays, so that not all nodes reconnect to a restarted server at the same moment.
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, _LONGEST_DELAY_S)
                with contextlib.suppress(StoreError):
                    await self._refresh()
        finally:
            for listener in self._listeners.values():
                listener.close()

    async def _listen(self) -> bool:
        """Subscribe to the missing channels, server by server; return False while a server is unreachable."""
        wanted, whole = self._by_primary()
        for primary, listener in list(self._listeners.items()):
            if listener.over or set(wanted.get(primary, ())) != listener.channels:
                del self._listeners[primary]
                listener.close()
        missing = [primary for primary in wanted if primary not in self._listeners]
        answers = await asyncio.gather(*(self._join(primary, wanted[primary]) for primary in missing))
        if any(answers):
            self._on_connect()
        return whole and all(answers)

    async def _join(self, primary: Primary, channels: Sequence[str]) -> bool:
        try:
            listener = _Listener(await primary.dedicated(), channels, self._on_message)
        except StoreError:
            return False  # the server is unreachable; the caller polls meanwhile
        try:
            await listener.subscribed()
        except StoreError:
            listener.close()
            return False
        except BaseException:
            listener.close()
            raise
        self._listeners[primary] = listener
        return True

    def _by_primary(self) -> tuple[dict[Primary, list[str]], bool]:
        """Return the channels by server, and whether every channel has one."""
        groups: dict[Primary, list[str]] = defaultdict(list)
        whole = True
        for channel in self._channels:
            try:
                groups[self._route(channel)].append(channel)
            except StoreError:
                whole = False
        return groups, whole


async def _first_end(listeners: Iterable[_Listener]) -> None:
    tasks = [asyncio.ensure_future(listener.ended()) for listener in listeners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Listener:
    """The channels of one server, on one connection."""

    def __init__(
        self, connection: Connection, channels: Sequence[str], on_message: Callable[[str, bytes], None]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self.channels = frozenset(channels)
        self._missing = set(channels)
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._heard = False
        connection.listen(self._take, self._over.set)
        connection.send(_commands(channels))

    async def subscribed(self) -> None:
        """Wait until the server has confirmed every channel; raise Unavailable if it does not."""
        over = asyncio.ensure_future(self._over.wait())
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({over, ready}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            ready.cancel()
            await asyncio.gather(over, ready, return_exceptions=True)
        if self._over.is_set() or not self._ready.is_set():
            raise Unavailable(f"{self._connection.address}: subscription was not confirmed", sent=True)

    async def ended(self) -> None:
        """Wait until the connection breaks, is silent too long, or a channel leaves this server."""
        while not self._over.is_set():
            self._heard = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PING_S):
                    await self._over.wait()
                    return
            if not self._heard:
                self._connection.send([("PING",)])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PING_S):
                        await self._over.wait()
                        return
                if not self._heard:
                    self._over.set()
                    return

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def close(self) -> None:
        self._connection.close()

    def _take(self, reply: Any) -> None:
        self._heard = True
        if isinstance(reply, hiredis.ReplyError):  # MOVED, NOPERM, ...
            self._over.set()
            return
        match reply:
            case [b"smessage", channel, message]:
                self._on_message(channel.decode(), message)
            case [b"ssubscribe", channel, _]:
                self._missing.discard(channel.decode())
                if not self._missing:
                    self._ready.set()
            case [b"sunsubscribe", *_]:  # the slot moved away
                self._over.set()


def _commands(channels: Sequence[str]) -> list[RedisCommand]:
    # One command per slot: a cluster refuses channels of several slots in one.
    slots: dict[int, list[str]] = defaultdict(list)
    for channel in channels:
        slots[key_slot(channel.encode())].append(channel)
    return [("SSUBSCRIBE", *group) for group in slots.values()]


Redirect = Literal["moved", "ask", "tryagain", "clusterdown", "readonly", "loading", "masterdown", "noscript", "oom"]
_REDIRECTS = frozenset(
    {"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "NOSCRIPT", "OOM"}
)

# How long a call waits for a server that was unreachable before. The connection attempt continues in the background:
# a server that hangs must not delay every call that also has work for other servers.
_AWAY_WAIT_S = 0.25


def redirect_of(error: hiredis.ReplyError) -> Redirect | None:
    """Return the redirect that an error reply asks for, by its first word; None for any other error."""
    word = str(error).partition(" ")[0]
    return cast("Redirect", word.lower()) if word in _REDIRECTS else None


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How connections to the server are made: timeouts in seconds, PEM files for TLS, credentials."""

    connect_timeout_s: float = 3.0
    timeout_s: float = 10.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_name: str = "mainspring"
    credentials: CredentialProvider | None = field(default=None, repr=False)
    """Called for user and password at every connect; its answer replaces those in the URL."""


class Shared(Generic[T]):
    """An operation that runs once for all callers that request it while it runs."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        task = self._task
        if task is None:
            task = self._task = asyncio.create_task(self._work())
            task.add_done_callback(self._finished)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # ended by cancel() below, not because our caller was cancelled
                raise Unavailable("the connection was closed", sent=False) from None
            raise

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finished(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, even if every caller was cancelled meanwhile


class Topology(Protocol):
    """Callbacks a primary needs: find the server of a channel, and refresh the topology."""

    def for_channel(self, channel: str) -> Primary: ...

    async def refresh(self) -> None: ...

    def keep(self, subscription: Subscription) -> None:
        """Close the subscription together with everything else: it may outlive the primary it was made on."""


class SharedConnection:
    """A connection that many callers share, opened when needed and again after it broke."""

    def __init__(self, address: str, open_one: Callable[[], Coroutine[Any, Any, Connection]]) -> None:
        self._address = address
        self._open_one = open_one
        self._current: Connection | None = None
        self._opened: Shared[Connection] = Shared(self._open)
        self._away = False

    async def get(self) -> Connection:
        """Return the connection, after at most one attempt to open it."""
        current = self._current
        if current is not None and not current.closed:
            return current
        if not self._away:
            return await self._opened()
        try:
            async with asyncio.timeout(_AWAY_WAIT_S):
                return await self._opened()
        except TimeoutError:
            raise Unavailable(f"{self._address}: cannot connect: it did not answer before either", sent=False) from None

    @property
    def idle(self) -> bool:
        return self._current is None or self._current.closed or self._current.idle

    def close(self) -> None:
        self._opened.cancel()
        if self._current is not None:
            self._current.close()

    async def _open(self) -> Connection:
        try:
            self._current = await self._open_one()
        except StoreError:
            self._away = True
            raise
        self._away = False
        return self._current


class Primary:
    """A primary server: its main connection, a second one for requests of the API, and dedicated ones."""

    def __init__(self, endpoint: Endpoint, options: LinkOptions, topology: Topology) -> None:
        self.address = endpoint.address
        self.endpoint = endpoint
        self._options = options
        self._topology = topology
        self._main = SharedConnection(self.address, self._open)
        self._requests = SharedConnection(self.address, self._open)
        self._extra: set[Connection] = set()
        self._closed = False
        self.latency = Histogram()
        """Time from sending to the last reply on the shared connections."""

    @property
    def timeout_s(self) -> float:
        return self._options.timeout_s

    async def pipeline(
        self, commands: Sequence[RedisCommand], *, timeout_s: float | None = None, requests: bool = False
    ) -> list[Any]:
        """Send on the main connection, or on that for requests. Try once to open it; never send twice."""
        connection = await (self._requests if requests else self._main).get()
        timeout_s = self._options.timeout_s if timeout_s is None else timeout_s
        began_s = time.perf_counter()
        try:
            return await connection.pipeline(commands, timeout_s=timeout_s)
        finally:
            self.latency.observe(time.perf_counter() - began_s)

    async def dedicated(self) -> Connection:
        """Return a separate connection for WAIT, blocking commands and pub/sub; the caller closes it after use."""
        connection = await self._open()
        self._extra = {extra for extra in self._extra if not extra.closed} | {connection}
        return connection

    async def subscribe(
        self, channels: Sequence[str], on_message: Callable[[str, bytes], None], on_connect: Callable[[], None]
    ) -> Subscription:
        """Keep sharded channels subscribed, wherever their slots move, until the result is closed."""
        topology = self._topology
        subscription = Subscription(
            channels, on_message, on_connect, route=topology.for_channel, refresh=topology.refresh
        )
        topology.keep(subscription)
        return subscription

    @property
    def idle(self) -> bool:
        """True while no call waits for a reply of this server."""
        return self._main.idle and self._requests.idle and all(one.closed or one.idle for one in self._extra)

    def close(self) -> None:
        self._closed = True
        self._main.close()
        self._requests.close()
        for connection in self._extra:
            connection.close()

    async def _open(self) -> Connection:
        self._check_open()
        options = self._options
        timeout_s = options.connect_timeout_s
        endpoint = await signed(self.endpoint, options.credentials, within_s=timeout_s)
        connection = await Connection.open(endpoint, connect_timeout_s=timeout_s, client_name=options.client_name)
        try:
            self._check_open()  # again: it may have been closed while connecting
        except Unavailable:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.address}: the connection was closed", sent=False)


# Short, because a failover is over in an instant; not shorter, because every node asks at that moment.
_LOOK_EVERY_S = 0.25


class Servers:
    """All primaries: one for a standalone server or behind sentinels, several in a cluster."""

    def __init__(self, endpoint: AnyEndpoint, options: LinkOptions) -> None:
        self.cluster = isinstance(endpoint, ClusterEndpoint)
        self._endpoint = endpoint
        self._options = options
        self._primaries: dict[ServerAddress, Primary] = {}
        self._former: list[Primary] = []
        self._redirected: dict[ServerAddress, Primary] = {}
        """Nodes named by a redirect that hold no slots, as far as known."""
        self._known: tuple[ServerAddress, ...] = ()
        self._slots: list[Primary | None] = [None] * SLOTS
        self._refreshed: Shared[None] = Shared(self._refresh)
        self._looking: asyncio.Task[None] | None = None
        self._look_again = 0.0
        self._subscriptions: set[Subscription] = set()

    @classmethod
    async def connect(cls, url: str, options: LinkOptions | None = None) -> Servers:
        """Find the primaries and connect to them, or raise the error that says why this failed."""
        options = options or LinkOptions()
        servers = cls(_with_tls(parse_url(url), options), options)
        try:
            await servers.refresh()
            await asyncio.gather(*(primary.pipeline([("PING",)]) for primary in servers.all()))
        except BaseException:
            await servers.aclose()
            raise
        return servers

    def for_slot(self, slot: int) -> Primary:
        primary = self._slots[slot]
        if primary is None:
            raise Unavailable(f"no server of the cluster holds slot {slot}", sent=False)
        return primary

    def for_channel(self, channel: str) -> Primary:
        return self.for_slot(key_slot(channel.encode()))

    def all(self) -> list[Primary]:
        return list(self._primaries.values())

    async def refresh(self) -> None:
        """Find the primaries again. Calls made while one runs share its result."""
        await self._refreshed()

    def suspect(self) -> None:
        """Check in the background whether another server replaced a primary that could not be reached."""
        now = asyncio.get_running_loop().time()
        if isinstance(self._endpoint, Endpoint) or now < self._look_again:
            return
        self._look_again = now + _LOOK_EVERY_S
        self._looking = asyncio.create_task(self._look(), name="mainspring-look")

    def at(self, node: ServerAddress) -> Primary:
        """Return the server with this address, which a redirect named."""
        primary = self._primaries.get(node) or self._redirected.get(node)
        if primary is None:
            primary = self._redirected[node] = Primary(self._base().at(*node), self._options, self)
        return primary

    def learn(self, slot: int, node: ServerAddress) -> None:
        """Record the owner of a slot that a server named: it knows before the others do."""
        self._slots[slot] = self.at(node)

    def keep(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)

    async def aclose(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        self._refreshed.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for primary in (*self._primaries.values(), *self._former, *self._redirected.values()):
            primary.close()

    async def _look(self) -> None:
        with contextlib.suppress(StoreError):
            await self.refresh()

    def _base(self) -> Endpoint:
        """Return user, password and TLS, which all servers of this URL share."""
        match self._endpoint:
            case ClusterEndpoint(seeds):
                return seeds[0]
            case SentinelEndpoint(primary=primary):
                return primary
            case endpoint:
                return endpoint

    async def _refresh(self) -> None:
        match self._endpoint:
            case ClusterEndpoint():
                await self._refresh_cluster(self._endpoint)
            case SentinelEndpoint():
                await self._refresh_sentinel(self._endpoint)
            case Endpoint() as endpoint:
                if not self._primaries:
                    self._adopt([(0, SLOTS - 1, (endpoint.host, endpoint.port))])

    async def _refresh_cluster(self, cluster: ClusterEndpoint) -> None:
        # Ask every known node, replicas too: the seeds may all be gone, and one node's view may be old.
        known = dict.fromkeys([*cluster.seeds, *(cluster.seeds[0].at(*node) for node in self._known)])
        maps, errors = await answers([self._slot_map(endpoint) for endpoint in known])
        if not maps:
            raise _none_answered("cluster node", errors)
        best = max(maps, key=lambda found: found.freshness)
        if not best.ranges:
            raise Unavailable("the cluster has no slots assigned", sent=False)
        self._known = best.nodes
        self._adopt(best.ranges)

    async def _slot_map(self, endpoint: Endpoint) -> SlotMap:
        info, slots = await self._ask(endpoint, [("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
        return read_slot_map(info, slots, (endpoint.host, endpoint.port))

    async def _refresh_sentinel(self, watch: SentinelEndpoint) -> None:
        found, errors = await answers([self._named_by(one, watch.master) for one in watch.sentinels])
        # The latest failover first; two sentinels may disagree for a moment.
        for _, node in sorted(set(found), reverse=True):
            try:
                if await self._is_primary(watch.primary.at(*node)):
                    self._adopt([(0, SLOTS - 1, node)])
                    return
                errors.append(Unavailable(f"{node[0]}:{node[1]} is not a primary", sent=False))
            except StoreError as error:
                errors.append(error)
        raise _none_answered(f"sentinel with a reachable primary {watch.master!r}", errors)

    async def _named_by(self, sentinel: Endpoint, master: str) -> tuple[int, ServerAddress]:
        # Sentinels have separate credentials in the URL.
        return read_sentinel_master((await self._put(sentinel, [("SENTINEL", "MASTER", master)]))[0])

    async def _is_primary(self, endpoint: Endpoint) -> bool:
        role = (await self._ask(endpoint, [("ROLE",)]))[0]
        # If ROLE is forbidden, trust the sentinel.
        return isinstance(role, hiredis.ReplyError) or role[0] == b"master"

    async def _ask(self, endpoint: Endpoint, commands: Sequence[RedisCommand]) -> list[Any]:
        options = self._options
        known = await signed(endpoint, options.credentials, within_s=options.connect_timeout_s)
        return await self._put(known, commands)

    async def _put(self, endpoint: Endpoint, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send questions on a separate short-lived connection, never behind a busy pipeline."""
        timeout_s = self._options.connect_timeout_s
        connection = await Connection.open(endpoint, connect_timeout_s=timeout_s, client_name=self._options.client_name)
        try:
            return await connection.pipeline(commands, timeout_s=timeout_s)
        finally:
            connection.close()

    def _adopt(self, ranges: Sequence[tuple[int, int, ServerAddress]]) -> None:
        old, self._primaries = self._primaries, {}
        slots: list[Primary | None] = [None] * SLOTS
        base = self._base()
        for first, last, node in ranges:
            primary = self._primaries.get(node) or old.pop(node, None) or self._redirected.pop(node, None)
            if primary is None:
                primary = Primary(base.at(*node) if base.path is None else base, self._options, self)
            self._primaries[node] = primary
            slots[first : last + 1] = [primary] * (last - first + 1)
        self._slots = slots
        # A former primary may still owe replies; close it once no call waits for them.
        self._former += old.values()
        for primary in [one for one in self._former if one.idle]:
            self._former.remove(primary)
            primary.close()


def _with_tls(endpoint: AnyEndpoint, options: LinkOptions) -> AnyEndpoint:
    """Fill TLS files that the URL leaves open from the options."""

    def filled(one: Endpoint) -> Endpoint:
        if one.tls is None:
            if options.tls_ca or options.tls_cert or options.tls_key:
                raise InvalidInput("TLS files are given, but the redis URL does not start with rediss")
            return one
        tls = Tls(one.tls.ca or options.tls_ca, one.tls.cert or options.tls_cert, one.tls.key or options.tls_key)
        return replace(one, tls=tls)

    match endpoint:
        case ClusterEndpoint():
            return ClusterEndpoint(tuple(map(filled, endpoint.seeds)))
        case SentinelEndpoint():
            sentinels = tuple(map(filled, endpoint.sentinels))
            return SentinelEndpoint(sentinels, endpoint.master, filled(endpoint.primary))
        case Endpoint():
            return filled(endpoint)


def _none_answered(what: str, errors: Sequence[StoreError]) -> Unavailable:
    reasons = "; ".join(dict.fromkeys(map(str, errors)))
    return Unavailable(f"no {what} answered: {reasons or 'none is known'}", sent=False)
