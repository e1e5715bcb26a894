"""What applications call: put tasks, look at them, cancel and move them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property, partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from .letters import Letters
from .listings import Listings
from .model.clock import Clock
from .model.errors import InvalidInput, MainspringError, NotConfirmed
from .model.explain import Explanation
from .model.limits import MAX_PAYLOAD_BYTES
from .model.retry import RetryPolicy
from .model.task import CancelOutcome, Handle, OnConflict, Task, TaskInfo
from .model.times import Delay, When, check_horizon, delay_ms, instant_ms
from .puts import Parts, Puts
from .results import Results
from .standstills import Standstills
from .store import ended
from .store.find import Finder, Reference
from .store.intake import Intake
from .store.link import LinkOptions
from .store.named import NamedPuts
from .store.put import Widths
from .store.replay import Replayer
from .store.store import Store

if TYPE_CHECKING:
    from .schedules import Schedules


CANCEL_BATCH: Final = 1_048_576
"""Cancels that travel together: the more of them fall into one slice, the less each costs."""


class Client(Puts, Listings, Letters, Results, Standstills):
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
        if clock is not None and not callable(getattr(clock, "now_ms", None)):
            raise InvalidInput(f"clock is a {type(clock).__name__}; give a ManualClock, or leave it out")
        self._wait_s = wait_s
        self._dedupe_ms = delay_ms(dedupe_window, field="dedupe_window")
        self._max_payload_bytes = max_payload_bytes
        self._widths = Widths()
        self._timezone = timezone
        self._owns_store = True
        self._opening = asyncio.Lock()
        self._parts: Parts | None = None

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
        now_ms = await store.fresh_ms()
        due_ms = instant_ms(at) if at is not None else now_ms + delay_ms(cast("Delay", after))
        check_horizon(due_ms, now_ms)
        reference = self._reference(id, lane)
        address = await finder.move(reference, intake, due_ms, now_ms)
        moved_id = id if reference.task_id is not None else f"{reference.idh.hex()}~{address.text()}"
        return Handle(moved_id, due_ms, "replaced", due_ms < now_ms)

    # -- inside ------------------------------------------------------------------------------------------------

    def _ready(self) -> Parts:
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
