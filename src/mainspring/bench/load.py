"""What is put. Everything about a task follows from its number, so a delivery can be checked from its payload."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from ..model.errors import InvalidInput
from ..model.task import Task

TARGET: Final = "null:"
DIGITS: Final = 10
FROM: Final = 10 ** (DIGITS - 1)
"""Numbers start here, so that all have the same length and payloads can be cut apart without parsing."""

SMALLEST_PAYLOAD: Final = DIGITS + 2
"""The number and the quotes of a JSON string."""

_STRIDE: Final = 7_919
LANE_TASKS: Final = 10


class Expected(Protocol):
    """What a tally must know to judge deliveries."""

    @property
    def tasks(self) -> int: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def lanes(self) -> bool: ...

    def due_ms(self, number: int) -> int: ...

    def cancelled(self, number: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What the user asks for."""

    tasks: int
    payload_bytes: int = 48
    ids: bool = False
    lanes: bool = False
    cancel: float = 0.0
    spread_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.tasks < 9 * FROM:
            raise InvalidInput(f"--tasks is {self.tasks}; give at least 1")
        if self.payload_bytes < SMALLEST_PAYLOAD:
            raise InvalidInput(f"--payload-bytes is {self.payload_bytes}; {SMALLEST_PAYLOAD} is the least")
        if not 0 <= self.cancel < 1:
            raise InvalidInput(f"--cancel is {self.cancel}; give a share from 0 up to (not including) 1")
        if self.spread_s < 0.001:
            raise InvalidInput("--spread must be a millisecond or more")

    def starting(self, now_ms: int) -> "Load":
        # The first due time lies behind the puts: overdue tasks are stored differently, and these are no such.
        put_ms = self.tasks * (24 if self.ids else 6) // 1000
        return Load(self, now_ms + 500 + put_ms, max(1, round(self.spread_s * 1000)))


@dataclass(frozen=True, slots=True)
class Load:
    """N tasks, due times scattered over the spread: neighbours in the put are not neighbours in time."""

    shape: Shape
    first_due_ms: int
    spread_ms: int

    @property
    def tasks(self) -> int:
        return self.shape.tasks

    @property
    def payload_bytes(self) -> int:
        return self.shape.payload_bytes

    @property
    def lanes(self) -> bool:
        return self.shape.lanes

    @property
    def last_due_ms(self) -> int:
        return self.first_due_ms + self.spread_ms

    @property
    def firing(self) -> int:
        """Tasks that are left after the cancels."""
        return self.tasks - int(self.tasks * self.shape.cancel)

    def due_ms(self, number: int) -> int:
        return self.first_due_ms + number * _STRIDE % self.spread_ms

    def cancelled(self, number: int) -> bool:
        share = self.shape.cancel
        return int((number + 1) * share) > int(number * share)

    def id(self, number: int) -> str:
        return f"order-{number}"

    def texts(self, first: int, last: int) -> Iterator[str]:
        return payload_texts(first, last, self.payload_bytes)

    def stream(self) -> Iterator[Task]:
        """The tasks, made one by one while they are put, as an application would."""
        first, spread = self.first_due_ms, self.spread_ms
        numbered = enumerate(self.texts(0, self.tasks))
        if not (self.shape.ids or self.shape.lanes):
            for number, text in numbered:
                yield Task(TARGET, text, first + number * _STRIDE % spread)
            return
        for number, text in numbered:
            yield Task(
                TARGET,
                text,
                first + number * _STRIDE % spread,
                None,
                f"order-{number}" if self.shape.ids else None,
                f"lane-{number // LANE_TASKS}" if self.shape.lanes else None,
            )


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """Tasks that come due one after the other at a steady rate."""

    tasks: int
    rate: int
    first_due_ms: int
    payload_bytes: int = 48
    lanes: bool = False

    def due_ms(self, number: int) -> int:
        return self.first_due_ms + number * 1000 // self.rate

    def cancelled(self, _number: int, /) -> bool:
        return False

    def due_before(self, until_ms: int) -> int:
        """How many tasks are due before a time."""
        return min(self.tasks, max(0, -(-(until_ms - self.first_due_ms) * self.rate // 1000)))


def payload_texts(first: int, last: int, payload_bytes: int) -> Iterator[str]:
    """Payloads that carry their number; with the quotes of JSON they have the bytes asked for."""
    filler = "x" * (payload_bytes - SMALLEST_PAYLOAD)
    return (text + filler for text in map(str, range(FROM + first, FROM + last)))
