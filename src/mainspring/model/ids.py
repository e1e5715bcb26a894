"""Identity of tasks and occurrences: ids, their hashes, and the key receivers use to drop repeats."""

import hashlib
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from .errors import InvalidInput
from .limits import MAX_NAME_BYTES
from .text import plain

IDH_BYTES: Final = 16
GENERATED: Final = re.compile(r"([0-9a-f]{32})~([0-9a-z]+(?:\.[0-9a-z]+){4})")
"""Form of generated ids: 32 hex digits, `~` and the address where the task was put."""
_RUN: Final = re.compile(r"([^@]+)@\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{3})?Z")
_BARE: Final = re.compile(r"[0-9a-f]{32}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.~-]")


def idh_of(task_id: str) -> bytes:
    """Return the 16-byte hash of a caller-given id."""
    return hashlib.blake2b(task_id.encode(), digest_size=IDH_BYTES).digest()


def idh_in_lane(idh: bytes, lane: str) -> bytes:
    """Return the 16-byte hash of a caller-given id in a lane; `idh` is the hash of the id alone.

    No UTF-8 text contains the first byte, so no id is hashed from the same bytes.
    """
    return hashlib.blake2b(b"\xff" + idh + lane.encode(), digest_size=IDH_BYTES).digest()


def check_name(value: object, field: str, most_bytes: int = MAX_NAME_BYTES) -> str:
    """Return an id, lane, item or name if it is a text of 1 to `most_bytes` bytes; refuse anything else."""
    if type(value) is not str:
        value = plain(value)
    if not isinstance(value, str):
        raise InvalidInput(f"{field} is of type {type(value).__name__}; give a text")
    if not value:
        without = "leave it out or " if field in ("id", "lane") else ""
        raise InvalidInput(f"{field} is empty; {without}give 1 to {most_bytes} bytes")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{field} is not valid Unicode (a lone surrogate); give plain text") from None
    if size > most_bytes:
        raise InvalidInput(f"{field} has {size} bytes; at most {most_bytes} are allowed")
    return value


def check_id(value: object) -> str:
    """Return a caller-given id; refuse the reserved form of generated ids."""
    name = check_name(value, "id")
    if len(name) > 2 * IDH_BYTES and GENERATED.fullmatch(name):
        raise InvalidInput(f"id {name!r} has the form of a generated id (32 hex digits, ~, an address); choose another")
    return name


def bare_idh(task_id: str) -> bytes | None:
    """Return the id hash in a generated id without its mark: deliveries and dead letters name tasks without an id so.

    A caller's id may have the same form: look that up first.
    """
    return bytes.fromhex(task_id) if _BARE.fullmatch(task_id) else None


def idempotency_key(namespace: str, task_id: str, original_due_ms: int, lane: str | None = None) -> str:
    """Return the key that all attempts at one task share; safe in a header whatever the id and the lane contain."""
    name = _UNSAFE.sub(_percent, task_id)
    if lane is not None:  # one id in two lanes is two tasks
        name = f"{_UNSAFE.sub(_percent, lane)}/{name}"
    return f"{namespace}/{name}/{original_due_ms}"


@lru_cache(maxsize=1024)
def _percent_of(character: str) -> str:
    return quote(character, safe="")


def _percent(found: re.Match[str]) -> str:
    # Most ids have at most one unsafe character: checking each character, as `quote` does, takes three times as long.
    return _percent_of(found[0])


MAX_SCHEDULE_NAME_BYTES: Final = 200
"""Shorter than an id may be: the planned time is appended to it."""


def check_schedule_name(name: object) -> str:
    text = check_name(name, "name")
    if "@" in text:
        raise InvalidInput(f"name {text!r} contains '@', which separates a schedule's name from the time of a run")
    if len(text.encode()) > MAX_SCHEDULE_NAME_BYTES:
        raise InvalidInput(f"name has {len(text.encode())} bytes; at most {MAX_SCHEDULE_NAME_BYTES} are allowed")
    return text


@lru_cache(maxsize=256)
def instant_text(at_ms: int) -> str:
    """Return `2026-11-16T02:00:00Z`, with milliseconds only if they are not zero."""
    seconds, ms = divmod(at_ms, 1000)
    text = datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
    return f"{text}.{ms:03}Z" if ms else text + "Z"


def occurrence_id(name: str, planned_ms: int) -> str:
    """`<schedule>@<planned time>`."""
    return f"{name}@{instant_text(planned_ms)}"


def schedule_named(task_id: str) -> str | None:
    """Return the name of the schedule whose planned run an id would be; None if it does not have that form."""
    found = _RUN.fullmatch(task_id) if task_id.endswith("Z") else None
    return None if found is None else found[1]


def schedule_of(task_id: str) -> str:
    """Return the name of the schedule whose run has this id."""
    return task_id.partition("@")[0]
