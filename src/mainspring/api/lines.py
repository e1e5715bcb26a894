"""The lines of a batch: many are decoded in one pass; where one is wrong, each for itself."""

from hashlib import blake2b
from typing import Final

import msgspec

from ..model.access import ApiKey
from ..model.errors import InvalidInput
from ..model.task import Task
from .new_task import NewTask, check_payload, task_of
from .problems import Problem
from .reading import check_depth

_decoder: Final = msgspec.json.Decoder(NewTask)
_AHEAD_MS: Final = 3_600_000
_SHORT: Final = 32
"""Ids shorter than this cannot have the form of generated ones."""


class Line(msgspec.Struct, gc=False):
    """One line: a task, or why it is none."""

    number: int
    task: Task | None = None
    problem: Problem | None = None


class Lines:
    """Turns the lines of one batch into tasks, portion by portion."""

    def __init__(self, key: ApiKey, depth: int, salt: bytes | None = None) -> None:
        self._key = key
        self._depth = depth
        self._salt = salt
        self.taken = 0
        self._targets: set[str] = set()
        """Those that were found good before."""

    def take(self, portion: bytes, now_ms: int) -> list[Line]:
        """Empty lines count, and are left out."""
        count = portion.count(b"\n") + (not portion.endswith(b"\n") and bool(portion))
        first = self.taken + 1
        self.taken += count
        if self._salt is None:
            try:
                decoded = _decoder.decode_lines(portion)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                decoded = []  # one of them is wrong: each for itself, to say which
            if len(decoded) == count:
                return [self._line(number, new, now_ms, None) for number, new in enumerate(decoded, first)]
        return self._take_each(portion, first, now_ms)

    def _take_each(self, portion: bytes, first: int, now_ms: int) -> list[Line]:
        lines = []
        for number, raw in enumerate(portion.split(b"\n"), first):
            if not raw.strip():
                continue
            try:
                lines.append(self._line(number, _decode(raw, self._depth), now_ms, raw))
            except Problem as problem:
                lines.append(Line(number, None, problem))
        return lines

    def _line(self, number: int, new: NewTask, now_ms: int, raw: bytes | None) -> Line:
        try:
            return Line(number, self._task(number, new, now_ms, raw))
        except InvalidInput as error:
            return Line(number, None, Problem("invalid", str(error)))
        except Problem as problem:
            return Line(number, None, problem)

    def _task(self, number: int, new: NewTask, now_ms: int, raw: bytes | None) -> Task:
        payload = bytes(new.payload)
        check_depth(payload, self._depth)
        check_payload(payload)
        if self._is_common(new, now_ms):
            return Task(new.target, new.payload, new.at, None, new.id)
        task_id = None
        if self._salt is not None and new.id is None and raw is not None:
            task_id = "line-" + blake2b(b"%d " % number + raw.strip(), key=self._salt, digest_size=20).hexdigest()
        task = task_of(new, now_ms, task_id=task_id)
        if not self._key.sees(task.target):
            raise Problem("forbidden", f"this key may not use the target {task.target[:200]!r}")
        if len(self._targets) < 10_000:
            self._targets.add(task.target)
        return task

    def _is_common(self, new: NewTask, now_ms: int) -> bool:
        """A known target, a plain time near by, a short id or none: nothing is left to check."""
        at = new.at
        return (
            type(at) is int
            and now_ms <= at < now_ms + _AHEAD_MS
            and new.target in self._targets
            and new.after is None
            and new.lane is None
            and new.expires is None
            and new.retry is None
            and (self._salt is None if new.id is None else 0 < len(new.id) < _SHORT and new.id.isascii())
        )


def _decode(raw: bytes, depth: int) -> NewTask:
    check_depth(raw, depth + 1)
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Problem("invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
