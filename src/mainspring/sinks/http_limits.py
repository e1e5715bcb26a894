"""Who may send when: each host has its own queue, its own number of requests at one time, its own rate.

A host that answers slowly, or not at all, fills its own queue and nothing else. What it has no room for is put
off: the task goes back to the timeline, comes again about when the host should be ready for it, and this does not
count as an attempt.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from ..model.delivery import Delivery
from ..model.outcome import Outcome, Retry

PATIENCE_S: Final = 30.0
"""What was not begun so long after it came is put off: its partition must not wait for a dead host to move."""

SOONEST_S: Final = 1.0
LATEST_S: Final = 300.0
"""When a task that was put off comes again."""

_MEASURE_S: Final = 1.0
_FEW_HOSTS: Final = 256
_UNANSWERED: Final = Retry("no outcome was noted")

Send = Callable[[Delivery], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one host."""

    concurrency: int
    rate: float | None = None


class Hosts:
    """The hosts with work, and what they share: room for waiting tasks, and connections."""

    def __init__(self, *, room: int, connections: int) -> None:
        self._room = room
        self._hosts: dict[Hashable, Host] = {}
        self.connections = asyncio.Semaphore(connections)
        self.waiting = 0
        self._sweep_at = _FEW_HOSTS

    def __len__(self) -> int:
        return len(self._hosts)

    async def carry(self, key: Hashable, limits: Limits, batch: Sequence[Delivery], send: Send) -> Sequence[Outcome]:
        """Send a batch within the limits of its host; one outcome each, in order."""
        host = self._hosts.get(key)
        if host is None:
            self._sweep()
            host = self._hosts[key] = Host(self, limits)
        return await host.carry(batch, send)

    def room_for(self, waiting: int) -> int:
        """How many more a host may queue that has so many: never more than is then still free for all others."""
        return max(0, self._room - self.waiting - waiting) // 2

    def _sweep(self) -> None:
        """Forget idle hosts whenever their number has doubled: URLs can name any number of them."""
        if len(self._hosts) >= self._sweep_at:
            self._hosts = {key: host for key, host in self._hosts.items() if not host.idle}
            self._sweep_at = max(_FEW_HOSTS, 2 * len(self._hosts))

    async def aclose(self) -> None:
        for host in self._hosts.values():
            host.stop()
        self._hosts.clear()


class Host:
    """One queue, and the workers that empty it."""

    def __init__(self, hosts: Hosts, limits: Limits) -> None:
        self._hosts = hosts
        self._limits = limits
        self._loads: deque[_Load] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._waiting = 0
        self._next_at = 0.0
        self._pulse = _Pulse(float(limits.concurrency))
        self._booked_until = 0.0

    @property
    def idle(self) -> bool:
        # Kept while its rate or its bookings still mean something: forgotten, they would start afresh.
        return not self._busy and max(self._next_at, self._booked_until) <= time.monotonic()

    async def carry(self, batch: Sequence[Delivery], send: Send) -> Sequence[Outcome]:
        load = _Load(batch, send)
        # As many as it sends at one time always find room.
        room = max(self._limits.concurrency - self._waiting, self._hosts.room_for(self._waiting))
        taken = min(len(batch), room)
        load.leave_out(taken, self._put_off)
        if taken:
            self._loads.append(load)
            self._count(taken)
            self._hire(taken)
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, load)
            try:
                await load.finished
            finally:
                timer.cancel()
                self._give_up(load)  # cancelled: nobody wants what was not begun
        return load.outcomes

    def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()

    def _count(self, change: int) -> None:
        self._waiting += change
        self._hosts.waiting += change

    def _hire(self, tasks: int) -> None:
        for _ in range(min(tasks, self._limits.concurrency - self._busy)):
            # Counted here and in the worker itself: a task that is over stays in the set a moment longer.
            self._busy += 1
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and worker.exception() is not None:
            self._hire(self._waiting)  # a bug: its load was told, and the others still need hands

    async def _work(self) -> None:
        try:
            while self._loads:
                if self._limits.rate is not None:
                    await self._pace(self._limits.rate)
                async with self._hosts.connections:
                    if self._loads:  # else others were faster
                        await self._send_next()
        finally:
            self._busy -= 1

    async def _send_next(self) -> None:
        load, at = self._take()
        try:
            load.settle(at, await load.send(load.batch[at]))
        except BaseException as error:
            load.fail(error)
            raise
        self._pulse.beat()

    def _take(self) -> "tuple[_Load, int]":
        load = self._loads[0]
        at = load.next
        load.next += 1
        if load.next == load.end:
            self._loads.popleft()
        self._count(-1)
        return load, at

    async def _pace(self, rate: float) -> None:
        now = time.monotonic()
        at = max(now, self._next_at)
        self._next_at = at + 1 / rate
        if at > now:
            await asyncio.sleep(at - now)

    def _give_up(self, load: "_Load") -> None:
        """Put off what is left of a load."""
        if load.next < load.end:
            self._loads.remove(load)
            self._count(load.next - load.end)
            load.leave_out(load.next, self._put_off)

    def _put_off(self) -> Retry:
        """Each comes a little after the one before, as fast as the host took them lately."""
        now = time.monotonic()
        self._booked_until = max(self._booked_until, now + SOONEST_S) + 1 / self._pulse.rate()
        self._booked_until = min(self._booked_until, now + LATEST_S)
        after_ms = round((self._booked_until - now) * 1000)
        return Retry("the host is busy; put off without an attempt", after_ms, untried=True)


class _Load:
    """One batch on its way through the queue: `next` to `end` is still to be begun."""

    __slots__ = ("_left", "batch", "end", "finished", "next", "outcomes", "send")

    def __init__(self, batch: Sequence[Delivery], send: Send) -> None:
        self.batch = batch
        self.send = send
        self.outcomes: list[Outcome] = [_UNANSWERED] * len(batch)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.next = 0
        self.end = self._left = len(batch)

    def settle(self, at: int, outcome: Outcome) -> None:
        self.outcomes[at] = outcome
        self._finish(1)

    def leave_out(self, first: int, put_off: Callable[[], Retry]) -> None:
        """Everything from `first` on is not begun."""
        left_out, self.end = self.end - first, first
        for at in range(first, first + left_out):
            self.outcomes[at] = put_off()
        self._finish(left_out)

    def fail(self, error: BaseException) -> None:
        if self.finished.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.finished.cancel()
        else:
            self.finished.set_exception(error)

    def _finish(self, count: int) -> None:
        self._left -= count
        if self._left == 0 and not self.finished.done():
            self.finished.set_result(None)


class _Pulse:
    """How many a second a host takes, measured over the last second or so of work."""

    def __init__(self, first_guess: float) -> None:
        self._rate = first_guess
        self._since = time.monotonic()
        self._beats = 0

    def beat(self) -> None:
        self._beats += 1
        self._measure()

    def rate(self) -> float:
        self._measure()
        return max(self._rate, 0.1)

    def _measure(self) -> None:
        elapsed = time.monotonic() - self._since
        if elapsed >= _MEASURE_S:
            self._rate = (self._rate + self._beats / elapsed) / 2
            self._since += elapsed
            self._beats = 0
