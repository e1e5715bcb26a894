"""A begin on its way to the server."""

from ..store.fire import Section
from .bitmaps import is_set
from .flight import Flight
from .live import LiveSlice


class Begun:
    """A section on its way to the server and the flights that leave when it is answered."""

    __slots__ = ("alike", "flights", "passes", "section", "touched")

    def __init__(
        self, section: Section, flights: list[Flight], touched: list[LiveSlice], alike: str | None = None
    ) -> None:
        self.section, self.flights, self.touched = section, flights, touched
        self.alike = alike
        """Where it is known that all have the same target and none expires: that target."""
        self.passes = [live.passes for live in touched]

    def part(self, x: list[bytes]) -> tuple[list[Flight], list[Flight]]:
        """Those that leave, and those that were cancelled before: their bits are set in what the server answered."""
        cancelled: dict[LiveSlice, tuple[int, bytes]] = {}
        for live, touch, bits in zip(self.touched, self.section.touches, x, strict=True):
            if bits.strip(b"\0"):
                cancelled[live] = (max(touch.f_at, 0), bits)
        if not cancelled:
            return self.flights, []
        leaving: list[Flight] = []
        gone: list[Flight] = []
        for flight in self.flights:
            first_byte, bits = cancelled.get(flight.live, (0, b""))
            (gone if is_set(bits, first_byte, flight.index) else leaving).append(flight)
        return leaving, gone
