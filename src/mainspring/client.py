"""What applications call: put tasks, look at them, cancel and move them."""

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from .bulk import BATCH, Tally, batches, checked, handles_of
from .letters import Letters
from .model.choice import ListedState, QueueFilter, QueueState, TaskFilter
from .model.clock import Clock
from .model.errors import InvalidInput, MainspringError, NotConfirmed
from .model.explain import Explanation
from .model.limits import MAX_PAYLOAD_BYTES
from .model.retry import RetryPolicy
from .model.task import CancelOutcome, Count, Handle, OnConflict, Page, PutSummary, Task, TaskInfo
from .model.texts import check_text
from .model.times import Delay, When, check_horizon, delay_ms, instant_ms
from .results import Results
from .standstills import Standstills
from .store import ended, query, queue_list
from .store.durable import SERVER, Durability, check_durability
from .store.find import Finder, Reference
from .store.intake import Batch, Intake
from .store.link import LinkOptions
from .store.named import NamedPuts
from .store.put import Places, Widths, put_rows
from .store.replay import Replayer
from .store.store import Store

if TYPE_CHECKING:
    from .schedules import Schedules


CANCEL_BATCH: Final = 1_048_576
"""Cancels that travel together: the more of them fall into one slice, the less each costs."""

P = TypeVar("P")
Progress = Callable[[int], None]
"""Called with the number of tasks stored so far."""

_CONFLICTS: Final = ("keep", "replace", "earliest", "reject")


class Client(Letters, Results, Standstills):
    """An asynchronous client: `async with Client(url) as client: await client.put(…)`.

    `wait_s` is how long puts, and results without a timeout, wait for a server that is away; 0 means that they fail at
    once, as other calls do.
    `timezone` is that of schedules that name none.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379",
        *,
        namespace: str = "main",
        partitions: int | None = None,
        wait_s: float = 0.0,
        dedupe_window: Delay = "1h",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        clock: Clock | None = None,
        options: LinkOptions | None = None,
        timezone: str = "UTC",
    ) -> None:
        self._open_store: Callable[[], Coroutine[Any, Any, Store]] = partial(
            Store.open, url, namespace=namespace, partitions=partitions, clock=clock, options=options
        )
        for name, number in (("wait_s", wait_s), ("max_payload_bytes", max_payload_bytes)):
            if type(number) not in (int, float) or not number >= 0:
                raise InvalidInput(f"{name} is {number!r}; give a number from 0 on")
        if options is not None and not isinstance(options, LinkOptions):
            raise InvalidInput(f"options is a {type(options).__name__}; give LinkOptions")
        self._wait_s = wait_s
        self._dedupe_ms = delay_ms(dedupe_window, field="dedupe_window")
        self._max_payload_bytes = max_payload_bytes
        self._widths = Widths()
        self._timezone = timezone
        self._owns_store = True
        self._opening = asyncio.Lock()
        self._parts: tuple[Store, Intake, NamedPuts, Finder] | None = None

    @cached_property
    def schedules(self) -> "Schedules":
        """Recurring work: add, edit, pause, trigger, backfill, …"""
        from .schedules import Schedules  # the language of schedules is much to load for a program that has none

        return Schedules(lambda: self.store, self._timezone)

    @classmethod
    def over(cls, store: Store, *, dedupe_window: Delay = "1h", wait_s: float = 0.0, timezone: str = "UTC") -> "Client":
        """A client on a store that is open already (and that stays open when the client closes)."""
        client = cls(wait_s=wait_s, dedupe_window=dedupe_window, timezone=timezone)
        client._owns_store = False
        client._use(store)
        return client

    async def open(self) -> None:
        async with self._opening:
            if self._parts is None:
                self._use(await self._open_store())

    def _use(self, store: Store) -> None:
        intake = Intake(store.keys, self._widths, max_payload_bytes=self._max_payload_bytes)
        named = NamedPuts(store, intake, self._widths, dedupe_ms=self._dedupe_ms)
        self._parts = (store, intake, named, Finder(store))

    async def aclose(self) -> None:
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
    ) -> Handle:
        """Schedule one task. With an `id` a repeated call is one task; `on_conflict` says which one wins."""
        task = Task(target, payload, at, after, id, lane, expires, retry, timeout)
        try:
            summary = await self.put_many([task], on_conflict=on_conflict, durability=durability, handles=True)
        except NotConfirmed as error:
            error.stored = 0  # it says so in its own words
            raise
        assert summary.handles is not None
        [handle] = summary.handles
        return handle.bound(lambda timeout: self.result(handle.id, lane=lane, timeout=timeout))

    async def put_many(
        self,
        tasks: Iterable[Task] | AsyncIterable[Task],
        *,
        on_conflict: OnConflict = "keep",
        durability: str = "server",
        progress: Progress | None = None,
        handles: bool = False,
    ) -> PutSummary:
        """Schedule any number of tasks in bulk. A wrong task stops the call; batches before it are stored.

        An error says how many are `stored` all the same, and has their handles: where `handles` are asked for those of
        all, else those of the last batch (16,384 tasks), which is the only one that can be stored in part.
        """
        if on_conflict not in _CONFLICTS:
            raise InvalidInput(f"on_conflict {on_conflict!r}: use one of {', '.join(_CONFLICTS)}")
        if progress is not None and not callable(progress):
            raise InvalidInput(f"progress is a {type(progress).__name__}; give a function that takes the number stored")
        level = check_durability(durability)
        tally = Tally(level, handles)
        try:
            await self._put_all(tasks, on_conflict, tally, progress or _silent)
        except MainspringError as error:
            tally.tell(error)
            raise
        return tally.summary()

    async def _put_all(
        self, tasks: Iterable[Task] | AsyncIterable[Task], on_conflict: OnConflict, tally: Tally, report: Progress
    ) -> None:
        if isinstance(tasks, list) and len(tasks) <= BATCH:
            if tasks:
                await self._prepare(checked(tasks), on_conflict, tally)()
            report(tally.accepted)
            return
        writing: asyncio.Task[None] | None = None
        try:
            async for some in batches(tasks):
                # The next batch is made ready while the server works on this one.
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
        self, tasks: Sequence[Task], on_conflict: OnConflict, tally: Tally
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Check and encode a batch; what is returned writes it."""
        store, intake, _, _ = self._ready()
        now_ms = store.clock.now_ms()
        batch = intake.take(tasks, now_ms)

        async def write() -> None:
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

    # -- one task ------------------------------------------------------------------------------------------

    async def get(self, id: str, *, lane: str | None = None) -> TaskInfo:
        """What is known of a task; `state` is "unknown" for an id nobody has heard of."""
        _, _, _, finder = self._ready()
        reference = self._reference(id, lane)
        return await ended.tell(self.store, id, reference, await finder.find(reference))

    async def explain(self, id: str, *, lane: str | None = None) -> Explanation:
        """Why a task has not run (yet): one sentence for people, a code and its facts for programs."""
        from .store.explain import explain  # it knows schedules too: much to load for who never asks

        _, _, _, finder = self._ready()
        return await explain(self.store, finder, id, self._reference(id, lane))

    async def cancel(self, id: str, *, lane: str | None = None) -> CancelOutcome:
        """Cancel before it fires. After "cancelled" it never fires; "too late" means it has begun."""
        [outcome] = await self.cancel_many([id], lane=lane)
        return outcome

    async def cancel_many(self, ids: Iterable[str], *, lane: str | None = None) -> list[CancelOutcome]:
        """Cancel in bulk; one answer per id, in order."""
        _, _, _, finder = self._ready()
        if isinstance(ids, str):
            raise InvalidInput("cancel_many takes many ids; this is a single one: use cancel, or [id]")
        if not isinstance(ids, Iterable):
            raise InvalidInput(f"cancel_many takes an iterable of ids; this is a {type(ids).__name__}")
        outcomes: list[CancelOutcome] = []
        rest = iter(ids)
        while some := list(islice(rest, CANCEL_BATCH)):
            outcomes += await finder.cancel(self._reference(id, lane) for id in some)
        return outcomes

    async def reschedule(
        self, id: str, *, at: When | None = None, after: Delay | None = None, lane: str | None = None
    ) -> Handle:
        """Move a pending task to another time, in one step. Raises if it is not pending any more."""
        store, intake, _, finder = self._ready()
        if (at is None) == (after is None):
            raise InvalidInput("give either at or after")
        now_ms = store.clock.now_ms()
        due_ms = instant_ms(at) if at is not None else now_ms + delay_ms(cast("Delay", after))
        check_horizon(due_ms, now_ms)
        reference = self._reference(id, lane)
        address = await finder.move(reference, intake, due_ms, now_ms)
        moved_id = id if reference.task_id is not None else f"{reference.idh.hex()}~{address.text()}"
        return Handle(moved_id, due_ms, "replaced", due_ms < now_ms)

    # -- many tasks ------------------------------------------------------------------------------------------

    async def list(
        self,
        *,
        after: When | None = None,
        before: When | None = None,
        state: ListedState | QueueState = "pending",
        target: str | None = None,
        lane: str | None = None,
        allowed: Sequence[str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """Tasks in due order, `limit` at a time; pass `page.next` as cursor for the next page.

        `target` and each of `allowed` (of which one must fit) is a whole target, or its beginning and `*`. With these a
        page looks through 20,000 tasks or a little more: it may be short, and still name a next one. Tasks that are
        held come before all others, as they were held. Tasks that are queued or running are in no order, and a page of
        them may hold some more.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
        if allowed is not None and (isinstance(allowed, (str, bytes)) or not isinstance(allowed, Sequence)):
            raise InvalidInput(
                f"allowed is a {type(allowed).__name__}; give a list of targets, or their beginnings and *"
            )
        for name, text in (("target", target), ("lane", lane), *(("allowed", one) for one in allowed or ())):
            if text is not None:
                check_text(text, name)
        from_ms, to_ms = _range(after, before)
        if state == "queued" or state == "running":
            where = QueueFilter(state, TaskFilter("pending", target, lane, allowed), from_ms, to_ms)
            in_queues = _cursor(queue_list.parse_place, cursor)
            return await queue_list.page(self.store, where, after=in_queues, limit=limit)
        if state not in ("pending", "fired"):
            raise InvalidInput(f"state {state!r} cannot be listed; use pending, fired, queued or running")
        place = _cursor(query.parse_place, cursor)
        if place is not None:
            from_ms = max(from_ms, place[0])
        chosen = TaskFilter(state, target, lane, allowed)
        return await query.page(self.store, from_ms=from_ms, to_ms=to_ms, after=place, limit=limit, where=chosen)

    async def count(self, *, after: When | None = None, before: When | None = None) -> Count:
        """How many tasks are pending, in all or due in a range (there the edges may be estimates)."""
        if after is None and before is None:
            return await query.count_all(self.store)
        return await query.count_between(self.store, *_range(after, before))

    # -- inside ------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Store, Intake, NamedPuts, Finder]:
        if self._parts is None:
            raise MainspringError("the client is not open; use 'async with Client(…)' or await client.open()")
        return self._parts

    def _replayer(self) -> Replayer:
        store, intake, _, _ = self._ready()
        return Replayer(store, intake, self._widths, wait_s=self._wait_s)

    def _mover(self) -> tuple[Finder, Intake]:
        _, intake, _, finder = self._ready()
        return finder, intake

    def _reference(self, id: str, lane: str | None) -> Reference:
        return Reference.parse(id, lane, len(self.store.keys))


def _silent(stored: int) -> None:
    """Nobody wants to know."""


def _cursor(parse: Callable[[str], P], text: str | None) -> P | None:
    try:
        return None if text is None else parse(text)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"cursor {str(text)[:80]!r} is not one that list returned") from None


_FOREVER_MS: Final = 1 << 45


def _range(after: When | None, before: When | None) -> tuple[int, int]:
    from_ms = 0 if after is None else instant_ms(after, field="after")
    to_ms = _FOREVER_MS if before is None else instant_ms(before, field="before")
    if to_ms <= from_ms:
        raise InvalidInput("the range is empty: before must be later than after")
    return from_ms, to_ms
