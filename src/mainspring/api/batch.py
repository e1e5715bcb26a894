"""`POST /v1/tasks:batch`: tasks as lines of JSON. The response has one line per task, and a summary as the last."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, cast

import msgspec

from ..model.access import ApiKey
from ..model.errors import Conflict, InvalidInput, MainspringError, StoreError
from ..model.limits import HORIZON_MS, MAX_PAYLOAD_BYTES
from ..model.targets.names import check_target
from ..model.targets.url import AllowList
from ..model.task import Handle, OnConflict, PutOutcome, Task
from ..model.times import timeout_ms
from ..store.durability import check_durability
from ..store.records import MARK_BYTES, NO_MARK, BatchMarks, Claim
from ..store.tasks.put_ids import ids_of_runs
from .asgi import (
    GUARDED,
    NDJSON,
    AsgiSend,
    HungUp,
    Problem,
    check_content_type,
    check_depth,
    check_repeated,
    choices,
    field_names,
    problem_of,
)
from .auth import Slots, check_lane, client_of
from .routes import Call, Route, check_put_target
from .tasks import NO_PAYLOAD, NewTask, checked_key, in_doubt, is_simple, task_of, weight_of

_decoder: Final = msgspec.json.Decoder(NewTask)
_NAMES: Final = field_names(NewTask)
_SHORT: Final = 32
"""Ids shorter than this cannot have the form of generated ones."""

_MOST_TARGETS: Final = 10_000
_PUBLIC: Final = AllowList()


class Portion(msgspec.Struct):
    """Some lines: their tasks by line number, and the problems of the other lines."""

    first: int
    numbers: Sequence[int]
    tasks: list[Task]
    wrong: dict[int, Problem]
    keyed: set[int] = msgspec.field(default_factory=set)
    """Lines with ids made from the Idempotency-Key: such an id is known only if the line was sent before."""
    marks: dict[int, bytes] = msgspec.field(default_factory=dict)
    """With an Idempotency-Key: the mark to store for each line once its task is stored."""
    repeated: dict[int, Task] = msgspec.field(default_factory=dict)
    """Lines that an earlier request with the Idempotency-Key has stored."""

    @property
    def size(self) -> int:
        return len(self.tasks) + len(self.wrong) + len(self.repeated)


class Repeats:
    """Recognizes lines of a repeated batch by its Idempotency-Key."""

    def __init__(
        self,
        salt: bytes,
        query: "BatchQuery",
        began_ms: int,
        holds: Callable[[int, bytes], bool],
        in_doubt: Callable[[int, bytes], bool],
    ) -> None:
        """`began_ms` is the time of the first request with the key. `holds` says if a line was stored, `in_doubt` if it
        may have been, too long ago to know its id."""
        self.began_ms = began_ms
        self.holds = holds
        self.in_doubt = in_doubt
        self._salt = salt
        self._rules = f"{query.durability} {query.on_conflict}".encode(), query.durability.encode()

    def id_of(self, number: int, raw: bytes) -> str:
        """Return the id of a line without one."""
        return "line-" + blake2b(b"%d " % number + raw.strip(), key=self._salt, digest_size=20).hexdigest()

    def mark_of(self, number: int, raw: bytes, *, named: bool) -> bytes:
        """Return the mark of a line. The rule for known ids is part of it if the line has a caller's id."""
        text = b"%d %b %b" % (number, self._rules[not named], raw.strip())
        return blake2b(text, key=self._salt, digest_size=MARK_BYTES).digest()


class Lines:
    """Turns the lines of one batch into tasks, portion by portion."""

    def __init__(
        self,
        key: ApiKey,
        depth: int,
        repeats: Repeats | None = None,
        reach: AllowList = _PUBLIC,
        check_timeout: Callable[[str, int], None] | None = None,
    ) -> None:
        self._key = key
        self._check_timeout = check_timeout
        self._reach = reach
        self._depth = depth
        self._repeats = repeats
        self.taken = 0
        self._targets: set[str] = set()
        """Targets that were checked before."""

    def take(self, portion: bytes, now_ms: int, most_wrong: int) -> Portion:
        """Return the tasks of some lines. Empty lines count but are skipped.

        Stop after `most_wrong` invalid lines; `taken` is then the number of the last one.
        """
        count = count_lines(portion)
        first = self.taken + 1
        self.taken += count
        if self._repeats is None:
            try:
                decoded = _decoder.decode_lines(portion)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                decoded = []  # one is invalid: decode each line on its own, to name it
            if len(decoded) == count:
                if self._are_usual(portion, decoded, now_ms):
                    return Portion(first, range(first, first + count), cast("list[Task]", decoded), {})
                found, odd = self._take_all(first, decoded, now_ms, simple=is_simple(portion))
                if len(found.wrong) <= most_wrong and (not _may_repeat(portion, decoded, odd) or not _repeats(portion)):
                    return found
        return self._take_each(portion, first, now_ms, most_wrong)

    def _are_usual(self, portion: bytes, decoded: list[NewTask], now_ms: int) -> bool:
        """Return whether `_take_all` would take every line unchanged, without unusual or repeated fields.

        Either would show as additional quotes. Checking all lines together, field by field, costs half as much.
        """
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
            and is_simple(text)  # text outside payloads is decoded, not skipped
        )

    def _take_all(
        self, first: int, decoded: list[NewTask], now_ms: int, *, simple: bool
    ) -> tuple[Portion, list[NewTask]]:
        """Return the tasks, and the lines with unusual fields."""
        found = Portion(first, range(first, first + len(decoded)), [], {})
        odd: list[NewTask] = []
        targets, depth, last_ms = self._targets, self._depth, now_ms + HORIZON_MS
        shallow = 2 * depth  # a shorter text has not enough brackets to be too deep
        for new in decoded:
            payload = new.payload
            at = new.at
            # A known target, a plain time, and a short id or none need no further checks.
            if (
                (simple or is_simple(bytes(payload)))
                and type(at) is int
                and 0 <= at <= last_ms
                and new.target in targets
                and new.after is None
                and new.lane is None
                and new.expires is None
                and new.retry is None
                and new.retries is None
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

    def _take_each(self, portion: bytes, first: int, now_ms: int, most_wrong: int) -> Portion:
        numbers: list[int] = []
        found = Portion(first, numbers, [], {})
        for number, raw in enumerate(portion.split(b"\n"), first):
            if not raw.strip():
                continue
            try:
                self._take_slowly(found, number, _decode(raw, self._depth), now_ms, raw)
            except Problem as problem:
                found.wrong[number] = problem
            if number not in found.wrong:
                numbers += [] if number in found.repeated else [number]
            elif len(found.wrong) >= most_wrong:
                self.taken = number
                break
        return found

    def _take_slowly(self, found: Portion, number: int, new: NewTask, now_ms: int, raw: bytes = b"") -> None:
        """Take any line, with all its fields."""
        try:
            check_depth(bytes(new.payload), self._depth, level=1)
            task = self._task(number, new, now_ms, raw)
            if self._repeats is not None:
                mark = self._repeats.mark_of(number, raw, named=new.id is not None)
                if self._repeats.holds(number, mark):
                    found.repeated[number] = task
                    return
                if self._repeats.in_doubt(number, mark):
                    raise in_doubt(task)
                found.marks[number] = mark
                if new.id is None:
                    found.keyed.add(number)
            found.tasks.append(task)
        except InvalidInput as error:
            found.wrong[number] = problem_of(error)
        except Problem as problem:
            found.wrong[number] = problem

    def _task(self, number: int, new: NewTask, now_ms: int, raw: bytes) -> Task:
        repeats = self._repeats
        if repeats is None:
            task = task_of(new, now_ms)
        else:
            # Counted from the first request, a delay is the same when the line is sent again.
            task = task_of(new, repeats.began_ms, task_id=repeats.id_of(number, raw))
        if new.timeout is not None and self._check_timeout is not None:
            self._check_timeout(task.target, timeout_ms(new.timeout))
        if not self._knows(task.target):
            check_put_target(task.target, self._reach)
            raise Problem("forbidden", f"this key may not use the target {task.target[:200]!r}")
        check_lane(self._key, task.lane)
        return task

    def _knows(self, target: str) -> bool:
        """Return whether a target is valid and this caller may use it."""
        if target in self._targets:
            return True
        try:
            check_target(target)
            check_put_target(target, self._reach)
        except InvalidInput:
            return False  # reported together with its line
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
        raise Problem("invalid", f"{error}{choices(NewTask, str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
    check_repeated(raw, _NAMES)
    return new


def _may_repeat(portion: bytes, decoded: list[NewTask], odd: list[NewTask]) -> bool:
    """Return whether there are more quotes than the known fields need: one count instead of a check per line."""
    named = len(decoded) - [new.id for new in decoded].count(None)
    payloads = [new.payload for new in decoded if new.payload is not NO_PAYLOAD]
    usual = _usual_quotes(len(decoded) - len(odd), named, len(payloads), b"".join(payloads))
    return portion.count(b'"') != usual + sum(map(_quotes, odd))


def _usual_quotes(lines: int, ids: int, payloads: int, text: bytes) -> int:
    """Return the quotes in lines with a target, a numeric time, and so many ids and payloads; `text` is all payloads
    together."""
    return 6 * lines + 4 * ids + 2 * payloads + text.count(b'"')


def _quotes(new: NewTask) -> int:
    """Return the quotes that a line needs at least, besides its id and payload."""
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


def count_lines(text: bytes) -> int:
    return text.count(b"\n") + (bool(text) and not text.endswith(b"\n"))


PORTION_BYTES: Final = 384 * 1024
PORTION_LINES: Final = 8_192
"""Most lines checked and written together: with fewer, portions of short lines were cut unevenly and cost a fifth.
Lines have a limit besides bytes, because an invalid one may be a single byte and costs more than a valid one."""
PORTION_KEYED_LINES: Final = 1_024
"""The same with an Idempotency-Key: each line is checked and hashed on its own, which costs twenty times as much."""

AT_ONCE: Final = 32
"""Batches that one process reads at once."""
AT_ONCE_OF_ONE: Final = 8
"""Batches of one client among them, so that a slow or greedy client cannot block the route for others."""

HELD_BYTES: Final = 64 << 20
"""Bytes of responses held by one process, for all batches. Most clients read nothing before they have sent everything,
so responses are kept until then."""
PIECE_BYTES: Final = 256 * 1024
"""Approximate size of the pieces of a response; each is sent once the client has taken the one before."""


class BatchQuery(msgspec.Struct, frozen=True):
    """`answers=errors` leaves out the lines of tasks that were stored."""

    on_conflict: OnConflict = "keep"
    durability: str = "server"
    answers: Literal["all", "errors"] = "all"


class LineAnswer(msgspec.Struct, omit_defaults=True):
    """Outcome of one line: `error` (a problem document), or the other fields. The last line is the summary."""

    line: int = 0
    id: str = ""
    due_ms: int = 0
    outcome: PutOutcome | None = None
    past: bool = False
    confirmed: bool = True
    """False if the task is stored, but not at the requested durability."""
    error: dict[str, Any] | None = None
    summary: "Summary | None" = None


class Summary(msgspec.Struct):
    """`complete` is false if the rest was not taken; send it again from `next_line` on. `skipped` is the
    number of lines that were received and not read."""

    lines: int = 0
    created: int = 0
    kept: int = 0
    replaced: int = 0
    failed: int = 0
    skipped: int = 0
    complete: bool = True
    next_line: int | None = None
    error: dict[str, Any] | None = None


_encode_lines: Final = msgspec.json.Encoder().encode_lines


LineOutcome = Handle | MainspringError | None
"""Outcome of a task; None if it was stored and only counted."""


class Batches(Slots):
    """The batches being read, by client, and the bytes of answers that wait to be sent."""

    def __init__(self) -> None:
        super().__init__(AT_ONCE, AT_ONCE_OF_ONE, "batches are being read")
        self.held_bytes = 0


class BatchAnswer:
    """Lines of a response, held until the whole request is read, then sent piece by piece."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._pieces: deque[bytes] = deque()

    def add(self, lines: bytes) -> None:
        for at in range(0, len(lines), PIECE_BYTES):
            self._pieces.append(lines[at : at + PIECE_BYTES])
        self._batches.held_bytes += len(lines)

    @property
    def has_room(self) -> bool:
        return self._batches.held_bytes < HELD_BYTES

    async def send(self, send: AsgiSend) -> None:
        length = b"%d" % sum(map(len, self._pieces))
        headers = [(b"content-type", NDJSON), (b"content-length", length), *GUARDED]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while self._pieces:
                piece = self._pieces.popleft()
                self._batches.held_bytes -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})
        finally:
            self.drop()

    def drop(self) -> None:
        """Discard unsent lines."""
        self._batches.held_bytes -= sum(map(len, self._pieces))
        self._pieces.clear()


async def put_batch(call: Call) -> BatchAnswer:
    check_content_type(call.headers, (NDJSON, b"application/ndjson", b"application/jsonl", b"application/json"))
    config = call.node.config
    if int(call.headers.get(b"content-length", b"0")) > config.api_batch_bytes:
        raise Problem("too-large", f"a batch has at most {config.api_batch_bytes} bytes here", connection="close")
    check_durability(call.query.durability)
    if call.query.on_conflict not in ("keep", "reject") and not call.may_reach_all:
        raise Problem("forbidden", "this key is bound to targets: put tasks that may replace others one by one")
    answer = BatchAnswer(call.app.batches)
    try:
        with call.app.batches.slot(client_of(call.key, call.address)):
            marks, repeats = await _repeats_of(call)
            batch = _Batch(call, answer, marks, repeats)
            try:
                await batch.read()
            finally:
                await batch.audit()
    except BaseException:
        answer.drop()
        raise
    return answer


class _Batch:
    """One request. The next portion is read and checked while the last one is on its way to the server."""

    def __init__(self, call: Call, answer: BatchAnswer, marks: BatchMarks | None, repeats: Repeats | None) -> None:
        self._call = call
        self._marks = marks
        self._answer = answer
        self._query: BatchQuery = call.query
        self._lines = Lines(
            call.key, call.node.config.api_json_depth, repeats, call.app.reach, call.node.config.check_timeout
        )
        self._summary = Summary()
        self._failure: MainspringError | None = None
        self._received = 0
        """Lines received, whether looked at or not."""
        self._looked_at = 0
        self._wrong_left = call.node.config.api_batch_errors
        rejects = self._query.on_conflict == "reject"
        self._rule: OnConflict = "keep" if rejects else self._query.on_conflict
        self._signs = not call.key.may("operate")
        may_be_refused = rejects or self._signs
        self._counts = self._query.answers == "errors" and not may_be_refused and call.may_reach_all
        """True if the caller does not need ids: stored tasks are only counted, which is cheaper."""
        self._has_quota = not call.app.quotas.of(call.key).is_none

    async def read(self) -> None:
        """Write the tasks of all lines, or as many as the limits allow; only count the lines after those."""
        config = self._call.node.config
        rest, size, more = b"", 0, True
        writing: asyncio.Task[None] | None = None
        try:
            while more:
                data, more = await self._portion(rest)
                size += len(data) - len(rest)
                cut = len(data) if not more else data.rfind(b"\n") + 1
                lines, rest = data[:cut], data[cut:]
                most = PORTION_LINES if self._marks is None else PORTION_KEYED_LINES
                for portion in _portions(lines, most):
                    if not self._summary.complete:
                        break  # the rest is only counted: to cut it into lines would cost more than to send it
                    found = self._take(portion)
                    if writing is not None:
                        await writing
                        writing = None
                    if found is not None and self._failure is None:
                        self._looked_at = self._lines.taken
                        writing = asyncio.create_task(self._write(found))
                        await asyncio.sleep(0)
                self._received += count_lines(lines)
                if self._failure is not None:
                    break
                if size > config.api_batch_bytes or len(rest) > config.api_body_bytes:
                    self._stop("too-large", "the body, or a line of it, is larger than the limit", self._received + 1)
                    break
        finally:
            if writing is not None:
                await writing
        summary = self._summary
        summary.skipped = self._received - self._looked_at
        if self._failure is not None and not summary.created + summary.kept + summary.replaced:
            raise self._failure  # nothing is known to be stored: repeat the whole request
        self._answer.add(_encode_lines([LineAnswer(summary=summary)]))

    def _take(self, portion: bytes) -> Portion | None:
        """Return the tasks of the lines; None once a limit is reached."""
        if not self._summary.complete or not (lines := self._within_limits(portion)):
            return None
        found = self._lines.take(lines, self._call.client.store.clock.now_ms(), self._wrong_left)
        self._wrong_left -= len(found.wrong)
        if self._wrong_left <= 0:
            most = self._call.node.config.api_batch_errors
            self._stop("invalid", f"{most} lines are wrong; the rest was not read", self._lines.taken + 1)
        return found

    def _within_limits(self, portion: bytes) -> bytes:
        """Return the lines within the limits."""
        config, taken, count = self._call.node.config, self._lines.taken, count_lines(portion)
        if not self._answer.has_room:
            self._stop("rate", "memory for batch responses is full; send the rest, or use answers=errors", taken + 1)
            return b""
        allowed = min(count, config.api_batch_lines - taken)
        if allowed < count:
            most = config.api_batch_lines
            self._stop("too-large", f"a batch has at most {most} lines here; send the rest", most + 1)
        # The request itself was counted when it was admitted: that covers its first line.
        counted = allowed - (taken == 0)
        granted = self._call.app.authenticator.count_lines(self._call.key, self._call.address, counted)
        if granted < counted:
            allowed -= counted - granted
            self._stop("rate", "each line counts as a request; send the rest later", taken + allowed + 1)
        return portion if allowed == count else b"\n".join([*portion.split(b"\n")[:allowed], b""])

    async def _portion(self, rest: bytes) -> tuple[bytes, bool]:
        """Return the unread rest plus the next chunk, and whether more follows."""
        pieces, size = [rest], len(rest)
        while size < len(rest) + PORTION_BYTES:
            message = await self._call.receive()
            if message["type"] != "http.request":
                raise HungUp
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if not message.get("more_body"):
                return b"".join(pieces), False
        return b"".join(pieces), True

    def _stop(self, kind: str, detail: str, next_line: int) -> None:
        summary = self._summary
        if summary.next_line is None or next_line < summary.next_line:
            summary.complete, summary.next_line, summary.error = False, next_line, Problem(kind, detail).fields

    # -- writing -----------------------------------------------------------------------------------------------

    async def _write(self, portion: Portion) -> None:
        kept_before = self._summary.kept
        await self._refuse_ids_of_runs(portion)
        if self._has_quota:
            await self._keep_to_quota(portion)
        await self._mark_begun(portion)
        handles = await self._put([self._call.signed(task) for task in portion.tasks] if self._signs else portion.tasks)
        if self._has_quota:
            self._add_to_quota(portion.tasks, handles, self._summary.kept - kept_before)
        if not self._call.may_reach_all:
            handles = [await self._own(task, one) for task, one in zip(portion.tasks, handles, strict=True)]
        await self._mark(portion, handles)
        self._report(portion, handles)
        self._summary.lines += portion.size
        if self._failure is not None:
            self._stop(problem_of(self._failure).kind, str(self._failure), portion.first)

    async def _refuse_ids_of_runs(self, portion: Portion) -> None:
        """Refuse ids of a schedule's runs together: refused by the put, each line would be a put of its own."""
        try:
            refused = await ids_of_runs(self._call.client.store, [task.id or "" for task in portion.tasks])
        except StoreError as error:
            self._failure = self._failure or error
            return
        self._leave_out(portion, {index: problem_of(error) for index, error in refused.items()})

    @staticmethod
    def _leave_out(portion: Portion, refused: Mapping[int, Problem]) -> None:
        if refused:
            portion.wrong |= {portion.numbers[index]: problem for index, problem in refused.items()}
            portion.numbers = [number for index, number in enumerate(portion.numbers) if index not in refused]
            portion.tasks = [task for index, task in enumerate(portion.tasks) if index not in refused]

    async def _keep_to_quota(self, portion: Portion) -> None:
        """Refuse lines beyond the key's quota; a later one may be small enough, so the batch continues."""
        call, tasks = self._call, portion.tasks
        sizes = [len(task.payload) for task in tasks]
        try:
            refused = await call.app.quotas.refusals(call.key, call.client.store, sizes)
        except StoreError as error:
            self._failure = self._failure or error
            return
        self._leave_out(portion, refused)

    def _add_to_quota(self, tasks: list[Task], handles: Sequence[LineOutcome], kept: int) -> None:
        """Count stored tasks. If lines are only counted, it is unknown which were stored before, only how many: assume
        the first ones."""
        stored: list[tuple[int, int]] = []
        for task, found in zip(tasks, handles, strict=True):
            if found is None and kept:
                kept -= 1
            elif found is None or (isinstance(found, Handle) and found.outcome != "kept"):
                stored.append(weight_of(task))
        self._call.app.quotas.add(self._call.key, self._call.client.store, stored)

    async def _mark_begun(self, portion: Portion) -> None:
        if self._marks is None or self._failure is not None:
            return
        try:
            await self._marks.begin({number: portion.marks[number] for number in portion.numbers})
        except StoreError as error:
            self._failure = error

    async def _mark(self, portion: Portion, handles: Sequence[LineOutcome]) -> None:
        """Mark lines stored at the requested durability, so that they count once if they are sent again, and take back
        the mark of those that were refused."""
        if self._marks is None:
            return
        marks: dict[int, bytes] = {}
        for number, found in zip(portion.numbers, handles, strict=True):
            if isinstance(found, StoreError):
                continue  # it may be stored
            if isinstance(found, MainspringError) or self._problem(portion, number, found) is not None:
                marks[number] = NO_MARK
            elif found is None or found.durability == self._query.durability:
                marks[number] = portion.marks[number]
        try:
            await self._marks.keep(marks)
        except StoreError as error:
            self._failure = self._failure or error

    async def _put(self, tasks: list[Task]) -> Sequence[LineOutcome]:
        if self._failure is not None:
            return [self._failure] * len(tasks)
        try:
            return await self._put_many(tasks)
        except (InvalidInput, Conflict) as error:
            # One line is invalid in a way not detected before, or others keep changing the task with its id.
            stored = error.handles or [None] * len(tasks)
            return [one or await self._put_one(task) for one, task in zip(stored, tasks, strict=True)]
        except MainspringError as error:
            self._failure = error
            error.stored = 0  # the summary counts them
            return [error if handle is None else handle for handle in error.handles or [None] * len(tasks)]

    async def _own(self, task: Task, found: LineOutcome) -> LineOutcome:
        """Do not report a kept task that belongs to another caller."""
        if isinstance(found, Handle) and found.outcome == "kept":
            try:
                await self._call.check_not_others(found.id, task.lane)
            except MainspringError as error:
                return error
        return found

    async def _put_one(self, task: Task) -> LineOutcome:
        if self._failure is not None:
            return self._failure
        try:
            [handle] = await self._put_many([task])
        except (InvalidInput, Conflict) as error:
            return error
        except MainspringError as error:
            self._failure = error
            return error if not error.handles else error.handles[0] or error
        return handle

    async def _put_many(self, tasks: list[Task]) -> Sequence[LineOutcome]:
        query = self._query
        done = await self._call.client.put_many(
            tasks, on_conflict=self._rule, durability=query.durability, handles=not self._counts
        )
        if done.handles is not None:
            return done.handles
        self._summary.created += done.created
        self._summary.kept += done.kept
        self._summary.replaced += done.replaced
        return [None] * len(tasks)

    # -- reporting ---------------------------------------------------------------------------------------------

    def _report(self, portion: Portion, handles: Sequence[LineOutcome]) -> None:
        summary = self._summary
        wrong = dict(portion.wrong)  # lines of the portion are counted with it
        answers: list[LineAnswer] = []
        counts = {"created": 0, "kept": 0, "replaced": 0}
        only_counted = handles.count(None) == len(handles)
        for number, found in () if only_counted else zip(portion.numbers, handles, strict=True):
            if found is None:
                continue
            if not isinstance(found, Handle):
                wrong[number] = problem_of(found)
            elif (problem := self._problem(portion, number, found)) is not None:
                wrong[number] = problem
            else:
                counts[found.outcome] += 1
                sure = found.durability == self._query.durability
                answers.append(LineAnswer(number, found.id, found.due_ms, found.outcome, found.past, sure))
        for number, task in portion.repeated.items():
            counts["kept"] += 1
            answers.append(LineAnswer(number, task.id or "", cast("int", task.at), "kept"))
        if portion.repeated:
            answers.sort(key=lambda one: one.line)
        summary.created += counts["created"]
        summary.kept += counts["kept"]
        summary.replaced += counts["replaced"]
        summary.failed += len(wrong)
        if self._query.answers == "errors":
            answers = [one for one in answers if not one.confirmed]
        if wrong:
            answers += [LineAnswer(number, error=problem.fields) for number, problem in wrong.items()]
            answers.sort(key=lambda one: one.line)
        self._answer.add(_encode_lines(answers))

    def _problem(self, portion: Portion, number: int, handle: Handle | None) -> Problem | None:
        """Return the problem of a line whose id is already known, or None."""
        if handle is None or handle.outcome != "kept" or number in portion.keyed:
            return None
        if self._query.on_conflict == "reject":
            return Problem("conflict", f"a task with id {handle.id!r} exists, due {handle.due_ms} ms")
        try:
            self._call.check_changeable(handle)
        except Problem as problem:
            return problem
        return None

    async def audit(self) -> None:
        """Record how many tasks were replaced: one entry, so that a batch does not push others out of the trail."""
        if self._summary.replaced:
            await self._call.audit("task.replace", "lines of a batch", None, {"replaced": self._summary.replaced})


def _portions(lines: bytes, most: int) -> Iterator[bytes]:
    """Cut lines into portions of at most `most`."""
    if lines.count(b"\n") <= most:
        if lines:
            yield lines
        return
    at = 0
    while at < len(lines):
        end = at
        for _ in range(most):
            end = lines.find(b"\n", end) + 1
            if not end:
                end = len(lines)
                break
        yield lines[at:end]
        at = end


async def _repeats_of(call: Call) -> tuple[BatchMarks | None, Repeats | None]:
    """Return what recognizes repeated lines, if the request has an Idempotency-Key."""
    given = call.headers.get(b"idempotency-key")
    if given is None:
        return None, None
    key = checked_key(given)
    # A record apart from that of a single request with the same key: no key contains a NUL.
    place = Claim.of(call.client.store, call.key.id, f"{key}\0batch")
    marks = BatchMarks(call.client.store, place, int(call.node.config.idempotency_window_s * 1000))
    salt = blake2b(f"{call.key.id}\0{key}".encode()).digest()
    return marks, Repeats(salt, call.query, await marks.open(), marks.holds, marks.in_doubt)


ROUTE: Final = Route(
    "POST",
    "/v1/tasks:batch",
    put_batch,
    "submit",
    "Put many tasks, one JSON object a line.",
    query=BatchQuery,
    body=NewTask,
    answers={200: LineAnswer},
    problems=("too-large", "content-type", "quota", "not-confirmed", "out-of-memory"),
    streams=True,
    lines=True,
)
