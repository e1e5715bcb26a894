"""Times as people write them, turned into epoch milliseconds."""

import math
import re
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, TypeGuard, cast

from .errors import InvalidInput
from .limits import HORIZON_MS

When = datetime | int | float | str
"""An instant: an aware datetime, epoch milliseconds (a number or its digits), or an ISO 8601 text with an offset."""

Delay = timedelta | str
"""A duration: a timedelta, "30m", "1h30m", "250ms", or ISO 8601 such as "PT10M"."""

EARLIEST_MS: Final = 10**11
"""In the year 1973. A smaller number is most likely in seconds (up to the year 5138)."""
LATEST_MS: Final = 3 * 10**14
"""Later than calendars go. A larger number is most likely in microseconds (from the year 1979 on)."""

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_TEXT_UNITS: Final = (("h", 3_600_000), ("m", 60_000), ("s", 1000))
_SHORT: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_DATE: Final = re.compile(r"\d{4}-|\d{8}T|\d{8,22}(?:\.\d*)?$", re.ASCII)
"""How ISO 8601 times begin, and epoch times; delays never do."""
_NUMBER: Final = re.compile(r"(?!\d{8}$)\d{1,22}(\.\d{0,22})?", re.ASCII)
"""Epoch milliseconds as text. Eight digits are a date."""
_ISO: Final = re.compile(
    r"P(?:(?P<w>\d+)W)?(?:(?P<d>\d+)D)?(?:T(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.IGNORECASE | re.ASCII,
)


def delay_ms(delay: Delay, *, field: str = "after") -> int:
    """Return a delay in milliseconds, fractions rounded up; refuse negative ones."""
    if isinstance(delay, timedelta):
        ms = math.ceil(delay / timedelta(milliseconds=1))
    elif isinstance(delay, str):
        ms = _text_ms(delay.strip(), field)
    else:
        raise InvalidInput(f"{field} is of type {type(delay).__name__}; give a timedelta or a text such as '30m'")
    if ms < 0:
        raise InvalidInput(f"{field} is negative ({delay}); a delay counts forward from now")
    if ms > HORIZON_MS:
        raise InvalidInput(f"{field} is longer than ten years ({_cut(str(delay))})")
    return ms


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def _text_ms(text: str, field: str) -> int:
    if text[:1] in ("P", "p"):
        match = _ISO.fullmatch(text)
        if match and any(match.groupdict().values()):
            return _rounded([(n, unit) for unit, n in match.groupdict().items() if n])
    else:
        pieces: list[tuple[str, str]] = []
        end = 0
        while piece := _SHORT.match(text, end):  # match, not search: searching a long run of digits is quadratic
            pieces.append((piece[1], piece[2]))
            end = piece.end()
        if end == len(text) and end:
            return _rounded(pieces)
    raise InvalidInput(
        f"{field}: {_cut(text)!r} is not a delay; write '30m', '1h30m', '250ms' or ISO 8601 such as 'PT10M'"
        " (no months or years: their length varies)"
    )


def _rounded(pieces: list[tuple[str, str]]) -> int:
    """Return milliseconds, computed in decimals.

    As a float, 8.3 minutes is slightly more than 498,000 ms and would be rounded up by one.
    """
    ms = sum(Decimal(number) * _UNIT_MS[unit] for number, unit in pieces)
    return math.ceil(min(ms, HORIZON_MS + 1))  # a number may have hundreds of digits


def is_delay(value: When | Delay) -> TypeGuard[Delay]:
    """Return whether a value is a delay such as `2h`, where a time such as `2030-01-01T09:00:00Z` is also allowed."""
    return isinstance(value, timedelta) or (isinstance(value, str) and not _DATE.match(value))


def expiry_ms(expires: When | Delay, due_ms: int) -> int:
    """Return until when a task may be delivered, from a time or a delay after the due time."""
    if is_delay(expires):
        found_ms = due_ms + delay_ms(expires, field="expires")
    else:
        found_ms = instant_ms(cast("When", expires), field="expires")
    if found_ms < due_ms:
        raise InvalidInput("expires lies before the due time: the task could never be delivered")
    check_horizon(found_ms, due_ms, field="expires")
    return found_ms


def timeout_ms(timeout: Delay) -> int:
    """Return the time limit of one attempt in milliseconds."""
    found_ms = delay_ms(timeout, field="timeout")
    if found_ms == 0:
        raise InvalidInput(f"timeout is {timeout!r}; leave it out for none")
    return found_ms


def delay_text(ms: int) -> str:
    """Return a duration in its largest unit without remainder, as `delay_ms` reads it."""
    return next((f"{ms // size}{unit}" for unit, size in _TEXT_UNITS if ms % size == 0), f"{ms}ms")


def in_seconds(ms: int) -> str:
    """Return a span for sums: all in seconds, so that a reader can add them up, but what is shorter than one."""
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:,.3f}".rstrip("0").rstrip(".") + " s"


def read_iso(text: str) -> datetime:
    """Return the time in an ISO 8601 text; raise ValueError for any other text."""
    if "\0" in text or _NUMBER.fullmatch(text):
        raise ValueError(text)  # Python would ignore what follows a zero byte, and read 1712010100930 as a date of 1712
    return datetime.fromisoformat(text)


def instant_ms(when: When, *, field: str = "at") -> int:
    """Return an instant in epoch milliseconds, rounded up so that nothing fires early."""
    if isinstance(when, bool):
        raise InvalidInput(f"{field} is a bool; give an aware datetime or epoch milliseconds")
    if isinstance(when, (int, float)):
        return _number_ms(when, field)
    if isinstance(when, datetime):
        if when.utcoffset() is None:
            raise InvalidInput(
                f"{field} is a naive datetime, without a zone ({when.isoformat()}); add an offset such as Z or +01:00,"
                " in Python e.g. tzinfo=UTC"
            )
        return math.ceil((when - _EPOCH) / timedelta(milliseconds=1))
    if isinstance(when, str):
        if number := _NUMBER.fullmatch(when):
            return _number_ms(float(when) if number[1] else int(when), field)
        try:
            return instant_ms(read_iso(when), field=field)
        except InvalidInput:
            raise
        except ValueError:
            raise InvalidInput(
                f"{field}: {_cut(when)!r} is not an ISO 8601 time such as 2030-01-01T09:00:00Z"
            ) from None
    raise InvalidInput(f"{field} is of type {type(when).__name__}; give an aware datetime or epoch milliseconds")


_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def _number_ms(number: float, field: str) -> int:
    try:
        at_ms = math.ceil(number)
    except (OverflowError, ValueError):  # infinite, or not a number
        raise InvalidInput(f"{field} is {number}; give a finite number of milliseconds") from None
    _check_unit(at_ms, field)
    return at_ms


def _check_unit(at_ms: int, field: str) -> None:
    """Refuse a number that is most likely in another unit: seconds taken for milliseconds would fire at once."""
    if at_ms < 0 or EARLIEST_MS <= at_ms < LATEST_MS:
        return
    unit = "seconds" if at_ms < EARLIEST_MS else "microseconds" if at_ms < 1000 * LATEST_MS else "nanoseconds"
    raise InvalidInput(f"{field} is {_cut(str(at_ms))}, which looks like {unit}; give milliseconds, or a datetime")


def check_horizon(due_ms: int, now_ms: int, *, field: str = "at") -> None:
    """Refuse a time before 1970 or beyond the horizon: almost always another unit by mistake."""
    if due_ms < 0:
        raise InvalidInput(f"{field} is before 1970 ({_cut(str(due_ms))} ms)")
    _check_unit(due_ms, field)
    if due_ms > now_ms + HORIZON_MS:
        raise InvalidInput(f"{field} is more than ten years ahead ({due_ms} ms)")
