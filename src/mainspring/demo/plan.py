"""What a demo is asked for."""

from typing import Final, Literal

import msgspec

from ..model.errors import InvalidInput

Via = Literal["http", "batch", "client"]

MOST_IDS: Final = 4_000_000
"""So that a tick's time and item fit together into 64 bits."""

TOPIC: Final = "ticks"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Ticks of `ids` items at random times within the next `within_ms`, posted `via` one of three ways."""

    ids: int = 1_000_000
    within_ms: int = 600_000
    rate: float | None = None
    """Ticks a second; None is as fast as they are taken."""
    seconds: float | None = None
    """How long ticks are posted; None posts one for each item."""
    schedulers: int = 2
    via: Via = "http"
    replace: bool = False
    """A tick of an item that has one already moves it, as `POST /ticks?replace=true` does."""
    named: bool = True
    """Ticks have ids, so that one whose answer was lost can be posted again. Only a batch can do without."""
    connections: int = 64
    """Of the generator, to all schedulers together."""
    batch: int = 2_000
    """Ticks of one request, where they go in batches."""
    lease_s: float = 2.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("ids", 1, MOST_IDS),
            ("within_ms", 100, 7 * 86_400_000),
            ("schedulers", 1, 64),
            ("connections", 1, 4_096),
            ("batch", 1, 10_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidInput(f"{name} is {value}; it must lie between {low} and {high}")
        if (self.rate is not None and self.rate <= 0) or (self.seconds is not None and self.seconds <= 0):
            raise InvalidInput("rate and seconds must be more than 0")
        if self.replace and (self.via != "http" or not self.named):
            raise InvalidInput("replace goes with via http only")

    @property
    def target(self) -> str:
        return f"kafka:{TOPIC}"
