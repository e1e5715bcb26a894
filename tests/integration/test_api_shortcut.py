"""`POST /ticks` takes a shorter way than other requests; nobody may notice but by the clock."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mainspring.api.app import App
from mainspring.api.protocol import sweep
from mainspring.config import Config
from mainspring.model.errors import Unavailable
from mainspring.testing.servers import Server

from .calling import LATER, Api, serving_api
from .test_api_hostile import Wire, post
from .test_http import WRONG

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
        (b'{"item":"a","at":1}', {"content_type": "application/json; charset=utf-8"}),
        (b'{"item":"a","at":%d}' % LATER, {"content_type": "text/plain"}),
        (b'{"item":"a","at":%d}' % LATER, {"origin": "https://elsewhere.example"}),
        (b'{"item":"a","at":%d}' % LATER, {"host": "elsewhere.example"}),
        (b'{"item":"a","at":%d}' % LATER, {"authorization": "Bearer nonsense"}),
        (b'{"item":"a","at":%d}' % LATER, {"mainspring_namespace": "nobody"}),
        *((body, {}) for _, body, _, _ in WRONG),
    ],
)
async def test_both_ways_say_the_same(api: Api, body: bytes, headers: dict[str, str]) -> None:
    await api.call("POST", SHORT, body, **headers)  # so that both find what is there
    assert told(await api.call("POST", SHORT, body, **headers)) == told(await api.call("POST", LONG, body, **headers))


async def test_a_key_is_looked_up_once_a_second_and_judged_every_time(api: Api, long_way: list[str]) -> None:
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


async def test_an_error_of_the_server_is_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("the server does not answer", sent=False)

    monkeypatch.setattr(api.client, "put_many", away)
    answer = await api.post(SHORT, {"item": "a", "at": LATER})
    assert (answer.status, answer.problem) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_a_bug_is_told_and_logged(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mainspring.api.shortcut.task_of", lambda *_, **__: 1 / 0)
    answer = await api.post(SHORT, {"item": "a", "at": LATER})
    assert (answer.status, answer.problem) == (500, "bug")
    assert "ZeroDivisionError" in caplog.text


class HeldWrite:
    """A write that has begun and goes on when it may."""

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


async def test_who_hangs_up_before_the_answer_does_no_harm(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
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
