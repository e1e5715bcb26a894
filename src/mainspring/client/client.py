"""`Client`: put, get, list, cancel and move tasks, pause work, and wait for results."""

import asyncio
import math
import warnings
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial, wraps
from heapq import nsmallest
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar, cast

from ..model.clock import Clock
from ..model.dead_letter import DeadLetter
from ..model.errors import (
    Conflict,
    InvalidInput,
    MainspringError,
    NotConfirmed,
    NotFound,
    StoreError,
    TaskFailed,
    Unavailable,
)
from ..model.explain import Explanation
from ..model.ids import check_name
from ..model.job import Result
from ..model.lane import LaneAnswer, LaneInfo, Mode, Pause, Pauses, Scope
from ..model.notice import Beat, Expected, check_beat
from ..model.retry import RetryPolicy
from ..model.shared_settings import DEDUPE_WINDOW, MAX_PAYLOAD, SharedSettings
from ..model.targets.url import AllowList
from ..model.task import (
    BulkCancelOutcome,
    CancelOutcome,
    Count,
    Handle,
    ListedState,
    OnConflict,
    Page,
    PutSummary,
    QueueFilter,
    QueueState,
    Task,
    TaskFilter,
    TaskInfo,
    fits_one,
    to_json,
)
from ..model.text import check_text, nearest
from ..model.times import Delay, When, check_horizon, delay_ms, instant_ms
from ..model.workers import QueueInfo, QueuePage, WorkerInfo, served_queues
from ..sinks.http_network import check_literal_target, leads_inside
from ..store import lanes, members
from ..store.codec import HEADER_BYTES
from ..store.durability import SERVER, Durability, check_durability
from ..store.notices import Notices
from ..store.queue_state import Depth, depths_of, names_in
from ..store.records import read_result
from ..store.redis.servers import LinkOptions
from ..store.runs import OVER, ended_task
from ..store.store import Store
from ..store.tasks import dead_letters, query
from ..store.tasks.dead_letters import Replayer, cancelled_ms, find_live
from ..store.tasks.encode import Batch, Intake
from ..store.tasks.find import Finder, Reference, resolve
from ..store.tasks.put import AddressTexts, Places, Widths, put_rows
from ..store.tasks.put_ids import NamedPuts, RetryWindow
from .dead_letters import DeadLetters, FlatDeadLetterCalls
from .runs import RunOperations

if TYPE_CHECKING:
    from .schedules import Schedules


async def check_reach(store: Store, targets: Iterable[str]) -> None:
    """Refuse webhooks to IP addresses that no live node may reach. Names are looked up when a task is due."""
    inside = [target for target in targets if leads_inside(target)]
    if not inside:
        return
    nodes = (await members.look_at_nodes(store)).members.values()
    reaches = [one.about.http_reach for one in nodes]
    if not reaches or None in reaches:
        return  # not known yet; the node that delivers decides
    allow = AllowList.parse(entry for reach in reaches for entry in reach or ())
    for target in inside:
        check_literal_target(target, allow)


BATCH: Final = 16_384
"""Tasks per batch of a bulk put. In larger batches more tasks share a slice, which costs the server less; preparing
this many keeps the loop for about 20 ms."""

BATCH_BYTES: Final = 8 * 1024 * 1024
"""Approximate limit of their payloads: more would keep the loop and the connection busy for long."""

_AT_ONCE: Final = 256
_LOOKED_AT: Final = 32
"""One task in this many is sampled when tasks are taken in bulk."""


class PutTally:
    """Totals of a bulk put so far."""

    def __init__(self, level: Durability, handles: bool) -> None:
        self.level = level
        self.handles: list[Handle] | None = [] if handles else None
        self.accepted = 0
        self.last: list[Handle | None] = []
        """Handles of a batch that was written in part. Kept here, because calls on one connection share its error."""
        self._counts = {"created": 0, "kept": 0, "replaced": 0}

    def add(self, batch: Batch, places: Places, named: list[Handle]) -> None:
        self._counts["created"] += batch.rows.size
        for handle in named:
            self._counts[handle.outcome] += 1
        self.accepted += batch.rows.size + len(named)
        if self.handles is not None:
            self.handles += cast("list[Handle]", handles_of(batch, places, named, self.level))

    def attach_stored(self, error: MainspringError) -> None:
        """Add to an error the tasks that were stored before it."""
        error.stored = self.accepted + sum(handle is not None for handle in self.last)
        error.handles = [*(self.handles or ()), *self.last]

    def summary(self) -> PutSummary:
        counts = self._counts
        return PutSummary(
            self.accepted,
            counts["created"],
            counts["kept"],
            counts["replaced"],
            self.level.text,
            self.handles,
        )


def handles_of(
    batch: Batch, places: Places, named: Iterable[Handle | None], level: Durability, short: Container[int] = ()
) -> list[Handle | None]:
    """Return one handle per task, in the order given; None for tasks that were not written.

    In the partitions `short`, tasks have only the durability of the server, whatever was requested.
    """
    found: list[Handle | None] = [None] * batch.size
    for number, handle in zip(batch.named, named, strict=True):
        found[number] = handle
    addresses = AddressTexts(places)
    for partition, place, first, numbers, due_ms in batch.runs:
        if (partition, place) not in places:
            continue
        reached = SERVER if partition in short else level
        rows = batch.rows.groups[partition][place]
        for index, number in enumerate(numbers, first):
            row = rows[index]
            at_ms = place.start_ms + int.from_bytes(row[:4], "big") if due_ms is None else due_ms
            task_id = f"{row[5:HEADER_BYTES].hex()}~{addresses.of(partition, place, index)}"
            found[number] = Handle(task_id, at_ms, "created", at_ms < batch.now_ms, reached.text)
    return found


async def batches(tasks: Iterable[Task] | AsyncIterable[Task]) -> AsyncIterator[list[Task]]:
    batch: list[Task] = []
    size = 0
    async for some in _by_few(tasks):
        batch += checked(some)
        size += payload_bytes(some)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _by_few(tasks: Iterable[Task] | AsyncIterable[Task]) -> AsyncIterator[list[Task]]:
    if isinstance(tasks, Iterable):
        rest = iter(tasks)
        while some := list(islice(rest, _AT_ONCE)):
            yield some
        return
    if not isinstance(tasks, AsyncIterable):
        raise InvalidInput(f"put_many takes an iterable of Task objects; this is of type {type(tasks).__name__}")
    some = []
    async for task in tasks:
        some.append(task)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def payload_bytes(tasks: list[Task]) -> int:
    """Estimate the size of the payloads from a sample."""
    some = tasks[::_LOOKED_AT]
    return sum(map(_payload_bytes, some)) * len(tasks) // len(some)


def _payload_bytes(task: Task) -> int:
    payload = task.payload
    if isinstance(payload, str | bytes | bytearray | memoryview):
        return len(payload)
    try:
        return len(to_json(payload))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0  # invalid; reported where it is encoded


def checked(tasks: list[Task]) -> list[Task]:
    strange = set(map(type, tasks)) - {Task}
    for kind in strange:
        if not issubclass(kind, Task):
            raise InvalidInput(f"put_many takes Task objects; this is of type {kind.__name__}")
    return tasks


PutProgress = Callable[[int], None]
"""Called with the number of tasks stored so far."""

PutParts = tuple[Store, Intake, NamedPuts, Finder]
"""The parts of an open client that puts use."""

_CONFLICTS: Final = ("keep", "replace", "earliest", "reject")


class PutOperations:
    """Calls of Client that store tasks."""

    _wait_s: float
    _widths: Widths

    @abstractmethod
    def _ready(self) -> PutParts: ...

    async def put_many(
        self,
        tasks: Iterable[Task] | AsyncIterable[Task],
        *,
        on_conflict: OnConflict = "keep",
        durability: str = "server",
        progress: PutProgress | None = None,
        handles: bool = False,
    ) -> PutSummary:
        """Put any number of tasks in bulk, from an iterable or an asynchronous one.

        - `on_conflict` and `durability` are those of `put`, for all tasks.
        - `progress` is called with the number of tasks stored so far, after each batch (16,384 tasks at most).
        - `handles=True` keeps a handle for each task in the summary, in order.

        Returns how many were accepted, created, kept and replaced. Raises what `put` raises. A wrong task stops the
        call; batches before it are stored. An error says how many are `stored` all the same, and has their handles: of
        all tasks with `handles=True`, else of the last batch, which is the only one that can be stored in part.
        """
        if on_conflict not in _CONFLICTS:
            raise InvalidInput(f"on_conflict {on_conflict!r}: use one of {', '.join(_CONFLICTS)}")
        if progress is not None and not callable(progress):
            raise InvalidInput(
                f"progress is of type {type(progress).__name__}; give a function that takes the number stored"
            )
        level = check_durability(durability)
        tally = PutTally(level, handles)
        try:
            await self._put_all(tasks, on_conflict, tally, progress or _silent)
        except MainspringError as error:
            tally.attach_stored(error)
            raise
        return tally.summary()

    async def _put_all(
        self, tasks: Iterable[Task] | AsyncIterable[Task], on_conflict: OnConflict, tally: PutTally, report: PutProgress
    ) -> None:
        store, _, _, _ = self._ready()
        if isinstance(tasks, list) and _is_one_batch(tasks):
            if tasks:
                await store.fresh_ms()
                await self._prepare(tasks, on_conflict, tally)()
            report(tally.accepted)
            return
        writing: asyncio.Task[None] | None = None
        try:
            async for some in batches(tasks):
                await store.fresh_ms()
                # Prepare the next batch while the server works on this one.
                write = self._prepare(some, on_conflict, tally)
                if writing is not None:
                    await writing
                    report(tally.accepted)
                writing = asyncio.create_task(write())
                await asyncio.sleep(0)
        finally:
            if writing is not None:
                await writing
        report(tally.accepted)

    def _prepare(
        self, tasks: Sequence[Task], on_conflict: OnConflict, tally: PutTally
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Check and encode a batch; return a function that writes it."""
        store, intake, _, _ = self._ready()
        now_ms = store.clock.now_ms()
        batch = intake.take(tasks, now_ms)

        async def write() -> None:
            await check_reach(store, batch.targets)
            places: Places = {}
            named: list[Handle | None] = []
            short: set[int] = set()
            try:
                await self._write(batch, on_conflict, now_ms, tally.level, places, named, short)
            except MainspringError:
                tally.last = handles_of(batch, places, named, tally.level, short)
                raise
            tally.add(batch, places, cast("list[Handle]", named))

        return write

    async def _write(
        self,
        batch: Batch,
        on_conflict: OnConflict,
        now_ms: int,
        level: Durability,
        places: Places,
        handles: list[Handle | None],
        short: set[int],
    ) -> None:
        store, _, named, _ = self._ready()
        with_ids = list(batch.named.values())
        handles += [None] * len(with_ids)
        shortfall: NotConfirmed | None = None
        if batch.rows.size:
            try:
                await put_rows(
                    store, batch.rows, self._widths, places, now_ms=now_ms, wait_s=self._wait_s, durability=level,
                    short=short,
                )  # fmt: skip
            except NotConfirmed as error:
                shortfall, level = error, SERVER  # the others are stored as well, without another wait
        if with_ids:
            await named.put(with_ids, handles, on_conflict, now_ms, level, wait_s=self._wait_s)
        if shortfall is not None:
            raise shortfall


def _is_one_batch(tasks: list[Task]) -> bool:
    return len(tasks) <= BATCH and (not tasks or payload_bytes(checked(tasks)) <= BATCH_BYTES)


def _silent(stored: int) -> None:
    """Do nothing: the default progress callback."""


P = TypeVar("P")

_FOREVER_MS: Final = 1 << 45

Given = ParamSpec("Given")
AsyncCall = Callable[Given, Coroutine[Any, Any, P]]


def _renamed(**names: str) -> Callable[[AsyncCall[Given, P]], AsyncCall[Given, P]]:
    """Accept keywords by their old names too, with a DeprecationWarning: `@_renamed(old="new")`."""

    def decorate(method: AsyncCall[Given, P]) -> AsyncCall[Given, P]:
        @wraps(method)
        async def call(*args: Given.args, **kwargs: Given.kwargs) -> P:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise InvalidInput(f"{old} is the old name of {new}; give {new} alone")
                warnings.warn(f"{old}= is {new}= now; the old name will be removed", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return await method(*args, **kwargs)

        return call

    return decorate


class ListOperations:
    """Lists and counts of tasks."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @_renamed(after="due_after", before="due_before")
    async def list(
        self,
        *,
        due_after: When | None = None,
        due_before: When | None = None,
        state: ListedState | QueueState = "pending",
        target: str | None = None,
        lane: str | None = None,
        allowed: Sequence[str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """Return a page of tasks in due order; pass `page.next` as `cursor` for the next page, None is the end.

        - `due_after`, `due_before`: the range of due times, the first included; datetimes, ISO 8601 text or epoch
          milliseconds.
        - `state`: "pending", "fired", "queued" or "running". Queued and running tasks are in no order.
        - `target`, and each of `allowed`, of which one must fit: a whole target, or its beginning and `*`. `lane`: its
          name.
        - `limit`: 1 to 1000.

        With filters a page looks through about 20,000 tasks: it may be short, and still name a next one. Tasks that are
        held come before all others. Raises InvalidInput for a wrong argument.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
        if allowed is not None and (isinstance(allowed, (str, bytes)) or not isinstance(allowed, Sequence)):
            raise InvalidInput(
                f"allowed is of type {type(allowed).__name__}; give a list of targets, or their beginnings and *"
            )
        for name, text in (("target", target), ("lane", lane), *(("allowed", one) for one in allowed or ())):
            if text is not None:
                check_text(text, name)
        from_ms, to_ms = _range(due_after, due_before)
        if state == "queued" or state == "running":
            where = QueueFilter(state, TaskFilter("pending", target, lane, allowed), from_ms, to_ms)
            in_queues = _cursor(query.parse_queue_place, cursor)
            return await query.queued_page(self.store, where, after=in_queues, limit=limit)
        if state not in ("pending", "fired"):
            raise InvalidInput(f"state {state!r} cannot be listed; use pending, fired, queued or running")
        place = _cursor(query.parse_place, cursor)
        if place is not None:
            from_ms = max(from_ms, place[0])
        chosen = TaskFilter(state, target, lane, allowed)
        await self.store.fresh_ms()
        return await query.page(self.store, from_ms=from_ms, to_ms=to_ms, after=place, limit=limit, where=chosen)

    @_renamed(after="due_after", before="due_before")
    async def count(self, *, due_after: When | None = None, due_before: When | None = None) -> Count:
        """Count pending tasks, all or those due in a range (the first time included).

        Returns a `Count`; `exact` is False where the edges of the range are estimates. Raises InvalidInput.
        """
        if due_after is None and due_before is None:
            return await query.count_all(self.store)
        chosen = _range(due_after, due_before)
        await self.store.fresh_ms()
        return await query.count_between(self.store, *chosen)


def _cursor(parse: Callable[[str], P], text: str | None) -> P | None:
    try:
        return None if text is None else parse(text)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"cursor {str(text)[:80]!r} is not one that list returned") from None


def _range(due_after: When | None, due_before: When | None) -> tuple[int, int]:
    from_ms = 0 if due_after is None else instant_ms(due_after, field="due_after")
    to_ms = _FOREVER_MS if due_before is None else instant_ms(due_before, field="due_before")
    if to_ms <= from_ms:
        raise InvalidInput("the range is empty: due_before must be later than due_after")
    return from_ms, to_ms


FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.25
LOOK_EVERY: Final = 8
"""Requests for the result after which to check whether there can ever be one."""

_OVER: Final = frozenset({"done", "finished", "cancelled", "replaced", "dead", "unknown"})


_BEFORE_IT_RAN: Final = "cancelled before it ran"


class ResultOperations:
    """Calls of Client for results."""

    _wait_s: float

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @property
    @abstractmethod
    def dead(self) -> DeadLetters: ...

    async def result(
        self,
        id: str,
        *,
        lane: str | None = None,
        timeout: float | Delay | None = None,  # noqa: ASYNC109  # callers expect the parameter of a result
    ) -> Any:
        """Wait until a task is done; return its handler's result, its command's output or its webhook's answer.

        `timeout` is a number of seconds or a text such as "30s". An unavailable server is waited for until then;
        without a timeout as long as a put would wait for it. Name the `lane` of the task if you know it. Raises
        TaskFailed if the task died or was cancelled, TimeoutError if it is not over in time, NotFound if no record
        of its end is stored.
        """
        result = await self.run_result(id, lane=lane, timeout=timeout)
        if result.ending != "done":
            raise TaskFailed(id, result)
        if result.reason:
            raise MainspringError(f"task {id!r} is done, but {result.reason}")
        return next((one for one in (result.output, result.response) if one is not None), result.value)

    async def run_result(
        self,
        id: str,
        *,
        lane: str | None = None,
        timeout: float | Delay | None = None,  # noqa: ASYNC109
    ) -> Result:
        """Wait until a task is over, successfully or not; return its stored value, log lines, output and response.

        `timeout` and `lane` are those of `result`. Raises TimeoutError, and NotFound if no record of its end is stored.
        """
        most_s = _seconds(timeout)
        outage = _Outage(self.store, self._wait_s if most_s is None else math.inf)
        try:
            async with asyncio.timeout(most_s):
                return await self._wait(id, lane, outage)
        except TimeoutError:
            raise TimeoutError(f"task {id!r} is not over after {timeout}{outage.description}") from None

    async def find_result(self, id: str, *, lane: str | None = None) -> Result | None:
        """Return what `run_result` would, at once: None while the task is not over. Raises NotFound as it does."""
        return await self._over(id, lane, await resolve(self.store, id, lane))

    async def _wait(self, id: str, lane: str | None, outage: "_Outage") -> Result:
        pause_s, asked = FIRST_PAUSE_S, 0
        while True:
            asked += 1
            try:
                reference = await resolve(self.store, id, lane)
                look = asked % LOOK_EVERY == 0 or await read_result(self.store, reference) is not None
                if look and (over := await self._over(id, lane, reference)) is not None:
                    return over
            except Unavailable as failure:
                await outage.wait(failure)
                continue
            outage.clear()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    async def _over(self, id: str, lane: str | None, reference: Reference) -> Result | None:
        """Return the end of a task; None while it is not over. Records of an earlier task with the id do not count."""
        # Not `get`: the record of a cancelled id may be of an earlier task, and a result of a later one.
        info = await find_live(self.store, id, lane)
        if info.state not in _OVER:
            return None
        # Read it only now: the task may have ended between the two requests.
        found = await read_result(self.store, reference)
        dead_letter = None if info.state == "done" else await self.dead.get(id, lane=lane)
        # The index forgets a cancelled id at once, so that it can be used again.
        off_ms = await cancelled_ms(self.store, reference) if info.state == "unknown" else None
        if off_ms is not None and _is_older(found, dead_letter, off_ms):
            return Result("cancelled", reason=_BEFORE_IT_RAN)
        if dead_letter is not None and not _says_more(found, dead_letter):
            return Result(
                "dead", reason=dead_letter.reason, attempt=dead_letter.attempts, target=dead_letter.target,
                due_ms=dead_letter.due_ms, response=dead_letter.response,
            )  # fmt: skip
        if info.state == "cancelled" and (found is None or found.ending != "cancelled" or not _is_of(found, info)):
            return Result("cancelled", reason=_BEFORE_IT_RAN)
        if found is not None and _is_of(found, info):
            return found
        if info.state == "unknown":
            raise NotFound(f"there is no task {id!r}")
        raise NotFound(
            f"task {id!r} is {info.state} and left no result: its handler or target keeps none (set result_ttl), or "
            "it has expired"
        )


class _Outage:
    """Waits for an unavailable server, up to `wait_s` per outage."""

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store = store
        self._wait_s = wait_s
        self._window: RetryWindow | None = None
        self._failure: StoreError | None = None

    async def wait(self, failure: StoreError) -> None:
        """Wait before the next attempt, or raise the failure."""
        self._failure = failure
        self._window = self._window or RetryWindow(self._store, self._wait_s)
        await self._window.after(failure)

    def clear(self) -> None:
        self._window = self._failure = None

    @property
    def description(self) -> str:
        return "" if self._failure is None else f", and the server is unavailable: {self._failure}"


def _is_older(found: Result | None, dead_letter: DeadLetter | None, off_ms: int) -> bool:
    """Return True if everything stored under an id is older than the task that was cancelled at `off_ms`."""
    if found is not None and (found.ending == "cancelled" or found.ended_ms > off_ms):
        return False
    return dead_letter is None or dead_letter.died_ms <= off_ms


def _says_more(found: Result | None, dead_letter: DeadLetter) -> bool:
    """Return whether the result is of the same death, or of a later run."""
    if found is None:
        return False
    return found.ended_ms >= dead_letter.died_ms or (found.ending == "dead" and found.due_ms in (0, dead_letter.due_ms))


def _is_of(found: Result, info: TaskInfo) -> bool:
    """Return whether the result is of this very task, as far as that is known."""
    return not (found.due_ms and info.due_ms is not None and info.attempt == 1 and found.due_ms != info.due_ms)


def _seconds(timeout: float | Delay | None) -> float | None:
    if timeout is None or (isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout >= 0):
        return timeout
    if isinstance(timeout, (bool, int, float)):
        raise InvalidInput(f"timeout is {timeout!r}; give seconds, a text such as '30s', or None to wait forever")
    return delay_ms(timeout, field="timeout") / 1000


class PauseOperations:
    """What Client can do about pauses and lanes. `target`, `queue` and `lane` say what is paused; none, everything."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @abstractmethod
    def _mover(self) -> tuple[Finder, Intake]: ...

    @_renamed(who="by")
    async def pause(
        self,
        *,
        target: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        mode: Mode = "hold",
        reason: str = "",
        by: str = "",
        until: When | None = None,
        for_: Delay | None = None,
    ) -> Pause:
        """Pause everything, or a target, a queue, a lane: until `resume`, `until` a time, or `for_` a delay.

        - `mode`: with "hold" tasks wait and go out afterwards, in order; with "drop" those that come due meanwhile
          become dead letters.
        - `reason`, `by`: texts that are shown with the pause.

        A delivery that has begun when a node hears of the pause is not called back. A new pause of the same replaces
        the old. Returns the pause. Raises InvalidInput.
        """
        if until is not None and for_ is not None:
            raise InvalidInput("give either until or for_")
        now_ms = await self.store.sample_clock()
        until_ms = now_ms + delay_ms(for_, field="for_") if for_ is not None else None
        if until is not None:
            until_ms = instant_ms(until, field="until")
            check_horizon(until_ms, now_ms, field="until")
        texts = check_text(reason, "reason"), check_text(by, "by")
        pause = Pause(Scope.of(target, queue, lane), mode, *texts, now_ms, until_ms).check()
        await lanes.write_pause(self.store, pause)
        return pause

    async def resume(self, *, target: str | None = None, queue: str | None = None, lane: str | None = None) -> bool:
        """End the pause of everything, a target, a queue or a lane; return False if there is none of exactly this."""
        return await lanes.remove_pause(self.store, Scope.of(target, queue, lane))

    async def pauses(self) -> list[Pause]:
        """Return all pauses, oldest first."""
        now_ms = await self.store.sample_clock()
        found = [one for one in await lanes.read_pauses(self.store) if one.lasts(now_ms)]
        return sorted(found, key=lambda one: (one.since_ms, one.scope.text))

    async def lanes(self) -> list[LaneInfo]:
        """Return stalled lanes and lanes that are recovering, longest wait first."""
        return (await lanes.read_lanes(self.store))[0]

    async def lane(self, lane: str) -> LaneInfo:
        """Return the state of a lane: its failed head, since when it waits, and how many tasks wait in it."""
        return await lanes.read_lane(self.store, check_name(lane, "lane"))

    async def lane_retry_head(self, lane: str) -> LaneAnswer:
        """Try the failed head of a lane now, also of a parked lane; a head that has expired is recorded as such.

        Returns "ok", "no head" if none has failed, or "too late" if it is on its way.
        """
        failed = await lanes.failed_head(self.store, check_name(lane, "lane"))
        if failed is None or failed.address is None or failed.found is None:
            return "no head"
        if failed.found.state == "fired":
            return "too late"
        finder, intake = self._mover()
        reference = Reference(None, failed.head.idh, failed.address.partition, False, failed.address)
        now_ms = await self.store.sample_clock()
        try:
            await finder.move(reference, intake, now_ms, now_ms, expired=True)
        except (Conflict, NotFound):
            return "too late"
        return "ok"

    async def lane_skip_head(self, lane: str, *, reason: str = "skipped by hand") -> LaneAnswer:
        """Give up the failed head of a lane: it becomes a dead letter with this `reason`, and its lane continues.

        Returns "ok", "no head", "too late" or "gone".
        """
        failed, reason = await lanes.failed_head(self.store, check_name(lane, "lane")), check_text(reason, "reason")
        return "no head" if failed is None else await lanes.skip_head(self.store, failed, reason)

    async def lane_resume(self, lane: str) -> LaneAnswer:
        """Resume a parked lane with its head, and end a pause of this lane; answers as `lane_retry_head`."""
        resumed = await self.resume(lane=check_name(lane, "lane"))
        if (await self.lane(lane)).state != "parked":
            return "ok" if resumed else "no head"
        return await self.lane_retry_head(lane)


CANCEL_BATCH: Final = 1_048_576
"""Most cancels sent together: the more fall into one slice, the less each costs."""


class QueueOperations:
    """Calls of Client for queues and the workers that serve them."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers by id. One that was killed is listed until its lease is over."""
        return await members.live_workers(self.store)

    async def queues(self) -> list[QueueInfo]:
        """Return the queues that have tasks or had some lately, and all that a worker serves, by name."""
        return (await self.queue_page(limit=None)).queues

    async def queue_page(
        self, *, limit: int | None, cursor: str | None = None, allowed: Sequence[str] | None = None
    ) -> QueuePage:
        """Return some of these queues, by name; pass `page.next` as `cursor` for the next page.

        `allowed`: as of `list`.
        """
        workers, places = await self.workers(), await names_in(self.store, range(len(self.store.keys)))
        served = _allowed(served_queues(workers), allowed)
        every = {*_allowed({name for _, name in places}, allowed), *served}
        behind = [name for name in every if cursor is None or name > cursor]
        names = sorted(behind) if limit is None else nsmallest(limit, behind)
        chosen = set(names)
        found = await depths_of(self.store, [place for place in places if place[1] in chosen])
        infos = await self._queue_infos(names, found, workers, served)
        return QueuePage(infos, names[-1] if len(names) < len(behind) else None)

    async def queue(self, name: str, *, allowed: Sequence[str] | None = None) -> QueueInfo | None:
        """Return one of these queues; None if it is not among them. `allowed` as of `list`."""
        workers = await self.workers()
        served = _allowed(served_queues(workers), allowed)
        found = await depths_of(self.store, [(p, name) for p in range(len(self.store.keys))])
        names = _allowed({*found, *({name} & set(served))}, allowed)
        return next(iter(await self._queue_infos(names, found, workers, served)), None)

    async def _queue_infos(
        self, names: Sequence[str], found: Mapping[str, Depth], workers: Sequence[WorkerInfo], served: Sequence[str]
    ) -> list[QueueInfo]:
        pauses = Pauses(await lanes.read_pauses(self.store), await self.store.sample_clock())
        known = set(served)
        unserved = [name for name in names if name not in known][: max(1, _COMPARED // max(1, len(served)))]
        near = {name: nearest(name, served) for name in unserved}
        return [
            QueueInfo(
                name=name,
                **found.get(name, Depth())._asdict(),
                paused=pauses.of_queue(name) is not None,
                workers=[one.id for one in workers if one.serves(name)],
                nearest=near.get(name),
            )
            for name in names
        ]


_COMPARED: Final = 100
"""Pairs of queue names compared for one page: a pair of long ones takes a sixth of a millisecond."""


def _allowed(queues: Iterable[str], allowed: Sequence[str] | None) -> list[str]:
    return [name for name in queues if allowed is None or fits_one(allowed, f"queue:{name}/*")]


class Client(
    PutOperations,
    ListOperations,
    FlatDeadLetterCalls,
    ResultOperations,
    PauseOperations,
    QueueOperations,
    RunOperations,
):
    """An asynchronous client: `async with Client(url) as client: await client.put(…)`.

    - `url`: redis://, rediss:// (TLS), unix://, redis+cluster://, redis+sentinel://.
    - `namespace`: its tasks and schedules are apart from those of others. `partitions`: for a new one, 32 by default.
    - `wait_s`: seconds that puts, and results without a timeout, wait for an unavailable server; 0 fails at once, as
      other calls do.
    - `dedupe_window`: how long a finished id is known, `max_payload_bytes`: the largest payload; the namespace keeps
      both.
    - `clock`: a ManualClock in tests. `options`: LinkOptions, such as timeouts, files for TLS and credentials.
    - `timezone`: the time zone of schedules that name none.

    Raises InvalidInput for wrong arguments; opening raises Unavailable, Refused and WrongFormat.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379",
        *,
        namespace: str = "main",
        partitions: int | None = None,
        wait_s: float = 0.0,
        dedupe_window: Delay | None = None,
        max_payload_bytes: int | None = None,
        clock: Clock | None = None,
        options: LinkOptions | None = None,
        timezone: str = "UTC",
    ) -> None:
        if max_payload_bytes is not None and type(max_payload_bytes) is not int:
            raise InvalidInput(f"max_payload_bytes is {max_payload_bytes!r}; give a whole number")
        said = {} if max_payload_bytes is None else {MAX_PAYLOAD: str(max_payload_bytes)}
        if dedupe_window is not None:
            said[DEDUPE_WINDOW] = f"{delay_ms(dedupe_window, field=DEDUPE_WINDOW)}ms"
        self._open_store: Callable[[], Coroutine[Any, Any, Store]] = partial(
            Store.open, url, namespace=namespace, partitions=partitions, clock=clock, options=options,
            shared=SharedSettings(said),
        )  # fmt: skip
        if type(wait_s) not in (int, float) or not wait_s >= 0:
            raise InvalidInput(f"wait_s is {wait_s!r}; give a number from 0 on")
        if options is not None and not isinstance(options, LinkOptions):
            raise InvalidInput(f"options is of type {type(options).__name__}; give LinkOptions")
        if clock is not None and not callable(getattr(clock, "now_ms", None)):
            raise InvalidInput(f"clock is of type {type(clock).__name__}; give a ManualClock, or leave it out")
        self._wait_s = wait_s
        self._widths = Widths()
        self._timezone = timezone
        self._owns_store = True
        self._opening = asyncio.Lock()
        self._parts: PutParts | None = None

    @cached_property
    def schedules(self) -> "Schedules":
        """Recurring work: add, edit, pause, trigger, backfill, …"""
        from .schedules import Schedules  # slow to load, and many programs have no schedules

        made = Schedules(lambda: self.store, self._timezone)
        made._asked_by = self._asked_by  # for handles of triggered runs
        return made

    @cached_property
    def dead(self) -> DeadLetters:
        """Dead letters: list, get, replay, drop, export, count."""
        return DeadLetters(lambda: self.store, self._replayer, self._wait_s)

    @classmethod
    def over(cls, store: Store, *, wait_s: float = 0.0, timezone: str = "UTC") -> "Client":
        """Return a client on a store that is already open, and that stays open when the client closes."""
        client = cls(wait_s=wait_s, timezone=timezone)
        client._owns_store = False
        client._use(store)
        return client

    async def open(self) -> None:
        """Connect by hand, as `async with` does; close it with `aclose()`. May be repeated."""
        async with self._opening:
            if self._parts is None:
                self._use(await self._open_store())

    def _use(self, store: Store) -> None:
        intake = Intake(store.keys, self._widths, store.shared)
        named = NamedPuts(store, intake, self._widths)
        self._parts = (store, intake, named, Finder(store))

    async def aclose(self) -> None:
        """Close the connections. May be repeated."""
        if self._parts is not None and self._owns_store:
            await self._parts[0].aclose()
        self._parts = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def store(self) -> Store:
        """The open connection to the namespace, for tools. Raises MainspringError while the client is not open."""
        if self._parts is None:
            raise MainspringError("the client is not open; use 'async with Client(…)' or await client.open()")
        return self._parts[0]

    # -- put ---------------------------------------------------------------------------------------------

    async def put(
        self,
        target: str,
        payload: Any = None,
        *,
        at: When | None = None,
        after: Delay | None = None,
        id: str | None = None,
        lane: str | None = None,
        expires: When | Delay | None = None,
        retry: RetryPolicy | str | None = None,
        timeout: Delay | None = None,  # noqa: ASYNC109  # of the attempts, not of this call
        on_conflict: OnConflict = "keep",
        durability: str = "server",
        retries: int | None = None,
    ) -> Handle[Coroutine[Any, Any, Any]]:
        """Schedule one task. With an `id` a repeated call is one task.

        - `target`: where the task goes, such as "queue:mail/send", "https://…", "target:orders" or "command:backup".
        - `payload`: any JSON value, or bytes, which are delivered as they are.
        - `at`: an aware datetime, ISO 8601 text with an offset, or epoch milliseconds. `after`: a timedelta or a text
          such as "30m" or "1h30m". Without either the task is due now.
        - `id`: a name of your own by which to find the task again. `on_conflict` says what happens if it is taken:
          "keep" the present task, "replace" it, keep the "earliest" of both, or "reject" with Conflict.
        - `lane`: tasks of one lane are delivered one after the other, in due order.
        - `expires`: a time, or a span counted from the due time, after which the task is not delivered any more.
        - `retries`: further attempts after a failed first one. `retry`: a whole policy, such as "5 base=1s cap=1m"
          (5 attempts in all). Both together: the policy with that number of retries.
        - `timeout`: how long one attempt may take.
        - `durability`: "server", "disk" or "replicas=n": where the task must be stored before the call returns.

        Returns a handle with the id, the due time and the outcome; `await handle.result()` waits for the end, and
        `await handle.cancel()` cancels the task.
        Raises InvalidInput, PayloadTooLarge, Conflict, NotConfirmed, Unavailable, OutOfMemory.
        """
        task = Task(target, payload, at, after, id, lane, expires, retry, timeout, retries)
        try:
            summary = await self.put_many([task], on_conflict=on_conflict, durability=durability, handles=True)
        except NotConfirmed as error:
            error.stored = 0  # its own message says so
            raise
        assert summary.handles is not None
        [handle] = summary.handles
        # Without a lane, ask for exactly this task, not for one of the same id in some lane.
        handle._of_task(self.store.keys.namespace, lane)
        return self._asked_by(handle, "" if lane is None and id is not None else lane)

    def _asked_by(self, handle: Handle, lane: str | None) -> Handle[Coroutine[Any, Any, Any]]:
        """Let `result()` and `cancel()` of the handle ask this client."""
        ask = partial(self.result, handle.id, lane=lane)
        return handle._asking(lambda timeout: ask(timeout=timeout), partial(self.cancel, handle.id, lane=lane))

    async def beat(
        self,
        name: str,
        *,
        every: str | None = None,
        cron: str | None = None,
        timezone: str | None = None,
        grace: str | None = None,
    ) -> Beat:
        """Report that a job of another program has succeeded; nodes send a notice if the next beat does not come.

        - `every` or `cron` (with `timezone`, UTC): when the next beats are expected. Needed once, then kept.
        - `grace`: how late a beat may come; one minute.

        Raises InvalidInput, NotFound if neither a call nor a setting says when this beat is expected, Conflict if too
        many are watched.
        """
        found = await Notices(self.store).beat(check_beat(name), Expected.make(every, cron, timezone, grace), came=True)
        if found is None:
            raise NotFound(f"the beat {name!r} is not known yet: say when it is expected with every or cron")
        return found

    async def beats(self) -> list[Beat]:
        """Return the jobs of others that are watched, by name."""
        return list((await Notices(self.store).beats()).values())

    async def remove_beat(self, name: str) -> bool:
        """Stop watching a beat; return False if it was not watched. Nodes whose settings name it watch it again."""
        return await Notices(self.store).remove_beat(check_beat(name))

    # -- one task ------------------------------------------------------------------------------------------

    async def get(self, id: str, *, lane: str | None = None) -> TaskInfo:
        """Return what is known about a task: its state, due time, target, payload, attempt, errors, and more.

        `id` is that of its handle, or yours. Name the `lane` of an id of your own if you know it: without it other
        partitions are searched too, and the id is Ambiguous if tasks of several lanes have it; `lane=""` is the task
        without a lane. Of a task that is over, and no longer stored, the history may know how it ended. The state is
        "unknown" if there is no such task (any more).
        """
        _, _, _, finder = self._ready()
        reference = await resolve(self.store, id, lane)
        info = await dead_letters.info_of(self.store, id, reference, await finder.find(reference))
        return await ended_task(self.store, reference, info) if info.state in OVER else info

    async def explain(self, id: str, *, lane: str | None = None, allowed: Sequence[str] | None = None) -> Explanation:
        """Say why a task has not run (yet): `text` is for people, `code` and the other fields are for programs.

        `id` and `lane` are those of `get`. `allowed` are whole targets, or their beginnings and `*`: queues and
        handlers beyond them are not named.
        """
        from ..store.tasks.explain import explain  # it loads schedules too: slow, and rarely needed

        _, _, _, finder = self._ready()
        return await explain(self.store, finder, id, await resolve(self.store, id, lane), allowed)

    async def cancel(self, id: str, *, lane: str | None = None) -> CancelOutcome:
        """Cancel a task before it fires; `id` and `lane` are those of `get`.

        Returns "cancelled": it never fires. "cancelling": a worker is running it and has been asked to stop.
        "too late": it has begun. "unknown": there is no such task. Raises Ambiguous, and cancels nothing, if tasks of
        several lanes have the id and no lane is named.
        """
        while True:
            [outcome] = await self.cancel_many([id], lane=lane)
            if outcome != "ambiguous":
                return outcome
            await self.get(id, lane=lane)  # raises Ambiguous with the lanes, unless only one is left

    async def cancel_many(self, ids: Iterable[str], *, lane: str | None = None) -> list[BulkCancelOutcome]:
        """Cancel any number of tasks; return one answer of `cancel` for each id, in order."""
        _, _, _, finder = self._ready()
        if isinstance(ids, str):
            raise InvalidInput("cancel_many takes many ids; this is a single one: use cancel, or [id]")
        if not isinstance(ids, Iterable):
            raise InvalidInput(f"cancel_many takes an iterable of ids; this is of type {type(ids).__name__}")
        outcomes: list[BulkCancelOutcome] = []
        rest = iter(ids)
        while some := list(islice(rest, CANCEL_BATCH)):
            found = await finder.cancel(Reference.parse(id, lane, len(self.store.keys)) for id in some)
            outcomes += found
            gone = [id for id, outcome in zip(some, found, strict=True) if outcome == "cancelled" and "@" in id]
            if gone:
                await self._plan_past_cancelled(gone)
        return outcomes

    async def _plan_past_cancelled(self, ids: list[str]) -> None:
        from ..store.schedules import plan_past_cancelled  # slow to load, as for `schedules`

        with suppress(StoreError):  # they are cancelled anyway, and their owner checks for missing runs
            await plan_past_cancelled(self.store, ids)

    async def reschedule(
        self, id: str, *, at: When | None = None, after: Delay | None = None, lane: str | None = None
    ) -> Handle[Coroutine[Any, Any, Any]]:
        """Move a pending task to another time, in one step: `at` an instant or `after` a delay from now, as for `put`.

        Returns a new handle; old handles still find the task. Raises NotFound if there is no such task, and Conflict if
        it is not pending any more.
        """
        store, intake, _, finder = self._ready()
        if (at is None) == (after is None):
            raise InvalidInput("give either at or after")
        now_ms = await store.fresh_ms()
        due_ms = instant_ms(at) if at is not None else now_ms + delay_ms(cast("Delay", after))
        check_horizon(due_ms, now_ms)
        try:
            await finder.move(await resolve(store, id, lane), intake, due_ms, now_ms)
        except NotFound:
            raise NotFound(f"there is no task {id!r} to be moved") from None
        return self._asked_by(Handle(id, due_ms, "replaced", due_ms < now_ms), lane)

    # -- inside ------------------------------------------------------------------------------------------------

    def _ready(self) -> PutParts:
        if self._parts is None:
            raise MainspringError("the client is not open; use 'async with Client(…)' or await client.open()")
        return self._parts

    def _replayer(self) -> Replayer:
        store, intake, _, _ = self._ready()
        return Replayer(store, intake, self._widths, wait_s=self._wait_s)

    def _mover(self) -> tuple[Finder, Intake]:
        _, intake, _, finder = self._ready()
        return finder, intake
