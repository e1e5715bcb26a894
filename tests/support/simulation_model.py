"""What a scheduler does, in plain Python: the truth that the real store is compared with.

A task is *certain* while every call that touched it was answered. After a lost reply it is not: what the
server holds then decides among the outcomes that were possible, and any other one is a flaw.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mainspring.model.delivery import Dead, Done, Outcome, Retry
from mainspring.model.ids import idempotency_key
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import OnConflict

ModelState = Literal["pending", "fired", "done", "dead", "cancelled", "replaced", "absent"]
OPEN = ("pending", "fired")

SURE: dict[str, frozenset[str]] = {
    "pending": frozenset({"pending"}),
    "fired": frozenset({"fired"}),
    "done": frozenset({"done", "finished", "unknown"}),
    "dead": frozenset({"dead"}),
    "cancelled": frozenset({"cancelled", "finished", "unknown"}),
    "replaced": frozenset({"replaced", "finished", "unknown"}),
    "absent": frozenset({"unknown"}),
}
"""What `get` may answer for a task: finished places are dropped, and ids are forgotten after their window."""


class Row:
    """An entry on the server that is neither done nor cancelled."""

    __slots__ = ("attempt", "due_ms", "fired", "idh", "partition")

    def __init__(self, partition: int, idh: bytes, due_ms: int, attempt: int, fired: bool) -> None:
        self.partition, self.idh = partition, idh
        self.due_ms, self.attempt, self.fired = due_ms, attempt, fired

    def __repr__(self) -> str:
        return f"<{'fired' if self.fired else 'pending'} due {self.due_ms} attempt {self.attempt}>"


@dataclass(slots=True)
class Known:
    """One accepted task (or one that may have been: `absent` is among its outcomes)."""

    n: int
    id: str | None
    lane: str | None
    due_ms: int
    original_ms: int
    handles: list[str] = field(default_factory=list)
    state: ModelState = "pending"
    attempt: int = 1
    else_: set[ModelState] = field(default_factory=set)
    """States it may be in instead, because a reply was lost. Empty when it is certain."""
    moves_to: int | None = None
    """A reschedule to this time may have happened."""
    last: Outcome | None = None
    """How the last delivery ended, until the server is seen to know it."""
    retries_at: set[int] = field(default_factory=set)
    """When the next attempt may be due: one time for every delivery of this attempt that asked for it."""
    may_repeat: bool = False
    """Under way when something failed: it may be delivered again."""
    copies: bool = False
    """The reply to its put was lost, so it may be in its slice twice."""
    moved: bool = False
    late: bool = False
    """Overdue when it was put (or moved): its place is that moment, not its due time."""
    deliveries: int = 0

    @property
    def certain(self) -> bool:
        return not self.else_ and self.moves_to is None and self.state != "fired"

    @property
    def open(self) -> bool:
        return self.state in OPEN

    def unsure(self, *instead: ModelState) -> None:
        self.else_ |= set(instead)


class Model:
    """All tasks, the lanes they share, and the rules of docs/internals/protocol.md in their plainest form."""

    def __init__(self, namespace: str, retry: RetryPolicy, *, dedupe_ms: int) -> None:
        self.namespace = namespace
        self.retry = retry
        self.dedupe_ms = dedupe_ms
        self.tasks: dict[int, Known] = {}
        self.by_id: dict[str, Known] = {}
        self.count = 0
        self.paused: set[str | None] = set()
        """Lanes that are paused; None is everything."""
        self.hears = False
        """The node that delivers now knows the pauses."""

    def next_n(self) -> int:
        self.count += 1
        return self.count

    def accept(self, task: Known) -> None:
        self.tasks[task.n] = task
        if task.id is not None:
            self.by_id[task.id] = task

    def open(self) -> list[Known]:
        return [task for task in self.tasks.values() if task.open]

    def pause(self, lane: str | None) -> None:
        self.paused.add(lane)

    def is_paused(self, task: Known) -> bool:
        return None in self.paused or (task.lane is not None and task.lane in self.paused)

    # -- ids that are taken ----------------------------------------------------------------------------

    def answers_to(self, task: Known, on_conflict: OnConflict, now_ms: int) -> set[str]:
        """Return the possible answers to a put of this task: created, kept, replaced or conflict."""
        assert task.id is not None
        current = self.by_id.get(task.id)
        if current is None or current.state in ("absent", "cancelled"):
            return {"created"}
        if current.state in ("done", "dead"):
            # The mark stays for the window after the end of the slice, which is a second or an hour wide.
            if now_ms > current.due_ms + self.dedupe_ms + 3_602_000:
                return {"created"}
            fresh = {"created"} if now_ms > current.due_ms + self.dedupe_ms else set()
            return fresh | self._over(on_conflict)
        if on_conflict == "reject":
            return {"conflict"}
        if on_conflict == "replace" or (
            on_conflict == "earliest" and current.state == "pending" and task.due_ms < current.due_ms
        ):
            return {"replaced" if current.state == "pending" else "created"}
        return {"kept"}

    @staticmethod
    def _over(on_conflict: OnConflict) -> set[str]:
        answers = {"replace": "created", "reject": "conflict"}
        return {answers.get(on_conflict, "kept")}

    # -- deliveries --------------------------------------------------------------------------------------

    def deliver(self, n: int, key: str, attempt: int, now_ms: int, outcome: Outcome, idh: bytes) -> None:
        """A sink got this task: was it its time, its turn, its key? Then take over how it ended."""
        task = self.tasks.get(n)
        assert task is not None, f"phantom: task {n} was never put"
        assert task.state != "cancelled" or task.else_, f"task {n} was delivered after 'cancelled'"
        assert task.state != "replaced" or task.else_, f"task {n} was delivered after it was replaced"
        assert task.state not in ("done", "dead"), f"task {n} was delivered again after it was {task.state}"
        held = self.hears and self.is_paused(task) and task.state == "pending" and task.certain
        assert not held, f"task {n} was delivered although it is paused"
        repeat = task.last is not None
        assert not repeat or task.may_repeat, f"task {n} was delivered twice and nothing had failed"
        if task.moves_to is not None and now_ms >= task.moves_to and key == self._key(task, idh, task.moves_to):
            self._moved(task)
        assert now_ms >= task.due_ms, f"task {n} is early by {task.due_ms - now_ms} ms"
        assert key == self._key(task, idh, task.original_ms), f"task {n} has key {key}"
        assert attempt == task.attempt, f"task {n}: attempt {attempt} instead of {task.attempt}"
        if not repeat:
            self._check_lane(task)
        task.deliveries += 1
        task.else_.clear()
        self._settle(task, outcome, now_ms)

    def _key(self, task: Known, idh: bytes, original_ms: int) -> str:
        return idempotency_key(self.namespace, task.id or idh.hex(), original_ms, task.lane)

    def _check_lane(self, task: Known) -> None:
        if task.lane is None:
            return
        for other in self.tasks.values():
            if other is task or other.lane != task.lane or other.else_ or other.moves_to is not None:
                continue
            if other.late and other.attempt == 1:
                continue  # the place of overdue tasks is the moment of their put, in the order they came
            waits = other.state == "pending" or (other.state == "fired" and other.last is None)
            assert not (waits and other.attempt > 1), (
                f"task {task.n} overtook task {other.n} of its lane, which waits for its next attempt"
            )
            # The head of a lane that failed is still its head, whenever its next attempt is due.
            assert not (waits and other.due_ms < task.due_ms and task.attempt == 1), (
                f"task {task.n} (due {task.due_ms}) overtook task {other.n} (due {other.due_ms}) of its lane"
            )

    def _settle(self, task: Known, outcome: Outcome, now_ms: int) -> None:
        task.state, task.last, task.moves_to = "fired", outcome, None
        wait_ms = self.wait_ms(task.attempt, outcome)
        if wait_ms is not None:
            task.retries_at.add(now_ms + wait_ms)

    def wait_ms(self, attempt: int, outcome: Outcome) -> int | None:
        """How long until the next attempt; None when there is none."""
        match outcome:
            case Retry(after_ms=after_ms):
                wait_ms = self.retry.wait_ms(attempt)
                return wait_ms if wait_ms is None or after_ms is None else after_ms
            case Done() | Dead():
                return None

    # -- what the server holds ----------------------------------------------------------------------------

    def resolve(self, rows: dict[int, list[Row]], dead: set[bytes], idh_of: dict[int, bytes]) -> None:
        """Compare with every open entry; where a reply was lost, learn what happened."""
        for n in rows:
            assert n in self.tasks, f"the server holds task {n}, which was never put"
        for task in self.tasks.values():
            self._resolve(task, rows.get(task.n, []))
            if task.state == "dead" and task.n in idh_of:
                assert idh_of[task.n] in dead, f"task {task.n} died without a dead letter"

    def _resolve(self, task: Known, rows: list[Row]) -> None:
        if rows and not task.copies:
            assert len(rows) == 1, f"task {task.n} stands twice: {rows}"
        if rows:
            # If there are several copies, take the one that got furthest.
            self._stands(task, max(rows, key=lambda row: (row.attempt, row.fired)))
        elif task.open:
            self._gone(task)
        elif "pending" in task.else_:
            task.else_.clear()

    def _stands(self, task: Known, row: Row) -> None:
        what = f"task {task.n} ({task.state}, attempt {task.attempt}, due {task.due_ms}): {row}"
        if not task.open:
            assert "pending" in task.else_ or task.copies, f"back from the end: {what}"
            self._rise(task, row)
        if task.moves_to is not None and row.due_ms == task.moves_to:
            self._moved(task)
        task.moves_to = None
        if task.last is not None and row.attempt == task.attempt + 1:
            assert row.due_ms in task.retries_at, f"a next attempt that nobody asked for: {what}"
            task.attempt, task.due_ms, task.last = row.attempt, row.due_ms, None
            task.retries_at.clear()
            task.may_repeat = False
        assert (row.attempt, row.due_ms) == (task.attempt, task.due_ms), f"it differs: {what}"
        if not row.fired:
            assert task.last is None or task.copies, f"delivered, but the server does not know: {what}"
        task.state = "fired" if row.fired else "pending"
        task.else_.clear()

    @staticmethod
    def _rise(task: Known, row: Row) -> None:
        """Put once more by a late duplicate of its put, which looks like a new request with its id."""
        task.due_ms = task.original_ms = row.due_ms
        task.attempt, task.last, task.may_repeat = 1, None, False
        task.retries_at.clear()

    def _gone(self, task: Known) -> None:
        """No open entry is left: finished by its last delivery, or by a call whose reply was lost."""
        task.moves_to = None
        match task.last:
            case Done():
                task.state = "done"
            case Dead():
                task.state = "dead"
            case Retry():
                assert self.wait_ms(task.attempt, task.last) is None, f"lost: task {task.n}, before its retry"
                task.state = "dead"
            case None:
                assert task.else_ - {"pending"}, f"lost: task {task.n} ({task.state}, due {task.due_ms})"
                task.state = next(iter(task.else_ - {"pending"}))
        task.else_.clear()
        task.last = None

    def _moved(self, task: Known) -> None:
        assert task.moves_to is not None
        self.move(task, task.moves_to)

    @staticmethod
    def move(task: Known, due_ms: int) -> None:
        """Reschedule. A task that was tried already keeps its key, and its lane waits for it."""
        task.due_ms, task.moves_to, task.moved = due_ms, None, True
        if task.attempt == 1:
            task.original_ms = due_ms

    # -- at the end of a turn -------------------------------------------------------------------------------

    def overdue(self, now_ms: int) -> Iterable[Known]:
        """Return what a turn without faults must not leave behind."""
        held = {task.lane for task in self.tasks.values() if task.open and (task.attempt > 1 or task.moved)} - {None}
        for task in self.tasks.values():
            if self.is_paused(task):
                continue
            if task.open and task.due_ms <= now_ms and (task.lane not in held or task.attempt > 1):
                yield task
