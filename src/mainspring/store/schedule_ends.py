"""When runs of schedules ended on workers. The worker writes it with the end itself, under the name of the schedule:
one small value for each schedule, however often it runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ..model.chain import Link, Run
from ..model.errors import StoreError
from ..model.ids import idh_of
from ..model.job import Job
from ..model.result import Ending, Result, decode_result
from .keys import PartitionKeys
from .store import Group, Store

if TYPE_CHECKING:
    from .schedules import Seen

KEPT_MS: Final = 32 * 86_400_000
"""Longer than most schedules wait for their next run."""


def end_key(keys: PartitionKeys, name: str) -> str:
    # No schedule has an "@" in its name, and no occurrence nothing behind it.
    return keys.result(idh_of(f"{name}@"))


def pack_end(job: Job, ending: Ending, ended_ms: int) -> bytes | None:
    """What is kept of the end of a run; None for a task that belongs to no schedule."""
    if job.body.occurrence is None:
        return None
    return Result(ending, job.body.occurrence[1], ended_ms=ended_ms).encode()


def schedule_of(job: Job) -> str:
    return job.id.partition("@")[0]


async def run_ends(store: Store, wanted: Sequence[tuple[int, str, Link]]) -> list[Run | None]:
    """How the last run of each chain (partition, name, link) ended; None where no worker said so."""
    groups: list[Group] = []
    for partition, name, _ in wanted:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("GET", end_key(keys, name))]))
    found: list[Run | None] = []
    for (_, _, link), answer in zip(wanted, await store.run(groups) if groups else (), strict=True):
        if isinstance(answer, StoreError):
            raise answer
        end = None if answer[0] is None else decode_result(answer[0])
        state = link.state
        ours = end is not None and end.value == state.last_ms
        found.append(Run(state.last_ms, state.began_ms, end.ended_ms, end.ending) if end is not None and ours else None)
    return found


async def with_ends(store: Store, seen: "Sequence[Seen]") -> "list[Seen]":
    """The same with the ends of runs that the chain has not heard of yet: it asks when the next run begins."""
    answered = list(seen)
    open_ends = [
        (i, one.partition, one.definition.name, one.link)
        for i, one in enumerate(answered)
        if one.definition is not None and one.link is not None and not one.link.state.last_is_over
    ]
    ends = await run_ends(store, [one[1:] for one in open_ends])
    for (i, _, _, link), run in zip(open_ends, ends, strict=True):
        if run is not None:
            told = msgspec.structs.replace(link, state=link.state.with_run(run))
            answered[i] = answered[i]._replace(link=told)
    return answered
