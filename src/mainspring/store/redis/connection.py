"""One RESP2 connection: pipelines out, replies back in order. It never retries anything.

A missing reply is `Unavailable`; its `sent` says whether the commands may have run. Error replies are
values in the list, because in a pipeline one error says nothing about its neighbours.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from mainspring.model.errors import ConfigError, MainspringError, Refused, Unavailable
from mainspring.store.redis.url import Endpoint, Tls

Arg = bytes | str | int | float
RedisCommand = tuple[Arg, ...]

_HELD_UP_S = 0.05
"""A timer this late shows that this process stalled (a paused machine, a blocked loop), not that the server did: the
reply could not be read, or the request not even be sent. The wait starts again, once."""
_NOTHING = object()
# hiredis types its argument as a tuple of exactly one.
_pack = cast("Callable[[RedisCommand], bytes]", hiredis.pack_command)


class _Waiter:
    """A pipeline in flight: the number of expected replies, and the replies so far."""

    __slots__ = ("expected", "future", "replies", "timer")

    def __init__(self, future: asyncio.Future[list[Any]], expected: int) -> None:
        self.future = future
        self.expected = expected
        self.replies: list[Any] = []
        self.timer: asyncio.TimerHandle | None = None


class Connection(asyncio.Protocol):
    """One connection, shared by any number of coroutines of one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False
        self._problem = ""
        """Why the connection is closed."""
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._waiters: deque[_Waiter] = deque()
        self._transport: asyncio.Transport | None = None
        self._writable: asyncio.Future[None] | None = None  # set while the send buffer is full
        self._listener: Callable[[Any], None] | None = None
        self._on_lost: Callable[[], None] | None = None

    @classmethod
    async def open(
        cls, endpoint: Endpoint, *, connect_timeout_s: float, client_name: str = "mainspring", again: bool = True
    ) -> Connection:
        """Connect, authenticate and select the database, all within the one timeout."""
        connection = cls(endpoint.address)
        due_s = connection._loop.time() + connect_timeout_s
        try:
            async with asyncio.timeout_at(due_s):
                await connection._dial(endpoint)
                await connection._greet(endpoint, client_name)
        except TimeoutError:
            connection.close()
            if again and connection._held_up(due_s):
                return await cls.open(
                    endpoint, connect_timeout_s=connect_timeout_s, client_name=client_name, again=False
                )
            message = f"{endpoint.address}: no answer within {connect_timeout_s:g} s while connecting"
            if endpoint.tls is not None:
                message += "; does the server speak TLS on this port (rediss, not redis)?"
            raise Unavailable(message, sent=False) from None
        except OSError as error:
            connection.close()
            message = f"{endpoint.address}: cannot connect: {_reason(error)}"
            raise Unavailable(message, sent=False) from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def pipeline(self, commands: Sequence[RedisCommand], *, timeout_s: float | None) -> list[Any]:
        """Send all commands in one write and return all replies; error replies are values."""
        if not commands:
            return []
        data = b"".join(map(_pack, commands))
        if self._writable is not None:
            await self._until_writable(timeout_s)
        if self.closed:
            raise Unavailable(f"{self.address}: {self._problem}", sent=False)
        if self._loop is not asyncio.get_running_loop():
            raise MainspringError(
                "used in another event loop than it was opened in; open the client in the loop that uses it, or use a"
                " SyncClient"
            )
        waiter = _Waiter(self._loop.create_future(), len(commands))
        self._waiters.append(waiter)
        cast("asyncio.Transport", self._transport).write(data)
        if timeout_s is None:
            return await waiter.future
        self._set_timer(waiter, timeout_s, again=True)
        try:
            return await waiter.future
        finally:
            cast("asyncio.TimerHandle", waiter.timer).cancel()

    def listen(self, on_reply: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        """Pass replies that no pipeline waits for to `on_reply` from now on (pub/sub)."""
        self._listener = on_reply
        self._on_lost = on_lost
        if self.closed:
            self._loop.call_soon(on_lost)

    def send(self, commands: Sequence[RedisCommand]) -> None:
        """Write without waiting; the replies go to the listener. For subscriptions only."""
        if self.closed:
            raise Unavailable(f"{self.address}: {self._problem}", sent=False)
        data = b"".join(map(_pack, commands))
        cast("asyncio.Transport", self._transport).write(data)

    @property
    def idle(self) -> bool:
        """True while no pipeline waits for replies."""
        return not self._waiters

    def close(self) -> None:
        """Close at once; waiting pipelines get Unavailable."""
        self._fail("the connection was closed")
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.closed:  # closed while connecting
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        # The hot path: only take replies off the reader here.
        self._reader.feed(data)
        gets = self._reader.gets
        waiters = self._waiters
        try:
            while (reply := gets()) is not _NOTHING:
                if not waiters:
                    self._unasked(reply)
                    continue
                waiter = waiters[0]
                waiter.replies.append(reply)
                if len(waiter.replies) == waiter.expected:
                    waiters.popleft()
                    if not waiter.future.done():  # done: its caller was cancelled
                        waiter.future.set_result(waiter.replies)
        except hiredis.ProtocolError as error:
            self._break(f"the server's reply cannot be read: {error}")

    def eof_received(self) -> None:
        self._fail("the server closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {_reason(exc)}" if exc else "the server closed the connection")

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # -- inside ---------------------------------------------------------------------------------

    async def _dial(self, endpoint: Endpoint) -> None:
        if endpoint.path is not None:
            await self._loop.create_unix_connection(lambda: self, endpoint.path)
            return
        context = tls_context(endpoint.tls) if endpoint.tls is not None else None
        transport, _ = await self._loop.create_connection(lambda: self, endpoint.host, endpoint.port, ssl=context)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def _greet(self, endpoint: Endpoint, client_name: str) -> None:
        commands: list[RedisCommand] = []
        if endpoint.password is not None:
            login = (endpoint.user,) if endpoint.user is not None else ()
            commands.append(("AUTH", *login, endpoint.password))
        if endpoint.db:
            commands.append(("SELECT", endpoint.db))
        # Best effort, and always sent: TLS 1.3 reports a missing client certificate only on the first read.
        commands.append(("CLIENT", "SETNAME", client_name))
        try:
            replies = await self.pipeline(commands, timeout_s=None)
        except Unavailable as error:
            # No command of the caller has been sent yet.
            raise Unavailable(str(error), sent=False) from error.__cause__
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError) and "max number of clients" in str(reply):
                raise Unavailable(f"{self.address}: the server accepts no more connections: {reply}", sent=False)
            if isinstance(reply, hiredis.ReplyError) and command is not commands[-1]:
                raise Refused(f"{self.address}: {command[0]!s} was refused: {reply}")

    async def _until_writable(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._writable is not None:
                    # Shielded: one impatient caller must not end the wait of the others.
                    await asyncio.shield(self._writable)
        except TimeoutError:
            message = f"{self.address}: the server accepted no data for {timeout_s:g} s"
            raise Unavailable(message, sent=False) from None

    def _unasked(self, reply: Any) -> None:
        if self._listener is not None:
            self._listener(reply)
        elif isinstance(reply, hiredis.ReplyError):
            self._break(f"the server refuses connections: {reply}")
        else:
            self._break(f"the server sent an unexpected reply: {str(reply)[:80]}")

    def _set_timer(self, waiter: _Waiter, timeout_s: float, *, again: bool) -> None:
        due_s = self._loop.time() + timeout_s
        waiter.timer = self._loop.call_at(due_s, self._expire, waiter, timeout_s, due_s, again)

    def _expire(self, waiter: _Waiter, timeout_s: float, due_s: float, again: bool) -> None:
        if waiter.future.done():
            return
        if again and self._held_up(due_s):
            self._set_timer(waiter, timeout_s, again=False)
        else:
            self._break(f"no reply within {timeout_s:g} s")

    def _held_up(self, due_s: float) -> bool:
        return self._loop.time() > due_s + _HELD_UP_S

    def _break(self, problem: str) -> None:
        """Close a connection whose replies no longer match its requests."""
        self._fail(problem)
        cast("asyncio.Transport", self._transport).abort()

    def _fail(self, problem: str) -> None:
        if self.closed:
            return
        waiters = list(self._waiters)
        self._waiters.clear()
        last = waiters[0].replies[-1:] if waiters else []
        if last and isinstance(last[0], hiredis.ReplyError):  # usually the reason, such as too many connections
            problem = f"{problem} after the reply: {last[0]}"
        self.closed, self._problem = True, problem
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(Unavailable(f"{self.address}: {problem}", sent=True))
        self.resume_writing()
        if self._on_lost is not None:
            self._on_lost()


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that verifies the certificate and the host name; verification cannot be turned off."""
    if tls.key is not None and tls.cert is None:
        raise ConfigError(f"TLS: the key {tls.key} is given without cert; name the certificate that belongs to it")
    files = f"ca {tls.ca}"
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            files = f"cert {tls.cert}" if tls.key is None else f"cert {tls.cert} and key {tls.key}"
            context.load_cert_chain(tls.cert, tls.key, no_passphrase)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS files cannot be read ({files}): {_reason(error)}") from error
    return context


def no_passphrase() -> str:
    """Refuse an encrypted key. Without this callback a program on a terminal would stop and prompt for a passphrase."""
    raise ConfigError("TLS: the key is encrypted with a passphrase; give one without, readable by this user only")


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        if "CERTIFICATE_REQUIRED" in (error.reason or ""):
            return "the server asks for a client certificate (cert and key)"
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio repeats the address instead
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
