"""Payloads as they are stored and sent: JSON, or the caller's own bytes."""

from math import isfinite
from typing import Any, Final

import msgspec

from .errors import InvalidInput
from .limits import MAX_PAYLOAD_BYTES

NULL: Final = b"null"
"""What the encoder writes for numbers that JSON has no word for. Where it does not stand there are none."""

to_json: Final = msgspec.json.Encoder().encode


def encode_payload(payload: Any, limit: int = MAX_PAYLOAD_BYTES) -> tuple[bytes, bool]:
    """The bytes to store and whether they are the caller's own."""
    raw = isinstance(payload, (bytes, bytearray, memoryview))
    try:
        data = bytes(payload) if raw else to_json(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"payload cannot be written as JSON: {error}; give JSON values or bytes") from None
    if len(data) > limit:
        raise InvalidInput(f"payload has {len(data)} bytes; at most {limit} are allowed")
    if not raw and NULL in data:
        _check_numbers(payload)
    return data, raw


def _check_numbers(payload: Any) -> None:
    """Refuse a payload with NaN or an infinity in it: it would arrive as another value than was given."""
    try:
        rest = [msgspec.to_builtins(payload)]
    except TypeError:
        return  # it holds JSON that is written already (msgspec.Raw)
    while rest:
        match rest.pop():
            case float() as number if not isfinite(number):
                raise InvalidInput(f"payload holds {number}, which JSON cannot say; give a number, a text or None")
            case dict() as table:
                rest += table.values()
            case list() | tuple() as row:
                rest += row
