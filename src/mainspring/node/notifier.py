"""Decides about notices, from the runs of this node's partitions, from states that the node sees, and as the leader for
all nodes; and gathers them into one message a minute for each channel.

Notices are put before the changed episodes, and the place up to which runs were followed, are stored. If the node dies
in between, or has lost the partition, its successor makes the same decision from the same runs, with the same ids. A
notice is a task for `notify:<channel>`, which puts it into the box of the channel. The first notice in the box puts a
digest task, due some seconds later, which sends one message with all notices in the box. Every step can be repeated: a
notice counts once by its id, a digest takes the same notices at each attempt, and its message keeps its id.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ..engine.partition import Partition
from ..model.delivery import DONE, Dead, Delivery, Outcome, Retry
from ..model.errors import MainspringError, StoreError
from ..model.lane import Pauses
from ..model.notice import (
    NOTIFY,
    ONE_PLACE,
    OURS,
    Beat,
    Beats,
    Channels,
    Decided,
    Episode,
    Episodes,
    Notice,
    NoticeKind,
    Signal,
    beat_signal,
    notice_tasks,
    signals_of,
)
from ..model.run import KeptRun
from ..model.targets.names import BEAT
from ..model.task import Task
from ..model.workers import served_queues
from ..sinks.http import HttpSink
from ..sinks.notify import Digest, missing_for, send
from ..store.lanes import read_pauses
from ..store.members import live_workers
from ..store.notices import EVERYWHERE, AskedRuns, Notes, Notices, in_order
from ..store.queue_state import depths
from ..store.runs import EntryId, RecordedRuns, RunRef, is_run_id, read_forwarded, write_forwarded
from ..store.store import Store

log = logging.getLogger("mainspring.notices")

EVERY_S: Final = 1.0
LOOK_EVERY_MS: Final = 10_000
"""Interval at which the leader checks queues, pauses and beats."""
OLD_MS: Final = 3_600_000
"""Runs older than this cause no notices: there were no channels, or no nodes, for a while."""
WAITED_MS: Final = 30_000
"""How long jobs wait without a worker before there is a notice: a worker may be starting."""
UNSEEN_MS: Final = 180_000
"""A breaker that no node has seen open for this long counts as closed: the node that had opened it has died."""
FORGOTTEN_MS: Final = 35 * 86_400_000
"""An episode without a failure for this long is forgotten: its schedule was removed, or runs once a year."""
RECEIVER_FORGOTTEN_MS: Final = 86_400_000
"""The same for a receiver. Shorter, because until it recovers the successes of all partitions are read."""
_STATES: Final[Mapping[str, NoticeKind]] = {"breaker": "breaker", "disabled": "disabled", "no worker": "no worker"}
"""Kinds that nodes see as states, by the track of their episodes."""
WATCHDOG: Final = "mainspring-watchdog"
"""Name of the target that the watchdog's task calls: the address stays in the settings."""
WATCHDOG_EVERY_MS: Final = 60_000
MOST_RESPONSES: Final = 5
"""Notices of one step that get the response of their receiver: a message shows no more of them."""
_GONE: Final = "HTTP 410"
"""Prefix of the reason of the pause if a node has disabled a target."""


@dataclass(frozen=True, slots=True)
class NoticeOptions:
    """The notices of a node: channels, expected beats, and the watchdog."""

    channels: Channels = field(default_factory=Channels)
    """Channels for notices about this namespace."""
    beats: Beats = field(default_factory=Beats)
    watchdog: bool = False
    """True if the leader calls a URL every minute."""

    def __bool__(self) -> bool:
        return bool(self.channels or self.beats or self.watchdog)


class Notifier:
    """The role of a node that decides about notices. Without channels, beats and a watchdog it does nothing."""

    def __init__(
        self,
        store: Store,
        options: NoticeOptions,
        owned: Collection[int],
        unavailable: Callable[[], Collection[str]],
        leads: Callable[[], bool],
    ) -> None:
        """Follow the runs of the partitions `owned`, as they change.

        `unavailable` returns the receivers whose breakers are open on this node, `leads` whether it is the leader.
        """
        self._store = store
        self._options = options
        self._owned = owned
        self._unavailable = unavailable
        self._leads = leads
        self._notices = Notices(store)
        self._notes = Notes()
        self._wants_successes = any(one.rule.late_ms is not None for one in options.channels.values())
        self._reported_unavailable: frozenset[str] = frozenset()
        self._reported_at_ms = self._look_at_ms = self._call_at_ms = 0

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
        self._notes = notes = await self._notices.read_notes(self._notes)
        more, failure, since = False, None, notes.failing_since()
        unknown = [number for number in self._owned if number not in notes.places]
        for number, end in zip(unknown, await self._notices.ends_of(unknown), strict=True):
            if isinstance(end, StoreError):
                failure = end  # the partitions of other servers continue
            else:
                await self._store_episodes({}, number, end)
                more = True
        asked = [self._asked(number, notes, since) for number in self._owned if number in notes.places]
        for one, found in zip(asked, await self._notices.new_runs(asked), strict=True):
            entries = found
            if found and not isinstance(found, StoreError) and one.successes_ms is None:
                # Something failed: from here on successes are needed too, also those of the same millisecond.
                [entries] = await self._notices.new_runs([one._replace(successes_ms=found[0].at[0])])
            if isinstance(entries, StoreError):
                failure = entries
            elif entries:
                more = True
                await self._follow(one.partition, notes.places[one.partition], entries)
        return more, failure

    def _asked(self, number: int, notes: Notes, since: Mapping[int, int]) -> AskedRuns:
        """Return which runs to read. Successes are needed only while something fails; old runs cause no notices."""
        oldest_ms = self._store.clock.now_ms() - OLD_MS
        starts = [since[at] for at in (number, EVERYWHERE) if at in since]
        successes_ms = oldest_ms if self._wants_successes else min(starts, default=None)
        return AskedRuns(number, max(notes.places[number], (oldest_ms, 0)), successes_ms)

    async def _follow(self, number: int, place: tuple[int, int], found: Sequence[RecordedRuns]) -> None:
        self._notes = notes = await self._notices.read_notes(self._notes)
        if notes.places.get(number) != place:
            return  # another node has followed these runs
        episodes, decided = Episodes(notes.episodes), list[Decided]()
        for run_id, record in in_order(found):
            for signal in signals_of(record, run_id):
                decided += episodes.take(signal, self._options.channels)
        for at, one in enumerate(decided[:MOST_RESPONSES]):
            response = None if one.run_id is None else await self._notices.response_of(one.run_id)
            if response is not None:
                decided[at] = one._replace(notice=one.notice.with_response(response))
        await self._notices.put(notice_tasks(decided))
        await self._store_episodes(episodes.changed, number, found[-1].at)

    async def _store_episodes(self, changed: Mapping[str, Episode | None], number: int, place: tuple[int, int]) -> None:
        self._notes = await self._notices.write_notes(self._notes, changed, number, place) or Notes()

    # -- states ------------------------------------------------------------------------------------------------------

    async def _look_at_breakers(self) -> None:
        """Report breakers that opened or closed on this node. Breakers of one receiver on many nodes are one
        episode."""
        now_ms = self._store.clock.now_ms()
        now = frozenset(one for one in self._unavailable() if not one.startswith(OURS))
        if now == self._reported_unavailable and not (now and now_ms >= self._reported_at_ms + UNSEEN_MS // 3):
            return
        opened = [self._state("breaker", one, bad=True) for one in now]
        closed = [self._state("breaker", one, bad=False) for one in self._reported_unavailable - now]
        await self._report([*opened, *closed])
        self._reported_unavailable, self._reported_at_ms = now, now_ms

    def _state(
        self, kind: NoticeKind, receiver: str, *, bad: bool, since_ms: int | None = None, reason: str = ""
    ) -> Signal:
        now_ms = self._store.clock.now_ms()
        # Nodes that see the same state in the same minute cause one notice.
        place = str(now_ms // 60_000 if since_ms is None else since_ms)
        queue = receiver.removeprefix("queue:") if receiver.startswith("queue:") else None
        target = receiver if queue is None else None
        return Signal(receiver, kind, bad, now_ms, place, None, target, queue, reason, lasts=True)

    async def _report(self, signals: Sequence[Signal], seen: Collection[str] | None = None) -> None:
        """Follow states. `seen` are the watched beats: the leader passes them, and ends the episodes that are over."""
        while True:
            self._notes = notes = await self._notices.read_notes(self._notes)
            episodes = Episodes(notes.episodes)
            over = [] if seen is None else list(self._over(episodes, signals, seen))
            decided = [one for signal in (*signals, *over) for one in episodes.take(signal, self._options.channels)]
            if not episodes.changed:
                return
            await self._notices.put(notice_tasks(decided))
            self._notes = await self._notices.write_notes(notes, episodes.changed) or Notes()
            if self._notes.version:
                return

    def _over(self, episodes: Episodes, signals: Sequence[Signal], watched: Collection[str]) -> Iterable[Signal]:
        """Yield the states that are over; forget episodes that no signal will end."""
        bad = {signal.key for signal in signals if signal.bad}
        now_ms = self._store.clock.now_ms()
        for key, one in list(episodes.known.items()):
            track, _, subject = key.partition("|")[2].partition("|")
            unseen_ms, kind = now_ms - one.last_ms, _STATES.get(track)
            if kind is not None and not one.of_runs:
                if unseen_ms > UNSEEN_MS if kind == "breaker" else f"{track}|{subject}" not in bad:
                    yield self._state(kind, subject, bad=False)
            elif unseen_ms > (FORGOTTEN_MS if subject.startswith(ONE_PLACE) else RECEIVER_FORGOTTEN_MS) or (
                subject.startswith(f"{BEAT}:") and subject.removeprefix(f"{BEAT}:") not in watched
            ):
                episodes.changed[key] = None
                del episodes.known[key]

    # -- as the leader ---------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        now_ms = self._store.clock.now_ms()
        if self._options.watchdog and not now_ms < self._call_at_ms <= now_ms + WATCHDOG_EVERY_MS:
            minute = now_ms // WATCHDOG_EVERY_MS
            call = Task(f"target:{WATCHDOG}", id=f"watchdog/{minute}", expires="1m", retries=0)
            # Replace: a caller may have put a task with this id to keep the call from being made.
            await self._notices.put([call], "replace")
            self._call_at_ms = (minute + 1) * WATCHDOG_EVERY_MS
        if now_ms < self._look_at_ms <= now_ms + LOOK_EVERY_MS:
            return
        self._look_at_ms = now_ms + LOOK_EVERY_MS
        beats = await self._watched()
        if self._options.channels:
            states = [*await self._disabled(now_ms), *await self._without_workers(now_ms)]
            await self._report([*states, *(beat_signal(one, now_ms) for one in beats.values())], beats.keys())

    async def _watched(self) -> dict[str, Beat]:
        """Return the watched beats. Those of the settings are watched from now on, even if none has come yet."""
        beats = await self._notices.beats()
        for name, expected in self._options.beats.items():
            if (known := beats.get(name)) is None or known.expected != expected:
                made = await self._notices.beat(name, expected, came=False)
                beats |= {} if made is None else {name: made}
        return beats

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
        why = "no worker serves the queue"
        return [
            self._state("no worker", f"queue:{queue}", bad=True, since_ms=oldest_ms, reason=why)
            for queue, oldest_ms in waiting.items()
            if queue not in served
        ]


# -- the sink -------------------------------------------------------------------------------------------------

DIGEST: Final = "/digest"
DIGEST_RETRY: Final = "12 base=5s cap=10m"


class NotifySink:
    """Delivers to `notify:<channel>`, which gathers notices, and to `notify:<channel>/digest`, which sends them as one
    message."""

    batch_tasks = 500

    def __init__(self, channels: Channels, http: HttpSink, namespace: str) -> None:
        self._channels = channels
        self._http = http
        self._namespace = namespace
        self.notices: Notices | None = None
        """Set when the node has started."""
        # Looked up once: the engine asks for every notice that is due.
        self._lacks = {name: missing_for(one, http) for name, one in channels.items()}

    def missing(self, target: str) -> str | None:
        """Return the package that this node lacks for a channel; without a name, for any of them."""
        name = target.partition(":")[2].removesuffix(DIGEST)
        reasons = [self._lacks.get(name)] if name else self._lacks.values()
        return next((reason for reason in reasons if reason is not None), None)

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        target = batch[0].target.partition(":")[2]
        name = target.removesuffix(DIGEST)
        if name not in self._channels:  # not dead: another node may have the channel, or this one after its next start
            return [Retry(f"this node has no channel {name!r}; add [notify.{name}] to its settings")] * len(batch)
        if self.notices is None:
            return [Retry("the node is starting or stopping", untried=True)] * len(batch)
        try:
            if target != name:
                return [await self._send_digest(self.notices, name, one) for one in batch]
            return await _gather(self.notices, name, batch)
        except MainspringError as error:
            return [Retry(str(error), error=error)] * len(batch)

    async def _send_digest(self, notices: Notices, name: str, delivery: Delivery) -> Outcome:
        try:
            window_ms = msgspec.json.decode(delivery.payload, type=int)
        except msgspec.MsgspecError as error:
            return Dead(f"the payload is no digest: {error}")
        taken = await notices.take(name, window_ms)
        if isinstance(taken, int):
            return Retry("more notices are coming", taken, untried=True)
        if not taken.counts:
            return DONE  # an earlier attempt has sent it
        outcome = await send(self._channels[name], Digest(self._namespace, name, taken), delivery, self._http)
        if not isinstance(outcome, Retry | Dead):
            await notices.sent(name, taken)
        return outcome

    async def aclose(self) -> None:
        """Do nothing: the owner of the HTTP sink closes it."""


async def _gather(store: Notices, channel: str, batch: Sequence[Delivery]) -> list[Outcome]:
    outcomes: list[Outcome] = [DONE] * len(batch)
    notices: list[tuple[str, Notice]] = []
    for at, one in enumerate(batch):
        try:
            notices.append((one.id, msgspec.json.decode(one.payload, type=Notice)))
        except msgspec.MsgspecError as error:
            outcomes[at] = Dead(f"the payload is no notice: {error}")
    if notices:
        due_ms = await store.add(channel, notices)
        # Also for notices that were there before: their digest may not have been put, and they would never be sent.
        digest = Task(
            f"{NOTIFY}:{channel}{DIGEST}", due_ms, at=due_ms, id=f"{NOTIFY}/{channel}/{due_ms}", retry=DIGEST_RETRY
        )
        await store.put([digest])
    return outcomes


# -- forwarding the history -------------------------------------------------------------------------------------------


class Forwarder:
    """Puts every record of the history as a task for `target`, with the id of the run. At least once: the cursor of a
    partition moves after the tasks are stored."""

    def __init__(self, store: Store, owned: Mapping[int, Partition], target: str) -> None:
        self._store, self._owned, self._target = store, owned, target
        self._notices = Notices(store)
        self._ends: dict[int, tuple[bytes, EntryId]] = {}
        """By partition: the token under which it was read, and how far its history has been forwarded."""

    async def step(self) -> float:
        asked: list[AskedRuns] = []
        for number, partition in list(self._owned.items()):
            known = self._ends.get(number)
            if known is None or known[0] != partition.token:
                end = await read_forwarded(self._store, number)
                known = self._ends[number] = partition.token, end
            asked.append(AskedRuns(number, known[1], 0))
        more, failure = False, None
        for one, found in zip(asked, await self._notices.new_runs(asked), strict=True):
            if isinstance(found, StoreError):
                failure = found  # the partitions of other servers continue
            elif found:
                more = True
                await self._forward(one.partition, found)
        if failure is not None:
            raise failure
        return 0.0 if more else EVERY_S

    async def _forward(self, number: int, found: Sequence[RecordedRuns]) -> None:
        token, _ = self._ends.pop(number)
        partitions = len(self._store.keys)
        runs = [
            KeptRun(run_id, RunRef.parse(run_id, partitions).ms, record)
            for run_id, record in in_order(found)
            if not (record.target == self._target and is_run_id(record.task_id, partitions))  # being forwarded
        ]
        await self._notices.put([Task(self._target, run.as_dict(), id=run.id) for run in runs])
        end = found[-1].at
        await write_forwarded(self._store, number, end)
        self._ends[number] = token, end
