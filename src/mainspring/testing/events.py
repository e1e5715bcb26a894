"""What happened, as a recorder writes it down: one event a line, in any order.

Times are the server's clock in microseconds: of a begin or a write the moment the server did it, of an answer to a
caller the moment it was received. One acceptance of a task is named by its idempotency key; a reschedule or a replace
is a new one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from ..model.ids import idempotency_key

Ending = Literal["done", "retry", "dead"]
UNSURE: Final = "unsure"
"""Answer of a cancel or replace whose reply was lost: the task may have ended by it."""


class Accepted(msgspec.Struct, frozen=True, gc=False, tag="accepted", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    due_ms: int
    lane: str | None = None
    sure: bool = True
    """False: the put was never answered, so it may have happened."""
    instead: str | None = None
    """Key of the acceptance whose place this one takes: a reschedule or a replace."""
    expires_ms: int | None = None
    twice: bool = False
    """An old copy of its put may have reached the server long after the answer: no fault of an owner."""
    level: str = "server"
    """The durability that was promised."""
    asked_us: int = 0
    """When it was asked for, if known: it took effect between then and the answer."""


class Begun(msgspec.Struct, frozen=True, gc=False, tag="begun", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    attempt: int
    partition: int
    token: str
    node: str = ""
    sent_us: int = 0
    """When it was handed to its target, by the node's reckoning of the server's clock; 0 where nobody looked."""
    queued_us: int = 0
    """Of a run of a worker: when it came into its queue. What was put later has its turn later."""


class Finished(msgspec.Struct, frozen=True, gc=False, tag="finished", tag_field="event"):
    """With an empty token: the target has it, which says nothing of the server."""

    at_us: int
    task: str
    key: str
    attempt: int
    ending: Ending
    partition: int
    token: str


class Cancelled(msgspec.Struct, frozen=True, gc=False, tag="cancelled", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    answer: str
    asked_us: int = 0


class Wrote(msgspec.Struct, frozen=True, gc=False, tag="wrote", tag_field="event", omit_defaults=True):
    """A write of an owner that took effect on the server."""

    at_us: int
    partition: int
    token: str
    what: str
    settled: int = 0
    """Deliveries that are under way no more: finished, or waiting for their retry."""


class Fault(msgspec.Struct, frozen=True, gc=False, tag="fault", tag_field="event", omit_defaults=True):
    """Something failed from `at_us` to `until_us`: a lost reply, a killed node, a server that was away."""

    at_us: int
    until_us: int
    what: str = ""
    node: str | None = None
    """Whom it hit; None: everybody."""
    loses: bool = False
    """The servers forgot writes that they had answered in this time, except those confirmed by replicas."""


class Healed(msgspec.Struct, frozen=True, gc=False, tag="healed", tag_field="event"):
    """From here on nothing is broken: whatever is due has to be delivered within this time."""

    at_us: int
    within_us: int


class Stall(msgspec.Struct, frozen=True, gc=False, tag="stall", tag_field="event"):
    """The recorder got no time in this span, as it measured itself: what was delivered could not be taken."""

    at_us: int
    until_us: int


class Left(msgspec.Struct, frozen=True, gc=False, tag="left", tag_field="event"):
    """How the store describes a task when all is over."""

    at_us: int
    task: str
    state: str


Event = Accepted | Begun | Finished | Cancelled | Wrote | Fault | Healed | Stall | Left

encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Event).decode


class History:
    """Events of one namespace, in any order."""

    def __init__(self, namespace: str = "main", events: Iterable[Event] = ()) -> None:
        self.namespace = namespace
        self.events: list[Event] = list(events)

    def key(self, task: str, due_ms: int) -> str:
        return idempotency_key(self.namespace, task, due_ms)

    def accepted(self, task: str, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True) -> None:
        self.events.append(Accepted(at_us, task, self.key(task, due_ms), due_ms, lane, sure))

    def replaced(
        self, task: str, old_due_ms: int, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True
    ) -> None:
        """The task stands at another time, or another one has its id."""
        old, new = self.key(task, old_due_ms), self.key(task, due_ms)
        self.events.append(Accepted(at_us, task, new, due_ms, lane, sure, old))

    rescheduled = replaced

    def begun(
        self, task: str, key: str, attempt: int, at_us: int, *, partition: int, token: str, node: str = ""
    ) -> None:
        self.events.append(Begun(at_us, task, key, attempt, partition, token, node))

    def finished(
        self, task: str, key: str, attempt: int, ending: Ending, at_us: int, *, partition: int, token: str
    ) -> None:
        self.events.append(Finished(at_us, task, key, attempt, ending, partition, token))

    def cancelled(self, task: str, due_ms: int, answer: str, at_us: int) -> None:
        self.events.append(Cancelled(at_us, task, self.key(task, due_ms), answer))

    def wrote(self, at_us: int, what: str, *, partition: int, token: str, settled: int = 0) -> None:
        self.events.append(Wrote(at_us, partition, token, what, settled))

    def fault(
        self, start_us: int, end_us: int, what: str = "", *, node: str | None = None, loses: bool = False
    ) -> None:
        self.events.append(Fault(start_us, end_us, what, node, loses))

    def healed(self, at_us: int, within_us: int) -> None:
        self.events.append(Healed(at_us, within_us))

    def stalled(self, start_us: int, end_us: int) -> None:
        self.events.append(Stall(start_us, end_us))

    def left(self, task: str, state: str, at_us: int) -> None:
        """The state at the end, as the store tells it."""
        self.events.append(Left(at_us, task, state))

    # -- several processes ---------------------------------------------------------------------------------

    def merge(self, *others: "History") -> Self:
        for other in others:
            self.events += other.events
        return self

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(encode(event) + b"\n" for event in self.events)

    @classmethod
    def load(cls, *paths: Path, namespace: str = "main") -> "History":
        history = cls(namespace)
        for path in paths:
            with path.open("rb") as file:
                history.events += map(_decode, file)
        return history
