"""What an answer means: done, again later, or never."""

import random
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import islice
from typing import Final

from ..model.outcome import Dead, Done, Outcome, Response, Retry
from ..model.texts import clean

LONGEST_WAIT_MS: Final = 3_600_000
"""A target that asks for more patience than an hour is asked again after an hour."""

SPREAD: Final = 0.1
"""Those that were told the same time come back within a tenth of it more, not all at once."""

_AGAIN: Final = frozenset({408, 425, 429})
_MOVED: Final = frozenset({301, 308})
_EXCERPT_CHARS: Final = 200
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ufffd]+")
MAX_HEADERS: Final = 50
MAX_HEADER_CHARS: Final = 500


def outcome_of(response: Response, now_s: float, keep_ms: int = 0) -> Outcome:
    """Judge an answer by its status. Of a success it is kept for `keep_ms`."""
    status = response.status
    if 200 <= status < 300:
        return Done(response, keep_ms)
    brief, reason = _reason(response)
    if status in _AGAIN or not 300 <= status < 500 or (300 <= status < 400 and status not in _MOVED):
        return Retry(reason, retry_after_ms(header(response, "retry-after"), now_s), response=response, brief=brief)
    return Dead(reason, response=response, brief=brief)


def header(response: Response, name: str) -> str | None:
    return next((value for key, value in response.headers if key.lower() == name), None)


def kept_headers(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """As many and as long as is reasonable: a target must not fill our memory."""
    return tuple(
        [
            (clean(name[:MAX_HEADER_CHARS]), clean(value[:MAX_HEADER_CHARS]))
            for name, value in islice(headers, MAX_HEADERS)
        ]
    )


def retry_after_ms(value: str | None, now_s: float) -> int | None:
    """Seconds, or a date. None where nothing usable is said: then the policy decides."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        wait_ms = min(int(text[:9]) * 1000, LONGEST_WAIT_MS)
    else:
        try:
            when = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        wait_ms = min(round(((when - datetime.fromtimestamp(now_s, UTC)).total_seconds()) * 1000), LONGEST_WAIT_MS)
    return wait_ms + int(wait_ms * random.uniform(0, SPREAD)) if wait_ms > 0 else None


def _reason(response: Response) -> tuple[str, str]:
    """For the log, and for the letter: that one has what the target wrote, which may be what it was sent."""
    try:
        text = f"HTTP {response.status} {HTTPStatus(response.status).phrase}"
    except ValueError:
        text = f"HTTP {response.status}"
    if 300 <= response.status < 400:
        where = _plain(header(response, "location") or "nowhere")
        rule = "redirects are never followed; give the final address"
        return f"{text}: {rule}", f"{text} to {where}: {rule}"
    excerpt = _plain(response.body.decode("utf-8", "replace"))
    return text, f"{text}: {excerpt}" if excerpt else text


def _plain(text: str) -> str:
    """One line, fit for a log."""
    line = _BLANK.sub(" ", text[: 4 * _EXCERPT_CHARS]).strip()
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"
