"""Limits of webhooks: each host has its own queue, its own concurrency, and its own rate.

A target with limits of its own has its own queue on its host and is held to both.

A host that answers slowly, or not at all, fills only its own queue. Tasks that do not fit are put off: they go back to
the timeline and come again about when the host should be ready. This does not count as an attempt.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ..model.delivery import Delivery, DeliveryBatch, Outcome, Retry
from ..model.flow import Rate

_MEASURE_S: Final = 1.0
_UNANSWERED: Final = Retry("no outcome was noted")

Send = Callable[[Delivery], Awaitable[Outcome]]


class RequestBatch:
    """A batch of requests; those from `next` to `end` have not begun."""

    __slots__ = ("_left", "batch", "end", "finished", "next", "outcomes", "send", "waited")

    def __init__(self, batch: Sequence[Delivery], send: Send) -> None:
        self.batch = batch
        self.send = send
        self.outcomes: list[Outcome] = [_UNANSWERED] * len(batch)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.next = 0
        self.end = self._left = len(batch)
        self.waited = False
        """True if its requests could not all begin at once."""

    def unwanted(self) -> Outcome | None:
        """Return the outcome of the next request if it waited so long that it must not be sent any more."""
        return self.batch.unwanted(self.next) if self.waited and isinstance(self.batch, DeliveryBatch) else None

    def settle(self, at: int, outcome: Outcome) -> None:
        self.outcomes[at] = outcome
        self._finish(1)

    def leave_out(self, first: int, put_off: Callable[[], Retry]) -> None:
        """Put off everything from `first` on."""
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


class Pulse:
    """Requests per second, measured over about the last second of work."""

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


SOONEST_S: Final = 1.0
LATEST_S: Final = 300.0
"""Bounds of the wait, in seconds, after which a task that was put off comes again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one host, or of one target on it."""

    concurrency: int
    rate: Rate | None = None


class RatePace:
    """Keeps requests below a rate; after a pause, a burst may go at once."""

    __slots__ = ("_ahead_s", "_interval_s", "next_at")

    def __init__(self, rate: Rate | None) -> None:
        self._interval_s = 0.0 if rate is None else 1 / rate.per_s
        self._ahead_s = 0.0 if rate is None else self._interval_s * (max(1, rate.burst) - 1)
        self.next_at = -inf
        """Time at which the requests so far fit the rate. A burst goes ahead of it."""

    def wait_s(self) -> float:
        """Return the seconds until the next request may go; 0 or less if it may go now."""
        return self.next_at - self._ahead_s - time.monotonic() if self._interval_s else 0.0

    def took(self) -> None:
        if self._interval_s:
            self.next_at = max(time.monotonic(), self.next_at) + self._interval_s


class RequestQueue:
    """Waiting requests in order of arrival, and the number in flight."""

    def __init__(self, limits: Limits) -> None:
        self.most = limits.concurrency
        self.loads: deque[RequestBatch] = deque()
        self.busy = 0
        self.waiting = 0
        self.pace = RatePace(limits.rate)
        self.pulse = Pulse(float(limits.concurrency))
        self._reserved_until = -inf

    @property
    def idle(self) -> bool:
        # Keep a queue while its rate or its reserved times still matter: a new queue would start without them.
        now = time.monotonic()
        return not self.busy and not self.loads and max(self.pace.next_at, self._reserved_until) <= now

    def take(self) -> tuple[RequestBatch, int]:
        """Take the next request out of the queue."""
        load = self.loads[0]
        at = load.next
        load.next += 1
        if load.next == load.end:
            self.loads.popleft()
        self.waiting -= 1
        return load, at

    def put_off(self) -> Retry:
        """Return a retry at a reserved time, spaced by the recent rate."""
        now = time.monotonic()
        self._reserved_until = max(self._reserved_until, now + SOONEST_S) + 1 / self.pulse.rate()
        self._reserved_until = min(self._reserved_until, now + LATEST_S)
        after_ms = round((self._reserved_until - now) * 1000)
        return Retry("the host is busy; put off without an attempt", after_ms, untried=True)


MAX_QUEUED_S: Final = 30.0
"""Seconds a request may be queued before it is put off: a partition must not wait for a dead host."""

UNPROVEN: Final = 8
"""Divisor for a host that has not answered yet: it gets at most this part of the free connections in the first half.
The other half is for hosts that answer, however many hang."""

FIRST: Final = 8
"""Divisor for the connections reserved for hosts that have none, even if all others hang at once."""

_FEW_HOSTS: Final = 256


class Hosts:
    """The hosts with work, and the resources they share: room for waiting tasks, and connections."""

    def __init__(self, *, room: int, connections: int) -> None:
        self._room = room
        self._hosts: dict[Hashable, Host] = {}
        self.free = connections
        """Free connections."""
        self._half, self._first = connections // 2, connections // FIRST
        self._waiting_hosts: dict[Host, int] = {}
        """Hosts with work that may not have a connection now, oldest first, and how many connections must be free for
        each. Only the host's own answers change the number."""
        self.waiting = 0
        self._sweep_at = _FEW_HOSTS

    def __len__(self) -> int:
        return len(self._hosts)

    async def carry(
        self,
        key: Hashable,
        limits: Limits,
        batch: Sequence[Delivery],
        send: Send,
        own: tuple[Hashable, Limits] | None = None,
    ) -> Sequence[Outcome]:
        """Send a batch within the limits of its host, and its target's own; return one outcome each, in order."""
        host = self._hosts.get(key)
        if host is None:
            self._sweep()
            host = self._hosts[key] = Host(self, limits)
        return await host.carry(own, batch, send)

    def room_for(self, waiting: int) -> int:
        """Return how many more requests a host with `waiting` may queue: never more than remain free for all others."""
        return max(0, self._room - self.waiting - waiting) // 2

    # -- connections -----------------------------------------------------------------------------------------

    def may_connect(self, host: "Host") -> bool:
        """Return True if a host may have one more connection. Otherwise it is served when connections become free.

        Hosts that hang keep their connections for a whole timeout. So each host leaves as many free as it has, and some
        for the first connection of others. A host stays far below that until it has answered that many.
        """
        needed = self._needed(host)
        may = self.free >= needed
        if not may:
            self._waiting_hosts[host] = needed
        return may

    def _needed(self, host: "Host") -> int:
        """Return how many connections must be free for a host to get one more."""
        busy = host.busy
        if not busy:
            return 1
        unproven = self._half + UNPROVEN * (busy + 1)
        return min(unproven, busy + self._first) if busy < host.proven else unproven

    def feed(self, answered: "Host") -> None:
        """Give a freed connection to waiting hosts first."""
        if answered in self._waiting_hosts:
            self._waiting_hosts[answered] = self._needed(answered)
        for host, needed in list(self._waiting_hosts.items()):
            if self.free <= 0:
                break
            del self._waiting_hosts[host]
            if self.free >= needed:
                host.fill()
            else:  # only a check: this runs with every answer, and hundreds of hosts may hang
                self._waiting_hosts[host] = needed

    # -- sweeping ----------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Forget idle hosts whenever their number has doubled: URLs can name any number of them."""
        if len(self._hosts) >= self._sweep_at:
            self._hosts = {key: host for key, host in self._hosts.items() if not host.idle}
            self._sweep_at = max(_FEW_HOSTS, 2 * len(self._hosts))

    async def aclose(self) -> None:
        for host in self._hosts.values():
            host.stop()
        self._hosts.clear()
        self._waiting_hosts.clear()


class Host:
    """The queues of one host, and the workers that empty them, each with a connection."""

    def __init__(self, hosts: Hosts, limits: Limits) -> None:
        self._hosts = hosts
        self._limits = limits
        self._queues: dict[Hashable, RequestQueue] = {}
        self._moving: deque[RequestQueue] = deque()
        """Queues with waiting requests, in turn."""
        self._workers: set[asyncio.Task[None]] = set()
        self.busy = 0
        """Requests in flight."""
        self.proven = 0
        """How many requests in flight the host has proven to answer; halved after a request that it did not answer."""
        self._waiting = 0
        self._pace = RatePace(limits.rate)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def idle(self) -> bool:
        return not self.busy and self._pace.wait_s() <= 0 and all(queue.idle for queue in self._queues.values())

    async def carry(
        self, own: tuple[Hashable, Limits] | None, batch: Sequence[Delivery], send: Send
    ) -> Sequence[Outcome]:
        queue = self._queue_of(own)
        load = RequestBatch(batch, send)
        # There is always room for as many as the queue sends at a time.
        room = max(queue.most - queue.waiting, self._hosts.room_for(self._waiting))
        taken = min(len(batch), room)
        load.leave_out(taken, queue.put_off)
        if taken:
            self._add(queue, load, taken)
            self.fill()
            load.waited = True
            timer = asyncio.get_running_loop().call_later(MAX_QUEUED_S, self._give_up, queue, load)
            try:
                await load.finished
            finally:
                timer.cancel()
                self._give_up(queue, load)  # cancelled: requests that were not begun are no longer wanted
        return load.outcomes

    def _queue_of(self, own: tuple[Hashable, Limits] | None) -> RequestQueue:
        key, limits = own or (None, Limits(self._limits.concurrency))
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = RequestQueue(limits)
        return queue

    def _add(self, queue: RequestQueue, load: RequestBatch, count: int) -> None:
        if not queue.loads:
            self._moving.append(queue)
        queue.loads.append(load)
        queue.waiting += count
        self._count(count)

    def stop(self) -> None:
        self._stopped = True
        for worker in self._workers:
            worker.cancel()
        for queue in self._moving:
            for load in queue.loads:
                load.fail(asyncio.CancelledError())
        if self._timer is not None:
            self._timer.cancel()

    def _count(self, change: int) -> None:
        self._waiting += change
        self._hosts.waiting += change

    # -- sending -----------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Begin as many requests as the limits allow now."""
        while (queue := self._next_queue()) is not None:
            worker = asyncio.create_task(self._work(queue, *self._begin(queue)))
            self._workers.add(worker)
            worker.add_done_callback(self._ended)

    def _next_queue(self) -> RequestQueue | None:
        """Return the queue whose turn it is; None if no request may begin now."""
        if not self._moving or self.busy >= self._limits.concurrency or self._stopped:
            return None
        soonest_s, host_s = inf, self._pace.wait_s()
        for queue in list(self._moving):
            self._moving.rotate(-1)
            if queue.busy < queue.most:
                wait_s = max(host_s, queue.pace.wait_s())
                if wait_s <= 0:
                    if not self._has_wanted(queue):
                        continue
                    return queue if self._hosts.may_connect(self) else None
                soonest_s = min(soonest_s, wait_s)
        if soonest_s < inf:
            self._come_back(soonest_s)
        return None

    def _has_wanted(self, queue: RequestQueue) -> bool:
        """Settle requests at the front of a queue that must not be sent any more; return True if others are left."""
        while queue.loads and (outcome := queue.loads[0].unwanted()) is not None:
            load, at = self._take(queue)
            load.settle(at, outcome)
        return bool(queue.loads)

    def _take(self, queue: RequestQueue) -> tuple[RequestBatch, int]:
        taken = queue.take()
        if not queue.loads:
            self._moving.remove(queue)
        self._count(-1)
        return taken

    def _begin(self, queue: RequestQueue) -> tuple[RequestBatch, int]:
        taken = self._take(queue)
        queue.busy += 1
        queue.pace.took()
        self.busy += 1
        self._hosts.free -= 1
        self._pace.took()
        return taken

    async def _work(self, queue: RequestQueue, load: RequestBatch, at: int) -> None:
        while True:
            try:
                outcome = await load.send(load.batch[at])
            except BaseException as error:
                self._landed(queue, answered=False)
                load.fail(error)
                raise
            self._landed(queue, answered=not isinstance(outcome, Retry) or outcome.response is not None)
            load.settle(at, outcome)
            queue.pulse.beat()
            self._hosts.feed(self)
            following = self._next_queue()
            if following is None:
                return
            queue = following
            load, at = self._begin(queue)
            self.fill()

    def _landed(self, queue: RequestQueue, *, answered: bool) -> None:
        # One more with every answer: a host that recovers soon has all connections it may have.
        self.proven = max(self.proven, self.busy + 1) if answered else self.proven // 2
        self.busy -= 1
        queue.busy -= 1
        self._hosts.free += 1

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and worker.exception() is not None:
            self._hosts.feed(self)
            self.fill()  # a bug: its batch has failed, and the others still need workers

    def _come_back(self, wait_s: float) -> None:
        """Try again after `wait_s`: the rates allow no request before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self.fill()

    def _give_up(self, queue: RequestQueue, load: RequestBatch) -> None:
        """Put off the remaining requests of a batch."""
        if load.next < load.end:
            queue.loads.remove(load)
            if not queue.loads:
                self._moving.remove(queue)
            queue.waiting += load.next - load.end
            self._count(load.next - load.end)
            load.leave_out(load.next, queue.put_off)
