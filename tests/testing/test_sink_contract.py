"""The contract suite finds sinks that break a promise, and passes one that breaks none."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.sinks.base import Sink
from mainspring.testing.sink_contract import Arrived, Receiver, SinkContract

POISON = b'"poison"'


class Shelf(Receiver):
    """A list in memory, and a sink that is wrong in one way."""

    target = "shelf:a"

    def __init__(self, wrong: "type[Wrong]") -> None:
        self._wrong = wrong
        self.got: list[Arrived] = []
        self.well, self.open = True, asyncio.Event()
        self.open.set()

    def sink(self) -> Sink:
        return self._wrong(self)

    async def arrived(self) -> Sequence[Arrived]:
        return self.got

    async def fail(self) -> None:
        self.well = False

    async def mend(self) -> None:
        self.well = True

    async def hold(self) -> bool:
        self.open.clear()
        return True

    async def release(self) -> None:
        self.open.set()

    def poison(self) -> bytes:
        return POISON

    async def take(self, one: Delivery) -> Outcome:
        await self.open.wait()
        if not self.well:
            return Retry("away")
        if one.payload == POISON:
            return Dead("poison")
        self.got.append(Arrived(one.payload, one.id, one.idempotency_key, one.original_due_ms, one.attempt))
        return DONE


class Wrong:
    """Right, in fact: those below change one thing each."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.closed = False

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [await self.shelf.take(one) for one in batch]

    async def aclose(self) -> None:
        self.closed = True


class Eager(Wrong):
    """Says done, and delivers later."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.later = asyncio.gather(*map(self.shelf.take, batch))
        return [DONE] * len(batch)


class Surprised(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        if not self.shelf.well:
            raise ConnectionError("away")
        return await super().deliver(batch)


class GivesUp(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [Dead("no") if isinstance(one, Retry) else one for one in await super().deliver(batch)]


class AllOrNothing(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        poisoned = any(one.payload == POISON for one in batch)
        return [Dead("one was bad")] * len(batch) if poisoned else await super().deliver(batch)


class OutOfOrder(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return sorted(await super().deliver(batch), key=lambda one: isinstance(one, Dead))


class TooFew(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return list(await super().deliver(batch))[:1]


class ClosedOnce(Wrong):
    async def aclose(self) -> None:
        if self.closed:
            raise ValueError("closed already")
        await super().aclose()


class Hoarder(Wrong):
    kept: list[Delivery]

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.kept = [*getattr(self, "kept", []), *batch]
        return await super().deliver(batch)


class Broken(Wrong):
    """Does not survive a cancelled delivery."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        if self.closed:
            return [Retry("busy")] * len(batch)
        self.closed = True
        outcomes = await super().deliver(batch)
        self.closed = False
        return outcomes


class NewKey(Wrong):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        outcomes = await super().deliver(batch)
        self.shelf.got[:] = [one._replace(key=f"{one.key}/{one.attempt}") for one in self.shelf.got]
        return outcomes


class Deaf(Wrong):
    """Continues when it is cancelled, and has a task of its own that never ends."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.task = asyncio.create_task(asyncio.Event().wait())
        return await super().deliver(batch)


class _Contract(SinkContract):
    """Not collected: the tests below call its parts."""

    def __init__(self, wrong: type[Wrong]) -> None:
        self._wrong = wrong

    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[Receiver]:
        yield Shelf(self._wrong)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (Eager, "test_nothing_is_done_before_the_target_says_so_and_the_loop_goes_on_meanwhile"),
        (Surprised, "test_a_target_that_is_away_means_another_attempt_and_nothing_is_lost"),
        (GivesUp, "test_a_target_that_is_away_means_another_attempt_and_nothing_is_lost"),
        (AllOrNothing, "test_one_that_the_target_refuses_leaves_the_others_alone"),
        (OutOfOrder, "test_one_that_the_target_refuses_leaves_the_others_alone"),
        (TooFew, "test_each_delivery_has_its_outcome_and_is_done_when_the_target_has_it"),
        (ClosedOnce, "test_a_closed_sink_leaves_nothing_behind_and_may_be_closed_again"),
        (Hoarder, "test_what_was_answered_is_let_go_however_long_the_target_is_away"),
        (Broken, "test_a_delivery_that_is_broken_off_leaves_the_sink_usable"),
        (NewKey, "test_key_id_and_due_time_are_the_same_at_every_attempt"),
        (Deaf, "test_a_closed_sink_leaves_nothing_behind_and_may_be_closed_again"),
    ],
)
async def test_a_sink_that_breaks_a_promise_is_found(
    wrong: type[Wrong], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.testing.sink_contract.GIVE_UP_S", 2.0)
    await getattr(_Contract(Wrong), part)()
    with pytest.raises((AssertionError, ConnectionError, ValueError)):
        await getattr(_Contract(wrong), part)()
