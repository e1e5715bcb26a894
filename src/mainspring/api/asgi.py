"""The words of ASGI: what comes from a server and what goes back to it."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from ..model.errors import MainspringError
from .problems import Problem, problem_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
Headers = dict[bytes, bytes]
"""Of a request, by lower-case name; of repeated ones the last counts."""

JSON: Final = b"application/json"
NDJSON: Final = b"application/x-ndjson"
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
GUARDED: Final = (
    NOSNIFF,
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
"""What every answer says to browsers: keep nothing, load nothing, show it in nobody's frame."""

READ_ANYWAY_BYTES: Final = 8 << 20
"""A body that is too large is read up to here all the same: many callers hear an answer only after they sent all."""

encode: Final = msgspec.json.Encoder().encode


class HungUp(Exception):
    """The caller went away before the request was complete."""


class Answer(msgspec.Struct, frozen=True):
    """Status, body and what is said about it."""

    status: int = 200
    body: bytes = b""
    kind: bytes = JSON
    headers: tuple[Header, ...] = ()
    guards: tuple[Header, ...] = GUARDED

    async def send(self, send: Send) -> None:
        size = b"%d" % len(self.body)
        headers = [(b"content-type", self.kind), (b"content-length", size), *self.guards, *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def answer(value: Any, status: int = 200, *headers: Header) -> Answer:
    """A value as JSON."""
    return Answer(status, encode(value), headers=headers)


def answer_to_error(error: Exception) -> Answer:
    """What the caller hears of it. Anything but a Problem or an error of ours is a bug; who caught it logs it."""
    if isinstance(error, Problem):
        return refusal(error)
    if isinstance(error, MainspringError):
        return refusal(problem_of(error))
    return refusal(Problem("bug", "an error in Mainspring itself; its log says more"))


def refusal(problem: Problem) -> Answer:
    return Answer(problem.status, problem.body(), b"application/problem+json", tuple(problem.headers))


async def read_body(receive: Receive, limit: int, what: str = "a body") -> bytes:
    """The whole body, or a Problem when it is larger than the limit."""
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
