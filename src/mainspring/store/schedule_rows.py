"""The entries of occurrences: what stands in the timeline for the next run of a schedule."""

from typing import NamedTuple

import msgspec

from ..model.chain import Link
from ..model.delivery import Body
from ..model.ids import idh_of
from ..model.occurrence import occurrence_id
from ..model.schedule import Definition
from .codec import INDEXED, LANE, SCHEDULED, entry
from .keys import HOUR_MS, SECOND_MS, Slice


class OccurrenceRow(NamedTuple):
    idh: bytes
    slice: Slice
    row: bytes
    due_ms: int


class Sketch(msgspec.Struct, frozen=True, gc=False):
    """An occurrence of which all is known but the moment at which it is put: made ahead, so that begin is quick."""

    idh: bytes
    due_ms: int
    body: Body
    flags: int
    tail: bytes
    """The entry without its offset, as it is when it is put in time."""

    def put(self, now_ms: int) -> tuple[Slice, bytes]:
        due_ms = self.due_ms
        if due_ms < now_ms - now_ms % SECOND_MS:
            # Overdue: into the slice of now, first in it, and the entry says when it was due.
            place = Slice.at(now_ms, SECOND_MS)
            return place, entry(0, self.flags, self.idh, _overdue(self.body, due_ms))
        # An hour slice is read whole when its hour comes: it must not be written to once that hour has begun.
        place = Slice.at(due_ms, HOUR_MS if due_ms - now_ms >= HOUR_MS else SECOND_MS)
        return place, (due_ms - place.start_ms).to_bytes(4, "big") + self.tail


def _overdue(body: Body, due_ms: int) -> Body:
    return Body(
        body.target, body.payload, body.id, body.lane, due_ms, None, 1, body.expires_ms, body.raw, (), body.retry,
        body.occurrence, body.timeout_ms,
    )  # fmt: skip


def body_of(definition: Definition, task_id: str, planned_ms: int) -> Body:
    return Body(
        definition.target, definition.payload, task_id, definition.lane, None, None, 1, None, definition.raw, (),
        definition.retry, (definition.generation, planned_ms), definition.timeout_ms,
    )  # fmt: skip


def sketch(definition: Definition, planned_ms: int, *, due_ms: int | None = None) -> Sketch:
    """The planned occurrence of the chain."""
    return _sketch(definition, occurrence_id(definition.name, planned_ms), planned_ms, SCHEDULED, due_ms)


def sketch_apart(definition: Definition, task_id: str, planned_ms: int, due_ms: int) -> Sketch:
    """A run beside the chain: triggered by hand, or put in for a time that has passed."""
    return _sketch(definition, task_id, planned_ms, 0, due_ms)


def _sketch(definition: Definition, task_id: str, planned_ms: int, mark: int, due_ms: int | None) -> Sketch:
    body = body_of(definition, task_id, planned_ms)
    flags = INDEXED | mark | (LANE if body.lane is not None else 0)
    idh = idh_of(task_id)
    due_ms = definition.due_ms(planned_ms) if due_ms is None else due_ms
    return Sketch(idh, due_ms, body, flags, entry(0, flags, idh, body)[4:])


def row_of(definition: Definition, link: Link, now_ms: int) -> OccurrenceRow | None:
    """The entry of a chain's planned occurrence; None when there is none."""
    if not link.planned_ms:
        return None
    made = sketch(definition, link.planned_ms)
    place, row = made.put(now_ms)
    return OccurrenceRow(made.idh, place, row, made.due_ms)
