"""One namespace on its servers: routing by partition, scripts, and what may be repeated without asking."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import hiredis

from ..model.clock import OLD_S, Clock, ServerClock
from ..model.errors import InvalidInput, NotConfirmed, OutOfMemory, Refused, StoreError, WrongFormat
from .durability import SERVER, Durability
from .keys import Keyspace, check_namespace, meta_key, slot_of
from .redis.connection import RedisCommand
from .redis.sender import Group, GroupResults, Replies, Sender
from .redis.servers import LinkOptions, Servers, redirect_of
from .scripts import Scripts

log = logging.getLogger("mainspring.store")


FORMAT: Final = 1
DEFAULT_PARTITIONS: Final = 32
REACH_S: Final = 2.0
"""How long a probe waits for the server's answer."""
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
        retry_for_s: float = RETRY_FOR_S,
        timeout_s: float | None = None,
    ) -> None:
        self.servers = servers
        self.keys = keyspace
        self.clock = clock
        self.scripts = Scripts(clock)
        self._ask_from_s = 0.0
        self._sender = Sender(servers, self.scripts, retry_for_s=retry_for_s, timeout_s=timeout_s)

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
    ) -> "Store":
        """Connect and check that the namespace is one this version can read.

        One that is not there is made; with `makes` false it is looked at as an empty one, and nothing is written.
        """
        check_namespace(namespace)
        clock = clock or ServerClock()
        servers = await Servers.connect(url, options or LinkOptions())
        try:
            sender = Sender(servers, Scripts(clock), retry_for_s=RETRY_FOR_S)
            count = await _agree_on_format(sender, namespace, partitions, makes=makes)
            store = cls(servers, Keyspace(namespace, count), clock)
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
            self.servers, self.keys, self.clock, retry_for_s=0.0, timeout_s=None if self.clock.manual else timeout_s
        )

    async def open_namespace(self, namespace: str) -> "Store | None":
        """Return the store of another namespace on the same servers.

        None if it does not exist, or if this version (or this user) may not read it.
        """
        check_namespace(namespace)
        ask: RedisCommand = ("HMGET", meta_key(namespace), "format", "partitions")
        try:
            [known] = await self.run_one(slot_of(namespace), [ask])
        except Refused:
            return None  # the server's ACL denies it, or the key belongs to another program
        found_format, partitions = ((int(raw) if raw and raw.isdigit() else 0) for raw in known)
        if found_format != FORMAT or not 1 <= partitions <= 4096:
            return None
        return Store(self.servers, Keyspace(namespace, partitions), self.clock)

    async def aclose(self) -> None:
        await self.servers.aclose()

    async def sample_clock(self) -> int:
        """Ask the server for its time; return it in milliseconds."""
        if not self.clock.manual:
            [reply] = await self.servers.for_slot(0).pipeline([("TIME",)])
            seconds, micros = _checked(reply)
            self.clock.sample(int(seconds) * 1_000_000 + int(micros))
        return self.clock.now_ms()

    async def fresh_ms(self) -> int:
        """Return the server's time, to count a delay from; ask for it again if the last sample is old.

        If the server does not answer, use the estimate: the call that needs the time will report the failure.
        """
        if self.clock.old and time.monotonic() >= self._ask_from_s and not await self.reachable():
            self._ask_from_s = (
                time.monotonic() + OLD_S
            )  # in a cluster other servers may answer: do not delay those calls
        return self.clock.now_ms()

    async def reachable(self) -> bool:
        """True when the server answers now."""
        try:
            async with asyncio.timeout(REACH_S):
                await self.sample_clock()
        except (StoreError, TimeoutError):
            return False
        return True

    async def run(self, groups: Sequence[Group], durability: Durability = SERVER) -> GroupResults:
        """Send all groups, one pipeline per server. A group that failed is answered by its error.

        What the server refused without executing (a slot that moved, an unknown script) is repeated here. A reply
        that was lost is never repeated here: only the caller knows whether that is safe.
        """
        results = await self._sender.run(groups, durability)
        return [_as_result(group[1], result) for group, result in zip(groups, results, strict=True)]

    async def run_one(self, slot: int, commands: list[RedisCommand], durability: Durability = SERVER) -> Replies:
        """One group; its failure is raised."""
        [result] = await self.run([(slot, commands)], durability)
        if isinstance(result, StoreError):
            raise result
        return result

    async def call(self, partition: int, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """One script call on one partition; an error reply is raised."""
        [reply] = await self.run_one(self.keys.partitions[partition].slot, [self.scripts.call(name, keys, args)])
        return reply

    async def recover(self) -> None:
        """After a failure: learn again who is primary, if anybody answers."""
        await self._sender.refresh()


async def _agree_on_format(sender: Sender, namespace: str, partitions: int | None, *, makes: bool) -> int:
    """Write the namespace's format if it is new and shall be made, and refuse one that differs."""
    key = meta_key(namespace)
    slot = slot_of(namespace)
    wanted = DEFAULT_PARTITIONS if partitions is None else partitions
    if type(wanted) is not int or not 1 <= wanted <= 4096:
        raise InvalidInput(f"partitions is {wanted!r}; give a whole number between 1 and 4096")
    ask: RedisCommand = ("HMGET", key, "format", "partitions")
    [known] = await _answered(sender, slot, [ask])
    if known == [None, None]:
        if not makes:
            return wanted
        # Read first: a full server refuses writes, and a node must still be able to open an existing namespace.
        new: list[RedisCommand] = [("HSETNX", key, "format", FORMAT), ("HSETNX", key, "partitions", wanted), ask]
        known = (await _answered(sender, slot, new))[2]
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
            " creation: leave it out, or use another namespace"
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
            result.replies = None  # not everything was done, so it must not be read as if it were
        return result
    if isinstance(result, StoreError):
        return result
    for command, reply in zip(commands, result, strict=True):
        if isinstance(reply, hiredis.ReplyError):
            if command[0] == "SPUBLISH" and commands[0][0] != "SPUBLISH":
                # The write it announces is done. Reported as a failure, it would be repeated.
                _warn_unheard(str(reply))
                continue
            return error_of(reply)
        # Only a transaction nests errors; other lists may be long and are not looked through.
        if command[0] == "EXEC":
            for inner in reply or ():
                if isinstance(inner, hiredis.ReplyError):
                    return error_of(inner)
    return result


@lru_cache(maxsize=64)
def _warn_unheard(refusal: str) -> None:
    """Warn once for each refusal: every call meets it."""
    if refusal.startswith("NOPERM"):
        log.warning(
            "nodes and workers cannot be called (%s): they find what is due by looking, and may be late. Give the user"
            " the channels that `mainspring acl` prints",
            refusal,
        )


def error_of(reply: hiredis.ReplyError) -> StoreError:
    """An error reply as an exception of ours, in plain words."""
    if redirect_of(reply) == "oom":
        return OutOfMemory(
            "the server has reached its maxmemory and takes no new tasks. Firing goes on and frees memory: try again"
            " later or raise maxmemory"
        )
    return Refused(f"the server refused: {reply}")


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise error_of(reply)
    return reply
