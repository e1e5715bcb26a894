"""Every exception Mainspring raises.

MainspringError
├── InvalidInput          the caller's value is wrong; nothing was written (also a ValueError)
│   ├── InvalidCron       a schedule expression is wrong; says which field, where, and what is allowed
│   └── PayloadTooLarge   the payload has more bytes than the limit
├── NotFound              nothing of that name exists
├── Conflict              the id is taken and on_conflict="reject"
├── Ambiguous             several tasks have the id in different lanes; `lanes` names the lanes
├── TaskFailed            the task whose result was asked for is dead or cancelled
├── SchedulerRunning      handlers and schedules are declared before the scheduler starts, or after it stopped
├── ConfigError           a setting is wrong or unknown
└── StoreError            the server or the connection failed
    ├── Unavailable       not reachable, or the connection broke; `sent` says whether the command may have run
    ├── Refused           the server answered with an error
    │   └── OutOfMemory   maxmemory reached; `stored` says how much of the call is written
    ├── NotConfirmed      stored, but the requested durability was not reached; repeat with the same id
    ├── WrongFormat       the namespace was made with another partition count or format
    └── EmbeddedError     the embedded server cannot start or be shared
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .job import Result
    from .task import Handle


class MainspringError(Exception):
    """Root of all errors of this package."""

    stored: int = 0
    """Number of tasks that a failed `put_many` has stored."""

    handles: "Sequence[Handle | None] | None" = None
    """Handles of the tasks that a failed `put_many` has stored; None where it is unknown whether the task is stored."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} ({self.stored:,} tasks of this call are stored)" if self.stored else text


class InvalidInput(MainspringError, ValueError):
    """The caller's value is wrong; the message names the field and nothing was written."""


class PayloadTooLarge(InvalidInput):
    """The payload has more bytes than the limit."""


class InvalidCron(InvalidInput):
    """A schedule expression is wrong. `field` counts from 1 (0: the expression as a whole), `position` too."""

    def __init__(
        self, expression: str, reason: str, *, field: int = 0, name: str = "", text: str = "", position: int = 1
    ):
        where = f": field {field} ({name}) {text!r} at position {position}" if field else ""
        super().__init__(f"cron {expression!r}{where}: {reason}")
        self.expression = expression
        self.reason = reason
        self.field = field
        self.name = name
        self.text = text
        self.position = position


class NotFound(MainspringError, LookupError):
    """Nothing of that name exists."""


class Conflict(MainspringError):
    """A task with this id exists and the call asked to reject repeats."""


_LANES_NAMED: Final = 10
"""Lanes that a message lists."""


class Ambiguous(MainspringError):
    """Tasks in several lanes have the id, and the call named no lane.

    `lanes` are the known ones; "" means the task without a lane. Each can be given as `lane`.
    """

    def __init__(self, id: str, lanes: "Sequence[str]") -> None:
        named = ", ".join(f"lane {lane!r}" if lane else "no lane" for lane in lanes[:_LANES_NAMED])
        named += f" and {len(lanes) - _LANES_NAMED} more" if len(lanes) > _LANES_NAMED else ""
        found = f" ({named})" if named else ""
        super().__init__(f"several tasks have the id {id!r}{found}: name the lane, '' for the task without one")
        self.id = id
        self.lanes = tuple(lanes)


class TaskFailed(MainspringError):
    """The task whose result was requested is dead or cancelled; `result` says how it ended."""

    def __init__(self, id: str, result: "Result") -> None:
        super().__init__(f"task {id!r} is {result.ending}: {result.reason}")
        self.result = result


class SchedulerRunning(MainspringError):
    """Handlers and schedules cannot be declared while the scheduler runs; nothing was changed."""


class ConfigError(MainspringError):
    """A setting is wrong, unknown, or contradicts another."""


class StoreError(MainspringError):
    """The server, or the connection to it, failed."""


class Unavailable(StoreError):
    """The server could not be reached, or the connection broke before the reply.

    `sent` is True when the command may have been executed: only an idempotent repeat is safe then.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(StoreError):
    """The server answered with an error; the command did nothing unless the message says otherwise."""


class OutOfMemory(Refused):
    """The server's maxmemory is reached. Each task is written whole or not at all; `stored` counts those written."""


class NotConfirmed(StoreError):
    """The tasks are stored, but the requested durability was not confirmed in time; `handles` has them."""

    replies: "Sequence[Any] | None" = None
    """The server's replies to the write itself."""

    def of(self, handle: "Handle") -> "NotConfirmed":
        """Return the same error for one task."""
        made = NotConfirmed(*self.args)
        made.handles = [handle]
        return made


class WrongFormat(StoreError):
    """The namespace on this server was made with another partition count or format."""


class EmbeddedError(StoreError):
    """The embedded server cannot be started or shared."""
