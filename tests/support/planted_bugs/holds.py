"""Planted bugs in how work is held back."""

from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Final

from mainspring.engine.holds import Hold, HoldPolicy
from mainspring.model.errors import StoreError
from mainspring.store.owner import fire, holds
from mainspring.store.store import Store
from mainspring.store.tasks import put

from .kinds import Mutation, Patch, Rewrite

Works = Sequence[fire.Commit]
CommitAll = Callable[[Store, Works, int], Awaitable[list[fire.CommitReply | StoreError]]]


async def _put_moves(store: Store, work: fire.Commit) -> None:
    keys = store.keys.partitions[work.partition]
    for moves in work.moves:
        rows = [row for row in moves.rows[2::3] if isinstance(row, bytes)]  # index, mark, entry in turn
        await store.run_one(keys.slot, [("MULTI",), *put.commands_for(keys, {moves.slice: rows}), ("EXEC",)])
        await store.run_one(keys.slot, [("HINCRBY", keys.n, "accepted", -len(rows))])


def _moves_after(commit: CommitAll) -> CommitAll:
    async def late(store: Store, works: Works, listening: int) -> list[fire.CommitReply | StoreError]:
        replies = await commit(store, [work._replace(moves=[]) for work in works], listening)
        for work, reply in zip(works, replies, strict=True):
            if isinstance(reply, fire.CommitReply) and reply.status == "ok":
                await _put_moves(store, work)
        return replies

    return late


def _moves_before(commit: CommitAll) -> CommitAll:
    async def early(store: Store, works: Works, listening: int) -> list[fire.CommitReply | StoreError]:
        for work in works:
            await _put_moves(store, work)
        return await commit(store, [work._replace(moves=[]) for work in works], listening)

    return early


def _no_slices(inherit: Any) -> Any:
    async def without_slices(store: Store, partition: int) -> holds.Inherited:
        return (await inherit(store, partition))._replace(slices={})  # type: ignore[no-any-return]

    return without_slices


def _stays_closed(_: Any) -> Any:
    return lambda _self, _hold: None


HOLDS: Final = (
    Mutation(
        "move-without-cancel-check",
        "a task that was cancelled in the last moment is moved aside all the same",
        (Rewrite("commit", "    if not is_set(gone, index) then\n", "    if gone then\n"),),
    ),
    Mutation(
        "move-without-a-mark",
        "nothing shows at its old place that a task was moved: a cancel there is believed",
        (
            Rewrite("commit", "redis.pcall('LSET', s, index, mark .. address)", ""),
            Rewrite("commit", "  if ARGV[a + 4] == '-1' then redis.call('SET', f, ARGV[a + 5])\n", "  if f then\n"),
        ),
    ),
    Mutation(
        "moved-after-the-commit",
        "tasks get their place in the hold slice in a call of its own, after their done bits",
        (Patch(fire, "commit_all", _moves_after),),
    ),
    Mutation(
        "moved-before-the-commit",
        "tasks get their place in the hold slice in a call of its own, and again when the commit is repeated",
        (Patch(fire, "commit_all", _moves_before),),
    ),
    Mutation(
        "new-ones-overtake-held-work",
        "a lane goes on although what was moved aside has not been read",
        (Patch(Hold, "barrier_ms", lambda _: lambda _self: inf),),
    ),
    Mutation(
        "takeover-forgets-hold-slices",
        "a new owner does not look for what its predecessor has moved aside",
        (Patch(holds, "inherit", _no_slices),),
    ),
    Mutation(
        "held-work-never-comes-back",
        "a hold does not end when its lane is free",
        (Patch(HoldPolicy, "_end_if_over", _stays_closed),),
    ),
)
