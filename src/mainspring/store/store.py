"""One namespace on its servers: routing by partition, scripts, and which commands are safe to repeat."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import hiredis

from ..model.clock import OLD_S, Clock, ServerClock
from ..model.errors import InvalidInput, NotConfirmed, OutOfMemory, Refused, StoreError, Unavailable, WrongFormat
from ..model.shared_settings import SharedSettings, checked_setting
from .durability import SERVER, Durability
from .keys import Keyspace, check_namespace, meta_key, slot_of
from .redis.connection import RedisCommand
from .redis.sender import Group, GroupResults, Replies, Sender
from .redis.servers import LinkOptions, Primary, Servers, redirect_of
from .scripts import Scripts

log = logging.getLogger("mainspring.store")


FORMAT: Final = 1
DEFAULT_PARTITIONS: Final = 32
REACH_S: Final = 2.0
"""Seconds that a probe waits for the server's reply."""
RETRY_FOR_S: Final = 10.0
"""Seconds a call keeps retrying while a slot moves or a server is not ready."""


class Store:
    """Sends groups of commands to the servers that hold their slots."""

    def __init__(
        self,
        servers: Servers,
        keyspace: Keyspace,
        clock: Clock,
        *,
        shared: SharedSettings | None = None,
        retry_for_s: float = RETRY_FOR_S,
        timeout_s: float | None = None,
        requests: bool = False,
    ) -> None:
        self.shared = shared or SharedSettings()
        """The shared settings of the namespace, as of the last read."""
        self.servers = servers
        self.keys = keyspace
        self.clock = clock
        self.scripts = Scripts(clock)
        self._ask_from_s = 0.0
        self._requests = requests
        self._sender = Sender(servers, self.scripts, retry_for_s=retry_for_s, timeout_s=timeout_s, requests=requests)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        namespace: str = "main",
        partitions: int | None = None,
        clock: Clock | None = None,
        options: LinkOptions | None = None,
        makes: bool = True,
        shared: SharedSettings | None = None,
    ) -> "Store":
        """Connect; check that this version can read the namespace and that its settings agree with `shared`.

        A missing namespace is created; with `makes` false it is treated as empty, and nothing is written.
        """
        check_namespace(namespace)
        shared = shared or SharedSettings()
        clock = clock or ServerClock()
        servers = await Servers.connect(url, options or LinkOptions())
        try:
            sender = Sender(servers, Scripts(clock), retry_for_s=RETRY_FOR_S)
            count = await _agree_on_format(sender, namespace, partitions, shared, makes=makes)
            shared.check(namespace)
            store = cls(servers, Keyspace(namespace, count), clock, shared=shared)
            await store.sample_clock()
        except BaseException:
            await servers.aclose()
            raise
        return store

    def urgent(self, timeout_s: float) -> "Store":
        """Return a store that fails fast, for an owner of many partitions: one slot must not delay the others.

        A temporary refusal (a slot that is moving, a cluster that is down) is returned at once, and a server that does
        not answer within `timeout_s` counts as lost. The owner retries by itself.
        """
        # A manual clock does not move while a slow machine works, so no lease ends meanwhile.
        return Store(
            self.servers,
            self.keys,
            self.clock,
            shared=self.shared,
            retry_for_s=0.0,
            timeout_s=None if self.clock.manual else timeout_s,
        )

    def for_requests(self) -> "Store":
        """Return a store with its own connection to each server, for requests of a node's clients.

        A reply waits for all earlier replies on its connection: leases and ticks must not wait for a large page.
        """
        return Store(self.servers, self.keys, self.clock, shared=self.shared, requests=True)

    async def open_namespace(self, namespace: str) -> "Store | None":
        """Return the store of another namespace on the same servers.

        None if it does not exist, or if this version (or this user) may not read it.
        """
        check_namespace(namespace)
        try:
            [flat] = await self.run_one(slot_of(namespace), [("HGETALL", meta_key(namespace))])
        except Refused:
            return None  # denied by the server's ACL, or the key belongs to another program
        meta = _Meta.read(flat)
        found_format, partitions = ((int(raw) if raw and raw.isdigit() else 0) for raw in meta.known)
        if found_format != FORMAT or not 1 <= partitions <= 4096:
            return None
        shared = SharedSettings()
        shared.take(meta.settings)
        keyspace = Keyspace(namespace, partitions)
        return Store(self.servers, keyspace, self.clock, shared=shared, requests=self._requests)

    async def aclose(self) -> None:
        await self.servers.aclose()

    async def keep_format(self) -> None:
        """Restore format and partition count if the server lost its data; refuse if they differ by now.

        Without them the next client could create the namespace with another count, and put tasks where no node looks.
        Refresh the shared settings, and write lost ones again.
        """
        await _agree_on_format(self._sender, self.keys.namespace, len(self.keys), self.shared, makes=True)

    async def set_shared(self, name: str, text: str) -> str | None:
        """Change a shared setting for all users of the namespace; return its former value."""
        key, text = self.keys.meta, checked_setting(name, text)
        before, _ = await self.run_one(self.keys.slot, [("HGET", key, _SET + name), ("HSET", key, _SET + name, text)])
        await self.keep_format()
        return None if before is None else str(before.decode())

    async def sample_clock(self) -> int:
        """Ask the server for its time; return it in milliseconds. Refuse a namespace that was made again meanwhile."""
        if not self.clock.manual:
            ask: list[RedisCommand] = [("TIME",), ("HGETALL", self.keys.meta)]
            reply, flat = await self.servers.for_slot(self.keys.slot).pipeline(ask)
            seconds, micros = _checked(reply)
            self.clock.sample(int(seconds) * 1_000_000 + int(micros))
            meta = _Meta.read(flat if isinstance(flat, list) else [])
            if None not in meta.known:  # otherwise the format is lost: a node restores it
                _check_format(self.keys.namespace, meta.known, len(self.keys))
                self.shared.take(meta.settings)
        return self.clock.now_ms()

    async def fresh_ms(self) -> int:
        """Return the server's time as the start of a delay; ask for it again if the last sample is old.

        If the server does not answer, use the estimate: the call that needs the time will report the failure.
        """
        if self.clock.old and time.monotonic() >= self._ask_from_s:
            try:
                async with asyncio.timeout(REACH_S):
                    await self.sample_clock()
            except (Unavailable, Refused, TimeoutError):
                # In a cluster other servers may answer: do not delay those calls.
                self._ask_from_s = time.monotonic() + OLD_S
        return self.clock.now_ms()

    async def outage(self) -> str | None:
        """Say why no server of this namespace takes writes now; None if one of them does.

        A full server (`maxmemory`) takes writes that free memory, and counts as up.
        """
        by_primary: dict[Primary, str] = {}
        for one in self.keys.partitions:
            with contextlib.suppress(StoreError):  # no server has this slot now
                by_primary.setdefault(self.servers.for_slot(one.slot), one.own)
        found = await asyncio.gather(*(_outage_of(primary, key) for primary, key in by_primary.items()))
        reasons = [reason for reason in found if reason is not None]
        if len(reasons) < len(found):
            return None
        return "; ".join(sorted(set(reasons))) or "no server of the cluster holds a partition"

    async def run(self, groups: Sequence[Group], durability: Durability = SERVER) -> GroupResults:
        """Send all groups, one pipeline per server. The result of a failed group is its error.

        Commands that the server refused without executing them (a slot that moved, an unknown script) are repeated.
        After a lost reply nothing is repeated: only the caller knows whether that is safe.
        """
        results = await self._sender.run(groups, durability)
        return [_as_result(group[1], result) for group, result in zip(groups, results, strict=True)]

    async def run_one(self, slot: int, commands: list[RedisCommand], durability: Durability = SERVER) -> Replies:
        """Run one group; raise its failure."""
        [replies] = await self.run_all([(slot, commands)], durability)
        return replies

    async def run_all(self, groups: Sequence[Group], durability: Durability = SERVER) -> list[Replies]:
        """Run all groups; raise the first failure."""
        found: list[Replies] = []
        for result in await self.run(groups, durability):
            if isinstance(result, StoreError):
                raise result
            found.append(result)
        return found

    async def call(self, partition: int, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Call one script on one partition; raise an error reply."""
        [reply] = await self.run_one(self.keys.partitions[partition].slot, [self.scripts.call(name, keys, args)])
        return reply

    async def recover(self) -> None:
        """Find the primaries again after a failure."""
        await self._sender.refresh()


async def _outage_of(primary: Primary, key: str) -> str | None:
    try:
        async with asyncio.timeout(REACH_S):
            # A write that changes nothing: servers that refuse writes still answer reads.
            [reply] = await primary.pipeline([("HDEL", key, "")])
    except (StoreError, TimeoutError):
        return "the server does not answer"
    if isinstance(reply, hiredis.ReplyError) and redirect_of(reply) not in ("moved", "ask", "tryagain"):
        return f"the server refuses every write: {reply}"
    return None


_SET: Final = "set:"
"""Prefix of shared settings in `meta`."""


class _Meta(NamedTuple):
    """Contents of the hash `meta` of a namespace."""

    known: list[bytes | None]
    """Format and partition count."""
    settings: dict[str, str]

    @classmethod
    def read(cls, flat: Sequence[bytes]) -> "_Meta":
        fields = {name.decode(errors="replace"): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        settings = {
            name.removeprefix(_SET): value.decode(errors="replace")
            for name, value in fields.items()
            if name.startswith(_SET)
        }
        return cls([fields.get("format"), fields.get("partitions")], settings)


async def _agree_on_format(
    sender: Sender, namespace: str, partitions: int | None, shared: SharedSettings, *, makes: bool
) -> int:
    """Write the format of a new namespace if `makes`; refuse a format that differs."""
    key = meta_key(namespace)
    slot = slot_of(namespace)
    wanted = DEFAULT_PARTITIONS if partitions is None else partitions
    if type(wanted) is not int or not 1 <= wanted <= 4096:
        raise InvalidInput(f"partitions is {wanted!r}; give a whole number between 1 and 4096")
    ask: RedisCommand = ("HGETALL", key)
    meta = _Meta.read((await _answered(sender, slot, [ask]))[0])
    if meta.known == [None, None]:
        if not makes:
            return wanted
        # Read first: a full server refuses writes, and a node must still be able to open an existing namespace.
        new: list[RedisCommand] = [("HSETNX", key, "format", FORMAT), ("HSETNX", key, "partitions", wanted), ask]
        meta = _Meta.read((await _answered(sender, slot, new))[2])
    found = _check_format(namespace, meta.known, partitions)
    # Fill in settings that this process read earlier and the server has lost.
    fills = shared.fills | shared.kept if shared.fills else {}
    if makes and (missing := fills.keys() - meta.settings.keys()):
        writes: list[RedisCommand] = [("HSETNX", key, _SET + name, fills[name]) for name in sorted(missing)]
        try:
            meta = _Meta.read((await _answered(sender, slot, [*writes, ask]))[-1])
        except OutOfMemory:
            log.warning("namespace %s: the server is full; its shared settings are written later", namespace)
    shared.take(meta.settings)
    return found


def _check_format(namespace: str, known: Sequence[bytes | None], partitions: int | None) -> int:
    """Return the partition count that `meta` names; refuse another format, or another count than `partitions`."""
    key = meta_key(namespace)
    try:
        found_format, found = (int(value or 0) for value in known)
    except ValueError:
        raise WrongFormat(
            f"{key} holds {known!r}, not a format and a partition count; is it another program's?"
        ) from None
    if found_format != FORMAT:
        raise WrongFormat(
            f"namespace {namespace!r} has format {found_format}, this version reads format {FORMAT};"
            " upgrade all nodes or use another namespace"
        )
    if not 1 <= found <= 4096:
        raise WrongFormat(f"{key} says {found} partitions; it must be 1 to 4096: is it another program's?")
    if partitions is not None and found != partitions:
        raise WrongFormat(
            f"namespace {namespace!r} has {found} partitions, {partitions} were asked for; the count is fixed at"
            " creation: leave it out, or use another namespace. If it was made again after the server lost its data,"
            " restart what still uses the old count"
        )
    return found


async def _answered(sender: Sender, slot: int, commands: list[RedisCommand]) -> Replies:
    [result] = await sender.run([(slot, commands)])
    result = _as_result(commands, result)
    if isinstance(result, StoreError):
        raise result
    return result


def _as_result(commands: list[RedisCommand], result: Replies | StoreError) -> Replies | StoreError:
    if isinstance(result, NotConfirmed) and result.replies is not None:
        if isinstance(_as_result(commands, list(result.replies)), StoreError):
            result.replies = None  # some commands failed: no caller may read this as a success
        return result
    if isinstance(result, StoreError):
        return result
    for command, reply in zip(commands, result, strict=True):
        if isinstance(reply, hiredis.ReplyError):
            if command[0] == "SPUBLISH" and commands[0][0] != "SPUBLISH":
                # The write that it announces was applied. Reported as a failure, it would be repeated.
                _warn_unheard(str(reply))
                continue
            return error_of(reply)
        # Only a transaction nests errors; other lists may be long and are not searched.
        if command[0] == "EXEC":
            for inner in reply or ():
                if isinstance(inner, hiredis.ReplyError):
                    return error_of(inner)
    return result


@lru_cache(maxsize=64)
def _warn_unheard(refusal: str) -> None:
    """Warn once per refusal: every call meets it."""
    if refusal.startswith("NOPERM"):
        log.warning(
            "nodes and workers cannot be notified (%s): they find due tasks by polling, and may be late. Give the user"
            " the channels that `mainspring acl` prints",
            refusal,
        )


def error_of(reply: hiredis.ReplyError) -> StoreError:
    """Return an error reply as an exception with a plain message."""
    if redirect_of(reply) == "oom":
        return OutOfMemory(
            "the server has reached its maxmemory and takes no new tasks. Firing continues and frees memory: try again"
            " later or raise maxmemory"
        )
    return Refused(f"the server refused: {reply}")


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise error_of(reply)
    return reply
