"""Sends groups of commands to the servers that hold their slots, and repeats commands that were refused unexecuted.

The first word of a refusal says what to do. A refused command was not executed:

        MOVED, READONLY, CLUSTERDOWN …   another server has the slot, or this one is not ready: find the owner, repeat
        ASK                              the slot is moving, and the keys of this call have left: ask there, once
        TRYAGAIN                         the slot is moving, and the keys of this call are split: wait, repeat

While a slot moves key by key, both servers answer TRYAGAIN to every call on several keys of which one does not exist:
such a call must wait for the end of the move. Calls on one key keep working.

A unit of execution is a single command, or a transaction from MULTI to EXEC. Only the refused units of a group are
sent again: its other commands have been executed, and must not be executed twice.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import hiredis

from ...model.errors import NotConfirmed, StoreError, Unavailable
from ..durability import SERVER, Durability, Pipeline, confirm
from ..scripts import Scripts
from .connection import Connection, RedisCommand
from .servers import Primary, ServerAddress, Servers, read_redirect, redirect_of

Group = tuple[int, list[RedisCommand]]
"""Commands for one slot, sent together."""
Replies = list[Any]
GroupResults = list[Replies | StoreError]

_RETRY_S: Final = 0.05
_NOT_EXECUTED: Final = frozenset({"moved", "ask", "tryagain", "clusterdown", "readonly", "loading", "masterdown"})
_ELSEWHERE: Final = frozenset({"moved", "readonly"})


class GroupPart(NamedTuple):
    """Commands of one group, from `first` on, that are sent together."""

    group: int
    first: int
    commands: list[RedisCommand]
    error: hiredis.ReplyError | None = None
    """The refusal, if it was refused."""

    @property
    def refusal(self) -> str | None:
        return None if self.error is None else redirect_of(self.error)


class Sender:
    """Sends all groups of a call, in one pipeline per server.

    A call retries for `retry_for_s` while a slot moves or a server is not ready; the other groups of the same call wait
    with it. With 0 it returns at once, for a caller that has work for other slots.
    """

    def __init__(
        self,
        servers: Servers,
        scripts: Scripts,
        *,
        retry_for_s: float,
        timeout_s: float | None = None,
        requests: bool = False,
    ) -> None:
        """Use the connection for requests, not the main one, if `requests` is set."""
        self._servers = servers
        self._scripts = scripts
        self._retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._requests = requests
        self._waiting: dict[tuple[Primary, str], Connection] = {}

    async def run(self, groups: Sequence[Group], durability: Durability = SERVER) -> GroupResults:
        """Return the replies of each group, or its error. A command whose reply was lost is never repeated here."""
        results: GroupResults = [Unavailable("not sent", sent=False)] * len(groups)
        await self._send(groups, [GroupPart(i, 0, group[1]) for i, group in enumerate(groups)], results, durability)
        refused = _refused(groups, results)
        if refused:
            await self._repeat(groups, refused, results, durability)
        return results

    async def refresh(self) -> None:
        """Find the primaries again, if any server answers."""
        try:
            await self._servers.refresh()
        except StoreError:
            return  # still unreachable: the next attempt finds out

    # -- refused commands ------------------------------------------------------------------------------

    async def _repeat(
        self, groups: Sequence[Group], refused: list[GroupPart], results: GroupResults, durability: Durability
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self._retry_for_s
        pause_s = 0.0
        while refused:
            asked = [part for part in refused if part.refusal == "ask"]
            if asked:
                await self._ask(groups, asked, results, durability)
                refused = _refused(groups, results, {part.group for part in refused})
            again = refused if self._retry_for_s else [part for part in refused if part.refusal in _ELSEWHERE]
            if not again or (pause_s and asyncio.get_running_loop().time() > deadline):
                break
            await self._learn(groups, again, pause_s)
            pause_s = _RETRY_S
            await self._send(groups, again, results, durability)
            refused = _refused(groups, results, {part.group for part in refused})
        for part in refused:
            results[part.group] = _keeps_refusing(part, groups[part.group][0], results[part.group])

    async def _learn(self, groups: Sequence[Group], refused: list[GroupPart], pause_s: float) -> None:
        """Find the current servers of the refused parts. A moving slot (TRYAGAIN) only needs time."""
        moves = [self._named(part, groups[part.group][0]) for part in refused if part.refusal == "moved"]
        if pause_s or not any(part.refusal in _ELSEWHERE for part in refused):
            await asyncio.sleep(_RETRY_S)
        if any(part.refusal != "tryagain" for part in refused):
            await self.refresh()
        for slot, node in moves:
            # After the refresh: the redirecting server knows this best, and others may not have heard of it yet.
            self._servers.learn(slot, node)

    def _named(self, part: GroupPart, slot: int) -> tuple[int, ServerAddress]:
        """Return the slot and the server that a redirect names."""
        assert part.error is not None
        try:
            answered = self._servers.for_slot(slot)
        except StoreError:
            answered = self._servers.all()[0]
        return read_redirect(part.error, (answered.endpoint.host, answered.endpoint.port))

    async def _ask(
        self, groups: Sequence[Group], asked: list[GroupPart], results: GroupResults, durability: Durability
    ) -> None:
        by_primary: dict[Primary, list[GroupPart]] = {}
        for part in asked:
            _, node = self._named(part, groups[part.group][0])
            by_primary.setdefault(self._servers.at(node), []).append(part)
        await asyncio.gather(
            *(
                self._send_to(primary, groups, some, results, durability, asking=True)
                for primary, some in by_primary.items()
            )
        )

    # -- sending -----------------------------------------------------------------------------------------

    async def _send(
        self, groups: Sequence[Group], parts: Sequence[GroupPart], results: GroupResults, durability: Durability
    ) -> None:
        by_primary: dict[Primary, list[GroupPart]] = {}
        for part in parts:
            try:
                primary = self._servers.for_slot(groups[part.group][0])
            except StoreError as error:
                results[part.group] = error
                self._servers.suspect()
                continue
            by_primary.setdefault(primary, []).append(part)
        if len(by_primary) == 1:
            [(primary, some)] = by_primary.items()
            await self._send_to(primary, groups, some, results, durability)
            return
        await asyncio.gather(
            *(self._send_to(primary, groups, some, results, durability) for primary, some in by_primary.items())
        )

    async def _send_to(
        self,
        primary: Primary,
        groups: Sequence[Group],
        parts: list[GroupPart],
        results: GroupResults,
        durability: Durability,
        *,
        asking: bool = False,
    ) -> None:
        commands = [command for part in parts for command in part.commands]
        timeout_s = primary.timeout_s if self._timeout_s is None else self._timeout_s
        shortfall = None
        try:
            if durability.confirm is not None:
                pipeline = await self._confirmed(primary, durability)
            else:
                pipeline = partial(primary.pipeline, requests=True) if self._requests else primary.pipeline
            replies = await self._exchange(pipeline, commands, timeout_s, asking=asking)
            # Refused commands stored nothing: there is nothing to wait for.
            if durability.confirm is not None and _executed(commands, replies):
                shortfall = await confirm(pipeline, durability)
        except StoreError as error:
            for part in parts:
                results[part.group] = error
            if isinstance(error, Unavailable):
                self._servers.suspect()
            return
        at = 0
        for part in parts:
            size = len(part.commands)
            _put_in(results, part, len(groups[part.group][1]), replies[at : at + size], shortfall)
            at += size

    async def _exchange(
        self, pipeline: Pipeline, commands: list[RedisCommand], timeout_s: float, *, asking: bool
    ) -> Replies:
        """Return the replies to all commands; send scripts that the server does not know in full."""
        replies = await _pipelined(pipeline, commands, timeout_s, asking=asking)
        unknown = [j for j, reply in enumerate(replies) if isinstance(reply, hiredis.ReplyError) and _is_unknown(reply)]
        if unknown:
            again = [(j, self._scripts.in_full(commands[j])) for j in unknown]
            # Repeat the wake-up after a script: the first one woke a node before the script had run.
            again += [(j, one) for j, one in enumerate(commands) if one[0] == "SPUBLISH" and j > unknown[0]]
            answers = await _pipelined(pipeline, [command for _, command in again], timeout_s, asking=asking)
            for (j, _), reply in zip(again, answers, strict=True):
                replies[j] = reply
        return replies

    async def _confirmed(self, primary: Primary, durability: Durability) -> Pipeline:
        """Use a separate connection for each level: one that waits for disks or replicas delays all calls behind it. A
        level that the server cannot reach must not delay those that it can."""
        place = primary, durability.text
        connection = self._waiting.get(place)
        if connection is None or connection.closed:
            self._waiting = {place: one for place, one in self._waiting.items() if not one.closed}
            connection = self._waiting[place] = await primary.dedicated()
        return connection.pipeline


async def _pipelined(pipeline: Pipeline, commands: list[RedisCommand], timeout_s: float, *, asking: bool) -> Replies:
    if not asking:
        return await pipeline(commands, timeout_s=timeout_s)
    # ASKING counts for the next command, and before MULTI for the whole transaction.
    sent: list[RedisCommand] = []
    wanted: list[int] = []
    for unit in _units(commands):
        sent.append(("ASKING",))
        wanted += range(len(sent), len(sent) + len(unit))
        sent += commands[unit.start : unit.stop]
    replies = await pipeline(sent, timeout_s=timeout_s)
    return [replies[at] for at in wanted]


def _units(commands: Sequence[RedisCommand]) -> Iterable[range]:
    """Yield the units: single commands, and transactions from MULTI to EXEC."""
    start = 0
    while start < len(commands):
        stop = start + 1
        if commands[start][0] == "MULTI":
            while commands[stop - 1][0] != "EXEC":
                stop += 1
        yield range(start, stop)
        start = stop


def _put_in(
    results: GroupResults, part: GroupPart, size: int, replies: Replies, shortfall: NotConfirmed | None
) -> None:
    """Put the replies of a part in their positions among those of its group."""
    if shortfall is not None and _executed(part.commands, replies):
        # One error per group: its replies say what was written, and where.
        results[part.group] = short = NotConfirmed(*shortfall.args)
        short.replies = replies if len(replies) == size else None
    elif len(replies) == size:
        results[part.group] = replies
    else:
        known = results[part.group]
        if not isinstance(known, StoreError):
            known[part.first : part.first + len(replies)] = replies


def _refused(groups: Sequence[Group], results: GroupResults, among: Iterable[int] | None = None) -> list[GroupPart]:
    """Return the units that were refused without being executed."""
    parts: list[GroupPart] = []
    for i in range(len(groups)) if among is None else sorted(among):
        replies = results[i]
        if isinstance(replies, StoreError) or not any(map(_was_refused, replies)):
            continue
        commands = groups[i][1]
        for unit in _units(commands):
            errors = [replies[j] for j in unit if _was_refused(replies[j])]
            if errors:
                parts.append(GroupPart(i, unit.start, commands[unit.start : unit.stop], errors[0]))
    return parts


def _was_refused(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and redirect_of(reply) in _NOT_EXECUTED


def _is_unknown(error: hiredis.ReplyError) -> bool:
    return redirect_of(error) == "noscript"


def _executed(commands: Sequence[RedisCommand], replies: Replies) -> bool:
    """Return whether any unit was executed. For a transaction, the answer to EXEC shows it."""
    return any(not isinstance(replies[unit.stop - 1], hiredis.ReplyError) for unit in _units(commands))


def _keeps_refusing(part: GroupPart, slot: int, result: Replies | StoreError) -> StoreError:
    if isinstance(result, StoreError):
        return result
    # If other commands of the group were executed, the caller may repeat the group only if it expects that.
    executed = len(result) > len(part.commands) and any(not isinstance(one, hiredis.ReplyError) for one in result)
    if part.refusal in ("ask", "tryagain"):
        reason = f"slot {slot} is moving to another server and accepts no such call until it has arrived"
        return Unavailable(f"{reason} ({part.error})", sent=executed)
    return Unavailable(f"the server keeps refusing: {part.error}", sent=executed)
