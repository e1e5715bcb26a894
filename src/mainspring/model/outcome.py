"""What a delivery came to. Sinks answer with these values; exceptions are surprises."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Done:
    """The target has the task."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Not delivered; try again, after `after_ms` if the target named a time, else by the retry policy."""

    reason: str
    after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """Not deliverable; keep it with the dead letters."""

    reason: str


Outcome = Done | Retry | Dead

DONE: Final = Done()
