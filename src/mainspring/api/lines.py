"""The lines of a batch: many are decoded in one pass; where one is wrong, each for itself."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, cast

import msgspec

from ..model.access import ApiKey
from ..model.errors import InvalidInput
from ..model.limits import HORIZON_MS, MAX_PAYLOAD_BYTES
from ..model.targets import check_target
from ..model.task import Task
from .new_task import NO_PAYLOAD, NewTask, is_simple, task_of
from .problems import Problem
from .reading import check_depth, check_repeated, field_names

_decoder: Final = msgspec.json.Decoder(NewTask)
_NAMES: Final = field_names(NewTask)
_SHORT: Final = 32
"""Ids shorter than this cannot have the form of generated ones."""

_MOST_TARGETS: Final = 10_000


class Portion(msgspec.Struct):
    """Some lines: the tasks with the numbers of their lines, and what is wrong with the others."""

    first: int
    numbers: Sequence[int]
    tasks: list[Task]
    wrong: dict[int, Problem]
    keyed: set[int] = msgspec.field(default_factory=set)
    """Lines with ids made of the Idempotency-Key: such an id is known already only if the line was sent before."""

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
                if self._are_usual(portion, decoded, now_ms):
                    return Portion(first, range(first, first + count), cast("list[Task]", decoded), {})
                found, odd = self._take_all(first, decoded, now_ms, simple=is_simple(portion))
                if not _may_repeat(portion, decoded, odd) or not _repeats(portion):
                    return found
        return self._take_each(portion, first, now_ms, most)

    def _are_usual(self, portion: bytes, decoded: list[NewTask], now_ms: int) -> bool:
        """Whether `_take_all` would take every line as it is, and none has a field but the usual, or one of them twice:
        either would show as more quotes. Asked of all of them together, field by field, it costs half as much."""
        times = [new.at for new in decoded]
        if set(map(type, times)) != {int}:
            return False
        numbers = cast("list[int]", times)
        ids = [new.id for new in decoded if new.id is not None]
        payloads = [new.payload for new in decoded if new.payload is not NO_PAYLOAD]
        text = b"\n".join(payloads)
        return (
            min(numbers) >= 0
            and max(numbers) <= now_ms + HORIZON_MS
            and all(map(self._knows, {new.target for new in decoded}))
            and max(map(len, payloads), default=0) < 2 * self._depth
            and "" not in ids
            and max(map(len, ids), default=0) < _SHORT
            and portion.count(b'"') == _usual_quotes(len(decoded), len(ids), len(payloads), text)
            and is_simple(text)  # what stands elsewhere is decoded, and not skipped over
        )

    def _take_all(
        self, first: int, decoded: list[NewTask], now_ms: int, *, simple: bool
    ) -> tuple[Portion, list[NewTask]]:
        """The tasks, and the lines that carry more than the usual."""
        found = Portion(first, range(first, first + len(decoded)), [], {})
        odd: list[NewTask] = []
        targets, depth, last_ms = self._targets, self._depth, now_ms + HORIZON_MS
        shallow = 2 * depth  # a shorter text has not enough brackets to be too deep
        for new in decoded:
            payload = new.payload
            at = new.at
            # A known target, a plain time, a short id or none: nothing is left to check.
            if (
                (simple or is_simple(bytes(payload)))
                and type(at) is int
                and 0 <= at <= last_ms
                and new.target in targets
                and new.after is None
                and new.lane is None
                and new.expires is None
                and new.retry is None
                and new.timeout is None
                and (len(payload) < shallow or _is_small(bytes(payload), depth))
                and (new.id is None or 0 < len(new.id) < _SHORT)
            ):
                found.tasks.append(new)
            else:
                odd.append(new)
                self._take_slowly(found, first + len(found.tasks) + len(found.wrong), new, now_ms)
        if found.wrong:
            found.numbers = [number for number in found.numbers if number not in found.wrong]
        return found, odd

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
            check_depth(bytes(new.payload), self._depth, level=1)
            found.tasks.append(self._task(number, new, now_ms, raw))
            if self._salt is not None and new.id is None:
                found.keyed.add(number)
        except InvalidInput as error:
            found.wrong[number] = Problem("invalid", str(error))
        except Problem as problem:
            found.wrong[number] = problem

    def _task(self, number: int, new: NewTask, now_ms: int, raw: bytes) -> Task:
        task_id = None
        if self._salt is not None and new.id is None:
            task_id = "line-" + blake2b(b"%d " % number + raw.strip(), key=self._salt, digest_size=20).hexdigest()
        task = task_of(new, now_ms, task_id=task_id)
        if not self._knows(task.target):
            raise Problem("forbidden", f"this key may not use the target {task.target[:200]!r}")
        return task

    def _knows(self, target: str) -> bool:
        """Whether a target is good, and this caller may use it."""
        if target in self._targets:
            return True
        try:
            check_target(target)
        except InvalidInput:
            return False  # it is told with its line
        if not self._key.sees(target):
            return False
        if len(self._targets) < _MOST_TARGETS:
            self._targets.add(target)
        return True


def _is_small(payload: bytes, depth: int) -> bool:
    return len(payload) <= MAX_PAYLOAD_BYTES and payload.count(b"[") + payload.count(b"{") < depth


def _decode(raw: bytes, depth: int) -> NewTask:
    check_depth(raw, depth)
    try:
        new = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Problem("invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
    check_repeated(raw, _NAMES)
    return new


def _may_repeat(portion: bytes, decoded: list[NewTask], odd: list[NewTask]) -> bool:
    """Whether there are more quotes than the fields need that were found. One count instead of a look at each line."""
    named = len(decoded) - [new.id for new in decoded].count(None)
    payloads = [new.payload for new in decoded if new.payload is not NO_PAYLOAD]
    usual = _usual_quotes(len(decoded) - len(odd), named, len(payloads), b"".join(payloads))
    return portion.count(b'"') != usual + sum(map(_quotes, odd))


def _usual_quotes(lines: int, ids: int, payloads: int, text: bytes) -> int:
    """What lines need that have a target, a number as their time, so many ids and payloads, and nothing else; `text` is
    all payloads."""
    return 6 * lines + 4 * ids + 2 * payloads + text.count(b'"')


def _quotes(new: NewTask) -> int:
    """What a line needs besides its id and payload, at the least."""
    texts = sum(text is not None for text in (new.target, new.after, new.lane, new.retry, new.timeout))
    times = [time for time in (new.at, new.expires) if time is not None]
    return 4 * texts + sum(4 if isinstance(time, str) else 2 for time in times)


def _repeats(portion: bytes) -> bool:
    try:
        for raw in portion.split(b"\n"):
            check_repeated(raw, _NAMES)
    except Problem:
        return True
    return False
