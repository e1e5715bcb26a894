"""Queues as workers see them: take jobs, renew their leases, end them, return them. See docs/queues.md.

jobs = await queue.take(store, worker, {partition: {"mail": 10}})
answers = await queue.finish(store, [End(job, DONE) for job in jobs])
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import msgspec

from ..model.dead_letter import DeadLetter
from ..model.delivery import DONE, EXPIRED, Body, Dead, Done, Retry, was_sent
from ..model.errors import StoreError
from ..model.ids import idh_of
from ..model.job import End, Ending, Job, JobCancelled, Result, decode_result
from ..model.limits import MAX_ERROR_CHARS, MAX_ERRORS_KEPT
from ..model.run import DELIVERED, STOPPED, UNTRIED_WAIT_MS, Run, Verdict, buried
from ..model.schedule.chain import ChainState, PastRun
from .codec import HEADER_BYTES, INDEXED, SCHEDULED, decode, decode_many, entry, without_headers
from .keys import ADDRESS_BYTES, SECOND_MS, Address, PartitionKeys, Slice, address_prefix
from .redis.connection import RedisCommand
from .redis.sender import Group
from .runs import runs_call
from .store import Store
from .tasks.cancel import note
from .tasks.put import WAKE_MS, fresh_score

if TYPE_CHECKING:
    from .schedules import Seen


# End times of scheduled runs. The worker writes one together with the end of the run, under the schedule's name: one
# small value per schedule, however often it runs.

KEPT_MS: Final = 32 * 86_400_000
"""Longer than most schedules wait for their next run."""


def end_key(keys: PartitionKeys, name: str) -> str:
    # A schedule's name contains no "@", and an occurrence has a time after it: no task has this id.
    return keys.result(idh_of(f"{name}@"))


def pack_end(job: Job, ending: Ending, ended_ms: int) -> bytes | None:
    """Return the record of a run's end; None for a task that belongs to no schedule."""
    if job.body.occurrence is None:
        return None
    return Result(ending, job.body.occurrence[1], ended_ms=ended_ms).encode()


def schedule_of(job: Job) -> str:
    return job.id.partition("@")[0]


async def run_ends(store: Store, wanted: Sequence[tuple[int, str, ChainState]]) -> list[PastRun | None]:
    """Return how the last run of each chain (partition, name, link) ended; None if no worker recorded it."""
    groups: list[Group] = []
    for partition, name, _ in wanted:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("GET", end_key(keys, name))]))
    found: list[PastRun | None] = []
    for (_, _, link), answer in zip(wanted, await store.run(groups) if groups else (), strict=True):
        if isinstance(answer, StoreError):
            raise answer
        end = None if answer[0] is None else decode_result(answer[0])
        state = link.state
        ours = end is not None and end.value == state.last_ms
        found.append(
            PastRun(state.last_ms, state.began_ms, end.ended_ms, end.ending) if end is not None and ours else None
        )
    return found


async def with_ends(store: Store, seen: "Sequence[Seen]") -> "list[Seen]":
    """Add ends of runs that the chains have not recorded yet: a chain reads them only when its next run begins."""
    answered = list(seen)
    open_ends = [
        (i, one.partition, one.definition.name, one.link)
        for i, one in enumerate(answered)
        if one.definition is not None and one.link is not None and not one.link.state.last_is_over
    ]
    ends = await run_ends(store, [one[1:] for one in open_ends])
    for (i, _, _, link), run in zip(open_ends, ends, strict=True):
        if run is not None:
            updated = msgspec.structs.replace(link, state=link.state.with_run(run))
            answered[i] = answered[i]._replace(link=updated)
    return answered


MOST_ENDS: Final = 1_000
"""Most jobs ended in one call: Lua can unpack a few thousand values at once."""

FinishAnswer = Literal["ok", "lost"] | StoreError


class By(NamedTuple):
    """Jobs of one partition, grouped by queue."""

    partition: int
    queues: dict[str, int]
    """Number of jobs in each queue."""
    jobs: list[Job]
    numbers: list[int]
    """Their positions among all given jobs."""


def by_partition(jobs: Sequence[Job], most: int = MOST_ENDS) -> list[By]:
    """Group jobs into calls of one partition each, at most `most` jobs per call."""
    sorted_: dict[int, dict[str, list[int]]] = {}
    for number, job in enumerate(jobs):
        sorted_.setdefault(job.partition, {}).setdefault(job.queue, []).append(number)
    every = []
    for partition, queues in sorted_.items():
        left = [(queue, number) for queue, numbers in queues.items() for number in numbers]
        for first in range(0, len(left), most):
            some = left[first : first + most]
            counts: dict[str, int] = {}
            for queue, _ in some:
                counts[queue] = counts.get(queue, 0) + 1
            numbers = [number for _, number in some]
            every.append(By(partition, counts, [jobs[number] for number in numbers], numbers))
    return every


async def finish(store: Store, ends: Sequence[End]) -> list[FinishAnswer]:
    """End jobs; return one answer each, in order. "lost": the claim is no longer valid and nothing was written.

    A call repeated after a lost reply answers "lost" for jobs that the first one ended, and changes nothing.
    """
    answers: list[FinishAnswer] = ["ok"] * len(ends)
    once: dict[tuple[int, bytes], int] = {}
    for number, end in enumerate(ends):
        if once.setdefault(end.job.key, number) != number:
            answers[number] = "lost"  # listed twice: the first one ends it
    now_ms = store.clock.now_ms()
    sent = {number: ends[number] for number in once.values()}
    while sent:
        numbers = list(sent)
        every = by_partition([end.job for end in sent.values()])
        groups = [_group(store, by, [sent[numbers[i]] for i in by.numbers], now_ms) for by in every]
        again: dict[int, End] = {}
        for by, result in zip(every, await store.run(groups), strict=True):
            called = [numbers[i] for i in by.numbers]
            if isinstance(result, StoreError):
                for number in called:
                    answers[number] = result
                continue
            refused = result[0]
            if refused:
                # Nothing was written: the runs of a call are packed together, and must be those that ended.
                again |= {number: sent[number] for number in called}
            for position in refused:
                number = called[abs(position) - 1]
                if position > 0:
                    answers[number] = "lost"
                    del again[number]
                else:
                    again[number] = _called_off(sent[number])
        sent = again
    await note(store, _cancelled(ends, answers))
    return answers


def _called_off(end: End) -> End:
    """Return the end of a job that was to be retried, but has been cancelled meanwhile."""
    runs = end.runs
    if runs and runs[-1].record.next_ms is not None:
        last = msgspec.structs.replace(runs[-1].record, end="cancelled", next_ms=None)
        runs = (*runs[:-1], runs[-1]._replace(record=last))
    return replace(end, outcome=JobCancelled(), runs=runs)


def _cancelled(ends: Sequence[End], answers: Sequence[FinishAnswer]) -> list[tuple[int, bytes]]:
    """Return callers' ids whose runs were stopped: the index forgets them."""
    return [
        (end.job.partition, end.job.idh)
        for end, answer in zip(ends, answers, strict=True)
        if isinstance(end.outcome, JobCancelled) and answer == "ok" and end.job.body.id is not None
    ]


class _Args:
    """The arguments of one call, in the order that the script expects."""

    def __init__(self) -> None:
        self.places: list[Slice] = []
        self.retries: list[Any] = []
        self.deaths: list[Any] = []
        self.lanes: list[Any] = []
        self.cancels: list[Any] = []
        self.results: list[Any] = []
        self.s_retries: list[str] = []
        self.x_lanes: list[str] = []
        self.x_cancels: list[str] = []
        self.result_keys: list[str] = []
        self.wakes = False


def _group(store: Store, by: By, ends: Sequence[End], now_ms: int) -> Group:
    names = store.keys.partitions[by.partition]
    parts = _Args()
    for position, end in enumerate(ends, 1):
        if end.result is not None:
            parts.result_keys.append(names.result(end.job.idh))
            parts.results += (position, max(1, end.result_ttl_ms), end.result)
        if end.run_end is not None:
            parts.result_keys.append(end_key(names, schedule_of(end.job)))
            parts.results += (position, KEPT_MS, end.run_end)
        if end.job.body.lane is not None:
            parts.lanes += (position, encode_ack(end.outcome))
            parts.x_lanes.append(_keys_of(names, end.job)[3])
            parts.wakes = True
        elif end.outcome is not DONE:
            _add(parts, names, position, end, now_ms)
    keys = [names.n, names.slices, names.ids, names.queued, names.acks, names.dead, names.dead_times]
    keys += map(names.queue, by.queues)
    keys += [names.entries(place.name) for place in parts.places]
    run_keys, runs = runs_call(store, names, [run for end in ends for run in end.runs])
    keys += (*parts.x_lanes, *parts.x_cancels, *parts.result_keys, *parts.s_retries, *run_keys)
    jobs = by.jobs
    args: list[Any] = [
        len(by.queues), len(parts.places), len(ends), len(parts.s_retries), len(parts.deaths) // 3,
        len(parts.x_lanes), len(parts.x_cancels), len(parts.result_keys), runs, *by.queues.values(),
        *[job.idh for job in jobs], *[job.claim for job in jobs], *[job.entry for job in jobs],
    ]  # fmt: skip
    for place in parts.places:
        args += (place.name, fresh_score(place))
    args += (*parts.retries, *parts.deaths, *parts.lanes, *parts.cancels, *parts.results)
    commands: list[RedisCommand] = [store.scripts.call("queue_finish", keys, args)]
    if parts.wakes:
        commands.append(("SPUBLISH", names.wake, "1"))
    return names.slot, commands


def _add(parts: _Args, names: PartitionKeys, position: int, end: End, now_ms: int) -> None:
    job = end.job
    match end.outcome:
        case Retry() as outcome:
            due_ms = now_ms + (outcome.after_ms or 0)
            place, row = _next_attempt(job, outcome, due_ms)
            if place not in parts.places:
                parts.places.append(place)
            known_by_place = int(job.body.id is None)
            parts.retries += (position, parts.places.index(place) + 1, address_prefix(place), row, known_by_place)
            parts.s_retries.append(_keys_of(names, job)[0])
            parts.wakes = parts.wakes or due_ms < now_ms + WAKE_MS
        case Dead() as outcome:
            parts.deaths += (position, _dead_letter(job, outcome, now_ms).encode(), now_ms)
        case JobCancelled():
            parts.cancels.append(position)
            parts.x_cancels.append(_keys_of(names, job)[3])


def _keys_of(names: PartitionKeys, job: Job) -> tuple[str, str, str, str]:
    """Return the keys of its slice: entries, fired, done and cancelled."""
    return names.slice_keys(Address.unpack(job.partition, job.claim).slice.name)


def _next_attempt(job: Job, outcome: Retry, due_ms: int) -> tuple[Slice, bytes]:
    place = Slice.at(due_ms, SECOND_MS)
    body = msgspec.structs.replace(job.body, due_ms=None, original_due_ms=job.original_due_ms)
    if not outcome.untried:
        errors = (*body.errors, outcome.reason[:MAX_ERROR_CHARS])[-MAX_ERRORS_KEPT:]
        body = msgspec.structs.replace(body, attempt=body.attempt + 1, errors=errors)
    # Flag the retry of a scheduled run too: the run ends when its last attempt does.
    flags = INDEXED | (SCHEDULED if body.occurrence is not None else 0)
    return place, entry(due_ms - place.start_ms, flags, job.idh, body)


def _dead_letter(job: Job, outcome: Dead, now_ms: int) -> DeadLetter:
    reason = outcome.reason[:MAX_ERROR_CHARS]
    if not job.body.target:  # undecodable: keep its bytes for inspection
        return DeadLetter(job.id, reason, now_ms, job.original_due_ms, entry=job.body.payload)
    place = job.claim[:ADDRESS_BYTES]
    # A worker that died while it had the job may have started it.
    sent = was_sent(reason) or job.deliveries > 1
    return DeadLetter.of(
        job.body, job.id, reason, now_ms, job.original_due_ms, place, sent=sent, traceback=outcome.traceback
    )


# -- messages to the owner of a lane ---------------------------------------------------------------------------


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    reason: str
    after_ms: int | None = None
    untried: bool = False
    traceback: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Failure).decode


def encode_ack(outcome: Done | Retry | Dead | JobCancelled) -> bytes:
    """Return the stored form of a run's outcome, kept in `acks` until the partition's owner has settled the task."""
    match outcome:
        case Done():
            return b"d"
        case Retry():
            return b"r" + _encode(_Failure(outcome.reason[:MAX_ERROR_CHARS], outcome.after_ms, outcome.untried))
        case Dead():
            return b"x" + _encode(_Failure(outcome.reason[:MAX_ERROR_CHARS], traceback=outcome.traceback))
        case JobCancelled():
            return b"c"


def decode_ack(raw: bytes) -> tuple[Verdict, str]:
    """Return what became of a task of a lane, and the traceback of the exception behind it."""
    match raw[:1]:
        case b"d":
            return DELIVERED, ""
        case b"c":
            return STOPPED, ""
        case b"r":
            failure = _decode(raw[1:])
            wait_ms = UNTRIED_WAIT_MS if failure.after_ms is None else failure.after_ms
            return Verdict("retry", failure.reason, wait_ms, counted=not failure.untried), ""
        case b"x":
            failure = _decode(raw[1:])
            return buried(failure.reason), failure.traceback
        case _:
            return buried(f"the worker's answer cannot be read: {raw[:40]!r}"), ""


_ROW: Final = slice(ADDRESS_BYTES, None)

Asks = Mapping[int, Mapping[str, int]]
"""Partition -> queue -> most jobs to take."""


class Beaten(NamedTuple):
    """Changes that a heartbeat of a worker returns for its jobs."""

    lost: list[Job]
    """Other workers have taken them."""
    cancelled: list[Job]
    """To be stopped and ended as `JobCancelled`."""


class _Taken(NamedTuple):
    partition: int
    queue: str
    entry: bytes
    record: bytes
    deliveries: int = 1
    called_off: bool = False


class Endings(Protocol):
    """Reports jobs that must not run when they are taken: expired, cancelled or unreadable ones."""

    def died(self, job: Job, outcome: Dead) -> None: ...

    def runs_of(self, job: Job, said: Dead | JobCancelled) -> tuple[Run, ...]: ...


async def take(store: Store, worker: str, asks: Asks, endings: Endings | None = None) -> list[Job]:
    """Take jobs for this worker, at most the given number of each queue, in one call per partition; end expired ones.

    A partition whose server does not answer is left out; if none answers, the failure is raised. Jobs in a lost reply
    come back when their lease ends.
    """
    claim = f"{worker}/{secrets.token_hex(4)}"
    groups = {p: _call(store, "queue_take", p, [claim], queues) for p, queues in asks.items()}
    jobs: list[Job] = []
    for p, (now_us, flat) in (await _answers(store, groups)).items():
        store.clock.sample(now_us)
        if flat:
            names = list(asks[p])
            taken = [_Taken(p, names[flat[i] - 1], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
            jobs += await _to_run(store, taken, f"{claim}/{now_us // 1000}", endings)
    return jobs


async def left_behind(store: Store, queues: Sequence[str], *, lease_ms: int, most: int) -> dict[int, dict[str, int]]:
    """Count, by partition and queue, jobs whose worker has sent no heartbeat for a lease, up to `most` in each queue.
    Leave out a partition whose server does not answer, as `take` does."""
    groups: dict[int, Group] = {}
    for keys in store.keys.partitions:
        call = store.scripts.call("queue_left", list(map(keys.queue, queues)), [lease_ms, most])
        groups[keys.number] = (keys.slot, [call])
    found: dict[int, dict[str, int]] = {}
    for p, counts in (await _answers(store, groups)).items():
        if some := {queue: count for queue, count in zip(queues, counts, strict=True) if count}:
            found[p] = some
    return found


async def reclaim(store: Store, worker: str, asks: Asks, endings: Endings | None = None, *, lease_ms: int) -> list[Job]:
    """Reclaim work whose worker sent no heartbeat for a lease. Jobs that were being cancelled end here."""
    claim = f"{worker}/{secrets.token_hex(4)}"
    groups = {p: _call(store, "queue_reclaim", p, [claim, lease_ms], queues) for p, queues in asks.items()}
    jobs: list[Job] = []
    for p, (now_us, flat) in (await _answers(store, groups)).items():
        store.clock.sample(now_us)
        names = list(asks[p])
        taken = [
            _Taken(p, names[flat[i] - 1], flat[i + 1], flat[i + 2], flat[i + 3], flat[i + 4] == 1)
            for i in range(0, len(flat), 5)
        ]
        jobs += await _to_run(store, taken, f"{claim}/{now_us // 1000}", endings)
    return jobs


async def _answers(store: Store, groups: Mapping[int, Group]) -> dict[int, Any]:
    """Return each partition's reply. Partitions whose server does not answer are left out, unless none does."""
    answers: dict[int, Any] = {}
    failure: StoreError | None = None
    for p, result in zip(groups, await store.run(list(groups.values())), strict=True):
        if isinstance(result, StoreError):
            failure = failure or result
        else:
            answers[p] = result[0]
    if failure is not None and not answers:
        raise failure
    return answers


def _call(store: Store, script: str, partition: int, args: list[Any], queues: Mapping[str, int]) -> Group:
    keys = store.keys.partitions[partition]
    for name, most in queues.items():
        args += (name, most)
    return keys.slot, [store.scripts.call(script, [keys.queued, *map(keys.queue, queues)], args)]


async def _to_run(store: Store, taken: list[_Taken], claim: str, endings: Endings | None) -> list[Job]:
    """Return the jobs that may run; end the expired and unreadable ones."""
    now_ms = store.clock.now_ms()
    jobs: list[Job] = []
    ends: list[End] = []
    for one, body in zip(taken, _bodies(taken), strict=True):
        job = _job(one, body if isinstance(body, Body) else Body("", one.record[_ROW]), claim)
        said: Dead | JobCancelled
        if isinstance(body, str):
            said = Dead(f"the entry cannot be read: {body}")
        elif one.called_off:
            said = JobCancelled()
        elif body.expires_ms is not None and body.expires_ms < now_ms:
            said = Dead(EXPIRED)
        else:
            jobs.append(job)
            continue
        ends.append(End(job, said, runs=() if endings is None else endings.runs_of(job, said)))
    for end, answer in zip(ends, await finish(store, ends) if ends else (), strict=True):
        # An end that did not reach the server comes back after its lease, and is reported then.
        if answer == "ok" and isinstance(end.outcome, Dead) and endings is not None:
            endings.died(end.job, end.outcome)
    return jobs


def _bodies(taken: list[_Taken]) -> list[Body | str]:
    """Return the bodies, or for a damaged entry why it cannot be read."""
    rows = [one.record[_ROW] for one in taken]
    try:
        return [*decode_many(without_headers(rows))]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [_body(row) for row in rows]


def _body(row: bytes) -> Body | str:
    try:
        return decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)


def _job(one: _Taken, body: Body, claim: str) -> Job:
    record = one.record
    due_ms = body.due_ms
    if due_ms is None:
        place = Address.unpack(one.partition, record).slice
        due_ms = place.from_ms + int.from_bytes(record[ADDRESS_BYTES : ADDRESS_BYTES + 4], "big")
    return Job(
        one.partition,
        one.queue,
        one.entry,
        record[ADDRESS_BYTES + 5 : ADDRESS_BYTES + HEADER_BYTES],
        body,
        due_ms,
        due_ms if body.original_due_ms is None else body.original_due_ms,
        one.deliveries,
        b"%b%b %b %b" % (record[:ADDRESS_BYTES], one.entry, one.queue.encode(), claim.encode()),
    )


async def beat(store: Store, jobs: Sequence[Job]) -> Beaten:
    """Renew the leases of these jobs. Jobs on a server that does not answer are left out."""
    beaten = Beaten([], [])
    every = by_partition(jobs)
    groups = [
        _script_call(store, "queue_beat", by, [(job.idh, job.entry, job.claim) for job in by.jobs]) for by in every
    ]
    failures = _sort_out(every, await store.run(groups), beaten)
    if failures and len(failures) == len(every):
        raise failures[0]
    return beaten


MOST_NAMED: Final = 16
"""Most queues that a message to workers names."""


def announce(names: PartitionKeys, queues: Collection[str], listening: int = 1) -> RedisCommand:
    """Tell workers which queues of a partition have jobs, and how many workers heard the message before this one."""
    named = queues if len(queues) <= MOST_NAMED else ()
    return ("SPUBLISH", names.work, " ".join((str(listening), *named)))


async def give_back(store: Store, jobs: Sequence[Job]) -> None:
    """Return jobs that were taken but not started; this does not count as a delivery. Others can take them at once.
    Jobs that a worker died with before are offered with the next reclaim."""
    every = by_partition(jobs)
    groups: list[Group] = []
    for by in every:
        rows = [(job.idh, job.entry, job.claim, job.queue) for job in by.jobs]
        slot, commands = _script_call(store, "queue_back", by, rows)
        names = store.keys.partitions[by.partition]
        groups.append((slot, [*commands, announce(names, {job.queue for job in by.jobs})]))
    beaten = Beaten([], [])
    failures = _sort_out(every, await store.run(groups), beaten)
    if beaten.cancelled:
        await finish(store, [End(job, JobCancelled()) for job in beaten.cancelled])
    if failures:
        raise failures[0]


def _script_call(store: Store, script: str, by: By, rows: Sequence[tuple[Any, ...]]) -> Group:
    keys = store.keys.partitions[by.partition]
    args: list[Any] = [*by.queues.values()]
    for row in rows:
        args += row
    return keys.slot, [store.scripts.call(script, [keys.queued, *map(keys.queue, by.queues)], args)]


def _sort_out(every: Sequence[By], results: Sequence[Any], beaten: Beaten) -> list[StoreError]:
    failures = []
    for by, result in zip(every, results, strict=True):
        if isinstance(result, StoreError):
            failures.append(result)
            continue
        flat = result[0]
        for position, word in zip(flat[::2], flat[1::2], strict=True):
            (beaten.cancelled if word == b"cancel" else beaten.lost).append(by.jobs[position - 1])
    return failures
