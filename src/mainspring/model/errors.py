"""Every exception Mainspring raises.

MainspringError
├── InvalidInput          the caller's value is wrong; nothing was written (also a ValueError)
│   ├── InvalidCron       a schedule expression is wrong; says which field, where, and what is allowed
│   └── PayloadTooLarge   the payload has more bytes than the limit
├── NotFound              there is nothing of that name
├── Conflict              the id is taken and on_conflict="reject"
├── Ambiguous             an id without its lane is that of several tasks; `lanes` has their lanes
├── TaskFailed            the task whose result was asked for is dead or cancelled
├── SchedulerRunning      handlers and schedules are declared before the scheduler starts, or after it stopped
├── ConfigError           a setting is wrong or unknown
└── StoreError            the server, or the connection to it
    ├── Unavailable       not reachable, or the connection broke; `sent` says whether the command may have run
    ├── Refused           the server answered with an error
    │   └── OutOfMemory   maxmemory reached; `stored` says how much of the call is written
    ├── NotConfirmed      stored, but the asked durability was not reached; repeat with the same id
    ├── WrongFormat       the namespace was made with another partition count or format
    └── EmbeddedError     the embedded server cannot start or be shared
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .job import Result
    from .task import Handle


class MainspringError(Exception):
    """Root of all errors of this package."""

    stored: int = 0
    """Of a `put_many` that failed: how many of its tasks are stored all the same."""

    handles: "Sequence[Handle | None] | None" = None
    """Of a `put_many` that failed: the handles of those that are stored, None for those of which that is not known."""

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
    """There is nothing of that name."""


class Conflict(MainspringError):
    """A task with this id exists and the call asked to reject repeats."""


class Ambiguous(MainspringError):
    """The id is that of tasks in several lanes, and the call named none.

    `lanes` are those that are known, "" stands for a task without one; each can be given as `lane`.
    """

    def __init__(self, id: str, lanes: "Sequence[str]") -> None:
        named = ", ".join(f"lane {lane!r}" if lane else "no lane" for lane in lanes)
        found = f" ({named})" if named else ""
        super().__init__(f"the id {id!r} is that of several tasks{found}: name the lane, '' for the task without one")
        self.id = id
        self.lanes = tuple(lanes)


class TaskFailed(MainspringError):
    """The task whose result was asked for has not been done; `result` says how it ended."""

    def __init__(self, id: str, result: "Result") -> None:
        super().__init__(f"task {id!r} is {result.ending}: {result.reason}")
        self.result = result


class SchedulerRunning(MainspringError):
    """What is declared in code cannot change while the scheduler runs; nothing was changed."""


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
    """The server's maxmemory is reached. A task is written whole or not at all; of a call with many `stored` are."""


class NotConfirmed(StoreError):
    """The tasks are stored, but the asked durability was not confirmed in time; `handles` has them."""

    replies: "Sequence[Any] | None" = None
    """What the server answered to the write itself."""

    def of(self, handle: "Handle") -> "NotConfirmed":
        """The same of one task."""
        made = NotConfirmed(*self.args)
        made.handles = [handle]
        return made


class WrongFormat(StoreError):
    """The namespace on this server was made with another partition count or format."""


class EmbeddedError(StoreError):
    """The embedded server cannot be started or shared."""
