"""Ending jobs: done, another attempt, a dead letter, or the word to the owner of a lane. See docs/queues.md."""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ..model.dead import DeadLetter
from ..model.errors import StoreError
from ..model.job import Cancelled, End, Job
from ..model.limits import MAX_ERROR_CHARS, MAX_ERRORS_KEPT
from ..model.outcome import DONE, Dead, Done, Retry, was_sent
from .cancelled_ids import note
from .codec import INDEXED, SCHEDULED, entry
from .keys import ADDRESS_BYTES, SECOND_MS, Address, PartitionKeys, Slice, address_prefix
from .put import WAKE_MS, fresh_score
from .schedule_ends import KEPT_MS, end_key, schedule_of
from .store import Group, Store
from .wire import Command

MOST_ENDS: Final = 1_000
"""Jobs that a call ends at most: Lua can spread some thousand values at once."""

Answer = Literal["ok", "lost"] | StoreError


class By(NamedTuple):
    """Jobs of one partition, queue by queue."""

    partition: int
    queues: dict[str, int]
    """How many of each."""
    jobs: list[Job]
    numbers: list[int]
    """Their places among all that were given."""


def by_partition(jobs: Sequence[Job], most: int = MOST_ENDS) -> list[By]:
    """What belongs together in one call."""
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


async def finish(store: Store, ends: Sequence[End]) -> list[Answer]:
    """End jobs; one answer each, in order. "lost": the claim is not valid any more, and nothing was written.

    Sent again after a lost reply it answers "lost" for what was ended, and changes nothing.
    """
    answers: list[Answer] = ["ok"] * len(ends)
    once: dict[tuple[int, bytes], int] = {}
    for number, end in enumerate(ends):
        if once.setdefault(end.job.key, number) != number:
            answers[number] = "lost"  # named twice: the first one ends it
    numbers = list(once.values())
    every = by_partition([ends[number].job for number in numbers])
    now_ms = store.clock.now_ms()
    groups = [_group(store, by, [ends[numbers[i]] for i in by.numbers], now_ms) for by in every]
    for by, result in zip(every, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            for i in by.numbers:
                answers[numbers[i]] = result
            continue
        for position in result[0]:
            answers[numbers[by.numbers[position - 1]]] = "lost"
    await note(store, _cancelled(ends, answers))
    return answers


def _cancelled(ends: Sequence[End], answers: Sequence[Answer]) -> list[tuple[int, bytes]]:
    """Callers' ids whose runs were stopped: the index forgets them."""
    return [
        (end.job.partition, end.job.idh)
        for end, answer in zip(ends, answers, strict=True)
        if isinstance(end.outcome, Cancelled) and answer == "ok" and end.job.body.id is not None
    ]


class _Args:
    """The parts of a call, in the order in which the script wants them."""

    def __init__(self) -> None:
        self.places: list[Slice] = []
        self.retries: list[Any] = []
        self.deaths: list[Any] = []
        self.lanes: list[Any] = []
        self.cancels: list[Any] = []
        self.results: list[Any] = []
        self.x_retries: list[str] = []
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
    keys += (*parts.x_retries, *parts.x_lanes, *parts.x_cancels, *parts.result_keys, *parts.s_retries)
    jobs = by.jobs
    args: list[Any] = [
        len(by.queues), len(parts.places), len(ends), len(parts.x_retries), len(parts.deaths) // 3,
        len(parts.x_lanes), len(parts.x_cancels), len(parts.result_keys), *by.queues.values(),
        *[job.idh for job in jobs], *[job.claim for job in jobs], *[job.entry for job in jobs],
    ]  # fmt: skip
    for place in parts.places:
        args += (place.name, fresh_score(place))
    args += (*parts.retries, *parts.deaths, *parts.lanes, *parts.cancels, *parts.results)
    commands: list[Command] = [store.scripts.call("queue_finish", keys, args)]
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
            s, _, _, x = _keys_of(names, job)
            parts.x_retries.append(x)
            parts.s_retries.append(s)
            parts.wakes = parts.wakes or due_ms < now_ms + WAKE_MS
        case Dead() as outcome:
            parts.deaths += (position, _letter(job, outcome.reason, now_ms).encode(), now_ms)
        case Cancelled():
            parts.cancels.append(position)
            parts.x_cancels.append(_keys_of(names, job)[3])


def _keys_of(names: PartitionKeys, job: Job) -> tuple[str, str, str, str]:
    """Entries, fired, done and cancelled of the slice it came from."""
    return names.slice_keys(Address.unpack(job.partition, job.claim).slice.name)


def _next_attempt(job: Job, outcome: Retry, due_ms: int) -> tuple[Slice, bytes]:
    place = Slice.at(due_ms, SECOND_MS)
    body = msgspec.structs.replace(job.body, due_ms=None, original_due_ms=job.original_due_ms)
    if not outcome.untried:
        errors = (*body.errors, outcome.reason[:MAX_ERROR_CHARS])[-MAX_ERRORS_KEPT:]
        body = msgspec.structs.replace(body, attempt=body.attempt + 1, errors=errors)
    # Of a schedule's run the next attempt is marked as well: its end is the end of the run.
    flags = INDEXED | (SCHEDULED if body.occurrence is not None else 0)
    return place, entry(due_ms - place.start_ms, flags, job.idh, body)


def _letter(job: Job, reason: str, now_ms: int) -> DeadLetter:
    reason = reason[:MAX_ERROR_CHARS]
    if not job.body.target:  # it could not be read: its bytes are kept, so that a person can
        return DeadLetter(job.id, reason, now_ms, job.original_due_ms, entry=job.body.payload)
    place = job.claim[:ADDRESS_BYTES]
    # A worker that died with it may have begun it.
    sent = was_sent(reason) or job.deliveries > 1
    return DeadLetter.of(job.body, job.id, reason, now_ms, job.original_due_ms, place, sent=sent)


# -- the word to the owner of a lane ---------------------------------------------------------------------------


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    reason: str
    after_ms: int | None = None
    untried: bool = False


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Failure).decode


def encode_ack(outcome: Done | Retry | Dead | Cancelled) -> bytes:
    """How a run ended, as `acks` keeps it until the owner of the partition has settled the task."""
    match outcome:
        case Done():
            return b"d"
        case Retry():
            return b"r" + _encode(_Failure(outcome.reason[:MAX_ERROR_CHARS], outcome.after_ms, outcome.untried))
        case Dead():
            return b"x" + _encode(_Failure(outcome.reason[:MAX_ERROR_CHARS]))
        case Cancelled():
            return b"c"


def decode_ack(raw: bytes) -> Done | Retry | Dead | Cancelled:
    match raw[:1]:
        case b"d":
            return DONE
        case b"c":
            return Cancelled()
        case b"r":
            failure = _decode(raw[1:])
            return Retry(failure.reason, failure.after_ms, failure.untried)
        case b"x":
            return Dead(_decode(raw[1:]).reason)
        case _:
            return Dead(f"the worker's answer cannot be read: {raw[:40]!r}")
