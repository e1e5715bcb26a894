"""A delivery together with the place of its entry, at which its outcome is recorded."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Final, Self

from ..model.delivery import Delivery, DeliveryColumns
from ..store.codec import HEADER_BYTES, TWO_FIELDS, forward_mark
from ..store.keys import Address, r_of
from .slice import LiveSlice, offsets

_offset: Final[Callable[[bytes], tuple[int]]] = Struct(">I").unpack_from
_HEAD: Final = itemgetter(slice(4))
_IDH: Final = itemgetter(slice(5, HEADER_BYTES))


class FlightGroup:
    """Flights that left one slice together."""

    __slots__ = ("flights", "indexes", "live", "target")

    def __init__(
        self, live: LiveSlice, flights: list["Flight"], indexes: Sequence[int], target: str | None = None
    ) -> None:
        self.live, self.flights, self.indexes = live, flights, indexes
        self.target = target
        """Their target, if it is known that all have the same and none expires."""

    def part(self, flights: list["Flight"]) -> "FlightGroup":
        """Return a group of some of its flights."""
        return FlightGroup(self.live, flights, [flight.index for flight in flights], self.target)

    def split(self, count: int) -> tuple["FlightGroup", "FlightGroup"]:
        """Return its first `count` flights, and the others."""
        first = FlightGroup(self.live, self.flights[:count], self.indexes[:count], self.target)
        return first, FlightGroup(self.live, self.flights[count:], self.indexes[count:], self.target)


def grouped(flights: Iterable["Flight"]) -> list[FlightGroup]:
    """Group flights of any order by slice."""
    by_live: dict[LiveSlice, list[Flight]] = {}
    for flight in flights:
        by_live.setdefault(flight.live, []).append(flight)
    return [FlightGroup(live, some, [flight.index for flight in some]) for live, some in by_live.items()]


class Flight(Delivery, gc=False):
    """A delivery as the dispatcher hands it to a sink. Attributes that few sinks need are computed on demand.

    Hidden from the garbage collector: nothing it refers to refers back, and there are a great many.
    """

    row: bytes
    index: int
    """Index of its row in the list of its slice."""
    live: LiveSlice
    plan: object = None
    """For an occurrence of a schedule: the plan of what is written when it begins."""

    @property
    def namespace(self) -> str:
        return self.live.namespace

    @property
    def idh(self) -> bytes:
        return self.row[5:HEADER_BYTES]

    @property
    def key(self) -> int:
        """Offset and index of the entry, as LiveSlice sorts them."""
        return _offset(self.row)[0] << 32 | self.index

    @property
    def address(self) -> bytes:
        """The packed address of its entry."""
        return Address(self.live.partition, self.live.slice, r_of(self.live.g), self.index).pack()

    @property
    def mark(self) -> bytes:
        """What remains of its entry when it moves; empty if it has a caller's id, which is looked up in the index."""
        return forward_mark(self.row) if self.body.id is None else b""

    def is_retry_of(self, head: bytes | None) -> bool:
        """Return whether it is the failed task that its lane waits for, and not a later one put with the same id."""
        return self.idh == head and self.body.is_retry

    @property
    def place_ms(self) -> int:
        """The time at which the entry is placed: its due time, or later if it was overdue when it was put."""
        return self.live.from_ms + _offset(self.row)[0]

    @property
    def due_ms(self) -> int:
        return self.place_ms if self.body.due_ms is None else self.body.due_ms

    @property
    def original_due_ms(self) -> int:
        body = self.body
        if body.original_due_ms is not None:
            return body.original_due_ms
        # Equals `place_ms` without the calls in between: this is needed for every message.
        return body.due_ms if body.due_ms is not None else self.live.from_ms + _offset(self.row)[0]

    @classmethod
    def columns(cls, batch: Sequence[Self]) -> DeliveryColumns | None:
        rows = [one.row for one in batch]
        if {row[HEADER_BYTES] for row in rows} != {TWO_FIELDS}:
            return None
        dues_ms = [one.live.from_ms + offset for one, offset in zip(batch, offsets(map(_HEAD, rows)), strict=True)]
        return DeliveryColumns(b"".join(map(_IDH, rows)), dues_ms)
