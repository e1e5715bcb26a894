"""The whole life of N tasks, measured the same way for every design: put, some cancelled, the rest fired."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from .ground import Ground, Reading
from .load import Load, Shape
from .tally import Tally, Verdict, judge

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how far it is and how far it goes."""


class Design(Protocol):
    """One way to keep tasks on a server."""

    grace_ms: int
    """How long after the last due time firing starts, so that all of its cleaning up is part of the figures."""

    async def put(self, load: Load, progress: Callable[[int], None]) -> None: ...

    async def cancel(self) -> int:
        """Cancel what the load put before says; return how many the server says were cancelled."""
        ...

    async def fire(self, tally: Tally) -> None:
        """Deliver all into the tally, finish and clear away; return when the server has nothing left to do."""
        ...


class Figures(msgspec.Struct, frozen=True):
    """What a life costs. Per task means per task put, also when most were cancelled."""

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
    """How long after the first due time the last put ended; meant to be 0."""

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
    put: Reading
    cancel: Reading
    fire: Reading
    pending_bytes: int
    cancelled: int
    fire_s: float
    put_overran_ms: int


async def live(ground: Ground, design: Design, shape: Shape, progress: Progress) -> Figures:
    load = shape.starting(ground.time.now_ms())
    tally = Tally(load.firing, ground.time)
    stages = await _stages(ground, design, load, tally, progress)
    progress("checking", 0, 1)
    return _figures(load, stages, judge(load, tally.batches), ground.time.doubt_us / 1000)


async def _stages(ground: Ground, design: Design, load: Load, tally: Tally, progress: Progress) -> Stages:
    before = await ground.read()
    await design.put(load, lambda done: progress("putting", done, load.tasks))
    put = await ground.read()
    overran_ms = max(0, ground.time.now_ms() - load.first_due_ms)
    progress("cancelling", 0, 1)
    cancelled = await design.cancel() if load.shape.cancel else 0
    stored = await ground.read()
    progress("waiting until all are due", 0, 1)
    await ground.time.until(load.last_due_ms + design.grace_ms)
    progress("firing", 0, 1)
    ready = await ground.read()
    started_at = time.perf_counter()
    await design.fire(tally)
    fired = await ground.read()
    return Stages(
        put.since(before),
        stored.since(put),
        fired.since(ready),
        stored.memory - before.memory,
        cancelled,
        tally.completed_at - started_at,
        overran_ms,
    )


def _figures(load: Load, stages: Stages, verdict: Verdict, doubt_ms: float) -> Figures:
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
