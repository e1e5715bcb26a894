"""`POST /ticks`: a posted tick becomes a task."""

import json
from typing import Any, Final

import msgspec

from ..model.errors import InvalidInput
from ..model.ids import check_id, check_name
from ..model.limits import HORIZON_MS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES
from ..model.task import Handle, PutOutcome, Task
from ..model.times import check_horizon, instant_ms
from .asgi import JSON, NOSNIFF, Answer, encode, read_body
from .call import Call
from .problems import Problem
from .reading import check_content_type
from .replaced import told
from .routes import Route

MAX_ITEM_BYTES: Final = MAX_NAME_BYTES - 16
"""Leaves room for "@" and the instant in the id."""


class Tick(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    item: str
    at: str | int | float


class Accepted(msgspec.Struct, omit_defaults=True):
    """The answer to a tick."""

    id: str
    due_ms: int
    outcome: PutOutcome
    past: bool = False


class TickQuery(msgspec.Struct, frozen=True):
    """`replace` keys by item alone and moves the tick that is there."""

    replace: bool = False


_HOT: Final = (NOSNIFF,)
"""An answer to a post is not kept by anybody, and is no page: this much is said of it."""


async def post_tick(call: Call) -> Answer:
    target = call.node.config.tick_target
    call.check_target(target)
    check_content_type(call.headers, (JSON,))
    replace = call.query.replace
    space = call.put_into
    body = await read_body(call.receive, MAX_PAYLOAD_BYTES, "a tick")
    task = task_of(body, target, space.client.store.clock.now_ms(), replace=replace)
    if replace and task.id is not None:
        await call.check_not_others(task.id)
    handle = await told(call, task, space.collector("replace" if replace else "keep").put(task))
    if handle.outcome == "kept":
        await call.check_not_others(handle.id)  # what a key may not see is not told as its own
    return accepted(handle)


def accepted(handle: Handle) -> Answer:
    """A tick is stored, or was already."""
    tick = Accepted(handle.id, handle.due_ms, handle.outcome, handle.past)
    return Answer(202 if handle.outcome == "created" else 200, encode(tick), guards=_HOT)


_decode: Final = msgspec.json.Decoder(Tick).decode


def task_of(body: bytes, target: str, now_ms: int, *, replace: bool) -> Task:
    """The payload is the caller's own text, byte for byte: whoever gets the tick reads what was posted."""
    tick = _parse(body)
    item, at = tick.item, tick.at
    if type(at) is int and 0 <= at <= now_ms + HORIZON_MS and 0 < len(item) <= MAX_ITEM_BYTES and item.isascii():
        due_ms = at  # as most are: nothing is left to ask
    else:
        due_ms = _due_ms(tick, now_ms)
    if replace:
        _check_item_as_id(item)
    # The instant, not its spelling: 09:00Z and 10:00+01:00 are one tick.
    task_id = item if replace else f"{item}@{due_ms}"
    return Task(target, msgspec.Raw(body), due_ms, None, task_id)


def _due_ms(tick: Tick, now_ms: int) -> int:
    """When it is due; a Problem that says what is wrong with it."""
    try:
        item = check_name(tick.item, "item")
        due_ms = instant_ms(tick.at)
        check_horizon(due_ms, now_ms)
    except InvalidInput as error:
        raise Problem("invalid", str(error)) from None
    except (OverflowError, ValueError):
        raise Problem("invalid", f"at: {tick.at!r} lies outside of the calendar") from None
    if len(item.encode()) > MAX_ITEM_BYTES:
        raise Problem("invalid", f"item has {len(item.encode())} bytes; at most {MAX_ITEM_BYTES} are allowed")
    return due_ms


def _check_item_as_id(item: str) -> None:
    try:
        check_id(item)
    except InvalidInput as error:
        raise Problem("invalid", str(error)) from None


def _parse(body: bytes) -> Tick:
    try:
        tick = _decode(body)
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"{error}. {_EXPECTED}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        end = "" if "byte" in str(error) else f" (byte {len(body)})"  # an unfinished text names no position
        raise Problem("malformed", f"{error}{end}. {_EXPECTED}") from None
    _refuse_repeated_fields(body)
    return tick


_EXPECTED: Final = 'A tick is {"item": "user1234", "at": "2030-01-01T09:00:00Z"}; at may be epoch milliseconds'


def _refuse_repeated_fields(body: bytes) -> None:
    """Receivers differ in which of two equal names they take; the text is handed on, so there must be one."""
    if b"\\" not in body and body.count(b'"item"') == body.count(b'"at"') == 1:
        return  # nothing is escaped, so a name looks like itself, and no text holds a quote
    names: list[Any] = json.loads(body, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
    if len(names) != 2:
        raise Problem("invalid", f"a field is given more than once. {_EXPECTED}")


TICK: Final = Route(
    "POST",
    "/ticks",
    post_tick,
    "submit",
    "Post a tick: at its time the same text reaches the tick target.",
    query=TickQuery,
    body=Tick,
    answers={200: Accepted, 202: Accepted},
    problems=("too-large", "content-type", "out-of-memory"),
    streams=True,
)
