"""`POST /ticks` takes a shorter path than other requests, with the same answers."""

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from mainspring.api import auth
from mainspring.api.app import App
from mainspring.api.server import HttpConnection, sweep
from mainspring.config.config import Config
from mainspring.model.errors import Unavailable
from mainspring.model.limits import MAX_ITEM_BYTES
from mainspring.store.access import list_keys, revoke_key
from mainspring.testing.servers import Server
from tests.api.test_hostile_clients import Wire, post
from tests.api.test_http import WRONG
from tests.engine.test_engine import until
from tests.support.api_calls import LATER, Api, serving_api

SHORT, LONG = "/ticks", "/ticks?replace=false"


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    server.call("FLUSHALL")
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as made:
        yield made


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests that came through the application."""
    seen: list[str] = []
    answer = App.__call__

    async def noted(self: App, scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await answer(self, scope, receive, send)

    monkeypatch.setattr(App, "__call__", noted)
    return seen


def told(answer: Any) -> tuple[int, bytes, dict[str, str]]:
    return answer.status, answer.body, {name: value for name, value in answer.headers.items() if name != "date"}


async def test_a_tick_does_not_pass_through_the_application(api: Api, long_way: list[str]) -> None:
    first = await api.post(SHORT, {"item": "a", "at": LATER})
    again = await api.post(SHORT, {"item": "a", "at": LATER})
    assert (first.status, again.status, long_way) == (202, 200, [])
    assert (await api.post(LONG, {"item": "a", "at": LATER})).status == 200
    assert long_way == ["/ticks"]
    assert (await api.client.count()).pending == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"item":"a","at":%d}' % LATER, {}),
        (b'{"item":"a","at":1000000000000}', {"content_type": "application/json; charset=utf-8"}),
        (b'{"item":"a","at":%d}' % LATER, {"content_type": "text/plain"}),
        (b'{"item":"a","at":%d}' % LATER, {"origin": "https://elsewhere.example"}),
        (b'{"item":"a","at":%d}' % LATER, {"host": "elsewhere.example"}),
        (b'{"item":"a","at":%d}' % LATER, {"authorization": "Bearer nonsense"}),
        (b'{"item":"a","at":%d}' % LATER, {"mainspring_namespace": "nobody"}),
        *((body, {}) for _, body, _, _ in WRONG),
    ],
)
async def test_ticks_get_the_same_answer_on_both_ways(api: Api, body: bytes, headers: dict[str, str]) -> None:
    await api.call("POST", SHORT, body, **headers)  # so that both find what is there
    assert told(await api.call("POST", SHORT, body, **headers)) == told(await api.call("POST", LONG, body, **headers))


async def test_a_key_is_looked_up_once_a_second_and_judged_every_time(
    api: Api, long_way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "FRESH_S", 60.0)  # even if a loaded machine takes long for a second's worth
    submitter, reader = await api.key("submit-only"), await api.key("reader")
    bound = await api.key("submit-only", targets=("https://example.com/*",))
    over = await api.key("submit-only", expires_ms=1)
    found = {}
    for name, token in (("submitter", submitter), ("reader", reader), ("bound", bound), ("over", over)):
        tick = {"item": name, "at": LATER}
        ways = [await api.post(path, tick, authorization=f"Bearer {token}") for path in (LONG, SHORT)]
        found[name] = [answer.status for answer in ways]
    assert found == {"submitter": [202, 200], "reader": [403, 403], "bound": [403, 403], "over": [401, 401]}
    assert long_way.count("/ticks") == 6, "those of the long way, the key that is over and the one that is bound"
    api.node_ring_forgets()
    assert (await api.post(SHORT, {"item": "a", "at": LATER}, authorization=f"Bearer {submitter}")).status == 202
    assert long_way.count("/ticks") == 7


async def test_a_rate_counts_on_both_ways(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_rate=1)) as api:
        answers = [await api.post(path, {"item": "a", "at": LATER}) for path in (SHORT, LONG, SHORT, LONG)]
    assert sorted(one.status for one in answers)[-2:] == [429, 429]
    refused = [one for one in answers if one.status == 429]
    assert all(one.headers["retry-after"] == "1" for one in refused)


async def test_ticks_in_one_packet_are_answered_in_order(api: Api) -> None:
    ticks = [post(b'{"item":"%d","at":%d}' % (n, LATER)) for n in range(5)]
    async with Wire(api) as wire:
        await wire.send(b"".join(ticks[:4]) + ticks[4].replace(b"\r\nhost", b"\r\nconnection: close\r\nhost", 1))
        answer = await wire.rest()
    assert re.findall(rb'"id":"(\d)@', answer) == [b"0", b"1", b"2", b"3", b"4"]
    assert answer.count(b"HTTP/1.1 202 ") == 5


async def test_a_tick_that_comes_byte_by_byte_is_one(api: Api, long_way: list[str]) -> None:
    async with Wire(api) as wire:
        for byte in post(b'{"item":"a","at":%d}' % LATER):
            await wire.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.head()).startswith(b"HTTP/1.1 202 ")
    assert long_way == []


async def test_an_error_of_the_server_is_reported(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("the server does not answer", sent=False)

    monkeypatch.setattr(api.client, "put_many", away)
    answer = await api.post(SHORT, {"item": "a", "at": LATER})
    assert (answer.status, answer.problem) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_a_bug_is_reported_and_logged(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mainspring.api.ticks.task_of", lambda *_, **__: 1 / 0)
    answer = await api.post(SHORT, {"item": "a", "at": LATER})
    assert (answer.status, answer.problem) == (500, "bug")
    assert "ZeroDivisionError" in caplog.text


class HeldWrite:
    """A write that has begun and ends on request."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.leave = asyncio.Event(), asyncio.Event()
        self._put_many = api.client.put_many
        monkeypatch.setattr(api.client, "put_many", self._held)

    async def _held(self, *args: Any, **more: Any) -> Any:
        self.begun.set()
        await self.leave.wait()
        return await self._put_many(*args, **more)


async def test_a_stop_answers_what_is_under_way_and_closes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    write = HeldWrite(api, monkeypatch)
    async with Wire(api) as wire:
        await wire.send(post())
        await write.begun.wait()
        for connection in list(api.face.connections):
            connection.shutdown()  # type: ignore[attr-defined]
        write.leave.set()
        answer = await wire.rest()
    assert answer.startswith(b"HTTP/1.1 202 ")
    assert b"\r\nconnection: close\r\n" in answer


async def test_a_caller_that_disconnects_before_the_answer_does_no_harm(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = HeldWrite(api, monkeypatch)
    async with Wire(api) as wire:
        await wire.send(post())
        await write.begun.wait()
    write.leave.set()
    assert (await api.post(SHORT, {"item": "b", "at": LATER})).status == 202
    assert (await api.client.count()).pending == 2


async def test_a_connection_that_rests_for_too_long_is_closed(api: Api) -> None:
    async with Wire(api) as wire:
        await wire.send(post())
        assert (await wire.head()).startswith(b"HTTP/1.1 202 ")
        now_s = asyncio.get_running_loop().time()
        sweep(api.face.connections, now_s + 80, now_s + 79)
        await wire.rest()
    assert len(api.face.connections) == 0


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The addresses of requests whose heads were parsed."""
    seen: list[bytes] = []
    begin = HttpConnection.on_headers_complete

    def noted(self: HttpConnection) -> None:
        seen.append(self.url)
        begin(self)

    monkeypatch.setattr(HttpConnection, "on_headers_complete", noted)
    return seen


def tick(n: int) -> bytes:
    return b'{"item":"%03d","at":%d}' % (n, LATER)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bytes that connections have received, piece by piece."""
    seen: list[bytes] = []
    receive = HttpConnection.data_received

    def noted(self: HttpConnection, data: bytes) -> None:
        seen.append(data)
        receive(self, data)

    monkeypatch.setattr(HttpConnection, "data_received", noted)
    return seen


def _has_more_than(items: list[bytes], count: int) -> bool:
    return len(items) > count


async def asked(wire: Wire, request: bytes) -> tuple[bytes, bytes]:
    """The head and the body of the answer to one request."""
    await wire.send(request)
    head = await wire.head()
    [length] = re.findall(rb"\r\ncontent-length: (\d+)\r\n", head)
    return head, await wire.reader.readexactly(int(length))


async def test_a_head_that_came_before_is_not_parsed_again_and_the_body_is(api: Api, parsed: list[bytes]) -> None:
    async with Wire(api) as wire:
        answers = [await asked(wire, post(tick(n))) for n in range(5)]
        assert len(parsed) == 2, "the first of the connection, and the first that came between two others"
        head, body = await asked(wire, post(b'{"item":"aaa","at":"tomorrow at 3"}'[: len(tick(0))]))
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"problem:malformed" in body
        assert len(parsed) == 2
        assert (await asked(wire, post(tick(5))))[0].startswith(b"HTTP/1.1 202 ")
    assert [re.findall(rb'"id":"(\d+)@', body) for _, body in answers] == [[b"%03d" % n] for n in range(5)]
    assert (await api.client.count()).pending == 6


async def test_a_head_that_differs_in_anything_is_parsed(
    api: Api, parsed: list[bytes], long_way: list[str], heard: list[bytes]
) -> None:
    whole = post(tick(9))
    head, _, _ = whole.partition(b"\r\n\r\n")
    async with Wire(api) as wire:
        for n in range(3):
            await asked(wire, post(tick(n)))
        del parsed[:]
        for packets in (
            [post(tick(3), more=b"x: y\r\n")],
            [post(b'{"item":"longer","at":%d}' % LATER)],
            [head + b"\r\n\r\n", tick(4)],
            [whole[:-7], whole[-7:]],
            [b"\r\n", post(tick(5))],
        ):
            *first, last = packets
            for packet in first:
                before = len(heard)
                await wire.send(packet)
                await until(partial(_has_more_than, heard, before))
            answer, _ = await asked(wire, last)
            assert answer.startswith(b"HTTP/1.1 202 ")
        assert parsed == [b"/ticks"] * 5
        answer, _ = await asked(wire, post(tick(6), path=b"/ticks?replace=false"))
        assert answer.startswith(b"HTTP/1.1 202 ")
        assert long_way == ["/ticks"]
        await wire.send(post(tick(7)) + post(tick(8), more=b"connection: close\r\n"))
        assert (await wire.rest()).count(b"HTTP/1.1 202 ") == 2
    assert (await api.client.count()).pending == 11


async def test_a_known_head_does_not_outlive_its_key(
    api: Api, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "FRESH_S", 60.0)
    token = await api.key("submit-only")
    with_key = b"authorization: Bearer %b\r\n" % token.encode()
    async with Wire(api) as wire:
        for n in range(4):
            assert (await asked(wire, post(tick(n), more=with_key)))[0].startswith(b"HTTP/1.1 202 ")
        assert len(parsed) == 2
        for record in await list_keys(api.client.store):
            await revoke_key(api.client.store, record.id)
        api.node_ring_forgets()
        assert (await asked(wire, post(tick(9), more=with_key)))[0].startswith(b"HTTP/1.1 401 ")


async def test_a_known_head_counts_against_the_rate(server: Server) -> None:
    server.call("FLUSHALL")
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_rate=3)) as api, Wire(api) as wire:
        answers = [await asked(wire, post(tick(n))) for n in range(40)]
    statuses = [head[9:12] for head, _ in answers]
    assert {b"202", b"429"} == set(statuses)
    assert statuses.count(b"202") < 30


@pytest.mark.parametrize("more", [b"origin: https://elsewhere.example\r\n", b"content-encoding: gzip\r\n"])
async def test_a_head_that_is_refused_is_refused_again(api: Api, more: bytes) -> None:
    async with Wire(api) as wire:
        for n in range(3):
            assert (await asked(wire, post(tick(n))))[0].startswith(b"HTTP/1.1 202 ")
        answers = [await asked(wire, post(tick(n), more=more)) for n in range(3, 7)]
        assert {head[9:10] for head, _ in answers} == {b"4"}
        assert (await asked(wire, post(tick(7))))[0].startswith(b"HTTP/1.1 202 ")
    assert (await api.client.count()).pending == 4


@pytest.mark.parametrize("query", ["", "?replace=true"])
async def test_the_limit_of_an_item_is_one_number(api: Api, query: str) -> None:
    for dead_letter in ("a", "\u00fc"):
        longest = dead_letter * (MAX_ITEM_BYTES // len(dead_letter.encode()))
        assert (await api.post(f"/ticks{query}", {"item": longest, "at": LATER})).status == 202
        for more in (1, 16, 17, 1_000):
            item = longest + "a" * more
            refused = await api.post(f"/ticks{query}", {"item": item, "at": LATER})
            assert (refused.status, refused.problem) == (400, "invalid")
            size = MAX_ITEM_BYTES + more
            assert refused.json["detail"] == f"item has {size} bytes; at most {MAX_ITEM_BYTES} are allowed"
    assert "give 1 to 240 bytes" in (await api.post(f"/ticks{query}", {"item": "", "at": LATER})).json["detail"]
    described = (await api.get("/openapi.json")).json["components"]["schemas"]["Tick"]["properties"]["item"]
    assert described["maxLength"] == MAX_ITEM_BYTES == 240
