"""Planted bugs in Python: what an owner or a client forgets to do."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from mainspring.engine import lookahead, sweeper
from mainspring.engine.deliveries import Deliveries, SinkBatch
from mainspring.engine.dispatcher import Dispatcher
from mainspring.engine.due import DueSelector
from mainspring.engine.flight import Flight, FlightGroup
from mainspring.engine.lookahead import LookAhead
from mainspring.engine.outcomes import Outcomes
from mainspring.engine.partition import CommitCall, OwnerCall, Partition, Settled
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import DONE
from mainspring.model.errors import StoreError
from mainspring.model.run import Verdict
from mainspring.store.codec import HEADER_BYTES, RESENT, decode, entry
from mainspring.store.owner import fire, holds
from mainspring.store.owner.read import Listed
from mainspring.store.redis.connection import Arg, RedisCommand
from mainspring.store.scripts import Scripts, _sha
from mainspring.store.store import Store
from mainspring.store.tasks import put

from .kinds import Mutation, Patch, Rewrite, with_text
from .scripts import INCARNATION, ONLY_THERE

# -- time and ownership ------------------------------------------------------------------------------------


def _callers_clock(_: Any) -> Any:
    def call(self: Scripts, name: str, keys: Sequence[str], args: Sequence[Arg]) -> RedisCommand:
        return ("EVALSHA", _sha(name, True), len(keys), *keys, *args, self._clock.now_ms() * 1000)

    return call


def _without_redo(load: Callable[..., None]) -> Any:
    def load_bitmaps(self: LiveSlice, fired: bytes, done: bytes) -> None:
        load(self, fired, done)
        self.bits.redo = bytearray(len(self.bits.redo))

    return load_bitmaps


def _without_done(load: Callable[..., None]) -> Any:
    return lambda self, fired, _: load(self, fired, b"")


def _none_held(inherit: Any) -> Any:
    async def without_heads(store: Store, partition: int) -> holds.Inherited:
        return (await inherit(store, partition))._replace(heads={})  # type: ignore[no-any-return]

    return without_heads


_TIME: Final = (
    Mutation(
        "client-clock",
        "scripts take the time from whoever calls, not from the server",
        (Patch(Scripts, "call", _callers_clock),),
    ),
    Mutation(
        "lease-not-checked-before-the-send",
        "what was begun is sent however long the answer took",
        (Patch(Partition, "holds_lease", lambda _: True),),
    ),
    Mutation(
        "one-answer-for-all-partitions-of-a-tick",
        "what the server says of one partition counts for all of the call",
        (
            Patch(
                Dispatcher,
                "_send",
                with_text("zip(calls, replies, ", "zip(calls, replies[:1] * len(calls), "),
            ),
        ),
    ),
    Mutation(
        "fenced-partition-keeps-the-others-back",
        "what has begun in a call is not sent if another partition of that call was lost",
        (
            Patch(
                Dispatcher,
                "_send",
                with_text("start(groups)", "start(groups if len(groups) == len(begins) else [])"),
            ),
        ),
    ),
    Mutation(
        "takeover-forgets-what-was-fired",
        "a new owner leaves alone what the former one had begun and not finished",
        (Patch(LiveSlice, "load_bitmaps", _without_redo),),
    ),
    Mutation(
        "lost-run-not-kept",
        "a new owner delivers again what the former one had begun, and the history has one attempt",
        (Patch(Outcomes, "lost", lambda _: lambda *_: ()),),
    ),
    Mutation(
        "takeover-forgets-what-is-done",
        "a new owner does not look at the done bits",
        (Patch(LiveSlice, "load_bitmaps", _without_done),),
    ),
    Mutation(
        "takeover-forgets-held-lanes",
        "a new owner does not know which lanes wait for a retry",
        (Patch(holds, "inherit", _none_held),),
    ),
)

# -- deliveries and commits ----------------------------------------------------------------------------------


def _settle_first(_: Any) -> Any:
    def deliver(self: Deliveries, groups: list[FlightGroup]) -> None:
        for group in groups:
            for flight in group.flights:
                batch = SinkBatch(flight.body.target, [group.part([flight])], self._clock.now_ms())
                task = asyncio.ensure_future(self._sinks[batch.kind].deliver([flight]))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
                self.in_flight += 1
                self.begun += 1
                self._settle(batch, [DONE], done=1)

    return deliver


async def _put_retries(store: Store, work: fire.Commit) -> None:
    keys = store.keys.partitions[work.partition]
    for retry in work.retries:
        rows = {retry.slice: [retry.row]}
        await store.run_one(keys.slot, [("MULTI",), *put.commands_for(keys, rows), ("EXEC",)])
        await store.run_one(keys.slot, [("HINCRBY", keys.n, "accepted", -1)])


Works = Sequence[fire.Commit]
CommitAll = Callable[[Store, Works, int], Awaitable[list[fire.CommitReply | StoreError]]]


def _retries_after(commit: CommitAll) -> CommitAll:
    async def late(store: Store, works: Works, listening: int) -> list[fire.CommitReply | StoreError]:
        replies = await commit(store, [work._replace(retries=[]) for work in works], listening)
        for work, reply in zip(works, replies, strict=True):
            if isinstance(reply, fire.CommitReply) and reply.status == "ok":
                await _put_retries(store, work)
        return replies

    return late


def _retries_before(commit: CommitAll) -> CommitAll:
    async def early(store: Store, works: Works, listening: int) -> list[fire.CommitReply | StoreError]:
        for work in works:
            await _put_retries(store, work)
        return await commit(store, [work._replace(retries=[]) for work in works], listening)

    return early


def _given_up(send: Any) -> Any:
    async def send_and_forget(self: Dispatcher, calls: Sequence[OwnerCall]) -> StoreError | None:
        failure: StoreError | None = await send(self, calls)
        for call in calls:
            if isinstance(call, CommitCall) and call.partition.unanswered is call:
                call.partition.unanswered = None
        return failure

    return send_and_forget


def _new_key(place_again: Any) -> Any:
    def later(self: Outcomes, partition: Partition, flight: Flight, verdict: Verdict) -> Settled:
        settled: Settled = place_again(self, partition, flight, verdict)
        retry = settled.retry
        assert retry is not None
        body = msgspec.structs.replace(decode(retry.row), original_due_ms=None)
        offset_ms = int.from_bytes(retry.row[:4], "big")
        return settled._replace(retry=retry._replace(row=entry(offset_ms, retry.row[4], retry.idh, body)))

    return later


_COMMIT: Final = (
    Mutation(
        "commit-before-delivery",
        "a task is marked done when it is sent, not when its target has it",
        (Patch(Deliveries, "start", _settle_first),),
    ),
    Mutation(
        "retry-put-after-the-commit",
        "the retry is put in a call of its own, after the done bit",
        (Patch(fire, "commit_all", _retries_after),),
    ),
    Mutation(
        "retry-put-before-the-commit",
        "the retry is put in a call of its own, before the done bit, and again when the commit is repeated",
        (Patch(fire, "commit_all", _retries_before),),
    ),
    Mutation(
        "failed-commit-forgotten",
        "a commit that failed is not sent again",
        (Patch(Dispatcher, "_send", _given_up),),
    ),
    Mutation(
        "retry-under-a-new-key",
        "the next attempt carries the key of its own time",
        (Patch(Outcomes, "_retry", _new_key),),
    ),
)

# -- reading, lanes, drops, puts --------------------------------------------------------------------------------


def _old_cursor(reconcile: Any) -> Any:
    def keep(self: LookAhead, partition: Partition, listed: list[Listed]) -> None:
        known = partition._slices
        same = [one._replace(g=known[one.slice].g) if one.slice in known else one for one in listed]
        reconcile(self, partition, same)

    return keep


def _goes_on(apply: Any) -> Any:
    def always(*args: Any) -> bool:
        apply(*args)
        return True

    return always


def _another_id(_: Any) -> Any:
    return lambda row: row[:4] + bytes((row[4] | RESENT,)) + os.urandom(16) + row[HEADER_BYTES:]


_READ: Final = (
    Mutation(
        "old-cursor-on-a-recreated-slice",
        "nothing shows that a slice is another one: reading goes on where it stopped in the slice before",
        (
            Rewrite("_entry", INCARNATION, ONLY_THERE),
            Patch(LookAhead, "_reconcile", _old_cursor),
            Patch(lookahead, "same_entry", lambda _: lambda _row, _head: True),
        ),
    ),
    Mutation(
        "nothing-read-again-after-a-reconnect",
        "after a reconnect only the counters are looked at",
        (Patch(LookAhead, "reconnected", lambda _: lambda _self: None),),
    ),
    Mutation(
        "lane-order-ignored",
        "tasks of a lane begin as they come due",
        (Patch(DueSelector, "waits_for_turn", lambda _: lambda _self, _flight: False),),
    ),
    Mutation(
        "failing-head-lets-others-pass",
        "a lane goes on while its head waits for the next attempt",
        (Patch(Outcomes, "failed", _goes_on),),
    ),
    Mutation(
        "drop-without-grace",
        "a slice is dropped as soon as all in it is done",
        (
            Rewrite("drop", "if (ARGV[4] + 2000) * 1000 > now then return {now, 'early'} end\n", ""),
            Patch(sweeper, "GRACE_MS", lambda _: -3_600_000),
        ),
    ),
    Mutation(
        "resend-without-mark",
        "a put whose reply was lost is sent again as it was",
        (Patch(put, "_resent", lambda _: lambda row: row),),
    ),
    Mutation(
        "resend-under-a-new-id",
        "a put whose reply was lost is sent again as another task",
        (Patch(put, "_resent", _another_id),),
    ),
    Mutation(
        "copies-not-recognised",
        "copies of one put count as tasks of their own",
        (Patch(LiveSlice, "_is_repeat", lambda _: lambda _self, _row, _index: False),),
    ),
)


def mark_failed_as_done(partition: Partition) -> None:
    """Set the done bits of rows whose retries and dead letters are only in memory."""
    for one in partition._outcomes:
        if one.live is not None:
            one.live.settle_many(one.rows)


def _failed_are_done(call: Any) -> Any:
    def marked(self: Partition, *args: Any, **options: Any) -> Any:
        mark_failed_as_done(self)
        return call(self, *args, **options)

    return marked


def _done_at_once(settle: Any) -> Any:
    def done(self: Partition, settled: Settled, flights: Sequence[Flight] = (), now_ms: int = 0) -> bool:
        settle(self, settled, flights, now_ms)
        mark_failed_as_done(self)
        if settled.live is not None:
            self._note_dirty(settled.live, 0.0)
        return True

    return done


_STOP: Final = (
    Mutation(
        "failed-task-done-before-its-retry-is-written",
        "a row is marked as done when its delivery fails, and not when its retry is written",
        (Patch(Partition, "settle", _done_at_once),),
    ),
    Mutation(
        "commit-marks-what-it-leaves",
        "a commit that takes some of the failed deliveries writes the done bits of all",
        (Patch(Partition, "commit", _failed_are_done),),
    ),
    Mutation(
        "outcome-of-a-forgotten-slice-written",
        "an outcome is written although its slice is read again, and the task goes out again",
        (Patch(Partition, "_take_outcomes", with_text("live is not None and live.forgotten", "False")),),
    ),
    Mutation(
        "failed-commit-at-a-stop-swallowed",
        "a stop goes on as if a commit had been written whose call failed",
        (
            Patch(
                Dispatcher,
                "_send",
                with_text("failure = reply", "failure = failure if isinstance(call, CommitCall) else reply"),
            ),
        ),
    ),
)

ENGINE: Final = (*_TIME, *_COMMIT, *_READ, *_STOP)
