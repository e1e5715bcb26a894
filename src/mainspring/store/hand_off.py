"""Handing tasks off to queues: the commit of what workers run. See PROTOCOL "Commit"."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from ..model.errors import StoreError
from .fire import Status, Touch
from .store import Group, Store

MOST_TASKS: Final = 1_000
"""Tasks that a call hands off at most: Lua can spread some thousand values at once."""

MOST_BYTES: Final = 4 << 20
"""Bytes that a call carries at most, give or take one task: a server that reads for long answers nobody else."""

BUSY: Final = b""
"""The answer for a task that has to wait: another one of its id is in a queue."""


class HandOff(NamedTuple):
    """What one partition hands off in a call."""

    partition: int
    token: bytes
    seq: int
    finished: int
    touches: list[Touch]
    queues: dict[str, list[bytes]]
    """Queue -> records: the packed address a task comes from, then its entry."""


class Handed(NamedTuple):
    status: Status
    answers: dict[int, bytes]
    """Of some tasks, by their place among all records: BUSY, or how a run of it had ended before."""


async def hand_off(store: Store, works: Sequence[HandOff]) -> list[Handed | StoreError]:
    """One call a partition, all in one trip a server."""
    handed: list[Handed | StoreError] = []
    for result in await store.run([_group(store, work) for work in works]):
        if isinstance(result, StoreError):
            handed.append(result)
            continue
        now_us, status, flat = result[0]
        store.clock.sample(now_us)
        answers = {position - 1: answer for position, answer in zip(flat[::2], flat[1::2], strict=True)}
        handed.append(Handed(cast("Status", status.decode()), answers))
    return handed


def _group(store: Store, work: HandOff) -> Group:
    names = store.keys.partitions[work.partition]
    keys = [names.fence, names.n, names.slices, names.queued, names.acks, names.queues]
    keys += map(names.queue, work.queues)
    tasks = sum(map(len, work.queues.values()))
    args: list[Any] = [work.token, work.seq, work.finished, len(work.touches), len(work.queues), tasks]
    for touch in work.touches:
        s, _, d, _ = touch.keys
        keys += (s, d)
        args += (touch.name, touch.g, touch.m, touch.header, touch.d_at, touch.d)
    for queue, records in work.queues.items():
        args += (queue, len(records))
    for records in work.queues.values():
        args += records
    # Not within the script: see `put`, whose wake-up follows its transaction for the same reason.
    return names.slot, [store.scripts.call("hand_off", keys, args), ("SPUBLISH", names.work, "1")]
