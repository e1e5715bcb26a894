"""The load: puts, cancels, moves, replaces and schedules, each written down as the caller saw it end."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from mainspring.client.client import Client
from mainspring.model.errors import Conflict, NotFound, StoreError
from mainspring.model.ids import idempotency_key, occurrence_id
from mainspring.model.schedule.input import define
from mainspring.model.task import Handle, Task
from mainspring.testing.history import UNSURE, AcceptedEvent, BegunEvent, CancelledEvent, Event, FaultEvent

from .network import Road
from .profile import Profile
from .recorder import STALL, Journal, now_us

LANES: Final = 12
UNKNOWN_KEY: Final = "?"
"""The put of a task without an id was never answered: its first delivery will show its key."""

_LATE_COPY_S: Final = 1.5
"""A call that took longer may have been repeated inside, so late that the slice of its first copy was gone."""
_REPEAT_FOR_S: Final = 20.0
_AT_ONCE: Final = 60
T = TypeVar("T")


class Put:
    """One task that was put, as far as its caller knows."""

    __slots__ = ("accepted", "id")

    def __init__(self, id: str, accepted: AcceptedEvent) -> None:
        self.id, self.accepted = id, accepted


class Load:
    """One client that puts steadily until it is stopped."""

    def __init__(
        self,
        name: str,
        client: Client,
        journal: Journal,
        profile: Profile,
        *,
        seed: int,
        ends_us: int,
        road: Road | None,
    ) -> None:
        self._name, self._client, self._journal, self._profile = name, client, journal, profile
        self._rng = random.Random(f"{name}/{seed}")
        self.ends_us = ends_us
        """Until then it puts, and nothing is due later; a run whose faults take longer moves it."""
        self._road = road
        self._count = 0
        self._busy: set[asyncio.Task[None]] = set()
        self.open: dict[str, AcceptedEvent] = {}
        """Tasks that must be delivered, by key."""
        self.expiring: dict[str, Put] = {}
        self.put = 0
        self.unsure = 0

    async def run(self, stop: asyncio.Event) -> None:
        steps: list[tuple[float, Callable[[], Coroutine[None, None, None]]]] = [
            (6, self._plain), (4, self._named), (2, self._lane), (1, self._burst), (2, self._cancelled),
            (2, self._moved), (1, self._swapped),
        ]  # fmt: skip
        if not self._profile.workers:  # reports of a run come a moment after it was begun, and may be late by that
            steps.append((1, self._expiring))
        weights = [weight for weight, _ in steps]
        gap_s = 1.6 / self._profile.rate  # a step is 1.6 tasks on average: bursts, and what is put twice
        while not stop.is_set():
            await asyncio.sleep(gap_s * self._rng.uniform(0.5, 1.5))
            if len(self._busy) < _AT_ONCE and now_us() < self.ends_us:
                [(_, step)] = self._rng.choices(steps, weights)
                task: asyncio.Task[None] = asyncio.create_task(step())
                self._busy.add(task)
                task.add_done_callback(self._busy.discard)
        await asyncio.gather(*self._busy)

    # -- kinds of tasks --------------------------------------------------------------------------------------

    async def _plain(self) -> None:
        await self._put_plain([self._task(self._word())])

    async def _burst(self) -> None:
        due_ms = self._due_ms()
        await self._put_plain([self._task("burst", due_ms=due_ms) for _ in range(self._rng.randint(3, 12))])

    async def _lane(self) -> None:
        lane = f"lane {self._rng.randrange(LANES)}"
        name = self._next_name(self._word())
        task = self._made(name, self._due_ms(), id=name if self._rng.random() < 0.5 else None, lane=lane)
        await (self._put_named(task) if task.id else self._put_plain([task]))

    async def _named(self) -> None:
        await self._put_named(self._named_task(self._word()))

    async def _expiring(self) -> None:
        due_ms = self._due_ms()
        name = self._next_name("expires")
        expires_ms = due_ms + self._rng.randint(200, 2000)
        put = await self._put_named(self._made(name, due_ms, id=name, expires=expires_ms))
        if put is not None:
            self.open.pop(put.accepted.key)
            self.expiring[name] = put

    async def _cancelled(self) -> None:
        put = await self._later_touched("goes")
        if put is None:
            return
        accepted, asked_us = put.accepted, now_us()
        answer: str = UNSURE
        with contextlib.suppress(StoreError):
            answer = await self._client.cancel(put.id, lane=accepted.lane)
        answer = UNSURE if answer == "cancelling" else answer  # its run may succeed before it is broken off
        self._journal.add(CancelledEvent(now_us(), accepted.task, accepted.key, answer, asked_us))
        if answer in ("cancelled", UNSURE):
            self.open.pop(accepted.key, None)

    async def _moved(self) -> None:
        put = await self._later_touched("moves")
        if put is None:
            return
        due_ms, asked_us, sure = self._other_due_ms(put.accepted), now_us(), True
        try:
            await self._client.reschedule(put.id, at=due_ms, lane=put.accepted.lane)
        except (Conflict, NotFound):
            # It has begun, or is over since a long failover, or the failover lost it: whether that was allowed is
            # known at the end. Nothing changed.
            return
        except StoreError:
            sure = False
        # A move promises no more than the server itself: there is no level to ask for.
        self._replaced(put.accepted, due_ms, "server", asked_us, sure=sure)

    async def _swapped(self) -> None:
        put = await self._later_touched("swaps", named=True)
        if put is None:
            return
        accepted, started, asked_us = put.accepted, time.monotonic(), now_us()
        due_ms = self._other_due_ms(accepted)
        task = self._made(accepted.task, due_ms, id=accepted.task, lane=accepted.lane)
        outcome, sure = "", True
        try:
            [handle] = await self._handles([task], "replace", accepted.level)
            outcome = handle.outcome
        except Conflict:
            self._doubt(accepted, asked_us)
            return
        except StoreError:
            sure = False
        if outcome == "created":
            # The former one was under way or over, or the client met its own work: only the store knows.
            self._doubt(accepted, asked_us)
        beside, twice = outcome == "created", self._slow(started)
        self._replaced(accepted, due_ms, accepted.level, asked_us, sure=sure, beside=beside, twice=twice)

    # -- putting ---------------------------------------------------------------------------------------------

    async def _put_plain(self, tasks: list[Task]) -> list[Put]:
        level, started, held = self._level(), time.monotonic(), self._held()
        try:
            handles = await self._handles(tasks, "keep", level)
        except StoreError:
            for task in tasks:
                self._accept(task, UNKNOWN_KEY + _name(task), level, sure=False, twice=True)
            return []
        twice = self._slow(started) or self._held() != held
        return [self._taken(task, handle, level, twice) for task, handle in zip(tasks, handles, strict=True)]

    async def _put_named(self, task: Task) -> Put | None:
        """As a careful caller does: with the same id, repeatedly, until there is an answer."""
        level, started, held = self._level(), time.monotonic(), self._held()
        while True:
            try:
                [handle] = await self._handles([task], "keep", level)
            except StoreError:
                if time.monotonic() < started + _REPEAT_FOR_S:
                    await asyncio.sleep(0.1)
                    continue
                self._accept(task, self._key(str(task.id), task), level, sure=False, twice=True)
                return None
            return self._taken(task, handle, level, self._held() != held or self._slow(started))

    async def _handles(self, tasks: list[Task], on_conflict: str, level: str) -> list[Handle]:
        summary = await self._client.put_many(
            tasks,
            on_conflict=on_conflict,  # type: ignore[arg-type]
            durability=level,
            handles=True,
        )
        assert summary.handles is not None
        return summary.handles

    def _taken(self, task: Task, handle: Handle, level: str, twice: bool) -> Put:
        key = self._key(handle.id.partition("~")[0] if task.id is None else task.id, task)
        return Put(handle.id, self._accept(task, key, level, sure=True, twice=twice))

    def _accept(self, task: Task, key: str, level: str, *, sure: bool, twice: bool) -> AcceptedEvent:
        expires_ms = task.expires if isinstance(task.expires, int) else None
        assert isinstance(task.at, int)
        accepted = AcceptedEvent(now_us(), _name(task), key, task.at, task.lane, sure, None, expires_ms, twice, level)
        self._note(accepted)
        return accepted

    def _replaced(
        self,
        old: AcceptedEvent,
        due_ms: int,
        level: str,
        asked_us: int,
        *,
        sure: bool,
        beside: bool = False,
        twice: bool = False,
    ) -> None:
        # Without an id the key is made of the generated one, which moves along.
        key = f"{old.key.rpartition('/')[0]}/{due_ms}"
        instead = None if beside else old.key
        twice = old.twice or twice
        self._note(
            AcceptedEvent(now_us(), old.task, key, due_ms, old.lane, sure, instead, None, twice, level, asked_us)
        )
        self.open.pop(old.key, None)

    def _doubt(self, accepted: AcceptedEvent, asked_us: int) -> None:
        self._journal.add(CancelledEvent(now_us(), accepted.task, accepted.key, UNSURE, asked_us))
        self.open.pop(accepted.key, None)

    def _note(self, accepted: AcceptedEvent) -> None:
        self._journal.add(accepted)
        self.put += 1
        self.unsure += not accepted.sure
        if accepted.sure:
            self.open[accepted.key] = accepted

    # -- choices ---------------------------------------------------------------------------------------------

    async def _later_touched(self, word: str, *, named: bool = False) -> Put | None:
        """A task that is put now and touched again before its time, or about then."""
        lane = f"lane {self._rng.randrange(LANES)}" if self._rng.random() < 0.3 else None
        if self._profile.workers:
            lane = None  # a cancelled run does not report its end, and its lane continues
        name = self._next_name(word)
        task = self._made(name, self._due_ms(), lane=lane, id=name if named or self._rng.random() < 0.5 else None)
        if task.id is not None:
            put = await self._put_named(task)
        else:
            puts = await self._put_plain([task])
            put = puts[0] if puts else None
        assert isinstance(task.at, int)
        left_s = task.at / 1000 - time.time()
        await asyncio.sleep(max(0.0, left_s * self._rng.uniform(0.2, 1.05)))
        return put

    def _task(self, word: str, *, due_ms: int | None = None) -> Task:
        return self._made(self._next_name(word), due_ms or self._due_ms())

    def _named_task(self, word: str) -> Task:
        name = self._next_name(word)
        return self._made(name, self._due_ms(), id=name)

    def _made(self, name: str, due_ms: int, **more: Any) -> Task:
        return Task(self._profile.target, {"task": name}, due_ms, **more)

    def _next_name(self, word: str) -> str:
        self._count += 1
        return f"{word}-{self._name}-{self._count}"

    def _word(self) -> str:
        share = self._rng.random()
        return "fails" if share < 0.10 else "dies" if share < 0.12 else "task"

    def _due_ms(self) -> int:
        ahead_s = self._rng.uniform(0.3, 3.0) if self._rng.random() < 0.65 else self._rng.uniform(3.0, 10.0)
        now_ms = time.time_ns() // 1_000_000
        return max(now_ms + 300, min(now_ms + int(ahead_s * 1000), self.ends_us // 1000))

    def _other_due_ms(self, accepted: AcceptedEvent) -> int:
        """Another time than it has: the same one would be the same task."""
        due_ms = self._due_ms()
        return due_ms if due_ms != accepted.due_ms else due_ms + 1

    def _level(self) -> str:
        return self._profile.levels[self._count % len(self._profile.levels)]

    def _key(self, id: str, task: Task) -> str:
        assert isinstance(task.at, int)
        return idempotency_key(self._client.store.keys.namespace, id, task.at, task.lane)

    def _slow(self, started: float) -> bool:
        return time.monotonic() - started > _LATE_COPY_S

    def _held(self) -> int:
        return self._road.weather.held if self._road is not None else 0


def _name(task: Task) -> str:
    return str(task.payload["task"])


SCHEDULES: Final = 50
EVERY_MS: Final = 1_000
AHEAD_MS: Final = 2_000
"""The first planned run: all schedules are added by then."""


class Recurring:
    """Many schedules at a cadence of one second. They may overlap, and nothing that was missed is left out."""

    def __init__(self, client: Client, journal: Journal, target: str) -> None:
        self._client, self._journal, self._target = client, journal, target
        self.open: dict[str, AcceptedEvent] = {}
        """Planned runs that must be delivered, by key."""

    async def add(self, until_us: int) -> None:
        """Add them before anything fails, with their planned times up to an end."""
        first_ms = (now_us() // 1_000_000 + 1) * 1_000 + AHEAD_MS
        last_ms = until_us // 1_000
        names = [f"schedule {number}" for number in range(SCHEDULES)]
        wanted = [
            define(
                name, every=f"{EVERY_MS}ms", start=first_ms, end=last_ms, target=self._target, payload={"task": name},
                overlap="allow", misfire="all(1000)", grace="1h",
            )
            for name in names
        ]  # fmt: skip
        await self._client.schedules.add_many(wanted)
        for name in names:
            for planned_ms in range(first_ms, last_ms + 1, EVERY_MS):
                self._expect(occurrence_id(name, planned_ms), planned_ms)

    def _expect(self, task: str, planned_ms: int) -> None:
        key = idempotency_key(self._client.store.keys.namespace, task, planned_ms)
        accepted = self.open[key] = AcceptedEvent(now_us(), task, key, planned_ms)
        self._journal.add(accepted)


def with_keys(events: list[Event]) -> list[Event]:
    """A put without an id that was never answered gets the key with which its task was first delivered."""
    keys: dict[str, str] = {}
    for event in events:
        if isinstance(event, BegunEvent):
            keys.setdefault(event.task, event.key)
    return [
        msgspec.structs.replace(event, key=keys.get(event.task, event.key))
        if isinstance(event, AcceptedEvent) and event.key.startswith(UNKNOWN_KEY)
        else event
        for event in events
    ]


def unplanned(events: list[Event]) -> int:
    """Stalls without a planned cause: not those of nodes that were stopped on purpose."""
    faults = [event for event in events if isinstance(event, FaultEvent)]
    stopped = [one for one in faults if one.what.startswith("stop ")]
    return sum(
        one.what == STALL
        and not any(stop.node == one.node and stop.at_us <= one.until_us <= stop.until_us for stop in stopped)
        for one in faults
    )


def duplicates(events: list[Event]) -> int:
    return sum(count - 1 for count in _begins(events).values())


def twice_begun(events: list[Event]) -> set[str]:
    """Keys of which an attempt was delivered more than once."""
    return {key for (key, _), count in _begins(events).items() if count > 1}


def _begins(events: list[Event]) -> Counter[tuple[str, int]]:
    return Counter((event.key, event.attempt) for event in events if isinstance(event, BegunEvent))
