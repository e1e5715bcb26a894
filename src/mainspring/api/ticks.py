"""`POST /ticks`: a tick becomes a task. Common ticks take a short path.

No route is called as often, and uvicorn's usual path costs more than the work. Anything unusual takes that path: a key
that must be looked up, another namespace, parameters, a large body, a body in chunks.
"""

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..model.access import ApiKey
from ..model.errors import InvalidInput, MainspringError
from ..model.ids import check_id, check_name
from ..model.limits import HORIZON_MS, MAX_ITEM_BYTES, MAX_PAYLOAD_BYTES
from ..model.task import Handle, OnConflict, PutOutcome, Task
from ..model.times import EARLIEST_MS, check_horizon, instant_ms
from .asgi import (
    JSON,
    NOSNIFF,
    Answer,
    Header,
    Headers,
    Problem,
    answer_to_error,
    check_content_type,
    encode,
    read_body,
)
from .auth import OPEN, check_right
from .routes import Call, Route
from .tasks import put_counted

if TYPE_CHECKING:
    from .app import App
    from .server import HttpConnection

log = logging.getLogger("mainspring.api")


class Tick(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    item: Annotated[
        str,
        msgspec.Meta(
            description=f"1 to {MAX_ITEM_BYTES} bytes in UTF-8.",
            extra_json_schema={"minLength": 1, "maxLength": MAX_ITEM_BYTES},
        ),
    ]
    at: str | int | float


class Accepted(msgspec.Struct, omit_defaults=True):
    """Response to a tick."""

    id: str
    due_ms: int
    outcome: PutOutcome
    past: bool = False


class TickQuery(msgspec.Struct, frozen=True):
    """`replace` identifies a tick by its item alone and moves an existing one."""

    replace: bool = False


_HOT: Final = (NOSNIFF,)
"""The only header of a common response: it is neither cached nor a page."""


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
    asked: OnConflict = "replace" if replace else "keep"
    signed = call.signed(task) if replace else task
    handle = await put_counted(call, task, lambda: space.collector(asked).put(signed))
    if handle.outcome == "kept":
        await call.check_not_others(handle.id)  # do not report a task that the key may not see
        call.check_changeable(handle)
    return accepted(handle)


def accepted(handle: Handle) -> Answer:
    """Return the response for a tick that is stored, now or before."""
    tick = Accepted(handle.id, handle.due_ms, handle.outcome, handle.past)
    return Answer(202 if handle.outcome == "created" else 200, encode(tick), guards=_HOT)


_decode: Final = msgspec.json.Decoder(Tick).decode


def task_of(body: bytes, target: str, now_ms: int, *, replace: bool) -> Task:
    """Return the task of a tick. The payload is the caller's text, byte for byte."""
    tick = _parse(body)
    item, at = tick.item, tick.at
    # Most ticks are valid: one test covers them.
    usual = type(at) is int and 0 < len(item) <= MAX_ITEM_BYTES and item.isascii()
    due_ms = int(at) if usual and EARLIEST_MS <= int(at) <= now_ms + HORIZON_MS else _due_ms(tick, now_ms)
    if replace:
        _check_item_as_id(item)
    # The instant, not its spelling: 09:00Z and 10:00+01:00 are the same tick.
    task_id = item if replace else f"{item}@{due_ms}"
    return Task(target, msgspec.Raw(body), due_ms, None, task_id)


def _due_ms(tick: Tick, now_ms: int) -> int:
    """Return when a tick is due; raise a Problem that names what is wrong with it."""
    try:
        check_name(tick.item, "item", MAX_ITEM_BYTES)
        due_ms = instant_ms(tick.at)
        check_horizon(due_ms, now_ms)
    except InvalidInput as error:
        raise Problem("invalid", str(error)) from None
    except (OverflowError, ValueError):
        raise Problem("invalid", f"at: {tick.at!r} lies outside of the calendar") from None
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
    """Refuse repeated fields: receivers differ in which of two they use, and the text is passed on as it is."""
    if b"\\" not in body and body.count(b'"item"') == body.count(b'"at"') == 1:
        return  # nothing is escaped: names appear literally, and no text contains a quote
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
    problems=("too-large", "content-type", "quota", "out-of-memory"),
    streams=True,
)


PATH: Final = TICK.path.encode()
_UNUSUAL: Final = frozenset({b"mainspring-namespace", b"transfer-encoding", b"upgrade", b"expect"})
_CLOSE: Final = (b"connection", b"close")


class Shortcut:
    """The short path for ticks of one application."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._defaults: list[Header] = []
        self._heads: dict[tuple[int, bytes], bytes] = {}

    def is_usual(self, headers: Headers) -> bool:
        length = headers.get(b"content-length", b"")
        return 0 < len(length) < 6 and int(length) <= MAX_PAYLOAD_BYTES and _UNUSUAL.isdisjoint(headers)

    def key_at_hand(self, headers: Headers) -> ApiKey | None:
        """The caller's key, or None if it still has to be looked up."""
        client = self._app.node.client
        key = None if client is None else self._app.authenticator.key_at_hand(headers, client.store.clock)
        if client is None or key is None or key is OPEN:
            return key
        # A key limited to targets needs a lookup: the task of that id may have a target that the key may not see.
        return key if key.targets is None and self._app.quotas.has_room(key, client.store) else None

    def admit(self, key: ApiKey, headers: Headers, address: str) -> None:
        """Check everything but the body."""
        self._app.authenticator.let_in(key, headers, address)
        check_right(key, TICK.right)
        check_content_type(headers, (JSON,))

    def admits_again(self, headers: Headers) -> bool:
        """Return whether admitted headers stay admitted: a key can be revoked, and a rate exceeded."""
        return self._app.authenticator.free and b"authorization" not in headers and self._app.node.client is not None

    def post(self, body: bytes, waiter: "Posted") -> None:
        """What `post_tick` does."""
        home = self._app.spaces.home
        task = task_of(body, self._app.node.config.tick_target, home.client.store.clock.now_ms(), replace=False)
        home.collector("keep").add(task, waiter)

    def count(self, key: ApiKey, body: bytes, handle: Handle) -> None:
        """Count a tick toward the quota of its key."""
        client = self._app.node.client
        if client is not None:  # otherwise the node has stopped meanwhile
            self._app.quotas.add(key, client.store, [(handle.due_ms, len(body))])

    def text(self, answer: Answer, defaults: list[Header], *, closes: bool) -> bytes:
        """Return the bytes of a response. Heads are the same for a second at a time."""
        if defaults is not self._defaults:
            self._defaults = defaults
            self._heads.clear()
        if answer.headers or closes:
            head = _head(answer, [*defaults, *answer.headers, *([_CLOSE] if closes else ())])
        else:
            known = answer.status, answer.kind
            head = self._heads.get(known) or self._heads.setdefault(known, _head(answer, defaults))
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(answer.body), answer.body)


def _head(answer: Answer, headers: list[Header]) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in (*headers, (b"content-type", answer.kind), *answer.guards)]
    return STATUS_LINE[answer.status] + b"".join(lines)


class _NoWaiter:
    def set(self) -> None:
        """Do nothing: no part of the request is waited for."""


class Posted:
    """One tick in progress. uvicorn treats it as a cycle: later requests on the connection wait for it."""

    message_event = _NoWaiter()
    more_body = keep_alive = True
    disconnected = response_started = response_complete = False

    def __init__(self, connection: "HttpConnection", shortcut: Shortcut, key: ApiKey | None, headers: Headers) -> None:
        """Without a key the tick is already admitted."""
        self._connection = connection
        self._shortcut = shortcut
        self._key = key
        self.headers = headers
        self.body = b""

    @property
    def let_in(self) -> bool:
        return self._key is None

    def start(self) -> None:
        """Start the put: the request is complete."""
        self.more_body = False
        try:
            if self._key is not None:
                client = self._connection.client
                self._shortcut.admit(self._key, self.headers, client[0] if client else "")
                self._key = None
            self._shortcut.post(self.body, self)
        except (Problem, MainspringError) as error:
            self.set_exception(error)
        except Exception as error:
            log.exception("a request failed in an unexpected way")
            self.set_exception(error)

    # -- the interface a collector expects of a waiter -----------------------------------------------------------

    def done(self) -> bool:
        return self.disconnected or self.response_complete

    def set_result(self, handle: Handle) -> None:
        self._send(accepted(handle))

    def set_exception(self, error: Exception) -> None:
        self._send(answer_to_error(error))

    def _send(self, answer: Answer) -> None:
        connection, transport = self._connection, self._connection.transport
        if self.done() or transport.is_closing():
            return
        closes = not self.keep_alive
        self.response_started = self.response_complete = True
        transport.write(self._shortcut.text(answer, connection.server_state.default_headers, closes=closes))
        if closes:
            transport.close()
        connection.on_response_complete()


class KeyedPost(Posted):
    """A tick of an API key, which counts toward the key's quota."""

    _owner: ApiKey | None = None

    def start(self) -> None:
        self._owner = self._key
        super().start()

    def done(self) -> bool:
        return self.response_complete  # the tick of a caller that hung up counts as well

    def set_result(self, handle: Handle) -> None:
        if self._owner is not None and handle.outcome != "kept":
            self._shortcut.count(self._owner, self.body, handle)
        super().set_result(handle)
