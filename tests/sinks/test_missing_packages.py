"""A node that lacks the package for a target holds the tasks, and uses up no attempt."""

import sys
from collections.abc import Awaitable, Callable, Mapping

import pytest

from mainspring.model.targets.named import Targets
from mainspring.model.targets.names import NEEDS_KAFKA
from mainspring.model.targets.webhook import NEEDS
from mainspring.sinks.base import NamedSink, Sink
from mainspring.sinks.http import HttpSink
from mainspring.sinks.kafka import KafkaSink, kafka_sink
from mainspring.sinks.kafka_options import KafkaOptions
from mainspring.sinks.log import LogSink
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]

URL = "http://127.0.0.1:1/hook"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Sink]:
    """The sinks of a node without aiohttp and confluent-kafka."""
    for package in ("aiohttp", "confluent_kafka"):
        monkeypatch.setitem(sys.modules, package, None)
    http, kafka = HttpSink(), kafka_sink(KafkaOptions("127.0.0.1:1"))
    assert not isinstance(kafka, KafkaSink)
    sinks: dict[str, Sink] = {"http": http, "kafka": kafka, "log": LogSink()}
    return {**sinks, "target": NamedSink(Targets.read({"shop": {"address": URL}}), sinks)}


@pytest.mark.parametrize(("target", "needs"), [(URL, NEEDS), ("kafka:orders", NEEDS_KAFKA), ("target:shop", NEEDS)])
@pytest.mark.parametrize("lane", [None, "a"])
async def test_tasks_wait_without_an_attempt_until_a_node_has_the_package(
    tickers: Tickers, store: Store, bare: Mapping[str, Sink], target: str, needs: str, lane: str | None
) -> None:
    first = await tickers(sinks=bare)
    waits = await first.client.put(target, 1, after="1s", lane=lane)
    await first.client.put("null:", 2, after="1s")
    for _ in range(5):
        await first.advance(seconds=30)
    task = await first.client.get(waits.id)
    assert (task.state, task.attempt) == ("pending", 1)
    assert (await balance(store)).done == 1, "other targets go on"
    why = await first.client.explain(waits.id)
    assert (why.code, why.attempt, needs in why.text) == ("no-sink", 1, True), why.text
    await first.engine.keeper.release()
    second = await tickers()
    await second.advance(seconds=1)
    assert [(one.target, one.attempt) for one in second.deliveries] == [(target, 1)]


async def test_tasks_of_a_scheme_that_only_another_nodes_plug_in_serves_wait(tickers: Tickers, store: Store) -> None:
    first = await tickers(sinks={"kafka": LogSink()})
    del first.engine.deliveries._sinks["kafka"]  # type: ignore[attr-defined]
    waits = await first.client.put("kafka:orders", 1, after="1s")
    for _ in range(5):
        await first.advance(seconds=30)
    why = await first.client.explain(waits.id)
    assert (why.code, why.attempt) == ("no-sink", 1), why.text
    await first.engine.keeper.release()
    second = await tickers()
    await second.advance(seconds=1)
    assert [one.attempt for one in second.deliveries] == [1]
