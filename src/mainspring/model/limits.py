"""Bounds that every entry point checks before anything is written."""

from typing import Final

MAX_PAYLOAD_BYTES: Final = 64 * 1024
MAX_NAME_BYTES: Final = 256
"""Longest id, lane or target."""

MAX_ITEM_BYTES: Final = MAX_NAME_BYTES - 16
"""Longest item of a tick: its id is the item, "@" and the time in milliseconds."""

HORIZON_MS: Final = 10 * 366 * 24 * 3600 * 1000
"""How far ahead a task may be due: ten years."""

SCHEDULES_A_CALL: Final = 100
"""Schedules that one request of the API may read or write: some take half a second to evaluate."""

MAX_PENDING: Final = 10**12
MAX_PENDING_BYTES: Final = 2**50
"""The largest quota of an API key."""

MAX_ERRORS_KEPT: Final = 16
"""Errors kept with a task through its retries; the oldest are dropped first."""

MAX_ERROR_CHARS: Final = 500

MAX_TRACEBACK_BYTES: Final = 4 * 1024
"""Largest traceback of a last attempt in a dead letter. Tasks that are retried carry none."""

LAST_START_MS: Final = 1 << 45
"""In the year 3084: previews begin before it, and bounds of schedules must lie before it."""

LAST_SHOWN_MS: Final = 1 << 47
"""In the year 6429: runs are shown until then. Python's calendar ends with the year 9999, and zones look ahead."""
