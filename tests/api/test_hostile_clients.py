"""Clients that mean no good, over raw sockets: malformed, endless, slow, many. Never a 500, never a half write."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from random import Random
from urllib.parse import quote

import pytest

from mainspring.api.asgi import GUARDED
from mainspring.api.server import LONGEST_S, MAX_AHEAD, MAX_HEAD_BYTES, MAX_HEADERS, HttpConnection, sweep
from mainspring.config.config import Config
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server, wait_until
from tests.support.api_calls import LATER, Api, serving_api


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with started(server, api_timeout_s=60.0) as made:
        yield made


@pytest.fixture
async def hasty(server: Server) -> AsyncIterator[Api]:
    """One that waits for its clients for a second only."""
    async with started(server, api_timeout_s=1.0) as made:
        yield made


@contextlib.asynccontextmanager
async def started(server: Server, *, api_timeout_s: float) -> AsyncIterator[Api]:
    config = Config(redis_url=server.url, port=0, partitions=4, api_timeout_s=api_timeout_s, api_connections=20)
    async with serving_api(config) as made:
        yield made
        await balance(made.client.store)
    server.call("FLUSHALL")


class Wire:
    """A connection on which a test writes what it likes."""

    def __init__(self, api: Api) -> None:
        host, _, port = api.url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))

    async def __aenter__(self) -> "Wire":
        self.reader, self.writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5):
                await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                return await self.reader.read()
        return b""

    async def head(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readuntil(b"\r\n\r\n")


def has_taken(api: Api, size: int) -> bool:
    """Return True if a connection got this many bytes and waits for more."""
    connections = [one for one in list(api.face.connections) if isinstance(one, HttpConnection)]
    return any(one.received > size and not one.flow.read_paused for one in connections)


TICK = b'{"item":"a","at":%d}' % LATER


def post(body: bytes = TICK, path: bytes = b"/ticks", more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (path, more, len(body))
    return head + body


CORPUS: dict[str, bytes] = {
    "nothing but noise": b"\x00\xff\x80\x7f" * 100 + b"\r\n\r\n",
    "TLS to a plain port": bytes.fromhex("16030100c8010000c40303") + b"\x11" * 200,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.0": b"GET / HTTP/3.0\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "a method that is none": b"GRAB /livez HTTP/1.1\r\nhost: a\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    "an absolute address": b"GET http://example.com/v1/tasks HTTP/1.1\r\nhost: example.com\r\n\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    "bytes in the path": b"GET /v1/tasks/\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a NUL in the path": b"GET /v1/tasks/a%00b HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "half a percent sign": b"GET /v1/tasks/%f HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no UTF-8 in the path": b"GET /v1/tasks/%ff%fe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a path of dots": b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an endless path": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an endless query": b"GET /v1/tasks?" + b"a=1&" * 9_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "two lengths": b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n12345",
    "length and chunks": (
        b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a negative length": b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    "a length beyond numbers": b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9"
    + b"9" * 30
    + b"\r\n\r\n",
    "chunks of nonsense": (
        b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n"
    ),
    "a chunk without end": (
        b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nx"
    ),
    "a header folded": b"GET /livez HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n",
    "a header without a name": b"GET /livez HTTP/1.1\r\n: b\r\n\r\n",
    "a space before the colon": b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length : 5\r\n\r\n12345",
    "a line feed in a header": b"GET /livez HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n",
    "many headers": (
        b"GET /livez HTTP/1.1\r\n" + b"".join(b"x%d: 1\r\n" % n for n in range(MAX_HEADERS + 1)) + b"\r\n"
    ),
    "one large header in one packet": b"GET /livez HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES + 10) + b"\r\n\r\n",
    "one large header": b"GET /livez HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES * 8) + b"\r\n\r\n",
    "a websocket": (
        b"GET /v1/tasks HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ),
    "h2c": b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n",
    "a tunnel": b"CONNECT localhost:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a tunnel to a path": b"CONNECT /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
    "a body that is cut": post(TICK[:-5]).replace(b"content-length: ", b"content-length: 9"),
    "an id of braces": b"GET /v1/tasks/%7B%7D/explain HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a delay without end": post(b'{"target":"null:","after":"%b"}' % (b"9" * 100_000), b"/v1/tasks"),
    "an id of the wrong shape": b"GET /v1/tasks/" + b"0" * 32 + b"~z.z.z.z.z HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an id with a huge address": (
        b"GET /v1/tasks/" + b"0" * 32 + b"~" + b"z" * 90 + b".1.1.1.1 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    ),
    "an authorization of bytes": b"GET /v1/tasks HTTP/1.1\r\nhost: localhost\r\nauthorization: \xff\xfe\x80\r\n\r\n",
    "a namespace of bytes": b"GET /v1/tasks HTTP/1.1\r\nhost: localhost\r\nmainspring-namespace: \xff\r\n\r\n",
    "a namespace of all": b"GET /v1/tasks HTTP/1.1\r\nhost: localhost\r\nmainspring-namespace: *\r\n\r\n",
    "an idempotency key of bytes": post(b'{"target":"null:"}', b"/v1/tasks", b"idempotency-key: \xff\r\n"),
    "no JSON": post(b"\xff" * 50, b"/v1/tasks"),
    "a JSON of brackets": post(b"[" * 60_000, b"/v1/tasks"),
    "a lone surrogate": post(b'{"target":"null:","id":"\\ud800"}', b"/v1/tasks"),
    "a NaN": post(b'{"target":"null:","at":NaN}', b"/v1/tasks"),
    "a number without end": post(b'{"target":"null:","at":%b}' % (b"9" * 5_000), b"/v1/tasks"),
    "a tick without end": post(b'{"item":"a","at":%b}' % (b"9" * 5_000)),
    "lines of noise": post(b"\xff\n\x00\n{}\n[]\nnull\n" * 100, b"/v1/tasks:batch"),
    "lines of nothing": post(b"\n" * 5_000, b"/v1/tasks:batch"),
    "an expectation": b"POST /ticks HTTP/1.1\r\nhost: localhost\r\nexpect: 200-maybe\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("data", CORPUS.values(), ids=CORPUS)
async def test_a_hostile_request_gets_an_answer_or_is_cut_and_writes_nothing(api: Api, data: bytes) -> None:
    async with Wire(api) as wire:
        await wire.send(data)
        wire.writer.write_eof() if wire.writer.can_write_eof() else None
        answer = await wire.rest()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer[:80]
    status = int(answer[9:12]) if answer else 0
    assert status != 500, answer
    if status >= 400:
        assert b"application/problem+json" in answer
    assert (await api.client.count()).pending == 0
    assert (await api.get("/livez")).status == 200


def mutated(random: Random, data: bytes) -> bytes:
    """Some bytes changed, cut out, doubled or swapped."""
    made = bytearray(data)
    for _ in range(random.randint(1, 6)):
        at, size = random.randrange(len(made)), random.randint(1, 8)
        match random.randrange(4):
            case 0:
                made[at] = random.randrange(256)
            case 1:
                del made[at : at + size]
            case 2:
                made[at:at] = made[at : at + size] * random.randint(1, 50)
            case _:
                made[at : at + size] = bytes(random.choice(b'\r\n\x00:{}[]"\\,%?&/ \xff09') for _ in range(size))
        if not made:
            return b"\r\n"
    return bytes(made)


FORGED = ("", ".", "9" * 5_000 + ".1", "\u00b2.1")
NUMBERS = ("0." + "9" * 5_000, "0." + "9" * 20, "0.\u00b2")
"""The second part of a lane is its name, which may be anything."""


@pytest.mark.parametrize(
    ("path", "cursors"),
    [
        ("/v1/tasks?", FORGED + NUMBERS),
        ("/v1/tasks?state=queued&", FORGED + NUMBERS),
        ("/v1/dead?", FORGED + NUMBERS),
        ("/v1/schedules?", FORGED + NUMBERS),
        ("/v1/audit?", FORGED + NUMBERS),
        ("/v1/lanes?", FORGED),
    ],
)
async def test_a_cursor_that_no_list_returned_is_refused(api: Api, path: str, cursors: tuple[str, ...]) -> None:
    for cursor in cursors:
        assert (await api.get(f"{path}cursor={quote(cursor)}")).problem == "invalid", cursor[:20]


async def test_no_change_of_a_few_bytes_breaks_anything(api: Api) -> None:
    """Good requests with random damage, some hundred of them, the same ones every time."""
    random = Random(1)
    task = b'{"target":"null:","at":%d,"id":"a","payload":{"n":[1,2.5e3,null,"\\u00e9"]}}' % LATER
    good = [
        post(),
        post(task, b"/v1/tasks", b"content-type: application/json\r\nidempotency-key: k\r\n"),
        post(task + b"\n" + task + b"\n", b"/v1/tasks:batch?answers=errors"),
        post(b'{"cron":"*/5 2-4 * * MON","timezone":"Europe/Paris","count":3}', b"/v1/schedules:preview"),
        b"GET /v1/tasks?limit=2&due_after=2030-01-01T00:00:00Z HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/tasks/%b~1.rs.mwisobk0.7y9v.0 HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"0f" * 16),
    ]

    async def attempt(data: bytes) -> bytes:
        async with Wire(api) as wire:
            await wire.send(data)
            with contextlib.suppress(OSError):
                wire.writer.write_eof()
            return await wire.rest()

    for _ in range(30):
        answers = await asyncio.gather(*(attempt(mutated(random, random.choice(good))) for _ in range(15)))
        for answer in answers:
            assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer[:80]
            assert b"HTTP/1.1 500" not in answer, answer
    assert (await api.get("/livez")).status == 200


async def test_requests_in_one_packet_are_answered_in_order(api: Api) -> None:
    async with Wire(api) as wire:
        last = post().replace(b"\r\nhost", b"\r\nconnection: close\r\nhost", 1)
        await wire.send(post() + b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n" + last)
        answer = await wire.rest()
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"202", b"404", b"200"]


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("path", [b"/ticks", b"/ticks?replace=false"])
@pytest.mark.parametrize("apart", [False, True])
async def test_an_offer_of_another_protocol_is_declined_and_the_body_is_a_body(
    api: Api, path: bytes, apart: bool
) -> None:
    """curl --http2 and Java's client make it with every first request."""
    head, _, body = post(path=path, more=OFFER).partition(b"\r\n\r\n")
    async with Wire(api) as wire:
        await wire.send(head + b"\r\n\r\n" + (b"" if apart else body))
        if apart:
            await asyncio.sleep(0.05)
            await wire.send(body)
        assert (await wire.head()).startswith(b"HTTP/1.1 202 ")
        await wire.reader.readuntil(b"}")
        await wire.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await wire.rest()).startswith(b"HTTP/1.1 200 ")
    smuggled = b"GET /healthy HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with Wire(api) as wire:
        await wire.send(post(smuggled, more=OFFER + b"x: y\r\n"))
        answer = await wire.head()
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", [b"/ticks", b"/ticks?replace=false"])
async def test_a_client_that_has_sent_everything_still_gets_its_answers(api: Api, path: bytes) -> None:
    async with Wire(api) as wire:
        await wire.send(post(path=path) * 3)
        wire.writer.write_eof()
        answer = await wire.rest()
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"202", b"200", b"200"]


async def test_refusals_on_the_connection_have_the_headers_for_browsers_too(api: Api) -> None:
    async with Wire(api) as wire:
        await wire.send(b"NONSENSE\r\n\r\n")
        answer = await wire.rest()
    assert answer.startswith(b"HTTP/1.1 400 ")
    for name, value in GUARDED:
        assert b"%b: %b\r\n" % (name, value) in answer


async def test_requests_without_end_before_the_first_answer_are_refused(api: Api) -> None:
    one = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with Wire(api) as wire:
        await wire.send(one * 5_000)
        answer = await wire.rest()
    assert b"HTTP/1.1 429 " in answer
    assert b"retry-after: 1\r\n" in answer.partition(b"HTTP/1.1 429 ")[2]
    assert answer.count(b"HTTP/1.1 200 ") <= 2 * MAX_AHEAD
    async with Wire(api) as wire:
        await wire.send(one * 100 + one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert (await wire.rest()).count(b"HTTP/1.1 200 ") == 101


async def test_a_caller_that_disconnects_with_many_requests_leaves_no_trace_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        async with Wire(api) as wire:
            await wire.send(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20 + post() * 5)
            wire.writer.transport.abort()
    for _ in range(100):
        if not api.face.connections:
            break
        await asyncio.sleep(0.05)
    assert (await api.get("/livez")).status == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_waits_for_leave_to_send_gets_it(api: Api) -> None:
    async with Wire(api) as wire:
        head, _, body = post(more=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await wire.send(head + b"\r\n\r\n")
        assert (await wire.head()).startswith(b"HTTP/1.1 100 ")
        await wire.send(body)
        assert (await wire.head()).startswith(b"HTTP/1.1 202 ")


# -- slow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (b"", b""),
        (b"GET /livez HT", b"408"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ", b"408"),
        (post()[:-5], b"408"),
        (post(b" " * 100, b"/v1/tasks:batch")[:-50], b"408"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" + post()[:-5], b"200"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" + post()[:30], b"200"),
    ],
    ids=[
        "silent",
        "half a line",
        "half a head",
        "half a body",
        "half a batch",
        "half behind a whole",
        "less behind one",
    ],
)
async def test_a_client_that_does_not_finish_is_cut(hasty: Api, begin: bytes, status: bytes) -> None:
    async with Wire(hasty) as wire:
        await wire.send(begin)
        answer = await wire.rest()
    assert answer[9:12] == status
    assert (await hasty.client.count()).pending == 0


async def test_a_client_that_dribbles_is_cut(hasty: Api) -> None:
    async with Wire(hasty) as wire:
        await wire.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n")
        for _ in range(300):
            await wire.send(b"x: y\r\n")
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.1):
                    await wire.reader.read(1000)
            if wire.reader.at_eof() or wire.reader.exception() is not None:
                return
    raise AssertionError("it is still listened to")


async def test_chunks_of_a_byte_are_refused_before_the_body_is_read(api: Api) -> None:
    head = b"POST /v1/tasks:batch HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with Wire(api) as wire:
        await wire.send(head + b"1\r\n \r\n" * 20_000)
        answer = await wire.rest()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"send larger ones" in answer
    async with Wire(api) as wire:
        await wire.send(head + b"20\r\n" + b" " * 31 + b"\n\r\n" + b"20\r\n%b\r\n" % (b" " * 32) * 5_000 + b"0\r\n\r\n")
        assert (await wire.head()).startswith(b"HTTP/1.1 200 ")


async def test_a_large_body_has_a_limited_time_even_if_it_comes_steadily(api: Api) -> None:
    async with Wire(api) as wire:
        head = b"POST /v1/tasks:batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000000\r\n\r\n"
        await wire.send(head + b"\n" * 6_000_000)
        # While the server itself does not read, its clients' time does not count.
        await asyncio.to_thread(wait_until, lambda: has_taken(api, 6_000_000), "all that was sent is read")
        now_s = asyncio.get_running_loop().time()
        sweep(api.face.connections, now_s + LONGEST_S + 1, now_s + LONGEST_S + 1)
        assert (await wire.head()).startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_does_not_take_its_answer_is_cut(hasty: Api) -> None:
    """The answer does not fit into the buffers of the sockets, and the client does not read it."""
    for n in range(300):
        await hasty.client.put("null:", "x" * 60_000, at=LATER + n)
    host, _, port = hasty.url.removeprefix("http://").rpartition(":")
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect((host, int(port)))
        wire.setblocking(False)
        wire.send(b"GET /v1/tasks?limit=300 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(600):
            if wire.getsockname() not in {getattr(one, "client", None) for one in hasty.face.connections}:
                return
            await asyncio.sleep(0.05)
    raise AssertionError("the connection is still held")


async def test_a_connection_that_rests_between_requests_is_kept(api: Api) -> None:
    async with Wire(api) as wire:
        await wire.send(post())
        assert b'"created"' in await wire.reader.readuntil(b"}")
        now_s = asyncio.get_running_loop().time()
        sweep(api.face.connections, now_s + 60, now_s)  # a minute passes: it does not count between requests
        await wire.send(post())
        assert b'"kept"' in await wire.reader.readuntil(b"}")


# -- many ------------------------------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_refused_with_503(api: Api) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            wire = await stack.enter_async_context(Wire(api))
            await wire.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await wire.head()).startswith(b"HTTP/1.1 200")
        one_more = await stack.enter_async_context(Wire(api))
        answer = await one_more.rest()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
    for _ in range(100):
        with contextlib.suppress(ConnectionError, OSError):
            if (await api.get("/livez")).status == 200:
                return
        await asyncio.sleep(0.1)
    raise AssertionError("nobody gets in any more")


async def test_a_client_that_goes_away_in_the_middle_does_no_harm(api: Api) -> None:
    for cut in (10, 40, len(post()) - 1):
        async with Wire(api) as wire:
            await wire.send(post()[:cut])
    assert (await api.post("/ticks", {"item": "b", "at": LATER})).status == 202
    assert (await api.client.count()).pending == 1
