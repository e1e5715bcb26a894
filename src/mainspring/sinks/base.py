"""What a sink is."""

from collections.abc import Sequence
from typing import Protocol

from ..model.delivery import Delivery
from ..model.outcome import Outcome


class Sink(Protocol):
    """Delivers to one kind of target.

    A sink whose deliveries end one by one has a number `batch_tasks`, the most tasks it wants in one batch: what
    was delivered is then soon marked done, and does not wait for the slowest of thousands. Tasks of lanes and runs of
    schedules come to it alone: others wait for their ends. One with `keeps_answers` has the answers kept with the runs:
    those of its `Done(response, keep_ms)`. One that takes its time to connect has `prepare()`: a node that starts calls
    it in its event loop and goes on at once, so that the first task does not wait.
    """

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        """One outcome per delivery, in order, after the target has it. All of a batch go to one target."""
        ...

    async def aclose(self) -> None: ...


def prepare(sink: Sink) -> None:
    """Let it begin to connect, if that is of use to it."""
    begin = getattr(sink, "prepare", None)
    if begin is not None:
        begin()


def most_in_batch(sink: Sink, target: str) -> int | None:
    """The most tasks it wants in one batch; None where they end together, and any number may come."""
    by_target = getattr(sink, "batch_tasks_of", None)
    most: int | None = getattr(sink, "batch_tasks", None) if by_target is None else by_target(target)
    return most
