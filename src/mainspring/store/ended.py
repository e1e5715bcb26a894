"""What became of a task that the index leads to no longer: its dead letter, or the note that it was cancelled."""

from typing import NamedTuple

from ..model.task import State, TaskInfo
from .cancelled_ids import last_cancelled
from .dead import Kept, find_letter
from .find import Finder, Located, Reference
from .query import describe, look_at
from .store import Store


class Ended(NamedTuple):
    state: State
    kept: Kept | None
    """Its dead letter."""


async def in_index(store: Store, task_id: str, lane: str | None) -> TaskInfo:
    """The task that has this id now. "unknown" where the id is free, whatever is kept of those who had it before."""
    located = await Finder(store).find(Reference.parse(task_id, lane, len(store.keys)))
    return TaskInfo(task_id, "unknown") if located is None else describe(task_id, located.entry)


async def cancelled_ms(store: Store, reference: Reference) -> int | None:
    """When the id was cancelled last; None when it is not among those of which that is kept."""
    partitions = range(len(store.keys)) if reference.elsewhere else [reference.home]
    return (await last_cancelled(store, partitions)).get(reference.idh)


async def how_it_ended(store: Store, reference: Reference, located: Located | None) -> Ended:
    state: State = "unknown" if located is None else located.entry.state
    kept = await find_letter(store, reference) if state in ("unknown", "dead") else None
    off_ms = await cancelled_ms(store, reference) if located is None and reference.address is None else None
    if kept is not None and (off_ms is None or off_ms < kept.letter.died_ms):
        # An id is forgotten some time after its end, its dead letter is not.
        return Ended("dead", kept)
    if off_ms is not None:
        return Ended("cancelled", None)
    if located is None and reference.address is not None:
        # Its old places were followed as far as that is done.
        [entry] = await look_at(store, [(reference.address, reference.idh)])
        return Ended(entry.state, None)
    return Ended(state, None)


async def tell(store: Store, task_id: str, reference: Reference, located: Located | None) -> TaskInfo:
    """What is known of a task, of one that is over too: the same as `explain` says of it."""
    if located is not None:
        return describe(task_id, located.entry)
    ended = await how_it_ended(store, reference, None)
    if ended.kept is None:
        return TaskInfo(task_id, ended.state)
    letter = ended.kept.letter
    return TaskInfo(
        task_id, "dead", letter.due_ms, letter.target or None, lane=letter.lane, attempt=letter.attempts,
        errors=letter.errors,
    )  # fmt: skip
