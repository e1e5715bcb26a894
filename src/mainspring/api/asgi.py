"""Requests and responses: ASGI messages, RFC 9457 problem documents, and reading parameters and bodies."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final, Literal, Protocol, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from ..model.errors import (
    Ambiguous,
    Conflict,
    InvalidInput,
    MainspringError,
    NotConfirmed,
    NotFound,
    OutOfMemory,
    PayloadTooLarge,
    StoreError,
)
from ..model.explain import with_times
from ..model.times import When, instant_ms

RETRY_AFTER_S: Final = 1
PREFIX: Final = "urn:mainspring:problem:"

PROBLEMS: Final = {
    "malformed": (400, "the request cannot be read: not JSON, not UTF-8, or not HTTP"),
    "invalid": (400, "a value is wrong; the detail names it"),
    "unauthenticated": (401, "no API key, or one that is unknown, expired or revoked"),
    "forbidden": (403, "the key's role or its targets do not allow this"),
    "not-found": (404, "it does not exist, or this key may not see it"),
    "method": (405, "the path answers other methods; they are in the header Allow"),
    "timeout": (408, "the request came too slowly"),
    "conflict": (409, "the id is taken, or the object has changed meanwhile"),
    "ambiguous": (409, "tasks of several lanes have this id; name the lane, empty for the one without"),
    "too-late": (409, "the task has begun, or is over"),
    "too-large": (413, "the body, or a part of it, is larger than the limit"),
    "content-type": (415, "the body is of another type than the route takes, or compressed"),
    "idempotency": (422, "the Idempotency-Key was used before with another request"),
    "rate": (429, "too many requests; Retry-After says when to try again"),
    "quota": (429, "the key has as many tasks or bytes pending as it may; it can put more as they become due"),
    "headers": (431, "the headers are larger than the limit"),
    "bug": (500, "an error in Mainspring itself"),
    "unavailable": (503, "the server does not answer, or the node is starting or stopping; try again"),
    "not-confirmed": (503, "stored, but the requested durability was not reached: repeat with the same id"),
    "out-of-memory": (507, "the server is full; nothing was written"),
}
"""Slug -> status and meaning."""


class Problem(Exception):
    """An error response. `kind` is stable, for programs; `detail` is for people."""

    def __init__(self, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, _ = PROBLEMS[kind]
        self.kind = kind
        self.detail = detail
        self.members: dict[str, Any] = {}
        """Further fields for programs."""
        self.headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "type": PREFIX + self.kind,
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail.encode("utf-8", "replace").decode(),
        } | self.members

    def body(self) -> bytes:
        return msgspec.json.encode(self.fields)


def not_ready(detail: str) -> Problem:
    return Problem("unavailable", detail, retry_after=str(RETRY_AFTER_S))


def problem_of(error: MainspringError) -> Problem:
    """Return the HTTP problem for an error of the store."""
    match error:
        case OutOfMemory():
            return Problem("out-of-memory", str(error), retry_after=str(RETRY_AFTER_S))
        case NotConfirmed():
            problem = Problem("not-confirmed", str(error), retry_after=str(RETRY_AFTER_S))
            if error.handles and (handle := error.handles[0]) is not None:
                problem.members = {"id": handle.id, "due_ms": handle.due_ms, "outcome": handle.outcome}
            return problem
        case StoreError():
            return not_ready(f"{error}. The same request may be sent again: with an id it counts once")
        case NotFound():
            return Problem("not-found", str(error))
        case Conflict():
            return Problem("conflict", str(error))
        case Ambiguous():
            problem = Problem("ambiguous", str(error))
            problem.members = {"id": error.id, "lanes": error.lanes}
            return problem
        case PayloadTooLarge():
            return Problem("too-large", str(error))
        case _:
            return Problem("invalid", str(error))


AsgiScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
AsgiSend = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
Headers = dict[bytes, bytes]
"""Headers of a request, by lower-case name; the last one of a repeated name counts."""

JSON: Final = b"application/json"
NDJSON: Final = b"application/x-ndjson"
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
GUARDED: Final = (
    NOSNIFF,
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
"""Headers of every response for browsers: no caching, no loading, no framing."""

READ_ANYWAY_BYTES: Final = 8 << 20
"""Bytes of an oversized body that are read all the same: many clients read a response only after sending everything."""

encode: Final = msgspec.json.Encoder().encode


class HungUp(Exception):
    """The caller went away before the request was complete."""


class Sendable(Protocol):
    """A response, whole or in pieces."""

    async def send(self, send: AsgiSend) -> None: ...


class Answer(msgspec.Struct, frozen=True):
    """Status, body and headers of a response."""

    status: int = 200
    body: bytes = b""
    kind: bytes = JSON
    headers: tuple[Header, ...] = ()
    guards: tuple[Header, ...] = GUARDED

    async def send(self, send: AsgiSend) -> None:
        size = b"%d" % len(self.body)
        headers = [(b"content-type", self.kind), (b"content-length", size), *self.guards, *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def answer(value: Any, status: int = 200, *headers: Header) -> Answer:
    """Return a value as a JSON response, its instants also as text."""
    return Answer(status, encode(with_times(value)), headers=headers)


def answer_to_error(error: Exception) -> Answer:
    """Return the response for an error. Anything but a Problem or an error of ours is a bug, which the caller logs."""
    if isinstance(error, Problem):
        return refusal(error)
    if isinstance(error, MainspringError):
        return refusal(problem_of(error))
    return refusal(Problem("bug", "an error in Mainspring itself; see its log"))


def refusal(problem: Problem) -> Answer:
    return Answer(problem.status, problem.body(), b"application/problem+json", tuple(problem.headers))


async def read_body(receive: Receive, limit: int, what: str = "a body") -> bytes:
    """Return the whole body; raise a Problem if it is larger than the limit."""
    message = await receive()
    body: bytes = message.get("body", b"")
    size = len(body)
    while message["type"] == "http.request" and message.get("more_body") and size <= READ_ANYWAY_BYTES:
        message = await receive()
        piece = message.get("body", b"")
        size += len(piece)
        if size <= limit:
            body += piece
    if message["type"] != "http.request":
        raise HungUp
    if size > limit:
        raise Problem("too-large", f"{what} has at most {limit} bytes here", connection="close")
    return body


_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[\[{\]}]")
_TOKENS: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|[\[{\]}]', re.DOTALL)
_WRONG_WORD: Final = re.compile(r"Invalid enum value .* - at `\$\.(\w+)`")
_LATEST_MS: Final = 1 << 45
MAX_PARAMETERS: Final = 32


def read_query(kind: type | None, query: bytes) -> Any:
    """Return the parameters as the route's Struct; unknown and repeated ones are errors, never ignored."""
    if not query:
        return None if kind is None else kind()
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except (UnicodeDecodeError, ValueError):
        raise Problem("malformed", f"the parameters are not UTF-8, or more than {MAX_PARAMETERS}") from None
    given = dict(pairs)
    known = () if kind is None else kind.__struct_fields__  # type: ignore[attr-defined]
    for name, _ in pairs:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none here"
            raise Problem("invalid", f"parameter {name[:80]!r} is unknown; {there}")
    if len(given) < len(pairs):
        raise Problem("invalid", "a parameter is given more than once")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"parameters: {error}{choices(kind, str(error))}") from None


def read_json(kind: Any, body: bytes, depth: int) -> Any:
    """Return a body as the route's type. An empty one is an empty object."""
    body = body or b"{}"
    check_depth(body, depth)
    try:
        found = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"{error}{choices(kind, str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
    check_repeated(body, field_names(kind))
    return found


def choices(kind: Any, error: str) -> str:
    """Return the allowed words, or the known fields, if an unknown one was given."""
    if error.startswith("Object contains unknown field") and " - at " not in error:
        return f"; there are {', '.join(getattr(kind, '__struct_encode_fields__', ()))}"
    named = _WRONG_WORD.search(error)
    hint = None if named is None or not isinstance(kind, type) else get_type_hints(kind).get(named[1])
    words = [str(word) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part)]
    return f"; use one of {', '.join(dict.fromkeys(words))}" if words else ""


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def field_names(kind: Any) -> tuple[bytes, ...]:
    """Return the names of a Struct's fields in JSON."""
    return tuple(b'"%b"' % name.encode() for name in getattr(kind, "__struct_encode_fields__", ()))


def check_repeated(body: bytes, names: tuple[bytes, ...]) -> None:
    """Refuse a field that is given twice: it is unclear which of the two counts."""
    if names and b"\\" not in body and all(body.count(name) < 2 for name in names):
        return  # nothing is escaped: names appear literally, and no text contains a quote
    level, seen = 0, set()
    for token in _TOKENS.finditer(body):
        if token[1] is None:
            level += 1 if token[0] in b"[{" else -1
        elif level == 1 and token[2] is not None:
            name = msgspec.json.decode(b'"%b"' % token[1]) if b"\\" in token[1] else token[1].decode()
            if name in seen:
                raise Problem("invalid", f"the field {name[:80]!r} is given more than once")
            seen.add(name)


def check_depth(body: bytes, depth: int, *, level: int = 0) -> None:
    """Refuse JSON that is nested deeper: decoders here and at receivers would run out of stack.

    `level` is the depth at which the body itself is nested.
    """
    if body.count(b"[") + body.count(b"{") <= depth - level:
        return
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", body)):
        level += 1 if bracket[0] in b"[{" else -1
        if level > depth:
            raise Problem("invalid", f"the JSON is nested deeper than {depth} levels")


def check_content_type(headers: Headers, wanted: tuple[bytes, ...]) -> None:
    """Treat a body without a content type as the route's. Report a compressed body as unsupported, not as malformed."""
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        packed = headers[b"content-encoding"].decode("latin-1")[:80]
        raise Problem("content-type", f"the content encoding is {packed!r}; send the body as it is")
    value = headers.get(b"content-type")
    if value is None or value in wanted:
        return
    if value.split(b";")[0].strip().lower() not in wanted:
        spoken = value.decode("latin-1")[:80]
        raise Problem("content-type", f"the content type is {spoken!r}; send {wanted[0].decode()}")


def when(text: str | None, field: str) -> When | None:
    """Return an instant in a parameter: ISO 8601 with an offset, or epoch milliseconds."""
    if text is None:
        return None
    # A + is a space in a query, but a time never contains one.
    given = text.replace(" ", "+")
    try:
        at_ms = instant_ms(given, field=field)
    except (OverflowError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{field}: {text[:80]!r} lies outside of the calendar") from None
    if not 0 <= at_ms < _LATEST_MS:
        raise InvalidInput(f"{field}: {text[:80]!r} lies outside of the calendar")
    return given
