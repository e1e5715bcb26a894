"""The lines of a batch: many are decoded in one pass; where one is wrong, each for itself."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from ..model.access import ApiKey
from ..model.errors import InvalidInput
from ..model.limits import MAX_PAYLOAD_BYTES
from ..model.task import Task
from .new_task import NewTask, is_simple, task_of
from .problems import Problem
from .reading import check_depth

_decoder: Final = msgspec.json.Decoder(NewTask)
_AHEAD_MS: Final = 3_600_000
_SHORT: Final = 32
"""Ids shorter than this cannot have the form of generated ones."""

_MOST_TARGETS: Final = 10_000


class Portion(msgspec.Struct):
    """Some lines: the tasks with the numbers of their lines, and what is wrong with the others."""

    first: int
    numbers: Sequence[int]
    tasks: list[Task]
    wrong: dict[int, Problem]

    @property
    def size(self) -> int:
        return len(self.tasks) + len(self.wrong)


class Lines:
    """Turns the lines of one batch into tasks, portion by portion."""

    def __init__(self, key: ApiKey, depth: int, salt: bytes | None = None) -> None:
        self._key = key
        self._depth = depth
        self._salt = salt
        self.taken = 0
        self._targets: set[str] = set()
        """Those that were found good before."""

    def take(self, portion: bytes, now_ms: int, most: int) -> Portion:
        """Empty lines count, and are left out; so are those beyond `most`."""
        count = portion.count(b"\n") + (not portion.endswith(b"\n") and bool(portion))
        first = self.taken + 1
        self.taken += count
        if self._salt is None and self.taken <= most:
            try:
                decoded = _decoder.decode_lines(portion)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                decoded = []  # one of them is wrong: each for itself, to say which
            if len(decoded) == count:
                return self._take_all(first, decoded, now_ms, simple=is_simple(portion))
        return self._take_each(portion, first, now_ms, most)

    def _take_all(self, first: int, decoded: list[NewTask], now_ms: int, *, simple: bool) -> Portion:
        found = Portion(first, range(first, first + len(decoded)), [], {})
        targets, depth, last_ms = self._targets, self._depth, now_ms + _AHEAD_MS
        shallow = 2 * depth  # a shorter text has not enough brackets to be too deep
        for new in decoded:
            payload = new.payload
            at = new.at
            # A known target, a plain time near by, a short id or none: nothing is left to check.
            if (
                (simple or is_simple(bytes(payload)))
                and type(at) is int
                and now_ms <= at < last_ms
                and new.target in targets
                and new.after is None
                and new.lane is None
                and new.expires is None
                and new.retry is None
                and (len(payload) < shallow or _is_small(bytes(payload), depth))
                and (new.id is None or 0 < len(new.id) < _SHORT)
            ):
                found.tasks.append(Task(new.target, payload, at, None, new.id))
            else:
                self._take_slowly(found, first + len(found.tasks) + len(found.wrong), new, now_ms)
        if found.wrong:
            found.numbers = [number for number in found.numbers if number not in found.wrong]
        return found

    def _take_each(self, portion: bytes, first: int, now_ms: int, most: int) -> Portion:
        numbers: list[int] = []
        found = Portion(first, numbers, [], {})
        for number, raw in enumerate(portion.split(b"\n"), first):
            if not raw.strip() or number > most:
                continue
            try:
                self._take_slowly(found, number, _decode(raw, self._depth), now_ms, raw)
            except Problem as problem:
                found.wrong[number] = problem
            if number not in found.wrong:
                numbers.append(number)
        return found

    def _take_slowly(self, found: Portion, number: int, new: NewTask, now_ms: int, raw: bytes = b"") -> None:
        """Any line, with everything it may carry."""
        try:
            check_depth(bytes(new.payload), self._depth)
            found.tasks.append(self._task(number, new, now_ms, raw))
        except InvalidInput as error:
            found.wrong[number] = Problem("invalid", str(error))
        except Problem as problem:
            found.wrong[number] = problem

    def _task(self, number: int, new: NewTask, now_ms: int, raw: bytes) -> Task:
        task_id = None
        if self._salt is not None and new.id is None:
            task_id = "line-" + blake2b(b"%d " % number + raw.strip(), key=self._salt, digest_size=20).hexdigest()
        task = task_of(new, now_ms, task_id=task_id)
        if not self._key.sees(task.target):
            raise Problem("forbidden", f"this key may not use the target {task.target[:200]!r}")
        if len(self._targets) < _MOST_TARGETS:
            self._targets.add(task.target)
        return task


def _is_small(payload: bytes, depth: int) -> bool:
    return len(payload) <= MAX_PAYLOAD_BYTES and payload.count(b"[") + payload.count(b"{") < depth


def _decode(raw: bytes, depth: int) -> NewTask:
    check_depth(raw, depth + 1)
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Problem("invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
