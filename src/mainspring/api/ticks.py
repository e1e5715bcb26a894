"""`POST /ticks`: a posted tick becomes a task. Pure: bytes in, a task or a Problem out."""

import json
from typing import Any, Final

import msgspec

from ..model.errors import InvalidInput
from ..model.ids import check_id, check_name
from ..model.limits import MAX_NAME_BYTES
from ..model.task import Task
from ..model.times import check_horizon, instant_ms
from .problems import Problem

MAX_ITEM_BYTES: Final = MAX_NAME_BYTES - 16
"""Leaves room for "@" and the instant in the id."""


class Tick(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    item: str
    at: str | int | float


class _Parts(msgspec.Struct, gc=False):
    item: msgspec.Raw
    at: msgspec.Raw


_decode: Final = msgspec.json.Decoder(Tick).decode
_split: Final = msgspec.json.Decoder(_Parts).decode


def task_of(body: bytes, target: str, now_ms: int, *, replace: bool) -> Task:
    """The payload is the caller's own text, byte for byte: whoever gets the tick reads what was posted."""
    tick = _parse(body)
    try:
        item = check_name(tick.item, "item")
        due_ms = instant_ms(tick.at)
        check_horizon(due_ms, now_ms)
        if replace:
            check_id(item)
    except InvalidInput as error:
        raise Problem(400, "invalid", str(error)) from None
    except (OverflowError, ValueError):
        raise Problem(400, "invalid", f"at: {tick.at!r} lies outside of the calendar") from None
    if len(item.encode()) > MAX_ITEM_BYTES:
        raise Problem(400, "invalid", f"item has {len(item.encode())} bytes; at most {MAX_ITEM_BYTES} are allowed")
    # The instant, not its spelling: 09:00Z and 10:00+01:00 are one tick.
    task_id = item if replace else f"{item}@{due_ms}"
    return Task(target, msgspec.Raw(body), due_ms, None, task_id)


def _parse(body: bytes) -> Tick:
    try:
        tick = _decode(body)
    except msgspec.ValidationError as error:
        raise Problem(400, "invalid", f"{error}. {_EXPECTED}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        end = "" if "byte" in str(error) else f" (byte {len(body)})"  # an unfinished text names no position
        raise Problem(400, "malformed", f"{error}{end}. {_EXPECTED}") from None
    _refuse_repeated_fields(body)
    return tick


_EXPECTED: Final = 'A tick is {"item": "user1234", "at": "2030-01-01T09:00:00Z"}; at may be epoch milliseconds'


def _refuse_repeated_fields(body: bytes) -> None:
    """Receivers differ in which of two equal names they take; the text is handed on, so there must be one."""
    parts = _split(body)
    if body == b'{"item":%b,"at":%b}' % (parts.item, parts.at):
        return
    if body == b'{"item": %b, "at": %b}' % (parts.item, parts.at):
        return
    names: list[Any] = json.loads(body, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
    if len(names) != 2:
        raise Problem(400, "invalid", f"a field is given more than once. {_EXPECTED}")
