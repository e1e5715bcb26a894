"""Payloads from the command line."""

import os
import sys
from typing import Final

import msgspec

from mainspring.model.errors import InvalidInput

STANDARD_INPUT: Final = "-"


def json_of(text: str, spoken: str) -> bytes:
    """JSON as it was written: no number changes its spelling."""
    data = (sys.stdin.buffer.read() if text == STANDARD_INPUT else os.fsencode(text)).strip()
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{spoken} is not JSON ({error}); a plain text needs quotes: '\"text\"'") from None
    return data
