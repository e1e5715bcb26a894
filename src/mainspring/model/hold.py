"""Held work: what may not go out now, and why."""

from typing import Final

import msgspec

LANE: Final = "lane:"
"""Before the name of a lane: the key of the hold under which its tasks wait, whatever holds them up."""

CATCH_UP: Final = "catch-up"
"""The key of the hold of what is overdue and has to wait for its turn."""

BREAKER: Final = "breaker"
"""The code of a hold whose receiver fails, or failed until a moment ago."""

RETRY: Final = "retry"
"""A lane waits for the next attempt of its head."""

PARKED: Final = "parked"
"""A lane stands still until somebody acts."""


class HoldRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a partition keeps of one of its holds, under the name of its slice."""

    key: str
    """`lane:<lane>`, or what the gate calls it that holds these tasks up."""
    cause: str = ""
    """`retry`, `parked`, or what the gate calls it."""
    since_ms: int = 0
    reason: str = ""
    who: str = ""
    until_ms: int | None = None
    """When it ends by itself."""
    ended_ms: int = 0
    """Its slice is gone since then; the record is kept as long as the ids of its tasks."""
    code: str = ""
    """What holds these tasks up, in the words of `explain`: `breaker`, `rate-limited` and the like."""

    @property
    def lane(self) -> str | None:
        return self.key.removeprefix(LANE) if self.key.startswith(LANE) else None

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "HoldRecord | None":
        """None when it cannot be read: the slice's rows say all that is needed to go on."""
        try:
            return _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(HoldRecord).decode
