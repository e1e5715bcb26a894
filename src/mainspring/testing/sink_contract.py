"""The promises of every sink, as tests: a class to inherit from, and the receiving end it needs.

    class TestFileSink(SinkContract):
        @asynccontextmanager
        async def receiver(self) -> AsyncIterator[Receiver]:
            yield FolderReceiver(…)

pytest runs the tests of the class; they need pytest-asyncio. docs/testing.md has a whole example.
"""

import asyncio
import gc
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, NamedTuple

import pytest

from ..model.delivery import Body, Dead, Delivery, Done, GivenDelivery, Outcome, Retry
from ..model.ids import idh_of
from ..sinks.base import Sink

NAMESPACE: Final = "contract"
DUE_MS: Final = 1_700_000_000_123
TOLD: Final = frozenset({"id", "key", "due_ms", "attempt"})


class Arrived(NamedTuple):
    """One task as the receiver got it, decoded: no quoting, and numbers as numbers."""

    payload: bytes
    id: str = ""
    key: str = ""
    """The idempotency key."""
    due_ms: int = 0
    """The due time of the first attempt."""
    attempt: int = 0


class Receiver(ABC):
    """The target of a sink under test, which can be broken, repaired, and asked what it received."""

    target: str
    """The target of all deliveries, with its scheme."""
    told: frozenset[str] = TOLD
    """Fields of `Arrived` that the sink sends along with the payload; the fewer, the less is checked."""
    big_bytes: int = 512 * 1024
    """The size of a payload that the sink must accept."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return a new sink. The suite closes it."""

    @abstractmethod
    async def arrived(self) -> Sequence[Arrived]:
        """Return everything that this receiver has received so far, in any order."""

    @abstractmethod
    async def fail(self) -> None:
        """Accept nothing from now on: be unreachable, or report an error."""

    @abstractmethod
    async def mend(self) -> None:
        """Work again."""

    async def hold(self) -> bool:
        """Accept deliveries but do not confirm them before `release`. Return False if this receiver cannot do that."""
        return False

    async def release(self) -> None:
        """End `hold`."""
        raise NotImplementedError("a receiver that can hold must be able to release")

    def poison(self) -> bytes | None:
        """Return a payload that only this receiver refuses, or None if it accepts everything."""
        return None

    def delivery(
        self,
        number: int,
        payload: bytes = b'{"order": 42}',
        *,
        id: str | None = None,
        lane: str | None = None,
        attempt: int = 1,
        raw: bool = False,
    ) -> Delivery:
        """Return one attempt at a task; two with the same number or id are attempts at the same task."""
        first = attempt == 1
        body = Body(
            self.target, payload, id, lane, original_due_ms=None if first else DUE_MS + number, attempt=attempt, raw=raw
        )
        idh = idh_of(id) if id is not None else number.to_bytes(16, "big")
        # A retry has its own due time, which the receiver must not see.
        due_ms = DUE_MS + number if first else DUE_MS + number + 60_000 * attempt
        return Traced(body, NAMESPACE, idh, due_ms)


class Traced(GivenDelivery, weakref=True, gc=True):
    """A delivery for which a test can tell whether it is still referenced."""


GIVE_UP_S: Final = 60.0
"""Time limit of any step: generous, since it only bounds hangs."""
BATCH: Final = 20
ROUNDS: Final = 30
TURNS: Final = 50
"""Turns of the loop before a delivery that was started counts as in flight."""


class SinkContract:
    """The promises of a sink. Define `receiver` in a subclass whose name begins with Test."""

    pytestmark = pytest.mark.asyncio

    def receiver(self) -> AbstractAsyncContextManager[Receiver]:
        """Yield a receiver that has received nothing yet, for one test."""
        raise NotImplementedError("define receiver(): an asynccontextmanager that yields a Receiver")

    # -- outcomes ------------------------------------------------------------------------------------------

    async def test_each_delivery_has_its_outcome_and_is_done_when_the_target_has_it(self) -> None:
        async with self._pair() as (sink, receiver):
            batch = [receiver.delivery(number, b"%d" % number) for number in range(BATCH)]
            outcomes = await _delivered(sink, batch)
            got = await receiver.arrived()  # at once: done means that it is there
            assert _kinds(outcomes) == [Done] * BATCH, f"not all were delivered: {outcomes}"
            assert Counter(one.payload for one in got) == Counter(one.payload for one in batch)

    async def test_nothing_is_done_before_the_target_says_so_and_the_loop_goes_on_meanwhile(self) -> None:
        async with self._pair() as (sink, receiver):
            await _held(receiver)
            under_way = asyncio.ensure_future(sink.deliver([receiver.delivery(1)]))
            await _turns()  # a sink that blocks never gets here: pytest's time limit ends it
            early = under_way.done()
            await receiver.release()
            async with asyncio.timeout(GIVE_UP_S):
                outcomes = await under_way
            assert not early, f"answered {outcomes} before the target had confirmed"
            assert _kinds(outcomes) == [Done]
            assert len(await receiver.arrived()) == 1

    async def test_one_that_the_target_refuses_leaves_the_others_alone(self) -> None:
        async with self._pair() as (sink, receiver):
            poison = receiver.poison()
            if poison is None:
                pytest.skip("this receiver accepts everything: poison() returns None")
            batch = [receiver.delivery(number, b"%d" % number) for number in range(BATCH)]
            at = BATCH // 2
            batch[at] = receiver.delivery(at, poison, raw=True)
            outcomes = await _delivered(sink, batch)
            assert not isinstance(outcomes.pop(at), Done), "a delivery that the target refused counts as done"
            assert _kinds(outcomes) == [Done] * (BATCH - 1), f"the others, in order: {outcomes}"
            payloads = [one.payload for one in await receiver.arrived()]
            assert sorted(payloads) == sorted(one.payload for one in batch if one.payload != poison)

    # -- what the target receives ----------------------------------------------------------------------------

    async def test_key_id_and_due_time_are_the_same_at_every_attempt(self) -> None:
        async with self._pair() as (sink, receiver):
            attempts = [receiver.delivery(7, attempt=attempt) for attempt in (1, 2, 3)]
            for one in attempts:
                assert _kinds(await _delivered(sink, [one])) == [Done]
            got = await receiver.arrived()
            assert len(got) in (1, len(attempts)), f"three attempts at one task, and {len(got)} arrived"
            for field in sorted(receiver.told - {"attempt"}):
                assert {getattr(one, field) for one in got} == {_sent(attempts[0], field)}, f"{field} is not the same"
            if "attempt" in receiver.told:
                numbers = sorted(one.attempt for one in got)
                # A receiver that drops repeats by their key keeps one of them.
                assert numbers in ([1, 2, 3], [1], [3]), f"the attempts 1, 2 and 3 arrived as {numbers}"

    @pytest.mark.parametrize("id", ["order-42", "grüße/ 日本 ~%2F", "a" * 200, None])
    async def test_any_id_and_lane_arrives(self, id: str | None) -> None:
        async with self._pair() as (sink, receiver):
            one = receiver.delivery(3, id=id, lane="spur-ü 日本" if id else None)
            assert _kinds(await _delivered(sink, [one])) == [Done]
            [got] = await receiver.arrived()
            for field in sorted(receiver.told):
                assert getattr(got, field) == _sent(one, field), f"{field} arrived as {getattr(got, field)!r}"

    async def test_bytes_of_all_values_and_large_payloads_arrive_unchanged(self) -> None:
        async with self._pair() as (sink, receiver):
            payloads = [bytes(range(256)), '"größe"'.encode(), b'"%b"' % (b"x" * receiver.big_bytes)]
            batch = [receiver.delivery(at, payload, raw=at == 0) for at, payload in enumerate(payloads)]
            assert _kinds(await _delivered(sink, batch)) == [Done] * len(batch)
            got = [one.payload for one in await receiver.arrived()]
            assert sorted(got) == sorted(payloads), "a payload was changed in transit"

    # -- an unavailable target ---------------------------------------------------------------------------------

    async def test_a_target_that_is_away_means_another_attempt_and_nothing_is_lost(self) -> None:
        async with self._pair() as (sink, receiver):
            await receiver.fail()
            batch = [receiver.delivery(number, b"%d" % number) for number in range(BATCH)]
            outcomes = await _delivered(sink, batch)
            assert _kinds(outcomes) == [Retry] * BATCH, f"an unavailable target must mean a retry: {outcomes}"
            await receiver.mend()
            await _until_delivered(sink, receiver, batch)
            missing = {one.payload for one in batch} - {one.payload for one in await receiver.arrived()}
            assert not missing, f"reported as done, but never arrived: {sorted(missing)}"

    async def test_what_was_answered_is_let_go_however_long_the_target_is_away(self) -> None:
        async with self._pair() as (sink, receiver):
            await receiver.fail()
            batches = [
                [receiver.delivery(first + at, bytes(4096), raw=True) for at in range(BATCH)]
                for first in range(0, ROUNDS * BATCH, BATCH)
            ]
            traces = [weakref.ref(one) for batch in batches for one in batch]
            await asyncio.gather(*(_delivered(sink, batch) for batch in batches))
            batches.clear()
            gc.collect()
            kept = sum(trace() is not None for trace in traces)
            assert kept <= 2 * BATCH, f"{kept} of {len(traces)} are still held: memory would grow during an outage"

    # -- concurrency and closing -------------------------------------------------------------------------------

    async def test_batches_at_the_same_time_do_not_mix(self) -> None:
        async with self._pair() as (sink, receiver):
            batches = [
                [receiver.delivery(first + at, b"%d" % (first + at)) for at in range(BATCH)]
                for first in range(0, 8 * BATCH, BATCH)
            ]
            answers = await asyncio.gather(*(_delivered(sink, batch) for batch in batches))
            assert [_kinds(answer) for answer in answers] == [[Done] * BATCH] * len(batches)
            got = Counter(one.payload for one in await receiver.arrived())
            assert got == Counter(one.payload for batch in batches for one in batch)

    async def test_a_delivery_that_is_broken_off_leaves_the_sink_usable(self) -> None:
        async with self._pair() as (sink, receiver):
            can_hold = await receiver.hold()
            under_way = asyncio.ensure_future(sink.deliver([receiver.delivery(at) for at in range(BATCH)]))
            await _turns()
            under_way.cancel()
            done, _ = await asyncio.wait([under_way], timeout=GIVE_UP_S)
            assert done, "the delivery continues although it was cancelled"
            assert under_way.cancelled() or under_way.exception() is None, repr(under_way)
            if can_hold:
                await receiver.release()
            last = receiver.delivery(999, b'"after"')
            assert _kinds(await _delivered(sink, [last])) == [Done]
            assert b'"after"' in [one.payload for one in await receiver.arrived()]

    async def test_a_closed_sink_leaves_nothing_behind_and_may_be_closed_again(self) -> None:
        tasks = asyncio.all_tasks()
        async with self.receiver() as receiver:
            beside = set(threading.enumerate())  # threads that the receiver itself needs
            sink = receiver.sink()
            try:
                assert _kinds(await _delivered(sink, [receiver.delivery(1)])) == [Done]
            finally:
                await _closed(sink)
            await _closed(sink)
            await _until(lambda: not _left(beside), lambda: f"threads of the sink still run: {_left(beside)}")
        await _until(
            lambda: asyncio.all_tasks() <= tasks, lambda: f"tasks of the sink still run: {asyncio.all_tasks() - tasks}"
        )

    async def test_a_sink_that_delivered_nothing_can_be_closed(self) -> None:
        async with self.receiver() as receiver:
            await _closed(receiver.sink())

    @asynccontextmanager
    async def _pair(self) -> AsyncIterator[tuple[Sink, Receiver]]:
        async with self.receiver() as receiver:
            sink = receiver.sink()
            try:
                yield sink, receiver
            finally:
                await _closed(sink)


async def _delivered(sink: Sink, batch: Sequence[Delivery]) -> list[Outcome]:
    """Deliver as the engine does: no batch is larger than the sink allows."""
    most = getattr(sink, "batch_tasks", len(batch))
    outcomes: list[Outcome] = []
    for first in range(0, len(batch), most):
        part = batch[first : first + most]
        async with asyncio.timeout(GIVE_UP_S):
            answer = await sink.deliver(part)
        assert len(answer) == len(part), f"{len(answer)} outcomes for {len(part)} deliveries"
        given: Sequence[object] = answer
        wrong = [one for one in given if not isinstance(one, (Done, Retry, Dead))]
        assert not wrong, f"neither Done nor Retry nor Dead: {wrong}"
        outcomes += answer
    return outcomes


async def _until_delivered(sink: Sink, receiver: Receiver, batch: Sequence[Delivery]) -> None:
    """Retry attempt after attempt, as the engine does; a sink may need a moment to notice that its target is back."""
    left, attempt, until = list(batch), 2, time.monotonic() + GIVE_UP_S
    while left:
        assert time.monotonic() < until, f"{len(left)} are not delivered {GIVE_UP_S:g} s after the target was back"
        again = [receiver.delivery(_number(one), one.payload, attempt=attempt) for one in left]
        outcomes = await _delivered(sink, again)
        dead = [one for one in outcomes if isinstance(one, Dead)]
        assert not dead, f"given up although the target is back: {dead}"
        left = [one for one, outcome in zip(again, outcomes, strict=True) if isinstance(outcome, Retry)]
        attempt += 1
        await asyncio.sleep(0.05 if left else 0)


async def _closed(sink: Sink) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        await sink.aclose()


async def _held(receiver: Receiver) -> None:
    if not await receiver.hold():
        pytest.skip("this receiver cannot hold back its answer: hold() returns False")


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0.002)


async def _until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < until, what()
        await asyncio.sleep(0.02)


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    # The event loop's own threads remain for the next blocking call.
    return [one for one in threading.enumerate() if one not in before and not one.name.startswith("asyncio_")]


def _kinds(outcomes: Sequence[Outcome]) -> list[type]:
    return [type(one) for one in outcomes]


def _sent(one: Delivery, field: str) -> object:
    values = {"id": one.id, "key": one.idempotency_key, "due_ms": one.original_due_ms, "attempt": one.attempt}
    return values[field]


def _number(one: Delivery) -> int:
    return int.from_bytes(one.idh, "big")
