"""What one partition has handed off to workers, or is about to."""

from typing import NamedTuple

from ..store.hand_off import HandOff
from .flight import Flight
from .live import LiveSlice


class HandingOff(NamedTuple):
    """Tasks on their way to their queues."""

    work: HandOff
    flights: list[Flight]
    """In the order of the records."""
    touched: list[LiveSlice]
    has_lanes: bool


class Handed:
    """The tasks of a partition that workers run, as far as its owner has to know of them."""

    __slots__ = ("answered", "awaited", "cursor", "put_off", "ready")

    def __init__(self) -> None:
        self.ready: list[Flight] = []
        """Begun, and to be handed off with the next call."""
        self.put_off: list[Flight] = []
        """Another task of their id is in a queue: they are tried again."""
        self.awaited: dict[bytes, Flight] = {}
        """By address, tasks of lanes that are with workers: they stay fired until these have answered."""
        self.answered: dict[bytes, LiveSlice] = {}
        """Addresses whose acks can go as soon as the end of the task is committed."""
        self.cursor = 0
        """How far the acks were read in this round."""

    @property
    def is_watched(self) -> bool:
        """Something here ends by the word of others."""
        return bool(self.awaited or self.put_off or self.answered)

    @property
    def out(self) -> int:
        """Rows that were fired and whose end this owner need not wait for: the next one takes them up again."""
        flights = (*self.awaited.values(), *self.put_off)
        return sum(not flight.live.forgotten for flight in flights)
