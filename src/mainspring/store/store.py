"""One namespace on its servers: routing by partition, scripts, and what may be repeated without asking."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from ..model.clock import Clock, ServerClock
from ..model.errors import OutOfMemory, Refused, StoreError, Unavailable, WrongFormat
from .durable import SERVER, Durability, Pipeline, confirm
from .keys import Keyspace, check_namespace, meta_key, slot_of
from .link import Link, LinkOptions, redirect_of
from .links import Links
from .scripts import Scripts
from .wire import Command, Connection

FORMAT: Final = 1
DEFAULT_PARTITIONS: Final = 32
_RETRY_S: Final = 0.05

Group = tuple[int, list[Command]]
"""Commands for one slot, sent together."""
Replies = list[Any]


class Store:
    """Sends groups of commands to the servers that hold their slots."""

    def __init__(self, links: Links, keyspace: Keyspace, clock: Clock, *, patience_s: float = 10.0) -> None:
        self.links = links
        self.keys = keyspace
        self.clock = clock
        self.scripts = Scripts(clock)
        self.patience_s = patience_s
        self._waiting: dict[Link, Connection] = {}

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        namespace: str = "main",
        partitions: int | None = None,
        clock: Clock | None = None,
        options: LinkOptions | None = None,
    ) -> "Store":
        """Connect and check that the namespace is one this version can read."""
        check_namespace(namespace)
        links = await Links.connect(url, options or LinkOptions())
        try:
            count = await _agree_on_format(links, namespace, partitions)
        except BaseException:
            await links.aclose()
            raise
        store = cls(links, Keyspace(namespace, count), clock or ServerClock())
        await store.sample_clock()
        return store

    async def aclose(self) -> None:
        await self.links.aclose()

    async def sample_clock(self) -> int:
        """Ask the server for its time; return it in milliseconds."""
        if not self.clock.manual:
            [reply] = await self.links.for_slot(0).pipeline([("TIME",)])
            seconds, micros = _checked(reply)
            self.clock.sample(int(seconds) * 1_000_000 + int(micros))
        return self.clock.now_ms()

    def link_of(self, partition: int) -> Link:
        return self.links.for_slot(self.keys.partitions[partition].slot)

    async def run(self, groups: Sequence[Group], durability: Durability = SERVER) -> list[Replies | StoreError]:
        """Send all groups, one pipeline per server. A group that failed is answered by its error.

        What the server refused without executing (a slot that moved, an unknown script) is repeated here. A reply
        that was lost is never repeated here: only the caller knows whether that is safe.
        """
        results: list[Replies | StoreError] = [Unavailable("not sent", sent=False)] * len(groups)
        todo = list(range(len(groups)))
        deadline = asyncio.get_running_loop().time() + self.patience_s
        while todo:
            await self._send(groups, todo, results, durability)
            todo = [i for i in todo if _repeatable(results[i])]
            if todo:
                if asyncio.get_running_loop().time() > deadline:
                    for i in todo:
                        results[i] = _as_error(results[i])
                    break
                await asyncio.sleep(_RETRY_S)
                await self._refresh()
        return [_as_result(group[1], result) for group, result in zip(groups, results, strict=True)]

    async def run_one(self, slot: int, commands: list[Command], durability: Durability = SERVER) -> Replies:
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
        await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self.links.refresh()
        except StoreError:
            return  # still unreachable: the next attempt finds out

    async def _send(
        self,
        groups: Sequence[Group],
        todo: Sequence[int],
        results: list[Replies | StoreError],
        durability: Durability,
    ) -> None:
        by_link: dict[Link, list[int]] = {}
        for i in todo:
            try:
                link = self.links.for_slot(groups[i][0])
            except StoreError as error:
                results[i] = error
                continue
            by_link.setdefault(link, []).append(i)
        if len(by_link) == 1:
            [(link, members)] = by_link.items()
            await self._send_to(link, groups, members, results, durability)
            return
        await asyncio.gather(
            *(self._send_to(link, groups, some, results, durability) for link, some in by_link.items())
        )

    async def _send_to(
        self,
        link: Link,
        groups: Sequence[Group],
        members: list[int],
        results: list[Replies | StoreError],
        durability: Durability,
    ) -> None:
        commands = [command for i in members for command in groups[i][1]]
        try:
            pipeline = link.pipeline if durability.confirm is None else await self._confirmed(link)
            replies = await pipeline(commands, timeout_s=None)
            unknown = [j for j, reply in enumerate(replies) if _is(reply, "noscript")]
            if unknown:
                again = [self.scripts.in_full(commands[j]) for j in unknown]
                for j, reply in zip(unknown, await pipeline(again, timeout_s=None), strict=True):
                    replies[j] = reply
            shortfall = None
            if durability.confirm is not None:
                shortfall = await confirm(pipeline, durability)
        except StoreError as error:
            for i in members:
                results[i] = error
            return
        at = 0
        for i in members:
            size = len(groups[i][1])
            results[i] = replies[at : at + size] if shortfall is None else shortfall
            at += size

    async def _confirmed(self, link: Link) -> Pipeline:
        """A connection of its own: one that waits for disks or replicas would hold up everybody else."""
        connection = self._waiting.get(link)
        if connection is None or connection.closed:
            connection = self._waiting[link] = await link.dedicated()
        return connection.pipeline


async def _agree_on_format(links: Links, namespace: str, partitions: int | None) -> int:
    """Write the namespace's format if it is new, and refuse one that differs."""
    key = meta_key(namespace)
    link = links.for_slot(slot_of(namespace))
    wanted = partitions or DEFAULT_PARTITIONS
    if not 1 <= wanted <= 4096:
        raise WrongFormat(f"partitions is {wanted}; it must lie between 1 and 4096")
    ask: Command = ("HMGET", key, "format", "partitions")
    [known] = await link.pipeline([ask])
    if _checked(known) == [None, None]:
        # Asked first: on a full server nothing can be written, and a node must still be able to open what is there.
        replies = await link.pipeline([("HSETNX", key, "format", FORMAT), ("HSETNX", key, "partitions", wanted), ask])
        for reply in replies:
            _checked(reply)
        known = replies[2]
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


def _is(reply: Any, kind: str) -> bool:
    return isinstance(reply, hiredis.ReplyError) and redirect_of(reply) == kind


_NOT_EXECUTED: Final = frozenset({"moved", "ask", "tryagain", "clusterdown", "readonly", "loading", "masterdown"})


def _repeatable(result: Replies | StoreError) -> bool:
    """True when the server refused the group without executing any of it."""
    if isinstance(result, StoreError):
        return False
    return any(isinstance(reply, hiredis.ReplyError) and redirect_of(reply) in _NOT_EXECUTED for reply in result)


def _as_error(result: Replies | StoreError) -> StoreError:
    if isinstance(result, StoreError):
        return result
    first = next(reply for reply in result if isinstance(reply, hiredis.ReplyError))
    return Unavailable(f"the server keeps refusing: {first}", sent=False)


def _as_result(commands: list[Command], result: Replies | StoreError) -> Replies | StoreError:
    if isinstance(result, StoreError):
        return result
    for command, reply in zip(commands, result, strict=True):
        if isinstance(reply, hiredis.ReplyError):
            return error_of(reply)
        # Only a transaction nests errors; other lists may be long and are not looked through.
        if command[0] == "EXEC":
            for inner in reply or ():
                if isinstance(inner, hiredis.ReplyError):
                    return error_of(inner)
    return result


def error_of(reply: hiredis.ReplyError) -> StoreError:
    """An error reply as an exception of ours, in plain words."""
    if redirect_of(reply) == "oom":
        return OutOfMemory(
            "the server has reached its maxmemory and takes no new tasks; nothing was written. Firing goes on and"
            " frees memory: try again later or raise maxmemory"
        )
    return Refused(f"the server refused: {reply}")


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise error_of(reply)
    return reply
