"""The usual tasks of a call, field by field: looked at together they cost a third of what they cost one by one.

Usual is a task without a lane or any rule of its own, not overdue, to a target that was met before, with a short id or
none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple, cast

from ..model.errors import InvalidInput
from ..model.ids import IDH_BYTES
from ..model.payload import NULL, encode_payload, to_json
from ..model.task import Task
from .codec import bin_head
from .keys import HOUR_MS, SECOND_MS

FEW: Final = 4
"""Fewer tasks than this are quicker one by one."""

_BYTES: Final = (bytes, bytearray, memoryview)
_THREE_FIELDS: Final = b"\x93"


class Bounds(NamedTuple):
    """What is usual in a call."""

    first_ms: int
    last_ms: int
    heads: Mapping[str, bytes]
    """By target: what its entries have before the payload."""
    max_payload_bytes: int


class Columns(NamedTuple):
    numbers: Sequence[int]
    """Which tasks of the call: a range where they are all of them."""
    dues_ms: list[int]
    leads: list[bytes]
    """What stands between id and payload."""
    payloads: list[bytes]

    def numbers_of(self, some: Sequence[int]) -> Sequence[int]:
        """Of those that stand there in the columns."""
        return some if isinstance(self.numbers, range) else [self.numbers[at] for at in some]

    def by_width(self, far_ms: int) -> "list[tuple[int, Columns]]":
        """By the width of their slices: seconds, and hours from `far_ms` on."""
        if max(self.dues_ms) < far_ms:
            return [(SECOND_MS, self)]
        if min(self.dues_ms) >= far_ms:
            return [(HOUR_MS, self)]
        far = [due_ms >= far_ms for due_ms in self.dues_ms]
        return [(SECOND_MS, self._only([not is_far for is_far in far])), (HOUR_MS, self._only(far))]

    def _only(self, chosen: Sequence[bool]) -> "Columns":
        return Columns(
            list(compress(self.numbers, chosen)),
            list(compress(self.dues_ms, chosen)),
            list(compress(self.leads, chosen)),
            list(compress(self.payloads, chosen)),
        )

    def by_time(self, width_ms: int) -> list[Sequence[int]]:
        """Where in the columns those stand that are due in one such span of time, the first span first."""
        spans = [due_ms // width_ms for due_ms in self.dues_ms]
        if min(spans) == max(spans):
            return [range(len(spans))]
        found: defaultdict[int, list[int]] = defaultdict(list)
        for at, span in enumerate(spans):
            found[span].append(at)
        return [found[span] for span in sorted(found)]


class SortedOut(NamedTuple):
    """The tasks of a call by how they are encoded."""

    plain: Columns | None
    named: Columns | None
    """Those with ids."""
    others: Sequence[int]
    """The numbers of those that are not usual, or wrong."""


def sort_out(tasks: Sequence[Task], bounds: Bounds) -> SortedOut:
    everyone = range(len(tasks))
    if len(tasks) < FEW:
        return SortedOut(None, None, everyone)
    ids = [task.id for task in tasks]
    if ids.count(None) == len(ids):
        if (plain := _columns(tasks, everyone, bounds)) is not None:
            return SortedOut(plain, None, ())
    elif all(map(_is_short, ids)) and (named := _columns(tasks, everyone, bounds, named=True)) is not None:
        return SortedOut(None, named, ())
    usual = [number for number in everyone if _are_usual((tasks[number],), bounds)]
    without, short = [ids[number] is None for number in usual], [_is_short(ids[number]) for number in usual]
    plain = _some(tasks, list(compress(usual, without)), bounds)
    named = _some(tasks, list(compress(usual, short)), bounds, named=True)
    taken = {number for some in (plain, named) if some is not None for number in some.numbers}
    return SortedOut(plain, named, [number for number in everyone if number not in taken])


def _some(tasks: Sequence[Task], numbers: Sequence[int], bounds: Bounds, *, named: bool = False) -> Columns | None:
    return _columns([tasks[number] for number in numbers], numbers, bounds, named=named) if numbers else None


def _columns(tasks: Sequence[Task], numbers: Sequence[int], bounds: Bounds, *, named: bool = False) -> Columns | None:
    """None if one of them is not usual, or wrong."""
    if not tasks or not _are_usual(tasks, bounds):
        return None
    payloads = _payloads([task.payload for task in tasks], bounds.max_payload_bytes)
    if payloads is None:
        return None
    targets, sizes = [task.target for task in tasks], list(map(len, payloads))
    heads = {target: bounds.heads[target] for target in set(targets)}
    if named:
        heads = {target: _THREE_FIELDS + head[1:] for target, head in heads.items()}
    if len(heads) == 1:
        [head] = heads.values()
        by_size = {size: head + bin_head(size) for size in set(sizes)}
        leads = list(map(by_size.__getitem__, sizes))
    else:
        leads = [heads[target] + bin_head(size) for target, size in zip(targets, sizes, strict=True)]
    return Columns(numbers, cast("list[int]", [task.at for task in tasks]), leads, payloads)


def _are_usual(tasks: Sequence[Task], bounds: Bounds) -> bool:
    """Their ids and payloads aside."""
    count = len(tasks)
    times, targets = [task.at for task in tasks], [task.target for task in tasks]
    return (
        [task.lane for task in tasks].count(None) == count
        and [task.after for task in tasks].count(None) == count
        and [task.expires for task in tasks].count(None) == count
        and [task.retry for task in tasks].count(None) == count
        and [task.timeout for task in tasks].count(None) == count
        and set(map(type, times)) == {int}
        and bounds.first_ms <= min(cast("list[int]", times))
        and max(cast("list[int]", times)) <= bounds.last_ms
        and set(map(type, targets)) == {str}
        and bounds.heads.keys() >= set(targets)
    )


def _is_short(id: object) -> bool:
    """A longer id may have the form of a generated one: that is looked at with more care."""
    return type(id) is str and 0 < len(id) < 2 * IDH_BYTES and id.isascii()


def _payloads(payloads: Sequence[Any], most: int) -> list[bytes] | None:
    """As they are stored; None if one of them is the caller's own bytes, or wrong."""
    if any(issubclass(kind, _BYTES) for kind in set(map(type, payloads))):
        return None
    try:
        written = list(map(to_json, payloads))
        if NULL in b"".join(written):
            _check(payload for payload, text in zip(payloads, written, strict=True) if NULL in text)
    except (TypeError, ValueError, OverflowError, RecursionError, InvalidInput):
        return None
    return written if max(map(len, written)) <= most else None


def _check(payloads: Iterable[Any]) -> None:
    """InvalidInput for a number that JSON has no word for."""
    for payload in payloads:
        encode_payload(payload)
