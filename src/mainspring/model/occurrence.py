"""One planned run of a schedule: what it is called. The name never changes, whenever it really runs."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from .errors import InvalidInput
from .ids import check_name

MAX_SCHEDULE_NAME_BYTES: Final = 200
"""Less than an id may have: the planned time is added to it."""


def check_schedule_name(name: object) -> str:
    text = check_name(name, "name")
    if "@" in text:
        raise InvalidInput(f"name {text!r} contains '@', which parts a schedule's name from the time of a run")
    if len(text.encode()) > MAX_SCHEDULE_NAME_BYTES:
        raise InvalidInput(f"name has {len(text.encode())} bytes; at most {MAX_SCHEDULE_NAME_BYTES} are allowed")
    return text


@lru_cache(maxsize=256)
def instant_text(at_ms: int) -> str:
    """`2026-11-16T02:00:00Z`, with milliseconds only where there are some."""
    seconds, ms = divmod(at_ms, 1000)
    text = datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
    return f"{text}.{ms:03}Z" if ms else text + "Z"


def occurrence_id(name: str, planned_ms: int) -> str:
    """`<schedule>@<planned time>`."""
    return f"{name}@{instant_text(planned_ms)}"


def schedule_of(task_id: str) -> str:
    """The name of the schedule whose run has this id."""
    return task_id.partition("@")[0]
