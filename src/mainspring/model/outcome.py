"""What a delivery came to. Sinks answer with these values; exceptions are surprises."""

from dataclasses import dataclass, field
from typing import Final

import msgspec


class Response(msgspec.Struct, frozen=True, gc=False):
    """What the target said, cut to what is worth keeping."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    """Its first bytes."""
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The target has the task."""

    # Not compared: a delivery that kept an answer is as done as one without, and who counts DONE counts it too.
    response: Response | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Retry:
    """Not delivered; try again, after `after_ms` if the target named a time, else by the retry policy."""

    reason: str
    after_ms: int | None = None
    untried: bool = False
    """The target was not even asked: this attempt does not count, and its reason is not kept as an error."""
    response: Response | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Dead:
    """Not deliverable; keep it with the dead letters."""

    reason: str
    response: Response | None = field(default=None, compare=False)


Outcome = Done | Retry | Dead

DONE: Final = Done()
