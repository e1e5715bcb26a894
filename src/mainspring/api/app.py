"""The HTTP API as a plain ASGI application: a framework would cost more than the work itself."""

import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from ..client import Client
from ..model.errors import MainspringError
from ..model.limits import MAX_PAYLOAD_BYTES
from ..model.task import Handle, OnConflict, Task
from ..node import Node
from .collector import Collector, Write
from .problems import Problem, not_ready, problem_of
from .ticks import task_of

log = logging.getLogger("mainspring.api")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Accepted(msgspec.Struct, omit_defaults=True):
    """The answer to a tick."""

    id: str
    due_ms: int
    outcome: str
    past: bool = False


class _HungUp(Exception):
    """The caller went away before the request was complete."""


class App:
    """Routes. Nothing is answered with success before the server has it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._target = node.config.tick_target
        self._keep = Collector(self._writer("keep"))
        self._replace = Collector(self._writer("replace"))
        self._probes: dict[str, Callable[[], Awaitable[None]]] = {
            "/livez": self._alive,
            "/readyz": self._ready,
            "/healthy": self._healthy,
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if scope["path"] == "/ticks":
                handle = await self._tick(scope, receive)
                answer = Accepted(handle.id, handle.due_ms, handle.outcome, handle.past)
                await _answer(send, 202 if handle.outcome == "created" else 200, _encode(answer), _JSON)
            else:
                await self._probe(scope)
                await _answer(send, 200, b'{"status":"ok"}', _JSON)
        except Problem as problem:
            await _refuse(send, problem)
        except MainspringError as error:
            await _refuse(send, problem_of(error))
        except _HungUp:
            return
        except Exception:
            log.exception("a request failed in an unexpected way")
            await _refuse(send, Problem(500, "bug", "an error in Mainspring itself; its log says more"))

    # -- probes ------------------------------------------------------------------------------------------------

    async def _probe(self, scope: MutableMapping[str, Any]) -> None:
        probe = self._probes.get(scope["path"])
        if probe is None:
            raise Problem(404, "not-found", f"there is nothing at {scope['path'][:200]}")
        _check_method(scope, ("GET", "HEAD"))
        await probe()

    async def _alive(self) -> None:
        """The process answers: that is all."""

    async def _ready(self) -> None:
        if not self._node.ready:
            raise not_ready("the node is starting or stopping")
        if not await self._node.reachable():
            raise not_ready("the server does not answer")

    async def _healthy(self) -> None:
        if not self._node.ready:
            raise not_ready("the node is starting or stopping")
        if not self._node.healthy:
            raise not_ready("the server does not answer, or an error holds up the engine; the log says more")

    # -- ticks -------------------------------------------------------------------------------------------------

    async def _tick(self, scope: MutableMapping[str, Any], receive: Receive) -> Handle:
        _check_method(scope, ("POST",))
        _check_content_type(scope["headers"])
        replace = _replaces(scope["query_string"])
        body = await _body(receive)
        now_ms = self._client().store.clock.now_ms()
        task = task_of(body, self._target, now_ms, replace=replace)
        return await (self._replace if replace else self._keep).put(task)

    def _client(self) -> Client:
        client = self._node.client
        if client is None:
            raise not_ready("the node is starting or stopping")
        return client

    def _writer(self, on_conflict: OnConflict) -> Write:
        async def write(tasks: Sequence[Task]) -> Sequence[Handle]:
            summary = await self._client().put_many(tasks, on_conflict=on_conflict, handles=True)
            return summary.handles or ()

        return write


_encode: Final = msgspec.json.Encoder().encode
_READ_BYTES: Final = 8 << 20
"""A body that is too large is read up to here all the same: many callers hear an answer only after they sent all."""
_JSON: Final = (b"content-type", b"application/json")
_PROBLEM: Final = (b"content-type", b"application/problem+json")


async def _answer(
    send: Send, status: int, body: bytes, kind: tuple[bytes, bytes], more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    headers = [kind, (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, problem: Problem) -> None:
    await _answer(send, problem.status, problem.body(), _PROBLEM, problem.headers)


def _check_method(scope: MutableMapping[str, Any], allowed: tuple[str, ...]) -> None:
    if scope["method"] not in allowed:
        spoken = ", ".join(allowed)
        raise Problem(405, "method", f"{scope['path']} answers {spoken}", allow=spoken)


def _check_content_type(headers: Headers) -> None:
    for name, value in headers:
        if name != b"content-type" or value == b"application/json":
            continue
        if value.split(b";")[0].strip().lower() != b"application/json":
            spoken = value.decode("latin-1")[:80]
            raise Problem(415, "content-type", f"the content type is {spoken!r}; send application/json")


def _replaces(query: bytes) -> bool:
    if not query:
        return False
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    match pairs:
        case [("replace", "true")]:
            return True
        case [("replace", "false")] | []:
            return False
    raise Problem(400, "invalid", "the only option here is ?replace=true (or false)")


async def _body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    size = len(body)
    while message["type"] == "http.request" and message.get("more_body") and size <= _READ_BYTES:
        message = await receive()
        piece = message.get("body", b"")
        size += len(piece)
        if size <= MAX_PAYLOAD_BYTES:
            body += piece
    if message["type"] != "http.request":
        raise _HungUp
    if size > MAX_PAYLOAD_BYTES:
        raise Problem(413, "too-large", f"a tick has at most {MAX_PAYLOAD_BYTES} bytes", connection="close")
    return body
