"""A delivery together with the place of its entry, so that its outcome finds the way back."""

from ..model.delivery import Delivery
from .live import LiveSlice


class Flight(Delivery, gc=False):
    """What the dispatcher hands to a sink. Sinks see a Delivery.

    Hidden from the garbage collector: nothing it refers to refers back, and there are a great many.
    """

    live: LiveSlice
    index: int

    @property
    def offset_ms(self) -> int:
        """The millisecond within its slice at which the entry stands."""
        return max(0, self.due_ms - self.live.slice.start_ms)
