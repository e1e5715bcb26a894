"""How a run ended, as it is kept for who waits for it."""

from typing import Any, Final, Literal

import msgspec

from .errors import InvalidInput
from .limits import MAX_PAYLOAD_BYTES

Ending = Literal["done", "dead", "cancelled"]


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command left behind. Of long output the end is kept."""

    exit_code: int | None = None
    """None: it never ran. Negative: the number of the signal that ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    """All that was written, also what was not kept."""
    stderr_bytes: int = 0


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a task: what its last run came to."""

    ending: Ending
    value: Any = None
    reason: str = ""
    """Why it is dead, or why the value could not be kept."""
    attempt: int = 1
    worker: str = ""
    started_ms: int = 0
    ended_ms: int = 0
    log: tuple[str, ...] = ()
    output: Output | None = None

    def encode(self) -> bytes:
        """Never fails: a value that cannot be kept is left out, with the reason in its place."""
        try:
            data = _encode(self)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return self._without(f"the handler's answer cannot be kept: {error}")
        if len(data) > MAX_RESULT_BYTES and self.value is not None:
            return self._without(f"the handler's answer is too large to be kept: {len(data)} bytes")
        return data

    def _without(self, reason: str) -> bytes:
        return _encode(msgspec.structs.replace(self, value=None, reason=reason))


MAX_RESULT_BYTES: Final = 4 * MAX_PAYLOAD_BYTES
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Result).decode


def decode_result(data: bytes) -> Result:
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the stored result cannot be read: {error}") from None
