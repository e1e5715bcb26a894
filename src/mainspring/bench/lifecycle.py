"""The whole lifecycle of N tasks, measured the same way for every design: the load, and the check of its deliveries."""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from ..model.delivery import DONE, Delivery, Outcome
from ..model.errors import InvalidInput, MainspringError
from ..model.task import Task
from .environment import BenchEnvironment, Measurement, ServerTime

TARGET: Final = "null:"
DIGITS: Final = 10
FROM: Final = 10 ** (DIGITS - 1)
"""The first number: all numbers have the same length, so that payloads can be split without parsing."""

SMALLEST_PAYLOAD: Final = DIGITS + 2
"""Bytes of the number and the quotes of a JSON string."""

_STRIDE: Final = 7_919
LANE_TASKS: Final = 10


class Expected(Protocol):
    """The properties of a load that are needed to judge its deliveries."""

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
    """The load that the user asks for."""

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
            raise InvalidInput(f"--payload-bytes is {self.payload_bytes}; give at least {SMALLEST_PAYLOAD}")
        if not 0 <= self.cancel < 1:
            raise InvalidInput(f"--cancel is {self.cancel}; give a share from 0 up to (not including) 1")
        if self.spread_s < 0.001:
            raise InvalidInput("--spread must be a millisecond or more")

    def starting(self, now_ms: int) -> "BenchLoad":
        # The first due time is after all puts: overdue tasks are stored differently and would distort the figures.
        put_ms = self.tasks * (24 if self.ids else 6) // 1000
        return BenchLoad(self, now_ms + 500 + put_ms, max(1, round(self.spread_s * 1000)))


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """N tasks with due times scattered over the spread: neighbours in the put are not neighbours in time."""

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
        """Number of tasks left after the cancels."""
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
        """Yield the tasks, made one by one during the put, as an application would."""
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
        """Return how many tasks are due before a time."""
        return min(self.tasks, max(0, -(-(until_ms - self.first_due_ms) * self.rate // 1000)))


def payload_texts(first: int, last: int, payload_bytes: int) -> Iterator[str]:
    """Return payloads that carry their number; with JSON's quotes each has `payload_bytes` bytes."""
    filler = "x" * (payload_bytes - SMALLEST_PAYLOAD)
    return (text + filler for text in map(str, range(FROM + first, FROM + last)))


STALL_S: Final = 15.0
"""Seconds without a delivery after which missing tasks count as lost."""

_AFTER_QUOTE: Final = 1
_MOST: Final = 255


class DeliveryTally:
    """A sink that keeps the payloads of each batch as one block with its arrival time: about 0.1 us per task."""

    def __init__(self, expected: int, clock: ServerTime) -> None:
        self.expected = expected
        self.count = 0
        self.complete = asyncio.Event()
        self.completed_at = 0.0
        self.batches: list[tuple[int, bytes]] = []
        self._clock = clock

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.take([one.body.payload for one in batch])
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""

    def take(self, payloads: list[bytes]) -> None:
        # Read the clock first: a task is received when it is handed over, not when it is recorded.
        self.batches.append((self._clock.latest_us(), b"".join(payloads)))
        self.count += len(payloads)
        if self.count >= self.expected and not self.complete.is_set():
            self.completed_at = time.perf_counter()
            self.complete.set()

    async def wait(self) -> bool:
        """Wait until everything has arrived; return False when nothing has arrived for a long time."""
        seen, seen_at = -1, time.monotonic()
        while not self.complete.is_set():
            if self.count != seen:
                seen, seen_at = self.count, time.monotonic()
            elif time.monotonic() - seen_at > STALL_S:
                self.completed_at = time.perf_counter()
                return False
            try:
                async with asyncio.timeout(0.5):
                    await self.complete.wait()
            except TimeoutError:
                continue
        return True


@dataclass(slots=True)
class DeliveryVerdict:
    """Result of judging the deliveries."""

    lost: int = 0
    duplicated: int = 0
    early: int = 0
    fired_after_cancel: int = 0
    misordered: int = 0
    """Tasks that arrived after a later task of the same lane."""
    lateness_ms: "array[float]" = field(default_factory=lambda: array("d"))


def judge(load: Expected, batches: Sequence[tuple[int, bytes]], *, late_from_ms: int | None = None) -> DeliveryVerdict:
    """Check that each number arrived once and not early. Keep the lateness of tasks due from `late_from_ms` on."""
    verdict = DeliveryVerdict()
    counts = bytearray(load.tasks)
    lanes: dict[int, int] = {}
    for received_us, block in batches:
        for number in _numbers(block, load.payload_bytes):
            counts[number] = min(counts[number] + 1, _MOST)
            due_ms = load.due_ms(number)
            late_us = received_us - due_ms * 1000
            verdict.early += late_us < 0
            if late_from_ms is not None and due_ms >= late_from_ms:
                verdict.lateness_ms.append(late_us / 1000)
            if load.lanes:
                lane = number // LANE_TASKS
                verdict.misordered += due_ms < lanes.get(lane, 0)
                lanes[lane] = due_ms
    _count(load, counts, verdict)
    return verdict


def _numbers(block: bytes, width: int) -> list[int]:
    if len(block) % width:
        raise MainspringError("a payload was delivered with a different length than it was put with")
    firsts = range(_AFTER_QUOTE, len(block), width)
    return [int(block[at : at + DIGITS]) - FROM for at in firsts]


def _count(load: Expected, counts: bytearray, verdict: DeliveryVerdict) -> None:
    for number, count in enumerate(counts):
        if count == 1 and not load.cancelled(number):
            continue
        if load.cancelled(number):
            verdict.fired_after_cancel += count
        elif count == 0:
            verdict.lost += 1
        else:
            verdict.duplicated += count - 1


BenchProgress = Callable[[str, int, int], None]
"""Called with the current step, the amount done, and the total."""


class Design(Protocol):
    """A way to keep tasks on a server."""

    grace_ms: int
    """How long after the last due time firing starts, so that the cleaning up is part of the figures."""

    async def put(self, load: BenchLoad, progress: Callable[[int], None]) -> None: ...

    async def cancel(self) -> int:
        """Cancel the tasks that the load marks as cancelled; return how many cancels the server confirmed."""
        ...

    async def fire(self, tally: DeliveryTally) -> None:
        """Deliver everything into the tally, finish and clean up; return when the server has nothing left to do."""
        ...


class Figures(msgspec.Struct, frozen=True):
    """Cost of a lifecycle. "Per task" means per task put, even if most were cancelled."""

    tasks: int
    put_per_s: float
    fire_per_s: float
    server_cpu_us_per_task: float
    client_cpu_us_per_task: float
    bytes_per_pending_task: float
    lost: int
    duplicated: int
    early: int
    cancelled: int
    fired_after_cancel: int
    misordered: int
    put_server_us: float
    cancel_server_us: float
    fire_server_us: float
    server_all_threads_us_per_task: float
    clock_doubt_ms: float
    put_overran_ms: int
    """How long after the first due time the last put ended; 0 in a valid run."""

    @property
    def sound(self) -> bool:
        # A task that is overdue when it is put counts from then in its lane: its order cannot be judged here.
        misordered = self.misordered if not self.put_overran_ms else 0
        return not (self.lost or self.duplicated or self.early or self.fired_after_cancel or misordered)

    @property
    def warning(self) -> str | None:
        if not self.put_overran_ms:
            return None
        return f"puts were slow: some tasks were up to {self.put_overran_ms} ms overdue when they were put"


class Stages(msgspec.Struct, frozen=True):
    put: Measurement
    cancel: Measurement
    fire: Measurement
    pending_bytes: int
    cancelled: int
    fire_s: float
    put_overran_ms: int


async def live(environment: BenchEnvironment, design: Design, shape: Shape, progress: BenchProgress) -> Figures:
    load = shape.starting(environment.time.now_ms())
    tally = DeliveryTally(load.firing, environment.time)
    stages = await _stages(environment, design, load, tally, progress)
    progress("checking", 0, 1)
    return _figures(load, stages, judge(load, tally.batches), environment.time.doubt_us / 1000)


async def _stages(
    environment: BenchEnvironment, design: Design, load: BenchLoad, tally: DeliveryTally, progress: BenchProgress
) -> Stages:
    before = await environment.read()
    await design.put(load, lambda done: progress("putting", done, load.tasks))
    put = await environment.read()
    overran_ms = max(0, environment.time.now_ms() - load.first_due_ms)
    progress("cancelling", 0, 1)
    cancelled = await design.cancel() if load.shape.cancel else 0
    stored = await environment.read()
    progress("waiting until all tasks are due", 0, 1)
    await environment.time.until(load.last_due_ms + design.grace_ms)
    progress("firing", 0, 1)
    ready = await environment.read()
    started_at = time.perf_counter()
    await design.fire(tally)
    fired = await environment.read()
    return Stages(
        put.since(before),
        stored.since(put),
        fired.since(ready),
        stored.memory - before.memory,
        cancelled,
        tally.completed_at - started_at,
        overran_ms,
    )


def _figures(load: BenchLoad, stages: Stages, verdict: DeliveryVerdict, doubt_ms: float) -> Figures:
    parts = (stages.put, stages.cancel, stages.fire)
    per_task = [part.server_us / load.tasks for part in parts]
    return Figures(
        tasks=load.tasks,
        put_per_s=round(load.tasks / stages.put.at_s),
        fire_per_s=round(load.firing / stages.fire_s),
        server_cpu_us_per_task=round(sum(per_task), 3),
        client_cpu_us_per_task=round(sum(part.client_us for part in parts) / load.tasks, 3),
        bytes_per_pending_task=round(stages.pending_bytes / load.firing, 1),
        lost=verdict.lost,
        duplicated=verdict.duplicated,
        early=verdict.early,
        cancelled=stages.cancelled,
        fired_after_cancel=verdict.fired_after_cancel,
        misordered=verdict.misordered,
        put_server_us=round(per_task[0], 3),
        cancel_server_us=round(per_task[1], 3),
        fire_server_us=round(per_task[2], 3),
        server_all_threads_us_per_task=round(sum(part.server_all_us for part in parts) / load.tasks, 3),
        clock_doubt_ms=round(doubt_ms, 3),
        put_overran_ms=stages.put_overran_ms,
    )
