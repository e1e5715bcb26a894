"""Taking work from queues, keeping it, and taking over what its worker has left. See docs/queues.md."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ..model.delivery import Body
from ..model.errors import StoreError
from ..model.job import Cancelled, End, Job
from ..model.outcome import EXPIRED, Dead
from .codec import HEADER_BYTES, decode, decode_many, without_headers
from .keys import ADDRESS_BYTES, Address
from .queue_end import By, by_partition, finish
from .store import Group, Store

_ROW: Final = slice(ADDRESS_BYTES, None)

Asks = Mapping[int, Mapping[str, int]]
"""Partition -> queue -> how many at most."""


class Beaten(NamedTuple):
    """What a worker learns about its jobs when it says that it lives."""

    lost: list[Job]
    """Others have them by now."""
    cancelled: list[Job]
    """To be stopped, and ended as `Cancelled`."""


class _Taken(NamedTuple):
    partition: int
    queue: str
    entry: bytes
    record: bytes
    deliveries: int = 1
    called_off: bool = False


Died = Callable[[Job, Dead], None]
"""Hears of jobs that nobody shall run any more: what has expired, or cannot be read."""


def _nobody_hears(_job: Job, _why: Dead) -> None: ...


async def take(store: Store, worker: str, asks: Asks, died: Died = _nobody_hears) -> list[Job]:
    """Work for this worker, at most so much of each queue; one call a partition. Expired tasks are ended here.

    A partition whose server does not answer is left out; when none answered, its failure is raised. What a server gave
    in an answer that was lost comes back when the lease is over.
    """
    claim = f"{worker}/{secrets.token_hex(4)}"
    groups = {p: _call(store, "queue_take", p, [claim], queues) for p, queues in asks.items()}
    jobs: list[Job] = []
    for p, (now_us, flat) in (await _answers(store, groups)).items():
        store.clock.sample(now_us)
        if flat:
            names = list(asks[p])
            taken = [_Taken(p, names[flat[i] - 1], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
            jobs += await _to_run(store, taken, f"{claim}/{now_us // 1000}", died)
    return jobs


async def left_behind(store: Store, queues: Sequence[str], *, lease_ms: int, most: int) -> dict[int, dict[str, int]]:
    """By partition and queue: how much work lies there whose worker has not said for a lease that it lives; of each at
    most so much is counted. A partition whose server does not answer is left out, as in `take`."""
    groups: dict[int, Group] = {}
    for keys in store.keys.partitions:
        call = store.scripts.call("queue_left", list(map(keys.queue, queues)), [lease_ms, most])
        groups[keys.number] = (keys.slot, [call])
    found: dict[int, dict[str, int]] = {}
    for p, counts in (await _answers(store, groups)).items():
        if some := {queue: count for queue, count in zip(queues, counts, strict=True) if count}:
            found[p] = some
    return found


async def reclaim(store: Store, worker: str, asks: Asks, died: Died = _nobody_hears, *, lease_ms: int) -> list[Job]:
    """Work whose worker has not said for a lease that it lives. What was to be cancelled is ended here."""
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
        jobs += await _to_run(store, taken, f"{claim}/{now_us // 1000}", died)
    return jobs


async def _answers(store: Store, groups: Mapping[int, Group]) -> dict[int, Any]:
    """By partition what its script said. Those whose server does not answer are left out, unless none does."""
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


async def _to_run(store: Store, taken: list[_Taken], claim: str, died: Died) -> list[Job]:
    """The jobs, less those that nobody shall run any more: these are ended."""
    now_ms = store.clock.now_ms()
    jobs: list[Job] = []
    ends: list[End] = []
    for one, body in zip(taken, _bodies(taken), strict=True):
        job = _job(one, body if isinstance(body, Body) else Body("", one.record[_ROW]), claim)
        if isinstance(body, str):
            ends.append(End(job, Dead(f"the entry cannot be read: {body}")))
        elif one.called_off:
            ends.append(End(job, Cancelled()))
        elif body.expires_ms is not None and body.expires_ms < now_ms:
            ends.append(End(job, Dead(EXPIRED)))
        else:
            jobs.append(job)
    for end, answer in zip(ends, await finish(store, ends) if ends else (), strict=True):
        # What the server has not heard of comes back with its lease, and is told then.
        if answer == "ok" and isinstance(end.outcome, Dead):
            died(end.job, end.outcome)
    return jobs


def _bodies(taken: list[_Taken]) -> list[Body | str]:
    """The bodies, or of a damaged one why it cannot be read."""
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
    """Keep these jobs for another lease. Where a server does not answer nothing is said of its jobs."""
    beaten = Beaten([], [])
    every = by_partition(jobs)
    groups = [_told(store, "queue_beat", by, [(job.idh, job.entry, job.claim) for job in by.jobs]) for by in every]
    failures = _sort_out(every, await store.run(groups), beaten)
    if failures and len(failures) == len(every):
        raise failures[0]
    return beaten


async def give_back(store: Store, jobs: Sequence[Job]) -> None:
    """Put back what was taken and not begun: it does not count as taken. Others get it at once; what workers have died
    with before, when they next look for work of the dead."""
    every = by_partition(jobs)
    groups: list[Group] = []
    for by in every:
        rows = [(job.idh, job.entry, job.claim, job.queue) for job in by.jobs]
        slot, commands = _told(store, "queue_back", by, rows)
        groups.append((slot, [*commands, ("SPUBLISH", store.keys.partitions[by.partition].work, "1")]))
    beaten = Beaten([], [])
    failures = _sort_out(every, await store.run(groups), beaten)
    if beaten.cancelled:
        await finish(store, [End(job, Cancelled()) for job in beaten.cancelled])
    if failures:
        raise failures[0]


def _told(store: Store, script: str, by: By, rows: Sequence[tuple[Any, ...]]) -> Group:
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
