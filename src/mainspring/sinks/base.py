"""What a sink is."""

from collections.abc import Sequence
from typing import Protocol

from ..model.delivery import Delivery
from ..model.outcome import Outcome


class Sink(Protocol):
    """Delivers to one kind of target."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        """One outcome per delivery, in order, after the target has it. All of a batch go to one target."""
        ...

    async def aclose(self) -> None: ...
