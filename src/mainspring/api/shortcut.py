"""`POST /ticks` on the connection itself: no ASGI messages, and no task for each request.

Nothing is called as often, and by that way uvicorn costs more than the work. Whatever is out of the ordinary takes the
way of all other requests: a key that must be looked up, another namespace, parameters, a large body, a body in chunks.
"""

import logging
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..model.access import ApiKey
from ..model.errors import MainspringError
from ..model.limits import MAX_PAYLOAD_BYTES
from ..model.task import Handle
from .asgi import JSON, Answer, Header, Headers, answer_to_error
from .gate import check_right
from .problems import Problem
from .reading import check_content_type
from .ticks import TICK, accepted, task_of

if TYPE_CHECKING:
    from .app import App
    from .protocol import Connection

log = logging.getLogger("mainspring.api")

PATH: Final = TICK.path.encode()
_UNUSUAL: Final = frozenset({b"mainspring-namespace", b"transfer-encoding", b"upgrade", b"expect"})
_CLOSE: Final = (b"connection", b"close")


class Shortcut:
    """The short way of one application."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._defaults: list[Header] = []
        self._heads: dict[tuple[int, bytes], bytes] = {}

    def is_usual(self, headers: Headers) -> bool:
        length = headers.get(b"content-length", b"")
        return 0 < len(length) < 6 and int(length) <= MAX_PAYLOAD_BYTES and _UNUSUAL.isdisjoint(headers)

    def key_at_hand(self, headers: Headers) -> ApiKey | None:
        """Who calls. None where that has to be looked up."""
        client = self._app.node.client
        key = None if client is None else self._app.gate.key_at_hand(headers, client.store.clock)
        # What a key may not see has to be looked for: a task of that id may go elsewhere.
        return key if key is None or key.targets is None else None

    def admit(self, key: ApiKey, headers: Headers, address: str) -> None:
        """Judge all but the body."""
        self._app.gate.let_in(key, headers, address)
        check_right(key, TICK.right)
        check_content_type(headers, (JSON,))

    def admits_again(self, headers: Headers) -> bool:
        """Whether headers that were let in once are so for ever: a key can be revoked, and a rate exceeded."""
        return self._app.gate.free and b"authorization" not in headers and self._app.node.client is not None

    def post(self, body: bytes, waiter: "Posted") -> None:
        """What `post_tick` does."""
        home = self._app.spaces.home
        task = task_of(body, self._app.node.config.tick_target, home.client.store.clock.now_ms(), replace=False)
        home.collector("keep").add(task, waiter)

    def text(self, answer: Answer, defaults: list[Header], *, closes: bool) -> bytes:
        """An answer as it is sent. Heads are alike for a second at a time."""
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


class _Nobody:
    def set(self) -> None:
        """Nobody waits for a part of the request."""


class Posted:
    """One tick on its way. For uvicorn it is a cycle: what follows on the connection waits until it is complete."""

    message_event = _Nobody()
    more_body = keep_alive = True
    disconnected = response_started = response_complete = False

    def __init__(self, connection: "Connection", shortcut: Shortcut, key: ApiKey | None, headers: Headers) -> None:
        """Without a key it is let in already."""
        self._connection = connection
        self._shortcut = shortcut
        self._key = key
        self.headers = headers
        self.body = b""

    @property
    def let_in(self) -> bool:
        return self._key is None

    def start(self) -> None:
        """The request is complete."""
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

    # -- what a collector asks of who waits ----------------------------------------------------------------------

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
