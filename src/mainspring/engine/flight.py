"""A delivery together with the place of its entry, so that its outcome finds the way back."""

from ..model.delivery import Delivery
from .live import LiveSlice


class Flight(Delivery, weakref=False):
    """What the dispatcher hands to a sink. Sinks see a Delivery."""

    live: LiveSlice
    index: int
