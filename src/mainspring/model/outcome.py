"""What a delivery came to. Sinks answer with these values; exceptions are surprises.

Handlers may return or raise `Retry` and `Dead`: that is why the two are exceptions. Nothing of ours raises them.
"""

import base64
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Final

import msgspec

from .errors import InvalidInput
from .limits import HORIZON_MS
from .texts import clean, plain, told
from .times import Delay, delay_ms


def told_bytes(name: str, value: bytes) -> dict[str, str]:
    """For JSON: as text, or in base64, under a name that says so, where it is none."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def given_bytes(name: str, told: Mapping[str, Any]) -> bytes:
    """What `told_bytes` was given."""
    packed = told.get(f"{name}_base64")
    return str(told.get(name, "")).encode() if packed is None else base64.b64decode(packed)


class Response(msgspec.Struct, frozen=True, gc=False):
    """What the target said, cut to what is worth keeping."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    """Its first bytes."""
    duration_ms: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told: dict[str, Any] = {"status": self.status, "headers": self.headers, "duration_ms": self.duration_ms}
        return told | told_bytes("body", self.body)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Response":
        headers = tuple((name, value) for name, value in told["headers"])
        return cls(told["status"], headers, given_bytes("body", told), told["duration_ms"])


@dataclass(frozen=True, slots=True)
class Done:
    """The target has the task."""

    # Not compared: a delivery that kept an answer is as done as one without, and who counts DONE counts it too.
    response: Response | None = field(default=None, compare=False)
    keep_ms: int = field(default=0, compare=False)
    """So long the response is kept with the run, by sinks that have `keeps_answers`."""


def _worded(reason: object) -> str:
    """Applications give exceptions, enums and what not for a reason."""
    if isinstance(reason, BaseException):
        return told(reason)
    return clean(plain(reason) if isinstance(reason, str) else str(reason))


def _whole_ms(after_ms: float) -> int:
    """Applications work it out of headers and clocks. No task is due beyond the horizon, whatever number was named."""
    try:
        return max(0, round(min(after_ms, HORIZON_MS)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"after_ms is {after_ms!r}; give a number of milliseconds, or after='5m'") from None


# Not frozen: Python itself sets the traceback of what is raised.
@dataclass(unsafe_hash=True)
class Retry(Exception):
    """Not delivered; try again, after `after_ms` if the target named a time, else by the retry policy.

    `Retry("busy", after="5m")` says the same as `after_ms=300_000`.
    """

    reason: str = "another attempt was asked for"
    after_ms: int | None = None
    untried: bool = False
    """The target was not even asked: this attempt does not count, and its reason is not kept as an error."""
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    """The exception behind it: rules of a retry policy may go by its type."""
    brief: str | None = field(default=None, compare=False)
    """What logs say instead of a reason that holds words of others: an answer's, an application's."""
    after: InitVar[Delay | None] = field(default=None, kw_only=True)

    def __post_init__(self, after: Delay | None) -> None:
        self.reason = _worded(self.reason)
        if after is not None:
            self.after_ms = delay_ms(after)
        elif self.after_ms is not None:
            self.after_ms = _whole_ms(self.after_ms)

    def __str__(self) -> str:
        return self.reason


@dataclass(unsafe_hash=True)
class Dead(Exception):
    """Not deliverable; keep it with the dead letters."""

    reason: str
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    brief: str | None = field(default=None, compare=False)
    disables: bool = field(default=False, compare=False, kw_only=True)
    """Said by sinks: the named target wants nothing more, and gets nothing, from any node, until it is resumed."""

    def __post_init__(self) -> None:
        self.reason = _worded(self.reason)

    def __str__(self) -> str:
        return self.reason


def as_ours(outcome: Retry | Dead) -> Retry | Dead:
    """The same, made by us: a subclass of an application may be made in its own way, without a reason or a number."""
    reason = getattr(outcome, "reason", None) or told(outcome)
    if isinstance(outcome, Retry):
        made: Retry | Dead = Retry(reason, outcome.after_ms, bool(outcome.untried))
    else:
        made = Dead(reason)
    made.response, made.error, made.brief = outcome.response, outcome.error, outcome.brief
    return made


Outcome = Done | Retry | Dead

DONE: Final = Done()

EXPIRED: Final = "expired"
"""The reason of a death by time: the task was not sent."""

EXPIRED_RUNNING: Final = "its expiry passed while it ran"
"""The same of one that a worker had begun."""

DROPPED: Final = "dropped while paused"
"""How the reason begins with which a task dies that came due in a pause which keeps nothing."""


def has_expired(reason: str) -> bool:
    """Is this the reason of a death by time?"""
    return reason in (EXPIRED, EXPIRED_RUNNING)


def was_sent(reason: str) -> bool:
    """Was the attempt made that a task was due for when it died of this? What expired or was dropped went nowhere."""
    return reason != EXPIRED and not reason.startswith(DROPPED)
