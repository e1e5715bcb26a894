"""One connection against real servers: order, errors as values, and honest `sent` after every accident."""

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import hiredis
import pytest

from mainspring.model.errors import Refused, Unavailable
from mainspring.store.redis.connection import Connection
from mainspring.store.redis.url import Endpoint, parse_url
from mainspring.testing.servers import Kind, Server, standalone


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    with standalone(kind) as started:
        yield started


async def opened(url: str) -> Connection:
    endpoint = parse_url(url)
    assert isinstance(endpoint, Endpoint)
    return await Connection.open(endpoint, connect_timeout_s=30)


async def test_replies_are_bytes_in_order_and_errors_are_values(server: Server) -> None:
    for url in (server.url, server.unix_url):
        connection = await opened(url)
        replies = await connection.pipeline(
            [("SET", "a", 1), ("GET", b"a"), ("LPUSH", "a", "x"), ("ECHO", "é"), ("DEL", "a")], timeout_s=60
        )
        assert replies[:2] == [b"OK", b"1"]
        assert isinstance(replies[2], hiredis.ReplyError)
        assert replies[3:] == ["é".encode(), 1]
        connection.close()


async def test_errors_inside_a_transaction_are_values_too(server: Server) -> None:
    connection = await opened(server.url)
    commands = [("MULTI",), ("SET", "a", "x"), ("INCR", "a"), ("EXEC",)]
    result = (await connection.pipeline(commands, timeout_s=60))[-1]
    assert result[0] == b"OK"
    assert isinstance(result[1], hiredis.ReplyError)
    connection.close()


async def test_callers_share_a_connection_and_get_their_own_replies(server: Server) -> None:
    connection = await opened(server.url)

    async def echo(n: int) -> None:
        commands = [("ECHO", f"{n}.{i}") for i in range(n % 7 + 1)]
        replies = await connection.pipeline(commands, timeout_s=60)
        assert replies == [f"{n}.{i}".encode() for i in range(n % 7 + 1)]

    await asyncio.gather(*(echo(n) for n in range(500)))
    assert await connection.pipeline([], timeout_s=60) == []
    connection.close()


async def test_a_cancelled_caller_does_not_shift_the_replies_of_others(server: Server) -> None:
    connection = await opened(server.url)
    server.pause()
    impatient = asyncio.create_task(connection.pipeline([("ECHO", "mine")], timeout_s=60))
    patient = asyncio.create_task(connection.pipeline([("ECHO", "yours")], timeout_s=60))
    await asyncio.sleep(0)
    impatient.cancel()
    server.resume()
    assert await patient == [b"yours"]
    assert impatient.cancelled()
    connection.close()


async def test_large_replies_and_large_commands_pass(server: Server) -> None:
    connection = await opened(server.url)
    items = [b"%d" % n * 20 for n in range(20_000)]
    await connection.pipeline([("RPUSH", "list", *items), ("SET", "big", b"x" * 20_000_000)], timeout_s=60)
    listed, big = await connection.pipeline([("LRANGE", "list", 0, -1), ("GET", "big")], timeout_s=60)
    assert listed == items
    assert len(big) == 20_000_000
    connection.close()


async def test_writers_wait_while_the_server_takes_no_data(server: Server) -> None:
    connection = await opened(server.url)
    server.pause()
    filler = ("SET", "big", b"x" * 30_000_000)
    first = asyncio.create_task(connection.pipeline([filler], timeout_s=60))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="accepted no data") as caught:
        await connection.pipeline([("ECHO", "late")], timeout_s=0.05)
    assert not caught.value.sent
    waiting = asyncio.create_task(connection.pipeline([("ECHO", "after")], timeout_s=60))
    server.resume()
    assert await first == [b"OK"]
    assert await waiting == [b"after"]
    connection.close()


async def test_a_timeout_closes_the_connection_and_says_sent(server: Server) -> None:
    connection = await opened(server.url)
    server.pause()
    with pytest.raises(Unavailable, match="no reply within") as caught:
        await connection.pipeline([("PING",)], timeout_s=0.05)
    assert caught.value.sent
    assert connection.closed
    with pytest.raises(Unavailable) as caught:
        await connection.pipeline([("PING",)], timeout_s=0.05)
    assert not caught.value.sent


async def test_a_process_that_was_suspended_does_not_mistake_it_for_a_silent_server(server: Server) -> None:
    connection = await opened(server.url)
    server.pause()
    asked = asyncio.create_task(connection.pipeline([("ECHO", "late")], timeout_s=1))
    await asyncio.sleep(0)
    time.sleep(1.2)  # noqa: ASYNC251  # the whole machine stands still, longer than the server may take
    server.resume()
    assert await asked == [b"late"]
    connection.close()


async def test_a_lost_server_fails_every_waiting_call(server: Server) -> None:
    connection = await opened(server.url)
    waiting = [asyncio.create_task(connection.pipeline([("BLPOP", f"none{n}", 0)], timeout_s=None)) for n in range(3)]
    await asyncio.sleep(0)
    server.kill()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
        assert outcome.sent
    assert connection.closed


async def test_a_refused_connection_is_unavailable_and_nothing_was_sent(server: Server) -> None:
    server.stop()
    for url in (server.url, server.unix_url):
        with pytest.raises(Unavailable, match="cannot connect") as caught:
            await opened(url)
        assert not caught.value.sent


async def test_a_server_that_accepts_and_says_nothing_is_given_up(server: Server) -> None:
    server.pause()
    endpoint = parse_url(server.url)
    assert isinstance(endpoint, Endpoint)
    with pytest.raises(Unavailable, match="while connecting"):
        await Connection.open(endpoint, connect_timeout_s=0.1)


class Full(asyncio.Protocol):
    """Behave like a server with one connection too many."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(b"-ERR max number of clients reached\r\n")

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


@pytest.mark.parametrize("login", ["", ":secret@"])
async def test_a_server_that_refuses_connections_says_so(login: str) -> None:
    met = Full()
    async with await asyncio.get_running_loop().create_server(lambda: met, "127.0.0.1") as full:
        port = full.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="max number of clients reached") as refused:
            await opened(f"redis://{login}127.0.0.1:{port}")
        assert not refused.value.sent
        await met.over.wait()


async def test_a_closed_connection_says_why_it_was_closed(server: Server) -> None:
    connection = await opened(server.url)
    server.kill()
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"the server closed the connection|the connection broke"):
            await connection.pipeline([("PING",)], timeout_s=60)


async def test_arguments_that_cannot_be_sent_leave_the_connection_usable(server: Server) -> None:
    connection = await opened(server.url)
    with pytest.raises((TypeError, hiredis.HiredisError)):
        await connection.pipeline([("SET", "a", None)], timeout_s=60)  # type: ignore[list-item]
    assert await connection.pipeline([("ECHO", "fine")], timeout_s=60) == [b"fine"]
    connection.close()


async def test_password_user_and_database_are_used(kind: Kind) -> None:
    with standalone(kind, password="s:e@c/r%t") as server:
        connection = await opened(f"{server.url}/3")
        await connection.pipeline([("SET", "a", 1)], timeout_s=60)
        assert b"db=3" in (await connection.pipeline([("CLIENT", "INFO")], timeout_s=60))[0]
        connection.close()
        server.call("ACL", "SETUSER", "ann", "on", ">pw", "~*", "+@all")
        connection = await opened(f"redis://ann:pw@127.0.0.1:{server.port}")
        assert await connection.pipeline([("ACL", "WHOAMI")], timeout_s=60) == [b"ann"]
        connection.close()


async def test_a_wrong_password_or_database_is_refused_without_showing_the_password(kind: Kind) -> None:
    with standalone(kind, password="right") as server:
        for bad in (f"redis://:hunter2@127.0.0.1:{server.port}", f"{server.url}/999"):
            with pytest.raises(Refused) as caught:
                await opened(bad)
            assert "hunter2" not in str(caught.value)
        connection = await opened(f"redis://127.0.0.1:{server.port}")
        reply = (await connection.pipeline([("PING",)], timeout_s=60))[0]
        assert str(reply).startswith("NOAUTH")
        connection.close()
