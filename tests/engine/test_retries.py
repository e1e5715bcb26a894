"""Retry policies and the error handler through the engine: which policy applies, and which failures are reported."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import Dead, Failure, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.retry import RetryPolicy
from mainspring.model.targets.named import Targets
from mainspring.model.task import Task
from mainspring.node.node import Node
from mainspring.sinks.base import NamedSink
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.ticker import Ticker
from tests.support.fleets import Fleet
from tests.support.web_receiver import Answer, Receiver, Request, receiving

Tickers = Callable[..., Awaitable[Ticker]]


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    yield made
    await made.aclose()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Answers with the status that the path names."""

    def answer(request: Request) -> Answer:
        return Answer(int(request.path.rpartition("/")[2]))

    with receiving(answer) as made:
        yield made


async def test_a_task_with_its_own_policy_follows_it_to_the_end(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", lambda _: Retry("no"))
    await ticker.client.put(
        "log:", id="own", after="1s", retry=RetryPolicy.of(max_attempts=3, base="5s", jitter="none")
    )
    await ticker.client.put_many([Task("log:", id="line", after="1s", retry="2 base=7s jitter=none")])
    start_ms = ticker.clock.now_ms()
    fired = await ticker.advance(hours=1)
    at = {name: [one.due_ms - start_ms for one in fired if one.id == name] for name in ("own", "line")}
    assert at == {"own": [1_000, 6_000, 16_000], "line": [1_000, 8_000]}
    assert {dead_letter.id: dead_letter.retry for dead_letter in await list_dead(store)} == {
        "own": "3 base=5s jitter=none",
        "line": "2 base=7s jitter=none",
    }


async def test_a_policy_stays_with_a_task_that_is_moved_or_replayed(ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Retry("no"))
    await ticker.client.put("log:", id="id", after="1h", retry="2 base=2s")
    await ticker.client.reschedule("id", after="1s")
    assert (await ticker.client.get("id")).retry == "2 base=2s"
    assert len(await ticker.advance(minutes=1)) == 2
    await ticker.client.dead_replay("id")
    assert len(await ticker.advance(minutes=1)) == 2


async def test_a_wrong_policy_is_refused_before_anything_is_written(client: Client) -> None:
    with pytest.raises(InvalidInput, match="bas is not a setting of a retry policy"):
        await client.put("log:", retry="3 bas=1s")
    assert (await client.count()).pending == 0


async def test_the_rules_of_a_named_target_decide_by_the_status(
    tickers: Tickers, store: Store, sink: HttpSink, receiver: Receiver
) -> None:
    def table(status: int) -> dict[str, object]:
        rules = {"404": "retry 30s", "5xx": "dead"}
        return {"url": f"http://127.0.0.1:{receiver.port}/{status}", "retry": {"max_attempts": 2, "on": rules}}

    targets = Targets.read({"missing": table(404), "broken": table(500)})
    options = EngineOptions(target_retries=targets.retries())
    ticker = await tickers(sinks={"target": NamedSink(targets, {"http": sink}), "http": sink}, options=options)
    await ticker.client.put("target:missing", id="missing", after="1s")
    await ticker.client.put("target:broken", id="broken", after="1s")
    await ticker.advance(seconds=30)
    assert sorted(request.path for request in receiver.requests) == ["/404", "/500"]
    await ticker.advance(seconds=1)
    assert sorted(request.path for request in receiver.requests) == ["/404", "/404", "/500"]
    await ticker.advance(hours=1)
    dead_letters = {dead_letter.id: dead_letter.attempts for dead_letter in await list_dead(store)}
    assert dead_letters == {"missing": 2, "broken": 1}


async def test_no_task_is_tried_again_past_its_max_age(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", lambda _: Retry("no"))
    await ticker.client.put("log:", after="1s", retry="99 base=10s factor=1 jitter=none max_age=35s")
    assert len(await ticker.advance(hours=1)) == 4
    [dead_letter] = await list_dead(store)
    assert "max_age" in dead_letter.reason


async def test_the_error_handler_gets_every_failure_of_a_webhook(
    tickers: Tickers, store: Store, sink: HttpSink, receiver: Receiver
) -> None:
    seen: list[Failure] = []
    retry = RetryPolicy.of(max_attempts=2, base="1s", jitter="none")
    options = EngineOptions(retry=retry, error_handler=seen.append)
    ticker = await tickers(sinks={"http": sink}, options=options)
    handle = await ticker.client.put(f"http://127.0.0.1:{receiver.port}/503", id="order 42", lane="l", after="1s")
    await ticker.advance(minutes=1)
    await ticker.engine.failures.seen()
    assert [(one.attempt, one.outcome, one.next_at_ms) for one in seen] == [
        (1, "retry", handle.due_ms + 1_000),
        (2, "dead", None),
    ]
    first = seen[0]
    assert (first.id, first.lane, first.original_due_ms) == ("order 42", "l", handle.due_ms)
    assert first.error.startswith("HTTP 503")
    assert first.response is not None
    assert first.response.status == 503
    assert {one.idempotency_key for one in seen} == {receiver.requests[0].headers["idempotency-key"]}


async def test_the_error_handler_gets_errors_expiry_and_unreadable_targets_too(tickers: Tickers, store: Store) -> None:
    class Broken:
        async def deliver(self, batch):  # type: ignore[no-untyped-def]
            raise RuntimeError("boom")

        async def aclose(self) -> None: ...

    seen: list[Failure] = []
    options = EngineOptions(retry=RetryPolicy(1), error_handler=seen.append)
    ticker = await tickers(sinks={"kafka": Broken()}, options=options)
    await ticker.client.put("kafka:a", id="raises", after="1s")
    await ticker.client.put("log:", id="late", after="1s", expires="2s")
    ticker.clock.advance(seconds=10)
    await ticker.turn()
    await ticker.engine.failures.seen()
    told = {one.id: (one.outcome, one.error, type(one.exception)) for one in seen}
    assert told == {
        "raises": ("dead", "RuntimeError: boom", RuntimeError),
        "late": ("dead", "expired", type(None)),
    }


async def test_a_handler_that_fails_changes_nothing_for_the_task(tickers: Tickers, store: Store) -> None:
    async def handler(failure: Failure) -> None:
        raise RuntimeError("the handler is broken")

    ticker = await tickers(options=EngineOptions(error_handler=handler))
    ticker.answer("log", lambda one: Retry("no", after_ms=10) if one.attempt == 1 else Dead("never"))
    await ticker.client.put("log:", after="1s")
    assert [one.attempt for one in await ticker.advance(minutes=1)] == [1, 2]
    await ticker.engine.failures.seen()
    assert [dead_letter.reason for dead_letter in await list_dead(store)] == ["never"]


async def test_policies_and_the_handler_of_a_config_reach_the_engine(
    fleet: Fleet, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mainspring.toml").write_text(
        '[retry]\nmax_age = "1h"\njitter = "250ms"\n[retry.on]\n429 = "retry 30s"\n'
        '[targets.ticks]\naddress = "log:"\nretry = "9 base=5s"\n'
    )
    loaded = Config.load({"redis_url": fleet.url, "namespace": namespace}, {"MAINSPRING_RETRY_CAP": "1m"})
    assert str(loaded.retry) == "6 cap=1m jitter=250ms max_age=1h 429=retry:30s"
    again = Config.load({}, loaded.to_environ())
    assert (again.retry, again.targets) == (loaded.retry, loaded.targets)
    node = Node(Config(redis_url=fleet.url, namespace=namespace, targets=loaded.targets, error_handler=print))
    await node.start()
    try:
        assert node.engine is not None
        assert node.engine.options.target_retries == {"target:ticks": RetryPolicy(9, base_ms=5_000)}
        assert node.engine.options.error_handler is print
    finally:
        await node.stop()
