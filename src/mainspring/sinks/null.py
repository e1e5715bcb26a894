"""`null:`, where tasks end without trace: for load tests and dry runs."""

from collections.abc import Sequence

from ..model.delivery import Delivery
from ..model.outcome import DONE, Outcome


class NullSink:
    """Counts and forgets."""

    def __init__(self) -> None:
        self.count = 0

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.count += len(batch)
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""
