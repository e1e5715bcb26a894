"""The history of runs: written with the call that ends them, read page by page. See docs/history.md.

keys, raw = runs_call(store, names, runs)       # for a script with `lua/lib/_runs.lua`
page = await list_runs(store, RunFilter(schedule="nightly"), None, 50)
"""

import logging
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from ..model.errors import Ambiguous, InvalidInput, StoreError
from ..model.ids import idh_in_lane
from ..model.run import (
    BUCKETS,
    FAILED_ENDS,
    HistoryState,
    KeptRun,
    Run,
    RunCounts,
    RunDetails,
    RunEnd,
    RunFilter,
    RunRecord,
    RunsPage,
    bucket_of,
)
from ..model.targets.names import receiver_of
from ..model.task import State, TaskInfo
from .keys import HOUR_MS, MINUTE_MS, PartitionKeys, base36
from .redis.sender import Group
from .store import Store

if TYPE_CHECKING:
    from .tasks.find import Reference

log = logging.getLogger("mainspring.history")

# -- bytes -----------------------------------------------------------------------------------------------------

RUNS_AN_ENTRY: Final = 32
"""More records together compress a little better, but each look-up of a run costs a whole entry."""

_DETAILS_AN_ENTRY: Final = 32 * 1024
"""Bytes of details after which an entry ends: details of its runs are stored, read and dropped together."""

_PLAIN_BYTES: Final = 300
"""Fewer bytes are stored uncompressed: compressing would cost more than it saves."""

_encode: Final = msgspec.msgpack.Encoder().encode
_records: Final = msgspec.msgpack.Decoder(list[RunRecord]).decode
_raw_records: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_record: Final = msgspec.msgpack.Decoder(RunRecord).decode
_details: Final = msgspec.msgpack.Decoder(dict[int, RunDetails]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, zlib.error)
"""Errors of decoding, as for entries of a later version."""


def pack(value: Any) -> bytes:
    """Return the stored bytes of records or details. No msgpack list or map begins with the first byte of zlib's."""
    raw = _encode(value)
    return raw if len(raw) < _PLAIN_BYTES else zlib.compress(raw, 1)


def unpack(data: bytes) -> bytes:
    return zlib.decompress(data) if data[:1] == b"\x78" else data


DETAILS_BYTES: Final = 64 * 1024
"""Most bytes of details kept for one run, before compression."""


def within(details: RunDetails, most: int = DETAILS_BYTES) -> RunDetails:
    """Return the details with the middle of long parts cut out: their beginnings and ends say most."""
    response, output, sizes = details.response, details.output, details.sizes
    if sum(sizes) <= most:
        return details
    share = most // sum(size > 0 for size in sizes)
    if response is not None:
        response = msgspec.structs.replace(response, body=_ends(response.body, share))
    if output is not None:
        stdout, stderr = _ends(output.stdout, share), _ends(output.stderr, share)
        output = msgspec.structs.replace(output, stdout=stdout, stderr=stderr)
    lines = _ends("\n".join(details.log).encode(), share).decode(errors="replace")
    log = tuple(lines.split("\n")) if details.log else ()
    return RunDetails(response, output, log, _ends(details.traceback.encode(), share).decode(errors="replace"))


def _ends(data: bytes, most: int) -> bytes:
    if len(data) <= most:
        return data
    return b"%b\n[%d bytes left out]\n%b" % (data[: most // 2], len(data) - most // 2 * 2, data[-(most // 2) :])


def _text(data: bytes) -> msgspec.Raw:
    """Return bytes as a msgpack text: Lua's decoder does not know binary values."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


class RunRef(NamedTuple):
    """Place of a run: its entry in a stream, and its number in the entry. Refs sort in the order of recording."""

    ms: int
    seq: int
    partition: int
    number: int
    """Twice the position in the entry, plus 1 if the entry is in the stream of failures."""

    @property
    def text(self) -> str:
        return ".".join(map(base36, (self.partition, self.ms, self.seq, self.number)))

    @classmethod
    def parse(cls, text: str, partitions: int) -> "RunRef":
        try:
            partition, ms, seq, number = (int(piece, 36) for piece in text.split("."))
        except (ValueError, AttributeError):
            raise InvalidInput(f"{str(text)[:80]!r} is not the id of a run, such as 5.mwn1d9qx.0.0") from None
        if not (0 <= partition < partitions and 0 <= ms < 1 << 48 and 0 <= seq < 1 << 16 and 0 <= number < 1 << 8):
            raise InvalidInput(f"{text[:80]!r} is not the id of a run of this namespace")
        return cls(ms, seq, partition, number)

    @property
    def failed(self) -> bool:
        return self.number % 2 == 1

    @property
    def position(self) -> int:
        return self.number // 2

    @property
    def entry(self) -> str:
        return f"{self.ms}-{self.seq}"

    def run(self, record: RunRecord) -> KeptRun:
        return KeptRun(self.text, self.ms, record)


# -- writing ---------------------------------------------------------------------------------------------------

MINUTES_KEPT: Final = 120
HOURS_KEPT: Final = 14 * 24
_SUBJECT_BYTES: Final = 120
"""Approximate bytes of the counts of one subject in a minute or an hour."""

OK, FAILED, RETRIED, SKIPPED, DURATION, LATENESS = range(6)
"""Counters of a rollup. The histograms follow: durations from 16 on, latenesses from 32."""
_DURATIONS: Final = 16
_LATENESSES: Final = 32
_DURATION_OF: Final = [_DURATIONS + bucket_of((1 << bits) - 1) for bits in range(64)]
"""Counters by the bits of a duration in milliseconds."""
_LATENESS_OF: Final = [_LATENESSES + bucket_of((1 << bits) - 1) for bits in range(64)]
_COUNTER_OF: Final = {"done": OK} | dict.fromkeys(FAILED_ENDS, FAILED) | {"retry": RETRIED}

Subject = Literal["s", "q", "t"]
"""A schedule, a queue, a target."""
_ALL: Final = "t"
"""Subject of all runs together: no target is empty. Adding up all subjects on request would take seconds."""


def runs_call(store: Store, names: PartitionKeys, runs: Sequence[Run]) -> tuple[tuple[str, ...], bytes]:
    """Return the keys and the argument with which a script writes these runs; both empty if there is nothing to
    write."""
    limits = store.shared.history
    if not runs or not limits.bytes:
        return (), b""
    share = limits.bytes // len(store.keys)
    entries: list[tuple[int, msgspec.Raw, int]] = []
    details: list[tuple[int, msgspec.Raw]] = []
    rings: dict[str, list[Any]] = {}
    kinds: tuple[list[Run], list[Run]] = ([], [])
    for run in runs:
        kinds[run.record.end in FAILED_ENDS].append(run)
    for failed in (1, 0):  # failures first: a lost attempt came before the one that succeeded
        for records, left in _entries(kinds[failed]):
            entries.append((failed, _text(pack(records)), len(records)))
            if left and limits.details_bytes:
                details.append((len(entries), _text(pack(left))))
            for position, record in enumerate(records):
                if record.planned_ms is not None and (schedule := record.schedule) is not None:
                    rings.setdefault(schedule, [schedule]).extend((len(entries), position * 2 + failed))
    now_ms = store.clock.now_ms()
    subjects = max(8, share // 4 // (_SUBJECT_BYTES * (MINUTES_KEPT + HOURS_KEPT)))
    raw = _encode(
        [
            share // 2, share // 4, limits.details_bytes // len(store.keys), limits.details_keep_ms,
            subjects, MINUTES_KEPT * MINUTE_MS, HOURS_KEPT * HOUR_MS,
            entries, details, list(rings.values()), counts_of(runs),
        ]
    )  # fmt: skip
    keys = (
        names.runs_n, names.runs, names.failed_runs, names.run_details, names.run_rings,
        names.rollup(MINUTE_MS, now_ms), names.rollup(HOUR_MS, now_ms),
    )  # fmt: skip
    return keys, raw


def _entries(runs: Iterable[Run]) -> Iterator[tuple[list[RunRecord], dict[int, RunDetails]]]:
    """Split runs into entries; return the records of each, and the details by position."""
    records: list[RunRecord] = []
    left: dict[int, RunDetails] = {}
    size = 0
    for record, details in runs:
        if details is not None:
            details = within(details)
            size += sum(details.sizes)
        if len(records) == RUNS_AN_ENTRY or (left and size > _DETAILS_AN_ENTRY):
            yield records, left
            records, left, size = [], {}, 0 if details is None else sum(details.sizes)
        if details is not None:
            left[len(records)] = details
        records.append(record)
    if records:
        yield records, left


def counts_of(runs: Iterable[Run]) -> list[Any]:
    """Return the subjects of these runs and their counts, alternating."""
    groups: dict[tuple[str, str | None], list[RunRecord]] = {}
    schedules: dict[str, list[RunRecord]] = {}
    for run in runs:
        record = run.record
        groups.setdefault((record.target, record.queue), []).append(record)
        if (schedule := record.schedule) is not None:
            schedules.setdefault(f"s{schedule}", []).append(record)
    sums: dict[str, dict[int, int]] = {}
    for (target, queue), some in groups.items():
        counts = _counts_of_group(some)
        # All runs first: a subject that comes later may find no room.
        for subject in (_ALL, f"t{counted_as(target)}", queue and f"q{queue}"):
            if subject is not None and (total := sums.setdefault(subject, counts)) is not counts:
                sums[subject] = {counter: total.get(counter, 0) + counts.get(counter, 0) for counter in total | counts}
    # Apart: a burst has very many schedules, and few targets and queues.
    sums |= {subject: _counts_of_group(some) for subject, some in schedules.items()}
    return [one for pair in sums.items() for one in pair]


def _counts_of_group(some: list[RunRecord]) -> dict[int, int]:
    # Plain loops, without calls: this is done for every run, and most calls have few of them.
    counts: dict[int, int] = {}
    count_of = counts.get
    duration_ms = lateness_ms = 0
    for one in some:
        counter = RETRIED if one.next_ms is not None else _COUNTER_OF.get(one.end, SKIPPED)
        counts[counter] = count_of(counter, 0) + 1
        began_ms = one.began_ms
        if began_ms:
            ms = one.ended_ms - began_ms
            duration_ms += ms
            counter = _DURATION_OF[ms.bit_length() if ms > 0 else 0]
            counts[counter] = count_of(counter, 0) + 1
            if one.attempt == 1:
                ms = began_ms - one.due_ms
                lateness_ms += ms
                counter = _LATENESS_OF[ms.bit_length() if ms > 0 else 0]
                counts[counter] = count_of(counter, 0) + 1
    counts[DURATION], counts[LATENESS] = duration_ms, lateness_ms
    return counts


def counted_as(target: str) -> str:
    """Return the target under which a run is counted: of a webhook the host."""
    return receiver_of(target) if target.startswith("http") else target


# -- reading: pages ---------------------------------------------------------------------------------------------

MOST_ENTRIES: Final = 2_000
"""Entries read for one page. If few match, the page is short and has a cursor."""
_AT_ONCE: Final = 256
"""Most entries of one exchange, where many streams are read together."""
_OF_A_STREAM: Final = 8
"""As many are read at once of each, however many streams there are."""
_RING: Final = 50
_RING_REF: Final = struct.Struct(">HIHB")
_ENTRY_ID: Final = re.compile(r"\d{1,16}(-\d{1,16})?")
_BEFORE_ALL: Final = RunRef(1 << 48, 0, 0, 0)


EntryId = tuple[int, int]
"""When an entry of a stream was written, in milliseconds, and its number among those of that time."""


def entry_id(entry: bytes) -> EntryId:
    ms, _, seq = entry.partition(b"-")
    return int(ms), int(seq)


class RecordedRuns(NamedTuple):
    """Runs that were recorded together, an entry of a stream; entries sort by when they were written."""

    at: EntryId
    partition: int
    failed: bool
    data: bytes

    @classmethod
    def of(cls, partition: int, failed: bool, row: Sequence[Any]) -> "RecordedRuns":
        return cls(entry_id(row[0]), partition, failed, row[1][1])

    def ref(self, position: int) -> RunRef:
        return RunRef(*self.at, self.partition, position * 2 + self.failed)

    def records(self) -> list[tuple[str, RunRecord]]:
        """Return the runs with their ids."""
        return [(run.id, run.record) for run in reversed(self.matching(RunFilter(), _BEFORE_ALL))]

    def matching(self, where: RunFilter, before: RunRef) -> list[KeptRun]:
        """Return the runs that match, the last first; none if they cannot be read, as those of a later version."""
        texts = [text.encode() for text in (where.schedule, where.queue, where.by) if text is not None]
        try:
            raw = unpack(self.data)
            # Decoding costs much more than a search for the bytes that a match must have.
            if any(text not in raw for text in texts) or (where.idhs and not any(idh in raw for idh in where.idhs)):
                return []
            records = [(self.ref(position), record) for position, record in enumerate(_records(raw))]
        except _UNREADABLE as error:
            log.warning("runs of entry %d-%d cannot be read: %s", *self.at, error)
            return []
        return [ref.run(record) for ref, record in reversed(records) if ref < before and where.fits(record)]


class _Stream:
    """One stream of a partition, read backwards in portions."""

    def __init__(self, keys: PartitionKeys, failed: bool, before: RunRef, from_ms: int) -> None:
        self.keys = keys
        self.failed = failed
        # A page that began with the entry of its cursor, of which nothing is left, could end there again.
        is_read = (keys.number, 2) > (before.partition, before.number)
        self.end = f"({before.entry}" if is_read else before.entry
        self.from_ms = from_ms
        self.oldest: RecordedRuns | None = None
        """The last entry that was read; None if no further one follows."""

    def group(self, count: int) -> Group:
        return self.keys.slot, [("XREVRANGE", _key(self.keys, self.failed), self.end, self.from_ms, "COUNT", count)]

    def take(self, rows: Sequence[Any], count: int) -> list[RecordedRuns]:
        entries = [RecordedRuns.of(self.keys.number, self.failed, row) for row in rows]
        self.oldest = entries[-1] if len(rows) == count else None
        if rows:
            self.end = "(" + rows[-1][0].decode()
        return entries


def _key(keys: PartitionKeys, failed: bool) -> str:
    return keys.failed_runs if failed else keys.runs


def _before(store: Store, cursor: str | None) -> RunRef:
    try:
        return _BEFORE_ALL if cursor is None else RunRef.parse(cursor, len(store.keys))
    except InvalidInput:
        raise InvalidInput(f"cursor {str(cursor)[:80]!r} is not one that a list of runs returned") from None


async def list_runs(store: Store, where: RunFilter, cursor: str | None, limit: int) -> RunsPage:
    """Return runs that match, newest first; pass `next` as cursor for the next page."""
    before = _before(store, cursor)
    if where.schedule is None:
        return await _scan(store, where, range(len(store.keys)), before, limit)
    refs, partitions, oldest = await _rings(store, where.schedule)
    known = [ref for ref in refs if ref < before and where.from_ms <= ref.ms < where.to_ms]
    found = [one for one in await _read_runs(store, known) if where.fits(one.record)][:limit]
    if len(found) == limit or oldest is None:
        return RunsPage(found, found[-1].id if len(found) == limit else None)
    # A full ring may lack older runs that the history still has.
    rest = await _scan(store, where, partitions, min(before, oldest), limit - len(found))
    return RunsPage(found + rest.runs, rest.next)


async def _rings(store: Store, schedule: str) -> tuple[list[RunRef], list[int], RunRef | None]:
    """Return the last runs of a schedule, newest first, its partitions, and the oldest run if there may be older ones.

    If rings of several partitions are full, only runs that the rings have without a gap are returned.
    """
    groups: list[Group] = [(keys.slot, [("HGET", keys.run_rings, schedule)]) for keys in store.keys.partitions]
    refs: list[RunRef] = []
    partitions: list[int] = []
    oldest: RunRef | None = None
    for keys, [raw] in zip(store.keys.partitions, await store.run_all(groups), strict=True):
        if raw:
            ring = [RunRef(high << 32 | low, seq, keys.number, n) for high, low, seq, n in _RING_REF.iter_unpack(raw)]
            refs += ring
            partitions.append(keys.number)
            if len(ring) == _RING:
                oldest = max(oldest or ring[0], ring[0])
    return sorted((ref for ref in refs if oldest is None or ref >= oldest), reverse=True), partitions, oldest


async def _read_runs(store: Store, refs: Iterable[RunRef]) -> list[KeptRun]:
    """Return the runs of these refs that are still kept and can be read, in the same order; refs of an entry follow
    each other."""
    entries = [list(some) for _, some in groupby(refs, key=lambda ref: ref[:3])]
    groups: list[Group] = []
    for ref, *_ in entries:
        keys = store.keys.partitions[ref.partition]
        groups.append((keys.slot, [("XRANGE", _key(keys, ref.failed), ref.entry, ref.entry)]))
    found: list[KeptRun] = []
    for some, [rows] in zip(entries, await store.run_all(groups), strict=True):
        try:
            records = _raw_records(unpack(rows[0][1][1])) if rows else []
            found += [ref.run(_record(records[ref.position])) for ref in some if ref.position < len(records)]
        except _UNREADABLE as error:
            log.warning("runs of entry %s cannot be read: %s", some[0].entry, error)
    return found


async def _scan(
    store: Store, where: RunFilter, partitions: Sequence[int], before: RunRef, limit: int, most: int | None = None
) -> RunsPage:
    """Return the matching runs of these partitions, and where to continue after `most` entries or some more."""
    before = min(before, RunRef(where.to_ms, 0, 0, 0))
    ends = where.ends
    kinds = [failed for failed in (False, True) if ends is None or any((end in FAILED_ENDS) == failed for end in ends)]
    streams = [
        _Stream(store.keys.partitions[partition], failed, before, where.from_ms)
        for partition in partitions
        for failed in kinds
    ]
    most_of_one = max(_OF_A_STREAM, _AT_ONCE // len(streams))
    found: list[KeptRun] = []
    entries: list[RecordedRuns] = []
    starved, count, looked, last = streams, 1, 0, before
    while looked < (most or MOST_ENTRIES):
        for stream, [rows] in zip(starved, await store.run_all([one.group(count) for one in starved]), strict=True):
            entries += stream.take(rows, count)
            looked += len(rows)
        entries.sort()
        # Take what is in order: entries until the first stream has no further one in hand.
        oldest = max((one.oldest for one in streams if one.oldest is not None), default=None)
        while entries and (oldest is None or entries[-1] >= oldest):
            entry = entries.pop()
            found += entry.matching(where, before)
            if len(found) >= limit:
                return RunsPage(found[:limit], found[limit - 1].id)
            last = entry.ref(0)
        if oldest is None:
            return RunsPage(found, None)
        starved = [one for one in streams if one.oldest == oldest]
        count = min(count * 2, most_of_one)
    return RunsPage(found, last.text)


# -- reading: one run, one task -----------------------------------------------------------------------------------


async def read_run(store: Store, run_id: str) -> KeptRun | None:
    """Return a run by its id, with its details if they are still kept."""
    ref = RunRef.parse(run_id, len(store.keys))
    found = await _read_runs(store, [ref])
    if not found:
        return None
    keys = store.keys.partitions[ref.partition]
    [rows] = await store.run_one(keys.slot, [("XRANGE", keys.run_details, ref.entry, ref.entry)])
    return found[0]._replace(details=_details(unpack(rows[0][1][1])).get(ref.position) if rows else None)


async def runs_of_task(
    store: Store,
    reference: "Reference",
    where: RunFilter,
    cursor: str | None,
    limit: int,
    *,
    most_entries: int | None = None,
) -> RunsPage:
    """Return the runs of a task that match, newest first."""
    spots = reference.spots_of_records(len(store.keys))
    if "@" not in (reference.task_id or ""):
        # Only a run of a schedule is in a partition that its id does not name: that of the schedule's lane.
        spots = [spot for spot in spots if spot.lane is not None or spot.partition == reference.home]
    idhs = frozenset(spot.idh for spot in spots)
    if reference.lane and reference.task_id is not None:
        idhs |= {idh_in_lane(reference.idh, reference.lane)}
    # A generated id says when its task was due: no attempt ended before.
    since_ms = 0 if reference.address is None else reference.address.slice.from_ms
    where = msgspec.structs.replace(where, idhs=idhs, from_ms=max(where.from_ms, since_ms))
    before = _before(store, cursor)
    partitions = sorted({spot.partition for spot in spots})
    page = await _scan(store, where, partitions, before, limit, most_entries)
    return page._replace(runs=[run for run in page.runs if reference.fits(run.record.lane)])


async def ended_task(store: Store, reference: "Reference", info: TaskInfo) -> TaskInfo:
    """Return what a short search of the history finds about a task of which nothing else is left.

    Raises Ambiguous if tasks of several lanes ended. Deaths are left to the dead letters: a replayed task may have
    succeeded without a record.
    """
    page = await runs_of_task(store, reference, RunFilter(), None, _A_LOOK, most_entries=_A_LOOK)
    if not page.runs:
        return info
    lanes = {run.record.lane or "" for run in page.runs}
    if len(lanes) > 1:
        raise Ambiguous(info.id, sorted(lanes))
    record = page.runs[0].record
    state = _STATE_AFTER.get(record.end)
    if state is None:
        return info
    if info.state == "cancelled" and (state != "cancelled" or (info.since_ms or 0) > page.runs[0].at_ms + _NOTED_MS):
        return info  # it had not begun: the run is that of an earlier task with this id
    return TaskInfo(
        info.id, state, record.due_ms, record.target, lane=record.lane, attempt=record.attempt,
        errors=(record.reason,) if record.reason else (), queue=record.queue, worker=record.by,
        since_ms=record.ended_ms,
    )  # fmt: skip


_A_LOOK: Final = 256
"""Entries searched for a task whose id may be misspelt, and the most runs taken from them."""

_NOTED_MS: Final = 1_000
"""After the end of a run that was cancelled the cancel of its id is recorded, by then for all but a slow server."""
OVER: Final[frozenset[State]] = frozenset({"cancelled", "finished", "unknown"})
"""States of tasks of which the history may know more."""
_STATE_AFTER: Final[dict[RunEnd, State]] = {"done": "done", "cancelled": "cancelled"}


async def read_forwarded(store: Store, partition: int) -> EntryId:
    """Return the last entry of a partition that was forwarded to `history_target`. Log if runs were dropped before they
    were forwarded."""
    keys = store.keys.partitions[partition]
    [values] = await store.run_one(keys.slot, [("HMGET", keys.runs_n, "forwarded", "runs.gone", "failed.gone")])
    end = entry_id(values[0] or b"0-0")
    gone_ms = max(int(values[1] or 0), int(values[2] or 0))
    if end[0] < gone_ms:
        log.warning("partition %d: runs up to %d ms were dropped, and not all forwarded before", partition, gone_ms)
    return end


async def write_forwarded(store: Store, partition: int, end: EntryId) -> None:
    keys = store.keys.partitions[partition]
    await store.run_one(keys.slot, [("HSET", keys.runs_n, "forwarded", f"{end[0]}-{end[1]}")])


def is_run_id(text: str, partitions: int) -> bool:
    try:
        RunRef.parse(text, partitions)
    except InvalidInput:
        return False
    return True


# -- logs of running jobs ---------------------------------------------------------------------------------------------

LOG_ENTRIES: Final = 1_000
LOG_BYTES: Final = 4 << 20
"""Approximate bound on the log of one job: fewer parts are kept if they are long."""
LOG_KEPT_MS: Final = 3_600_000
_LOG_AT_ONCE: Final = 64
"""Most parts that one read returns; the next read continues."""
_LOG_END: Final = 200
"""Parts at the end of a log: a record has no more lines, and a part has one at least."""


async def publish_logs(store: Store, logs: Iterable[tuple[int, bytes, str]]) -> None:
    """Add to the logs of running jobs: (partition, idh, text). A follower may miss text if a server does not answer."""
    groups: list[Group] = []
    for partition, idh, text in logs:
        keys = store.keys.partitions[partition]
        key, part = keys.run_log(idh), text.encode()
        most = min(LOG_ENTRIES, LOG_BYTES // max(1, len(part)))
        add = ("XADD", key, "MAXLEN", "~", most, "*", "l", part)
        groups.append((keys.slot, [add, ("PEXPIRE", key, LOG_KEPT_MS)]))
    await store.run(groups)


async def read_log(store: Store, reference: "Reference", after: str) -> tuple[str, str]:
    """Return a portion of a running job's log after an entry, and the last entry of the portion."""
    if not _ENTRY_ID.fullmatch(after):
        raise InvalidInput(f"cursor {after[:80]!r} is not one that a log returned")
    rows = await _parts(store, reference, "XRANGE", f"({after}", "+", _LOG_AT_ONCE)
    return _text_of_parts(rows), rows[-1][0].decode() if rows else after


async def end_of_log(store: Store, reference: "Reference") -> str:
    """Return the end of the log of a job."""
    return _text_of_parts((await _parts(store, reference, "XREVRANGE", "+", "-", _LOG_END))[::-1])


async def _parts(store: Store, reference: "Reference", command: str, first: str, last: str, most: int) -> Sequence[Any]:
    groups: list[Group] = []
    for spot in reference.spots_of_records(len(store.keys)):
        keys = store.keys.partitions[spot.partition]
        groups.append((keys.slot, [(command, keys.run_log(spot.idh), first, last, "COUNT", most)]))
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        if result[0]:
            return list(result[0])
    return ()


def _text_of_parts(rows: Sequence[Any]) -> str:
    return b"".join(row[1][1] for row in rows).decode(errors="replace")


# -- counts and state ----------------------------------------------------------------------------------------------


_READ_AT_ONCE: Final = 512
"""Counts read and added up at once: a step of the event loop must stay short."""


async def run_counts(
    store: Store, kind: Subject, name: str | None, from_ms: int, to_ms: int, width_ms: int
) -> list[RunCounts]:
    """Return the counts of each minute or hour in a range, for one subject or for all runs."""
    subject = _ALL if name is None else kind + name
    times = range(from_ms - from_ms % width_ms, to_ms, width_ms)
    found: list[RunCounts] = []
    at_once = max(1, _READ_AT_ONCE // len(store.keys))
    for first in range(0, len(times), at_once):
        some = times[first : first + at_once]
        sums: list[Counter[int]] = [Counter() for _ in some]
        groups: list[Group] = [
            (keys.slot, [("HGET", keys.rollup(width_ms, at_ms), subject) for at_ms in some])
            for keys in store.keys.partitions
        ]
        for raws in await store.run_all(groups):
            for total, raw in zip(sums, raws, strict=True):
                if raw is not None:
                    total.update(_read_counts(raw))
        found += [_counts(at_ms, total) for at_ms, total in zip(some, sums, strict=True)]
    return found


def _read_counts(raw: bytes) -> dict[int, int]:
    counts = msgspec.msgpack.decode(raw)
    # Lua writes counters 1, 2, ... without gaps as a list.
    return dict(enumerate(counts, 1)) if isinstance(counts, list) else counts


def _counts(at_ms: int, total: Counter[int]) -> RunCounts:
    durations = tuple(total[_DURATIONS + i] for i in range(BUCKETS))
    latenesses = tuple(total[_LATENESSES + i] for i in range(BUCKETS))
    return RunCounts(
        at_ms, total[OK], total[FAILED], total[RETRIED], total[SKIPPED],
        durations, latenesses, total[DURATION], total[LATENESS],
    )  # fmt: skip


_STATE: Final = (
    "runs", "failed", "ring", "details", "runs.gone", "failed.gone", "details.gone", "written", "dropped"
)  # fmt: skip


async def history_state(store: Store, partitions: Iterable[int] | None = None) -> HistoryState:
    """Return how much history these partitions keep (None: all), and since when it is complete."""
    asked = range(len(store.keys)) if partitions is None else partitions
    names = [store.keys.partitions[number] for number in asked]
    groups: list[Group] = [(keys.slot, [("HMGET", keys.runs_n, *_STATE)]) for keys in names]
    rows = [[0] * len(_STATE)]
    for [values] in await store.run_all(groups):
        rows.append([int(value or 0) for value in values])
    runs, failed, ring, details, runs_gone, failed_gone, details_gone, written, dropped = zip(*rows, strict=True)
    return HistoryState(
        sum(runs) + sum(failed) + sum(ring), sum(details),
        max(runs_gone), max(failed_gone), max(details_gone), sum(written), sum(dropped),
    )  # fmt: skip
