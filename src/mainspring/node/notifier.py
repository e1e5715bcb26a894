"""Decides what to tell: of the runs of its own partitions, of states that a node sees, and for all as the leader.

Notices are put before the episodes and the cursor that led to them are stored. A node that dies in between, or that has
lost the partition, makes the same decision as its successor, from the same runs and with the same ids.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from ..engine.partition import Partition
from ..model.errors import StoreError
from ..model.lane import Pauses
from ..model.notice import (
    BEAT,
    KINDS,
    OURS,
    BeatReport,
    Beats,
    BeatState,
    Channels,
    Decided,
    Episodes,
    Signal,
    notice_tasks,
    signals_of,
)
from ..model.run import KeptRun
from ..model.task import Task
from ..model.workers import served_queues
from ..store.lanes import read_pauses
from ..store.members import live_workers
from ..store.notices import AskedRuns, Notes, Notices, RecordedRuns, in_order
from ..store.queue_state import depths
from ..store.runs import RunRef, is_run_id, read_forwarded, write_forwarded
from ..store.store import Store

log = logging.getLogger("mainspring.notices")

EVERY_S: Final = 1.0
LOOK_EVERY_MS: Final = 10_000
"""Interval between looks of the leader at queues, pauses and beats."""
OLD_MS: Final = 3_600_000
"""Age of runs that are not told any more: the settings were without channels for a while."""
WAITED_MS: Final = 30_000
"""How long jobs wait without a worker before that is told: a worker may be starting."""
WATCHDOG: Final = "mainspring-watchdog"
"""Name of the target that the watchdog's task calls; the address stays in the settings."""
WATCHDOG_EVERY_MS: Final = 60_000
MOST_RESPONSES: Final = 5
"""Notices of one partition to which the response is added at once: a message shows no more."""
_UNSERVED: Final = "jobs wait, and no worker serves the queue"
_GONE: Final = "HTTP 410"
"""Beginning of the reason for which a node disables a target."""


@dataclass(frozen=True, slots=True)
class NoticeOptions:
    """What a node tells, and what it expects."""

    channels: Channels = field(default_factory=Channels)
    """Those that are told about this namespace."""
    beats: Beats = field(default_factory=Beats)
    watchdog: bool = False
    """Whether there is a target that the leader calls every minute."""

    def __bool__(self) -> bool:
        return bool(self.channels or self.beats or self.watchdog)


class Receivers(Protocol):
    """What a node knows of its receivers."""

    @property
    def unavailable(self) -> Collection[str]:
        """Those whose circuit breakers are open on this node."""


class Notifier:
    """One role of a node. Without channels, beats and a watchdog there is nothing for it to do."""

    def __init__(
        self,
        store: Store,
        owned: Mapping[int, Partition],
        options: NoticeOptions,
        receivers: Receivers,
        leads: Callable[[], bool],
    ) -> None:
        self._store = store
        self._owned = owned
        self._options = options
        self._leads = leads
        self._receivers = receivers
        self._notices = Notices(store)
        self._known: dict[int, tuple[bytes, Notes]] = {}
        """The token under which a partition was read, and its episodes."""
        self._wants_successes = any(one.rule.late_ms is not None for one in options.channels.values())
        self._told_unavailable: frozenset[str] = frozenset()
        self._look_at_ms = self._call_at_ms = 0

    async def step(self) -> float:
        if not self._options:
            return LOOK_EVERY_MS / 1000
        more, failure = False, None
        if self._options.channels:
            more, failure = await self._follow_runs()
            await self._look_at_breakers()
        if self._leads():
            await self._lead()
        if failure is not None:
            raise failure
        return 0.0 if more else EVERY_S

    # -- runs ------------------------------------------------------------------------------------------------------

    async def _follow_runs(self) -> tuple[bool, StoreError | None]:
        """Follow the runs of the owned partitions; return whether there may be more, and the failure, if any."""
        more, failure, asked = False, None, list[AskedRuns]()
        for number, partition in list(self._owned.items()):
            known = self._known.get(number)
            if known is None or known[0] != partition.token:
                try:
                    known = self._known[number] = partition.token, await self._notices.read_notes(number)
                except StoreError as error:  # the partitions of other servers go on
                    failure = error
                    continue
            asked.append(self._asked(number, known[1]))
        for number in self._known.keys() - self._owned.keys():
            del self._known[number]
        for one, found in zip(asked, await self._notices.new_runs(asked), strict=True):
            entries = found
            if found and not isinstance(found, StoreError) and not one.successes:
                # Something failed. From here on successes matter too, also those of the same moment.
                [entries] = await self._notices.new_runs([one.from_moment_of(found[0])])
            if isinstance(entries, StoreError):
                failure = entries
            elif entries:
                more = True
                await self._follow(one.partition, entries)
        return more, failure

    def _asked(self, number: int, notes: Notes) -> AskedRuns:
        """Where nothing fails, successes end no episode and are not read; and what is long past is not told."""
        if notes.episodes:
            return AskedRuns(number, notes.cursor, True)
        oldest_ms = self._store.clock.now_ms() - OLD_MS
        known_ms = int(notes.cursor.partition(b"-")[0])
        return AskedRuns(number, notes.cursor if known_ms > oldest_ms else b"%d-0" % oldest_ms, self._wants_successes)

    async def _follow(self, number: int, found: Sequence[RecordedRuns]) -> None:
        token, notes = self._known.pop(number)
        episodes, decided, cursor = Episodes(notes.episodes), list[Decided](), found[-1].cursor
        for run_id, record in in_order(found):
            for signal in signals_of(record, run_id):
                decided += episodes.take(signal, self._options.channels)
        await self._notices.put(notice_tasks(await self._with_responses(decided)))
        if await self._notices.write_notes(number, notes.cursor, cursor, episodes.changed):
            self._known[number] = token, Notes(cursor, episodes.known)

    async def _with_responses(self, decided: list[Decided]) -> list[Decided]:
        """Add what the receivers of the first runs answered."""
        shown = []
        for one in decided[:MOST_RESPONSES]:
            response = None if one.run_id is None else await self._notices.response_of(one.run_id)
            told = one.notice if response is None else one.notice.with_response(response)
            shown.append(one._replace(notice=told))
        return [*shown, *decided[MOST_RESPONSES:]]

    # -- states ------------------------------------------------------------------------------------------------------

    async def _look_at_breakers(self) -> None:
        """Tell of breakers that have opened or closed here. Breakers of one receiver on many nodes are one episode."""
        now = frozenset(one for one in self._receivers.unavailable if not one.startswith(OURS))
        if now == self._told_unavailable:
            return
        changed = [self._state("breaker", one, bad=True) for one in now - self._told_unavailable]
        changed += [self._state("breaker", one, bad=False) for one in self._told_unavailable - now]
        await self._tell(changed)
        self._told_unavailable = now

    def _state(self, kind: str, receiver: str, *, bad: bool, since_ms: int | None = None, reason: str = "") -> Signal:
        now_ms = self._store.clock.now_ms()
        # Nodes that see it in the same minute tell it once.
        place = str(now_ms // 60_000 if since_ms is None else since_ms)
        queue = receiver.removeprefix("queue:") if receiver.startswith("queue:") else None
        target = receiver if queue is None else None
        named = next(one for one in KINDS if one == kind)
        return Signal(receiver, named, bad, now_ms, place, None, target, queue, reason, lasts=True)

    async def _tell(self, signals: list[Signal], ended: Collection[str] = ()) -> None:
        """Follow states. What was told as one of the kinds `ended` and is not among the signals any more is over."""
        bad = {signal.key for signal in signals if signal.bad}
        while True:
            notes = await self._notices.read_notes(None)
            told = {key.partition("|")[2] for key in notes.episodes}
            over = [key.partition("|") for key in sorted(told - bad)]
            well = [self._state(kind, subject, bad=False) for kind, _, subject in over if kind in ended]
            episodes = Episodes(notes.episodes)
            decided = [one for signal in (*signals, *well) for one in episodes.take(signal, self._options.channels)]
            if not episodes.changed:
                return
            await self._notices.put(notice_tasks(decided))
            after = b"%d" % (int(notes.cursor or b"0") + 1)
            if await self._notices.write_notes(None, notes.cursor, after, episodes.changed):
                return

    # -- as the leader ---------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        now_ms = self._store.clock.now_ms()
        if self._options.watchdog and not now_ms < self._call_at_ms <= now_ms + WATCHDOG_EVERY_MS:
            minute = now_ms // WATCHDOG_EVERY_MS
            call = Task(f"target:{WATCHDOG}", id=f"watchdog/{minute}", expires="1m", retries=0)
            # A caller may have put a task with this id, so that no call is made.
            await self._notices.put([call], "replace")
            self._call_at_ms = (minute + 1) * WATCHDOG_EVERY_MS
        if now_ms < self._look_at_ms <= now_ms + LOOK_EVERY_MS:
            return
        self._look_at_ms = now_ms + LOOK_EVERY_MS
        await self._expect_beats(now_ms)
        if self._options.channels:
            lasting = [*await self._disabled(now_ms), *await self._without_workers(now_ms)]
            await self._tell(lasting, ("disabled", "no worker"))

    async def _expect_beats(self, now_ms: int) -> None:
        """Watch for the beats of the settings from now on, whether or not any has come."""
        for name, expected in self._options.beats.items():
            raw = await self._notices.read_beat(name)
            if raw is None or msgspec.msgpack.decode(raw, type=BeatState).expected != expected:
                report = msgspec.to_builtins(BeatReport(expected=expected))
                id_ = f"{BEAT}/{name}/expected/{now_ms // LOOK_EVERY_MS}"
                await self._notices.put([Task(f"{BEAT}:{name}", report, id=id_)])

    async def _disabled(self, now_ms: int) -> list[Signal]:
        pauses = Pauses((one for one in await read_pauses(self._store) if one.mode == "drop"), now_ms)
        return [
            self._state("disabled", one.scope.name or "", bad=True, since_ms=one.since_ms, reason=one.reason)
            for one in pauses.by_scope.values()
            if one.scope.kind == "target" and one.reason.startswith(_GONE)
        ]

    async def _without_workers(self, now_ms: int) -> list[Signal]:
        found = await depths(self._store)
        waiting = {
            queue: depth.oldest_ms
            for queue, depth in found.items()
            if depth.ready and depth.oldest_ms is not None and depth.oldest_ms < now_ms - WAITED_MS
        }
        if not waiting:
            return []
        served = served_queues(await live_workers(self._store))
        return [
            self._state(
                "no worker", f"queue:{queue}", bad=True, since_ms=oldest_ms, reason="no worker serves the queue"
            )
            for queue, oldest_ms in waiting.items()
            if queue not in served
        ]


# -- the history elsewhere ---------------------------------------------------------------------------------------------


class Forwarder:
    """Puts every record of the history as a task for `target`, with the id of the run: at least once, as the cursor of
    a partition follows when the tasks are stored."""

    def __init__(self, store: Store, owned: Mapping[int, Partition], target: str) -> None:
        self._store, self._owned, self._target = store, owned, target
        self._notices = Notices(store)
        self._cursors: dict[int, tuple[bytes, bytes]] = {}
        """The token under which a partition was read, and how far its history has been forwarded."""

    async def step(self) -> float:
        asked: list[AskedRuns] = []
        for number, partition in list(self._owned.items()):
            known = self._cursors.get(number)
            if known is None or known[0] != partition.token:
                known = self._cursors[number] = partition.token, await read_forwarded(self._store, number)
            asked.append(AskedRuns(number, known[1], True))
        more, failure = False, None
        for one, found in zip(asked, await self._notices.new_runs(asked), strict=True):
            if isinstance(found, StoreError):
                failure = found  # the partitions of other servers go on
            elif found:
                more = True
                await self._forward(one.partition, found)
        if failure is not None:
            raise failure
        return 0.0 if more else EVERY_S

    async def _forward(self, number: int, found: Sequence[RecordedRuns]) -> None:
        token, _ = self._cursors.pop(number)
        partitions = len(self._store.keys)
        runs = [
            KeptRun(run_id, RunRef.parse(run_id, partitions).ms, record)
            for run_id, record in in_order(found)
            if not (record.target == self._target and is_run_id(record.task_id, partitions))  # a record on its way
        ]
        await self._notices.put([Task(self._target, run.as_dict(), id=run.id) for run in runs])
        await write_forwarded(self._store, number, found[-1].cursor)
        self._cursors[number] = token, found[-1].cursor
