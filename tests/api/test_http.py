"""The API over real HTTP: what it answers, and that wrong requests leave nothing behind."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mainspring.api.server import ApiServer
from mainspring.api.spaces import CROWD, Collector
from mainspring.config.config import Config
from mainspring.model.errors import Conflict, Unavailable
from mainspring.model.task import Handle, Task
from mainspring.node.node import Node
from mainspring.sinks.log import NullSink
from mainspring.store import store
from mainspring.testing.servers import Server

LATER = 4_000_000_000_000 // 2 - 100_000_000_000  # 2030, in milliseconds


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    def __init__(self, node: Node, url: str) -> None:
        self.node = node
        self._address = url.removeprefix("http://")

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await asyncio.to_thread(self._call, method, path, body, headers)

    def _call(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        try:
            data = body if isinstance(body, (bytes, type(None), Iterator)) else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, named, encode_chunked=isinstance(body, Iterator))
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read())
        finally:
            connection.close()

    async def tick(self, body: Any, query: str = "") -> Answer:
        return await self.call("POST", f"/ticks{query}", body, content_type="application/json")

    async def count(self) -> int:
        assert self.node.client is not None
        return (await self.node.client.count()).pending

    async def payload_of(self, task_id: str) -> Any:
        assert self.node.client is not None
        return (await self.node.client.get(task_id)).payload


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    config = Config(redis_url=server.url, port=0, partitions=4, tick_target="null:")
    node = Node(config, {"null": NullSink()})
    face = ApiServer(node)
    await face.start()
    try:
        await node.start()
        yield Api(node, face.url)
    finally:
        await face.stop()
        await node.stop()
        server.call("FLUSHALL")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthy"])
async def test_the_probes_of_a_started_node_say_ok(api: Api, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "REACH_S", 60.0)  # a machine that stalls for two seconds is no server that is away
    answer = await api.call("GET", path)
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    head = await api.call("HEAD", path)
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "15")


async def test_a_node_that_is_not_started_lives_but_is_not_ready(server: Server) -> None:
    node = Node(Config(redis_url=server.url, port=0))
    face = ApiServer(node)
    await face.start()
    api = Api(node, face.url)
    try:
        assert (await api.call("GET", "/livez")).status == 200
        for answer in (
            await api.call("GET", "/readyz"),
            await api.call("GET", "/healthy"),
            await api.tick({"item": "a", "at": LATER}),
        ):
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert_problem(answer, "")
    finally:
        await face.stop()


async def test_an_api_that_ends_by_itself_ends_the_node(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def boom(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("uvicorn.Server.main_loop", boom)
    node = Node(Config(redis_url=server.url, port=0), {})
    assert await node.run_until_signal(ApiServer(node)) == 1


async def test_a_new_tick_is_202_and_a_repeated_one_200(api: Api) -> None:
    tick = {"item": "user 1/ü{x}", "at": LATER}
    first, again = await api.tick(tick), await api.tick(tick)
    assert (first.status, again.status) == (202, 200)
    expected = {"id": f"user 1/ü{{x}}@{LATER}", "due_ms": LATER}
    assert first.json == expected | {"outcome": "created"}
    assert again.json == expected | {"outcome": "kept"}
    assert await api.count() == 1


async def test_one_instant_in_two_spellings_is_one_tick(api: Api) -> None:
    spellings = ["2030-01-01T09:00:00Z", "2030-01-01T10:00:00.000+01:00", 1893488400000, 1893488400000.0]
    answers = [await api.tick({"item": "a", "at": at}) for at in spellings]
    assert [answer.status for answer in answers] == [202, 200, 200, 200]
    assert len({answer.json["id"] for answer in answers}) == 1


async def test_replace_keys_by_item_alone_and_moves_the_tick(api: Api) -> None:
    first = await api.tick({"item": "a", "at": LATER}, "?replace=true")
    moved = await api.tick({"item": "a", "at": LATER + 5000}, "?replace=true")
    assert (first.status, first.json["outcome"]) == (202, "created")
    assert (moved.status, moved.json) == (200, {"id": "a", "due_ms": LATER + 5000, "outcome": "replaced"})
    assert await api.count() == 1


async def test_a_time_in_the_past_is_taken_and_marked(api: Api) -> None:
    answer = await api.tick({"item": "a", "at": "2001-01-01T00:00:00Z"})
    assert (answer.status, answer.json["past"]) == (202, True)


async def test_the_content_type_may_be_missing_or_carry_a_charset(api: Api) -> None:
    body = json.dumps({"item": "a", "at": LATER}).encode()
    assert (await api.call("POST", "/ticks", body)).status == 202
    charset = await api.call("POST", "/ticks", body, content_type="Application/JSON; charset=utf-8")
    assert charset.status == 200


async def test_a_body_in_pieces_is_put_together(api: Api) -> None:
    pieces = iter([b'{"item": "pie', b'ces", "at"', b": %d}" % LATER])
    answer = await api.call("POST", "/ticks", pieces, content_type="application/json")
    assert (answer.status, answer.json["id"]) == (202, f"pieces@{LATER}")


GOOD = '"at": "2030-01-01T09:00:00Z"'
WRONG: list[tuple[str, bytes, int, str]] = [
    ("no body", b"", 400, "truncated (byte 0)"),
    ("not JSON", b"item=a", 400, "byte 0"),
    ("cut short", b'{"item": "a", ', 400, "truncated (byte 14)"),
    ("something behind it", b'{"item":"a","at":1893488400000} x', 400, "byte"),
    ("a list", b'["a", 1]', 400, "Expected `object`"),
    ("item missing", b"{" + GOOD.encode() + b"}", 400, "`item`"),
    ("at missing", b'{"item": "a"}', 400, "`at`"),
    ("item empty", b'{"item": "", %b}' % GOOD.encode(), 400, "item is empty; give 1 to 240 bytes"),
    ("item a number", b'{"item": 1, %b}' % GOOD.encode(), 400, "$.item"),
    ("item null", b'{"item": null, %b}' % GOOD.encode(), 400, "$.item"),
    ("item too long", b'{"item": "%b", %b}' % (b"x" * 241, GOOD.encode()), 400, "at most 240"),
    ("item a lone surrogate", b'{"item": "\\ud800", %b}' % GOOD.encode(), 400, ""),
    ("item not UTF-8", b'{"item": "\xff", %b}' % GOOD.encode(), 400, ""),
    ("unknown field", b'{"item": "a", %b, "when": 1}' % GOOD.encode(), 400, "unknown field `when`"),
    ("a deep unknown field", b'{"x": %b' % (b"[" * 60_000), 400, "unknown field"),
    ("item twice", b'{"item": "a", "item": "b", %b}' % GOOD.encode(), 400, "more than once"),
    ("item twice, once in disguise", b'{"item": "a", "\\u0069tem": "b", %b}' % GOOD.encode(), 400, "more than once"),
    ("at twice behind a text like it", b'{"item": "at", "at": 1, %b}' % GOOD.encode(), 400, "more than once"),
    ("at naive", b'{"item": "a", "at": "2030-01-01T09:00:00"}', 400, "naive"),
    ("at a date", b'{"item": "a", "at": "2030-01-01"}', 400, "naive"),
    ("at not a time", b'{"item": "a", "at": "tomorrow"}', 400, "not an ISO 8601 time"),
    ("at true", b'{"item": "a", "at": true}', 400, "$.at"),
    ("at null", b'{"item": "a", "at": null}', 400, "$.at"),
    ("at NaN", b'{"item": "a", "at": NaN}', 400, "malformed"),
    ("at infinite", b'{"item": "a", "at": 1e999}', 400, ""),
    ("at a list", b'{"item": "a", "at": []}', 400, "$.at"),
    ("at negative", b'{"item": "a", "at": -1}', 400, "before 1970"),
    ("at in seconds", b'{"item": "a", "at": 1893488400}', 400, "looks like seconds; give milliseconds"),
    ("at in microseconds", b'{"item": "a", "at": 1893488400000000}', 400, "microseconds"),
    ("at beyond all numbers", b'{"item": "a", "at": %b}' % (b"9" * 400), 400, ""),
    ("at at the end of time", b'{"item": "a", "at": "9999-12-31T23:59:59-23:59"}', 400, ""),
    ("too large", b'{"item": "a", "at": 1893488400000%b}' % (b" " * 65536), 413, "65536 bytes"),
]


@pytest.mark.parametrize(("body", "status", "detail"), [row[1:] for row in WRONG], ids=[r[0] for r in WRONG])
async def test_a_wrong_tick_is_refused_and_leaves_nothing(api: Api, body: bytes, status: int, detail: str) -> None:
    answer = await api.tick(body)
    assert answer.status == status
    assert_problem(answer, detail)
    assert await api.count() == 0


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "detail"),
    [
        ("GET", "/nowhere", {}, 404, "there is nothing at /nowhere; /docs shows every route"),
        ("GET", "//", {}, 404, "nothing at //"),
        ("POST", "/", {}, 405, "answers GET, HEAD"),
        ("POST", "/tick", {}, 404, "nothing at /tick"),
        ("GET", "/ticks", {}, 405, "answers POST"),
        ("POST", "/livez", {}, 405, "answers GET, HEAD"),
        ("POST", "/ticks?replace=yes", {}, 400, "$.replace"),
        ("POST", "/ticks?replce=true", {}, 400, "'replce' is unknown; there are replace"),
        ("POST", "/ticks?replace=true&replace=false", {}, 400, "more than once"),
        ("POST", "/ticks", {"content_type": "text/plain"}, 415, "text/plain"),
    ],
)
async def test_a_wrong_request_is_refused(
    api: Api, method: str, path: str, headers: dict[str, str], status: int, detail: str
) -> None:
    answer = await api.call(method, path, {"item": "a", "at": LATER}, **headers)
    assert answer.status == status
    assert_problem(answer, detail)
    assert await api.count() == 0
    if status == 405:
        assert answer.headers["allow"] == ("POST" if path == "/ticks" else "GET, HEAD")


@pytest.mark.parametrize("pieces", [2, 100])
async def test_a_large_body_in_pieces_is_refused(api: Api, pieces: int) -> None:
    answer = await api.call("POST", "/ticks", iter([b" " * 40_000] * pieces))
    assert answer.status == 413
    assert_problem(answer, "65536 bytes")


async def test_an_item_in_the_form_of_a_generated_id_cannot_be_replaced(api: Api) -> None:
    answer = await api.tick({"item": "0" * 32 + "~0.rs.0.0.0", "at": LATER}, "?replace=true")
    assert answer.status == 400
    assert_problem(answer, "generated id")


async def test_many_at_once_are_all_stored_and_the_wrong_ones_fail_alone(api: Api) -> None:
    bodies = [{"item": f"i{n}", "at": LATER if n % 5 else "soon"} for n in range(100)]
    answers = await asyncio.gather(*(api.tick(body) for body in bodies))
    assert [answer.status for answer in answers] == [202 if n % 5 else 400 for n in range(100)]
    assert await api.count() == 80


def assert_problem(answer: Answer, detail: str) -> None:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json
    assert set(problem) == {"type", "title", "status", "detail"}
    assert problem["status"] == answer.status
    assert problem["type"].startswith("urn:mainspring:problem:")
    assert detail in problem["detail"]


# -- group commit ----------------------------------------------------------------------------------------------


def _handles(tasks: list[Task]) -> list[Handle]:
    return [Handle(task.id or "", 0) for task in tasks]


async def test_requests_gather_while_a_write_is_on_its_way() -> None:
    batches: list[list[Task]] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def write(tasks: Any) -> list[Handle]:
        batches.append(tasks)
        begun.set()
        await gate.wait()
        return _handles(tasks)

    collector = Collector(write)
    first = collector.put(Task("log:", id="0"))
    await begun.wait()
    rest = [collector.put(Task("log:", id=str(n))) for n in range(1, 2 * CROWD)]
    gate.set()
    assert [handle.id for handle in await asyncio.gather(first, *rest)] == [str(n) for n in range(2 * CROWD)]
    assert [len(batch) for batch in batches] == [1, 2 * CROWD - 1], "too few for two writes"


async def test_an_error_about_one_task_fails_that_one_only() -> None:
    async def write(tasks: Any) -> list[Handle]:
        if any(task.id == "bad" for task in tasks):
            raise Conflict("bad")
        return _handles(tasks)

    collector = Collector(write)
    answers = await asyncio.gather(
        *(collector.put(Task("log:", id=id)) for id in ("a", "bad", "b")), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Handle, Conflict, Handle]


async def test_an_error_of_the_server_fails_the_batch_and_the_next_one_is_tried_again() -> None:
    down = True

    async def write(tasks: Any) -> list[Handle]:
        if down:
            raise Unavailable("away", sent=False)
        return _handles(tasks)

    collector = Collector(write)
    with pytest.raises(Unavailable):
        await collector.put(Task("log:", id="a"))
    down = False
    assert (await collector.put(Task("log:", id="a"))).id == "a"
