"""Bounds that every entry point checks before anything is written."""

from typing import Final

MAX_PAYLOAD_BYTES: Final = 64 * 1024
MAX_NAME_BYTES: Final = 256
"""Longest id, lane or target."""

MAX_ITEM_BYTES: Final = MAX_NAME_BYTES - 16
"""Longest item of a tick: its id is the item, "@" and the time in milliseconds."""

HORIZON_MS: Final = 10 * 366 * 24 * 3600 * 1000
"""How far ahead a task may be due: ten years."""

MAX_PENDING: Final = 10**12
MAX_PENDING_BYTES: Final = 2**50
"""The largest quota of an API key."""

MAX_ERRORS_KEPT: Final = 16
"""Errors that travel with a task through its retries; the oldest are forgotten first."""

MAX_ERROR_CHARS: Final = 500

MAX_TRACEBACK_BYTES: Final = 4 * 1024
"""Of the last attempt's traceback, which a dead letter keeps. It does not travel with a task that is tried again."""

LAST_START_MS: Final = 1 << 45
"""In the year 3084: previews begin before it, and bounds of schedules lie before it."""

LAST_SHOWN_MS: Final = 1 << 47
"""In the year 6429: runs are shown up to there. Calendars of Python end with the year 9999, and zones look ahead."""
