"""Lanes that stand still, as people and programs see them."""

from typing import Literal

import msgspec

LaneState = Literal["retrying", "parked", "held", "returning", "flowing"]
"""`retrying`: waits for the next attempt of its head. `parked`: stands still until somebody acts. `held`: a pause or a
breaker holds it up. `returning`: it goes on, and what was held comes back. `flowing`: none of these."""


class LaneInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that say nothing about this lane are None."""

    lane: str
    state: LaneState
    partition: int
    since_ms: int | None = None
    """Since when it stands still."""
    behind: int | None = 0
    """Tasks that were moved aside and wait in the lane's hold slice. None where nothing was: behind a head that is
    tried again soon a few may wait where they were put, and these are not counted."""
    head_id: str | None = None
    """The failed task it waits for."""
    head_state: str | None = None
    attempts: int | None = None
    """How often the head was tried."""
    error: str | None = None
    """What it said the last time."""
    next_ms: int | None = None
    """When it is tried again."""
    cause: str | None = None
    """Of a held lane: what holds it up."""
    reason: str | None = None
    who: str | None = None
    until_ms: int | None = None


LaneAnswer = Literal["ok", "too late", "no head", "gone"]
"""`no head`: the lane waits for no failed task. `too late`: it is being delivered now. `gone`: it is over."""
