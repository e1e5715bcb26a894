"""The calls of a client for dead letters: list, show, replay, drop, export."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from ..model.clock import Clock
from ..model.dead_letter import DeadFilter, DeadLetter, DeadPage, DropOutcome, Replayed, ReplaySummary
from ..model.errors import InvalidInput
from ..model.text import check_text
from ..model.times import Delay, When, check_horizon, delay_ms, instant_ms
from ..store.store import Store
from ..store.tasks import dead_letters
from ..store.tasks.dead_letters import AT_ONCE, KeptDeadLetter, Replayer
from ..store.tasks.find import resolve

P = ParamSpec("P")
T = TypeVar("T")
Sleep = Callable[[float], Awaitable[Any]]
AHEAD_MS: Final = 1_000
"""With a rate, how long before they are due dead letters are replayed: a replay that is stopped stops at once."""

FARTHEST_AHEAD_MS: Final = 2 * AHEAD_MS
"""How far ahead the last dead letter of a portion is due."""

_FOREVER_MS: Final = 1 << 45


class DeadLetters:
    """`client.dead`: calls for dead letters.

    Every call on many dead letters takes the same filters: `target` (whole, or its beginning and `*`), `lane`,
    `reason` (part of it), `died_after` (included) and `died_before` (not included). Without any it means all of them.
    """

    def __init__(self, store: Callable[[], Store], replayer: Callable[[], Replayer], wait_s: float) -> None:
        self._opened = store
        self._replayer = replayer
        self._wait_s = wait_s

    @property
    def _store(self) -> Store:
        return self._opened()

    async def count(self, *, died_after: When | None = None, died_before: When | None = None) -> int:
        """Return how many dead letters there are, or how many died in a range of time, without reading them.

        Times are aware datetimes, ISO 8601 text or epoch milliseconds. Raises InvalidInput.
        """
        where = _filter(None, None, None, died_after, died_before)
        return await dead_letters.count(self._store, where.from_ms, where.to_ms)

    async def get(self, id: str, *, lane: str | None = None) -> DeadLetter | None:
        """Return the dead letter of the task `id`; None if there is none.

        Raises Ambiguous if tasks of several lanes have the id and no `lane` is named.
        """
        kept = await self._find(id, lane)
        return None if kept is None else kept.dead_letter

    async def replay(
        self,
        id: str,
        *,
        lane: str | None = None,
        at: When | None = None,
        after: Delay | None = None,
        new_key: bool = False,
        dry_run: bool = False,
    ) -> Replayed:
        """Put the task of a dead letter again, now or `at` a time or `after` a delay: same id, same lane, attempt 1.

        The task keeps its idempotency key unless `new_key`. `dry_run` only says what would happen. Returns the outcome
        and the due time; a task of the same id that is not over is never overwritten: the outcome is then "conflict".
        Raises InvalidInput, and Ambiguous as `get` does.
        """
        due_ms = await self._due_ms(at, after)
        kept = await self._find(id, lane)
        if kept is None:
            return Replayed(id, "unknown", None, "there is no dead letter with this id")
        if dry_run:
            [answer] = await self._replayer().rehearse([kept], [due_ms])
        else:
            [answer] = await self._replayer().replay([kept], [due_ms], new_key=new_key)
        return answer

    async def replay_many(
        self,
        *,
        target: str | None = None,
        lane: str | None = None,
        reason: str | None = None,
        died_after: When | None = None,
        died_before: When | None = None,
        at: When | None = None,
        after: Delay | None = None,
        rate: float | None = None,
        new_key: bool = False,
        dry_run: bool = False,
        progress: Callable[[ReplaySummary], None] | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> ReplaySummary:
        """Replay all matching dead letters, earliest death first; tasks that die meanwhile are left alone.

        With a `rate`, at most so many become due per second. `at`, `after`, `new_key` and `dry_run` are those of
        `replay`; `progress` gets the counts so far. If the call is stopped, every dead letter is either replayed or
        still there. Returns the counts by outcome. Raises InvalidInput.
        """
        where = _filter(target, lane, reason, died_after, died_before)
        where = await self._so_far(where)
        start_ms = None if at is None and after is None else await self._due_ms(at, after)
        pace = _Pace(self._store.clock, start_ms, _checked_rate(rate), sleep)
        summary = ReplaySummary(dry_run)
        replayer = self._replayer()
        async for some in _portions(dead_letters.walk(self._store, where), pace.portion):
            if dry_run:
                answers = await replayer.rehearse(some, [pace.due_ms() for _ in some])
            else:
                await pace.wait()
                answers = await replayer.replay(some, [pace.due_ms() for _ in some], new_key=new_key)
            for answer in answers:
                summary.add(answer)
            if progress is not None:
                progress(summary)
        return summary

    async def drop(self, id: str, *, lane: str | None = None) -> DropOutcome:
        """Drop the dead letter of the task `id` for good; return "dropped" or "unknown". Raises Ambiguous as `get`."""
        kept = await self._find(id, lane)
        if kept is None:
            return "unknown"
        [dropped] = await dead_letters.drop(self._store, [kept], wait_s=self._wait_s)
        return "dropped" if dropped else "unknown"

    async def drop_many(
        self,
        *,
        target: str | None = None,
        lane: str | None = None,
        reason: str | None = None,
        died_after: When | None = None,
        died_before: When | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Drop all matching dead letters for good; return their number. Tasks that die meanwhile stay.

        `dry_run` only counts them; `progress` gets the number so far. Raises InvalidInput.
        """
        where = _filter(target, lane, reason, died_after, died_before)
        where = await self._so_far(where)
        count = 0
        async for some in dead_letters.walk(self._store, where):
            count += len(some) if dry_run else sum(await dead_letters.drop(self._store, some, wait_s=self._wait_s))
            if progress is not None:
                progress(count)
        return count

    async def export(
        self,
        write: Callable[[bytes], Any],
        *,
        target: str | None = None,
        lane: str | None = None,
        reason: str | None = None,
        died_after: When | None = None,
        died_before: When | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Write all matching dead letters as JSON lines, oldest first: `export(file.write)`. Return the number.

        `progress` gets the number so far. Raises InvalidInput.
        """
        where = _filter(target, lane, reason, died_after, died_before)
        namespace, count = self._store.keys.namespace, 0
        async for some in dead_letters.walk(self._store, where):
            write(b"".join(msgspec.json.encode(kept.dead_letter.as_dict(namespace)) + b"\n" for kept in some))
            count += len(some)
            if progress is not None:
                progress(count)
        return count

    # -- inside ------------------------------------------------------------------------------------------------

    async def _so_far(self, where: DeadFilter) -> DeadFilter:
        """Limit a filter to what has died by now: otherwise tasks that die again would be replayed without end."""
        return msgspec.structs.replace(where, to_ms=min(where.to_ms, await self._store.sample_clock() + 1))

    async def _find(self, id: str, lane: str | None) -> KeptDeadLetter | None:
        return await dead_letters.find_dead_letter(self._store, await resolve(self._store, id, lane))

    async def _due_ms(self, at: When | None, after: Delay | None) -> int:
        if at is not None and after is not None:
            raise InvalidInput("both at and after are given; give one of them")
        now_ms = await self._store.fresh_ms()
        due_ms = instant_ms(at) if at is not None else now_ms + (0 if after is None else delay_ms(after))
        check_horizon(due_ms, now_ms)
        return due_ms

    # -- many (last: from here on `list` is a method) ---------------------------------------------------------

    async def list(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        target: str | None = None,
        lane: str | None = None,
        reason: str | None = None,
        died_after: When | None = None,
        died_before: When | None = None,
    ) -> DeadPage:
        """Return a page of dead letters, the newest first; pass `page.next` as `cursor` for the next page.

        `limit` is 1 to 1000. A page looks through 10,000 letters at most: with filters it may be short, and still name
        a next one. Raises InvalidInput.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
        where = _filter(target, lane, reason, died_after, died_before)
        try:
            after = None if cursor is None else dead_letters.parse_place(cursor)
        except (ValueError, AttributeError, TypeError):
            raise InvalidInput(f"cursor {str(cursor)[:80]!r} is not one that list returned") from None
        return await dead_letters.page(self._store, where, after=after, limit=limit)


def _flat(
    method: Callable[Concatenate[DeadLetters, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["FlatDeadLetterCalls", P], Coroutine[Any, Any, T]]:
    """Return a call of `client.dead` as one of the client itself."""

    @wraps(method)
    async def call(self: "FlatDeadLetterCalls", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await method(self.dead, *args, **kwargs)

    return call


class FlatDeadLetterCalls:
    """Old names: `client.dead_list` is `client.dead.list` now, and so on. They will be removed."""

    @property
    @abstractmethod
    def dead(self) -> DeadLetters: ...

    dead_list = _flat(DeadLetters.list)
    dead_count = _flat(DeadLetters.count)
    dead_get = _flat(DeadLetters.get)
    dead_replay = _flat(DeadLetters.replay)
    dead_replay_many = _flat(DeadLetters.replay_many)
    dead_drop = _flat(DeadLetters.drop)
    dead_drop_many = _flat(DeadLetters.drop_many)
    dead_export = _flat(DeadLetters.export)


class _Pace:
    """Computes when each dead letter is due, and when it is replayed."""

    def __init__(self, clock: Clock, start_ms: int | None, rate: float | None, sleep: Sleep) -> None:
        self._clock = clock
        self._start_ms = start_ms
        self._gap_ms = 0.0 if rate is None else 1000 / rate
        self._sleep = sleep
        self._next_ms = float(clock.now_ms() if start_ms is None else start_ms)
        self.portion = AT_ONCE if rate is None else max(1, min(AT_ONCE, int(rate * AHEAD_MS / 1000)))

    def due_ms(self) -> int:
        if self._start_ms is None:
            # Do not catch up after a delay: the rate is what the target can bear.
            self._next_ms = max(self._next_ms, float(self._clock.now_ms()))
        due_ms = int(self._next_ms)
        self._next_ms += self._gap_ms
        return due_ms

    async def wait(self) -> None:
        """Wait for the next one. With a start time there is no wait: they become due by themselves, at their rate."""
        while self._start_ms is None and self._gap_ms:
            early_ms = self._next_ms - AHEAD_MS - self._clock.now_ms()
            if early_ms <= 0:
                return
            await self._sleep(early_ms / 1000)


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and (type(rate) not in (int, float) or not 0.001 <= rate <= 1e6):
        raise InvalidInput(f"rate is {rate!r}; give letters per second, from 0.001 to 1,000,000")
    return rate


def _filter(
    target: str | None, lane: str | None, reason: str | None, died_after: When | None, died_before: When | None
) -> DeadFilter:
    for name, text in (("target", target), ("lane", lane), ("reason", reason)):
        if text is not None:
            check_text(text, name)
    from_ms = 0 if died_after is None else instant_ms(died_after, field="died_after")
    to_ms = _FOREVER_MS if died_before is None else instant_ms(died_before, field="died_before")
    if not 0 <= from_ms < to_ms <= _FOREVER_MS:
        raise InvalidInput("the range is empty: died_before must be later than died_after")
    return DeadFilter(target, lane, reason, from_ms, to_ms)


async def _portions(walked: AsyncIterator[list[KeptDeadLetter]], size: int) -> AsyncIterator[list[KeptDeadLetter]]:
    async for some in walked:
        for at in range(0, len(some), size):
            yield some[at : at + size]
