"""A task as it is posted, and what becomes of it. Every check that can be made before the write is made here."""

import re
from typing import Final

import msgspec

from ..model.errors import InvalidInput
from ..model.ids import check_id, check_name
from ..model.limits import MAX_PAYLOAD_BYTES
from ..model.retry_text import retry_line
from ..model.targets import check_target
from ..model.task import Handle, OnConflict, PutOutcome, Task
from ..model.times import check_horizon, delay_ms, expiry_ms, instant_ms, timeout_ms

NO_PAYLOAD: Final = msgspec.Raw(b"null")
_DIGITS: Final = bytes.maketrans(b"123456789E-", b"000000000e+")
_LONG: Final = b"0" * 18
_LARGE: Final = re.compile(rb"0e\+?000").search
"""Numbers that may be out of range, once all digits, signs and exponents are written alike."""
Moment = int | float | str
"""Epoch milliseconds, or ISO 8601 with an offset."""


class NewTask(Task, frozen=True, forbid_unknown_fields=True, gc=False):
    """`at` or `after` says when; neither means now. With an `id` a repeated post is one task."""

    # A task itself, so that a line of a batch in which nothing has to be worked out goes on as it is.

    target: str
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: NO_PAYLOAD)
    at: Moment | None = None
    after: str | None = None
    id: str | None = None
    lane: str | None = None
    expires: Moment | None = None
    retry: str | None = None
    timeout: str | None = None


class PostedTask(NewTask, frozen=True, forbid_unknown_fields=True, gc=False):
    """A single task says for itself what lines of a batch share."""

    on_conflict: OnConflict = "keep"
    durability: str = "server"


class Put(msgspec.Struct, omit_defaults=True):
    """What became of a posted task; `id` finds it again."""

    id: str
    due_ms: int
    outcome: PutOutcome
    past: bool = False
    durability: str = "server"

    @classmethod
    def of(cls, handle: Handle) -> "Put":
        return cls(handle.id, handle.due_ms, handle.outcome, handle.past, handle.durability)


def task_of(new: NewTask, now_ms: int, *, task_id: str | None = None) -> Task:
    """The task, its times in milliseconds; InvalidInput for what is wrong. `task_id` is for one that names none."""
    check_target(new.target)
    payload = bytes(new.payload)
    check_payload(payload)
    if new.id is not None:
        task_id = check_id(new.id)
    if new.lane is not None:
        check_name(new.lane, "lane")
    try:
        due_ms = due_ms_of(new.at, new.after, now_ms)
        expires_ms = None if new.expires is None else expiry_ms(new.expires, due_ms)
    except OverflowError:
        raise InvalidInput("a time lies outside of the calendar") from None
    retry = None if new.retry is None else retry_line(new.retry)
    if new.timeout is not None:
        timeout_ms(new.timeout)
    return Task(new.target, msgspec.Raw(payload), due_ms, None, task_id, new.lane, expires_ms, retry, new.timeout)


def check_payload(payload: bytes) -> None:
    """What is skipped over when a body is decoded: its size, its encoding, and numbers that nobody can read again."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidInput(f"payload has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    if is_simple(payload):
        return
    try:
        msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"payload: {error}") from None


def is_simple(text: bytes) -> bool:
    """True for JSON in which no number is too large and no byte is wrong: what is left is checked by skipping it."""
    if not text.isascii():
        return False
    alike = text.translate(_DIGITS)
    return _LONG not in alike and _LARGE(alike) is None


def due_ms_of(at: Moment | None, after: str | None, now_ms: int) -> int:
    if at is not None and after is not None:
        raise InvalidInput("both at and after are given; say one of them")
    due_ms = instant_ms(at) if at is not None else now_ms + (0 if after is None else delay_ms(after))
    check_horizon(due_ms, now_ms)
    return due_ms
