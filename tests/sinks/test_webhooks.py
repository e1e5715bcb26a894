"""Webhooks and named targets through the engine: from the put to the receiver, the retry or the dead letter."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import msgspec
import pytest

from mainspring.cli.dead import lines_of
from mainspring.cli.output import lines_of as result_lines
from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.audit import of_pause
from mainspring.model.delivery import DONE, Delivery, Outcome, Response, Retry
from mainspring.model.errors import InvalidInput, NotFound, OutOfMemory
from mainspring.model.ids import idh_of
from mainspring.model.job import Result
from mainspring.model.lane import Pause, Scope
from mainspring.model.targets.named import Plain, Targets
from mainspring.model.targets.webhook import Webhook
from mainspring.model.task import Task
from mainspring.node.node import Node
from mainspring.sinks.base import NamedSink
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.sinks.log import LogSink
from mainspring.store import access
from mainspring.store.access import read_audit
from mainspring.store.keys import partition_of
from mainspring.store.lanes import read_pauses, write_if_none
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.ticker import Ticker
from tests.support.fleets import Fleet, masters_of
from tests.support.paths import ROOT
from tests.support.web_receiver import Answer, Request, delivery, receiving

Tickers = Callable[..., Awaitable[Ticker]]


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    yield made
    await made.aclose()


async def test_failed_attempts_are_repeated_with_the_same_key_until_it_is_done(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink})
    answers = iter([Answer(503, {}, b"busy"), Answer(429, {"Retry-After": "120"}), Answer(200)])
    with receiving(lambda _: next(answers)) as receiver:
        await ticker.client.put(receiver.url, {"order": 42}, after="1m", id="order/42")
        await ticker.advance(minutes=1)
        assert len(receiver.requests) == 1
        await ticker.advance(seconds=2)
        assert len(receiver.requests) == 2
        await ticker.advance(seconds=118)
        assert len(receiver.requests) == 2  # the target named a time, and that is kept to
        await ticker.advance(seconds=20)
        assert len(receiver.requests) == 3
        await ticker.advance(hours=1)
    assert [request.headers["mainspring-attempt"] for request in receiver.requests] == ["1", "2", "3"]
    assert len({request.headers["idempotency-key"] for request in receiver.requests}) == 1
    assert len({request.headers["mainspring-due"] for request in receiver.requests}) == 1
    assert {request.body for request in receiver.requests} == {b'{"order":42}'}
    info = await ticker.client.get("order/42")
    assert info is not None
    assert (info.state, info.attempt) == ("done", 3), "the history knows"


async def test_a_dead_letter_says_what_the_target_answered_every_time(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink})
    answers = iter([Answer(500, {}, b"broken"), Answer(404, {"X-Why": "sold"}, b"no such order")])
    with receiving(lambda _: next(answers)) as receiver:
        await ticker.client.put(receiver.url, 1, after="1s")
        await ticker.advance(minutes=10)
    [dead_letter] = await list_dead(store)
    assert dead_letter.reason == "HTTP 404 Not Found: no such order"
    assert dead_letter.errors == ("HTTP 500 Internal Server Error: broken", "HTTP 404 Not Found: no such order")
    assert dead_letter.attempts == 2
    answer = dead_letter.response
    assert answer is not None
    assert (answer.status, answer.body, dict(answer.headers)["X-Why"]) == (404, b"no such order", "sold")
    told = dead_letter.as_dict("main")["response"]
    assert (told["status"], told["body"]) == (404, "no such order")
    assert Response.from_dict(told) == answer
    shown = lines_of(dead_letter, "main")
    assert "  X-Why: sold" in shown
    assert "  no such order" in shown


async def test_an_answer_that_is_no_text_is_kept_as_it_came(tickers: Tickers, store: Store, sink: HttpSink) -> None:
    ticker = await tickers(sinks={"http": sink})
    with receiving(lambda _: Answer(404, {}, b"\xff\x00")) as receiver:
        await ticker.client.put(receiver.url, 1, after="1s")
        await ticker.advance(seconds=2)
    [dead_letter] = await list_dead(store)
    told = dead_letter.as_dict("main")["response"]
    assert (told["body_base64"], Response.from_dict(told).body) == ("/wA=", b"\xff\x00")


async def test_the_answer_to_a_call_that_succeeded_is_kept_with_the_run(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink})
    headers = {"X-Order": "42", "Set-Cookie": "key=1", "X-Auth-Token": "2"}
    answers = iter([Answer(503, {}, b"busy"), Answer(201, headers, b"stored \x1b[2J")])
    with receiving(lambda _: next(answers)) as receiver:
        await ticker.client.put(receiver.url, 1, after="1s", id="order/42")
        assert await ticker.client.find_result("order/42") is None
        await ticker.advance(seconds=1)
        assert await ticker.client.find_result("order/42") is None  # it failed, and is tried again
        await ticker.advance(minutes=5)
    result = await ticker.client.run_result("order/42", timeout=60)
    assert (result.ending, result.attempt, result.worker) == ("done", 2, ticker.engine.options.node)
    answer = result.response
    assert answer is not None
    assert (answer.status, answer.body, dict(answer.headers)["X-Order"]) == (201, b"stored \x1b[2J", "42")
    assert (dict(answer.headers)["Set-Cookie"], dict(answer.headers)["X-Auth-Token"]) == ("***", "***")
    assert result.ended_ms - result.started_ms == answer.duration_ms
    assert await ticker.client.result("order/42") == answer
    assert Result.from_dict(msgspec.json.decode(msgspec.json.encode(result.as_dict()))) == result
    shown = result_lines(result)
    assert "  X-Order: 42" in shown
    assert "  stored \ufffd[2J" in shown  # it cannot clear the screen of who reads it
    keys = store.keys.partitions[partition_of("order/42", len(store.keys))]
    [left_ms] = await store.run_one(keys.slot, [("PTTL", keys.result(idh_of("order/42")))])
    assert 3_500_000 < left_ms <= 3_600_000


@pytest.mark.parametrize("status", [200, 302, 404, 503])
async def test_bytes_that_are_no_text_in_an_answer_harm_neither_the_task_nor_its_neighbours(
    tickers: Tickers, store: Store, sink: HttpSink, status: int
) -> None:
    ticker = await tickers(sinks={"http": sink})
    strange = {"X-City": "caf\xe9", "Location": "/caf\xe9"}

    def answer(request: Request) -> Answer:
        return Answer(status, strange, b"\xe9") if request.body == b"7" else Answer(200)

    with receiving(answer) as receiver:
        due_ms = ticker.clock.now_ms() + 1_000
        await ticker.client.put_many(Task(receiver.url, n, due_ms, id=f"t{n}", retry="2 base=1s") for n in range(30))
        await ticker.advance(seconds=1)
        assert ticker.engine.deliveries.in_flight == 0
        states = [(await ticker.client.get(f"t{n}")).state for n in range(30)]
        assert set(states[:7] + states[8:]) == {"done"}
        assert states[7] == {200: "done", 404: "dead"}.get(status, "pending")
        await ticker.advance(minutes=10)
    assert len(receiver.requests) == 30 + (status in (302, 503))
    result = await ticker.client.run_result("t7", timeout=60)
    assert result.response is not None
    assert dict(result.response.headers)["X-City"] == "caf?"
    assert [dead_letter.id for dead_letter in await list_dead(store)] == ([] if status == 200 else ["t7"])


async def test_the_result_of_an_earlier_task_is_not_that_of_a_later_one(tickers: Tickers, sink: HttpSink) -> None:
    ticker = await tickers(sinks={"http": sink})
    answers = iter([Answer(200, {}, b"first"), Answer(404, {}, b"second"), Answer(200, {}, b"third")])
    with receiving(lambda _: next(answers)) as receiver:
        for ending, body in (("done", b"first"), ("dead", b"second"), ("done", b"third")):
            await ticker.client.put(receiver.url, 1, after="1h", id="a", on_conflict="replace")
            assert await ticker.client.find_result("a") is None
            await ticker.advance(hours=1)
            result = await ticker.client.run_result("a", timeout=60)
            assert (result.ending, result.response is not None and result.response.body) == (ending, body)
            await ticker.advance(hours=2)  # the id may be used again


async def test_a_webhook_that_is_given_up_keeps_its_last_answer(tickers: Tickers, sink: HttpSink) -> None:
    ticker = await tickers(sinks={"http": sink})
    with receiving(lambda _: Answer(404, {}, b"sold")) as receiver:
        await ticker.client.put(receiver.url, 1, after="1s", id="a")
        await ticker.advance(seconds=2)
    result = await ticker.client.run_result("a", timeout=60)
    assert (result.ending, result.response is not None and result.response.body) == ("dead", b"sold")


async def test_a_target_says_for_how_long_its_answers_are_kept(tickers: Tickers, sink: HttpSink) -> None:
    with receiving(lambda _: Answer(200, {}, b"fine")) as receiver:
        targets = Targets({"kept": Webhook(receiver.url), "not": Webhook(receiver.url, result_ttl_s=0)})
        ticker = await tickers(sinks={"target": NamedSink(targets, {"http": sink})})
        await ticker.client.put("target:kept", 1, after="1s", id="a")
        await ticker.client.put("target:not", 1, after="1s", id="b")
        await ticker.advance(seconds=1)
        kept = await ticker.client.find_result("a")
        assert kept is not None
        assert kept.response is not None
        with pytest.raises(NotFound, match="'b' is done and left no result"):
            await ticker.client.find_result("b")
        with pytest.raises(NotFound, match="there is no task 'nobody'"):
            await ticker.client.find_result("nobody")


async def test_on_a_full_server_calls_end_and_their_answers_are_kept(
    tickers: Tickers, sink: HttpSink, fleet: Fleet
) -> None:
    ticker = await tickers(sinks={"http": sink})
    with receiving(lambda _: Answer(200, {}, b"fine")) as receiver:
        await ticker.client.put_many(Task(receiver.url, n, ticker.clock.now_ms() + 1_000, id=str(n)) for n in range(99))
        for server in masters_of(fleet):
            server.call("CONFIG", "SET", "maxmemory", "1")
        try:
            await ticker.advance(seconds=1)
        finally:
            for server in masters_of(fleet):
                server.call("CONFIG", "SET", "maxmemory", "0")
        assert {(await ticker.client.get(str(n))).state for n in range(99)} == {"done"}
        assert len(receiver.requests) == 99
        # In the step in which they end: a call that ended without its answer would be lost to those who wait for it.
        results = [await ticker.client.find_result(str(n)) for n in range(99)]
        assert all(one is not None and one.response is not None for one in results)


async def test_a_postponed_task_loses_no_attempt_and_keeps_its_key(tickers: Tickers, store: Store) -> None:
    class Busy:
        """Puts off twice, then fails, then takes it."""

        def __init__(self) -> None:
            self.seen: list[tuple[int, str, tuple[str, ...]]] = []
            self._answers: list[Outcome] = [
                Retry("busy", 5_000, untried=True), Retry("busy", untried=True), Retry("failed"), DONE,
            ]  # fmt: skip

        async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
            [one] = batch
            self.seen.append((one.attempt, one.idempotency_key, one.body.errors))
            return [self._answers[len(self.seen) - 1]]

        async def aclose(self) -> None:
            """Nothing is held open."""

    busy = Busy()
    ticker = await tickers(sinks={"http": busy})
    await ticker.client.put("http://a.example/", 1, after="1s", lane="a")
    await ticker.advance(seconds=1)
    await ticker.advance(seconds=4)
    assert len(busy.seen) == 1
    await ticker.advance(minutes=10)
    assert [attempt for attempt, _, _ in busy.seen] == [1, 1, 1, 2]
    assert len({key for _, key, _ in busy.seen}) == 1
    assert busy.seen[-1][2] == ("failed",)


async def test_deliveries_are_handed_over_in_small_batches_and_all_are_marked_done(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink})
    with receiving() as receiver:
        due = ticker.clock.now_ms() + 1_000
        await ticker.client.put_many(Task(receiver.url, number, due) for number in range(500))
        await ticker.advance(seconds=1)
    assert sorted(int(request.body) for request in receiver.requests) == list(range(500))
    assert receiver.connections <= 64
    assert ticker.engine.deliveries.in_flight == 0


# -- named targets ---------------------------------------------------------------------------------------------


async def test_a_name_leads_to_a_webhook_or_another_address(tickers: Tickers, store: Store, sink: HttpSink) -> None:
    with receiving() as receiver:
        hook = Webhook(receiver.url, method="PUT", headers=(("X-Shop", "1"),))
        targets = Targets({"orders": hook, "plain": Plain(receiver.url + "/plain")})
        ticker = await tickers(sinks={"target": NamedSink(targets, {"http": sink})})
        await ticker.client.put("target:orders", 1, after="1s")
        await ticker.client.put("target:plain", 2, after="2s")
        await ticker.advance(seconds=2)
    first, second = receiver.requests
    assert (first.method, first.path, first.headers["x-shop"], first.body) == ("PUT", "/hook", "1", b"1")
    assert (second.method, second.path, second.body) == ("POST", "/hook/plain", b"2")


async def test_an_unknown_name_is_tried_again_and_logged_once(sink: HttpSink, caplog: pytest.LogCaptureFixture) -> None:
    named = NamedSink(Targets({"odd": Plain("kafka:x"), "wrong": Webhook("https://a.example/")}), {"https": LogSink()})
    expected = {
        "target:orders": "this node has no target 'orders'; add [targets.orders] to its settings",
        "target:odd": "target 'odd' is kafka:x, and this node has no sink for it",
        "target:wrong": "target 'wrong': the sink for https: takes plain addresses only",
    }
    for target, reason in expected.items():
        for _ in range(3):
            assert await named.deliver([delivery(target)] * 2) == [Retry(reason)] * 2
    assert [record.message for record in caplog.records] == list(expected.values())


# -- a whole node ----------------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # another thread receives
            await asyncio.sleep(0.02)


async def test_on_one_machine_the_node_reaches_its_own_webhooks(tmp_path: Path) -> None:
    with receiving() as receiver:
        targets = Targets({"orders": Webhook(receiver.url, headers=(("X-Shop", "1"),))})
        node = Node(Config(data_dir=tmp_path, targets=targets))
        await node.start()
        try:
            assert node.client is not None
            await node.client.put(f"http://localhost:{receiver.port}/", 1, after="10ms")
            await node.client.put("target:orders", 2, after="10ms")
            await until(lambda: len(receiver.requests) == 2)
        finally:
            await node.stop()
    assert {request.body: request.headers.get("x-shop") for request in receiver.requests} == {b"1": None, b"2": "1"}


async def test_the_example_of_the_page_on_webhooks_reaches_a_receiver(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "webhooks.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    with receiving() as receiver:
        node = Node(Config(data_dir=tmp_path))
        await node.start()
        try:
            assert node.embedding is not None
            assert node.embedding.server is not None
            names: dict[str, Any] = {"url": node.embedding.server.url, "hook": receiver.url}
            exec(f"async def example():\n{indent(example, '    ')}", names)  # noqa: S102
            await names["example"]()
            await until(lambda: len(receiver.requests) == 1)
        finally:
            await node.stop()
    [request] = receiver.requests
    assert (request.body, request.headers["mainspring-id"]) == (b'{"order":42}', "order-42")


async def test_the_loopback_is_refused_with_the_setting_that_allows_it(fleet: Fleet, namespace: str) -> None:
    with receiving() as receiver:
        async with Client(fleet.url, namespace=namespace, partitions=4) as client:
            await client.put(receiver.url, 1, after="10ms")  # while no node runs that could refuse it
        node = Node(Config(redis_url=fleet.url, namespace=namespace, partitions=4))
        await node.start()
        try:
            assert node.client is not None
            with pytest.raises(InvalidInput, match=r"or --http-allow 127\.0\.0\.1"):
                await node.client.put(receiver.url, 1, after="10ms")
            dead_letters: list[str] = []
            async with asyncio.timeout(60):
                while not dead_letters:
                    dead_letters = [one.reason for one in await list_dead(node.client.store)]
        finally:
            await node.stop()
        assert receiver.connections == 0
    assert dead_letters[0].endswith("MAINSPRING_HTTP_ALLOW=127.0.0.1, or --http-allow 127.0.0.1")


# -- 410 Gone ----------------------------------------------------------------------------------------------------


def gone_target(sink: HttpSink, url: str) -> dict[str, NamedSink]:
    return {"target": NamedSink(Targets({"shop": Webhook(url, gone_disables=True)}), {"http": sink})}


async def test_410_disables_the_target_on_all_nodes_until_it_is_resumed(
    tickers: Tickers, store: Store, sink: HttpSink, caplog: pytest.LogCaptureFixture
) -> None:
    gone = True
    with receiving(lambda _: Answer(410 if gone else 200)) as receiver:
        nodes = [
            await tickers(sinks=gone_target(sink, receiver.url), options=EngineOptions(node=name)) for name in "ab"
        ]
        first, second = nodes
        first.engine.follow({0, 1}, set())
        second.engine.follow({2, 3}, set())
        client = first.client
        await client.put("target:shop", "the one that is answered", after="1s")
        for _ in range(2):
            first.clock.advance(seconds=1)
            for node in nodes:
                await node.turn()
        [pause] = await client.pauses()
        assert (pause.scope.text, pause.mode) == ("target target:shop", "drop")
        assert pause.reason == "HTTP 410 Gone"
        assert pause.who in ("a", "b")
        await client.put_many(Task("target:shop", n, after="1s") for n in range(20))
        await client.put("log:", "others", after="1s")
        first.clock.advance(seconds=1)
        for node in nodes:
            await node.turn()
        assert len(receiver.requests) == 1
        assert len(first.deliveries) + len(second.deliveries) == 1
        reasons = {dead_letter.reason for dead_letter in await list_dead(store)}
        assert reasons == {"HTTP 410 Gone", f"dropped while paused by {pause.who}: HTTP 410 Gone"}
        assert len([one for one in caplog.records if "is disabled on all nodes" in one.message]) == 1
        gone = False
        assert await client.resume(target="target:shop")
        await client.put("target:shop", "again", after="1s")
        first.clock.advance(seconds=1)
        for node in nodes:
            await node.turn()
        assert [request.body for request in receiver.requests[1:]] == [b'"again"']
    assert len(await list_dead(store)) == 21


async def test_a_target_that_410_disabled_stays_so_after_a_restart(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        first = await tickers(sinks=gone_target(sink, receiver.url), options=EngineOptions(node="first"))
        await first.client.put("target:shop", after="1s")
        await first.advance(seconds=2)
        await first.crash()
        first.clock.advance(seconds=10)
        second = await tickers(sinks=gone_target(sink, receiver.url), options=EngineOptions(node="second"))
        await second.client.put_many(Task("target:shop", n, after="1s") for n in range(5))
        await second.advance(seconds=2)
        assert len(receiver.requests) == 1
    assert len(await list_dead(store)) == 6


async def test_410_does_not_overwrite_an_existing_pause(tickers: Tickers, store: Store, sink: HttpSink) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        ticker = await tickers(sinks=gone_target(sink, receiver.url))
        await ticker.client.pause(target="target:shop", reason="they move house", by="ops")
        ticker.engine.pauses.disable("target:shop", "HTTP 410 Gone")  # begun before it was paused
        ticker.engine.pauses.disable("https://shop.example/*", "an address may be that of many")
        await ticker.turn()
        [pause] = await ticker.client.pauses()
        assert (pause.mode, pause.who) == ("hold", "ops")
        await ticker.client.put("target:shop", after="1s")
        await ticker.advance(seconds=2)
        assert not receiver.requests
    assert not await list_dead(store)


async def test_the_pause_that_a_node_makes_is_in_the_audit_trail_once(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        ticker = await tickers(sinks=gone_target(sink, receiver.url), options=EngineOptions(node="a"))
        await ticker.client.put_many(Task("target:shop", n, after="1s") for n in range(3))
        await ticker.advance(seconds=2)
        await ticker.turn()
    [pause] = await ticker.client.pauses()
    [entry] = (await read_audit(store)).changes
    told = entry.change
    assert (told.who, told.what, told.object) == ("a", "pause.add", "target target:shop")
    assert (told.address, told.role, told.before) == (socket.gethostname(), "", None)
    assert told.after == of_pause(pause)
    assert pause.reason == "HTTP 410 Gone"


async def test_a_pause_that_a_node_did_not_make_is_not_recorded_as_its_own(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks=gone_target(sink, "http://127.0.0.1:1/"))
    await ticker.client.pause(target="target:shop", by="ops")
    ticker.engine.pauses.disable("target:shop", "HTTP 410 Gone")  # begun before it was paused
    await ticker.turn()
    assert (await read_audit(store)).changes == []


async def test_a_pause_whose_reply_was_lost_is_known_as_the_nodes_own(store: Store) -> None:
    ours, theirs = (Pause(Scope("target", "target:shop"), "drop", "HTTP 410 Gone", who, 1) for who in ("a", "b"))
    assert [await write_if_none(store, one) for one in (ours, ours, theirs)] == [True, True, False]


async def test_a_full_server_that_takes_no_audit_entry_has_the_pause_all_the_same(
    tickers: Tickers, store: Store, sink: HttpSink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **_options: object) -> None:
        raise OutOfMemory("the server is full")

    monkeypatch.setattr(access, "record_change", full)
    ticker = await tickers(sinks=gone_target(sink, "http://127.0.0.1:1/"))
    ticker.engine.pauses.disable("target:shop", "HTTP 410 Gone")
    await ticker.turn()
    assert [one.scope.name for one in await ticker.client.pauses()] == ["target:shop"]
    assert "the pause of target target:shop could not be recorded in the audit trail" in caplog.text


async def test_a_node_that_stops_has_written_what_it_disabled(fleet: Fleet, store: Store, sink: HttpSink) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        engine = Engine(store, gone_target(sink, receiver.url), EngineOptions(node="stopping"))
        await engine.start()
        await engine.loops.pause.stop()
        engine.pauses.disable("target:shop", "HTTP 410 Gone")  # the answer to one of the last requests
        await engine.stop()
    assert [one.who for one in await read_pauses(store)] == ["stopping"]
