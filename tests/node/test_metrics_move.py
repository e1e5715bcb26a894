"""Every figure of `/metrics` moves when what it counts happens; see test_metrics.py for those of the plain way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.model.flow import BreakerPolicy
from mainspring.sinks.log import NullSink
from mainspring.testing.servers import Server
from tests.support.api_calls import Api, serving_api
from tests.support.job_queues import TARGET, HandWorker


@dataclass
class Gate:
    """A sink that answers when it is opened, and fails tasks that ask for it."""

    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        await self.open.wait()
        return [Retry("no", 3_600_000) if one.value() == "fail" else DONE for one in batch]

    async def aclose(self) -> None:
        self.open.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def api(server: Server, gate: Gate) -> AsyncIterator[Api]:
    server.call("FLUSHALL")
    breaker = BreakerPolicy.read("failure_rate=0.1 min_calls=2")
    config = Config(redis_url=server.url, port=0, partitions=4, breaker=breaker, lease_s=6, horizon_s=60, concurrency=2)
    async with serving_api(config, {"log": gate, "null": NullSink()}) as made:
        yield made


async def total(api: Api, name: str, **labels: str) -> float:
    """The sum over all labels but those that are named."""
    text = (await api.get("/metrics")).body.decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    assert samples or "counter" not in name, f"{name} is not told"
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


async def until(fits: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(600):
        if await fits():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within a minute: {what}")


async def reaches(api: Api, name: str, least: float, **labels: str) -> None:
    async def there() -> bool:
        return await total(api, name, **labels) >= least

    await until(there, f"{name} {labels} is {least} or more")


async def test_metrics_show_tasks_in_flight_and_those_waiting_behind_them(api: Api, gate: Gate) -> None:
    await api.client.put("log:", "first")
    await reaches(api, "mainspring_in_flight", 1)
    await reaches(api, "mainspring_partition_in_flight", 1)
    gate.open.set()

    async def none_is_out() -> bool:
        return await total(api, "mainspring_in_flight") == 0

    await until(none_is_out, "it is settled")
    await reaches(api, "mainspring_sink_seconds_count", 1, kind="log")
    await reaches(api, "mainspring_delivery_seconds_count", 1, kind="log")


async def test_metrics_show_tasks_in_memory_and_overdue_tasks(api: Api, gate: Gate) -> None:
    assert await total(api, "mainspring_look_ahead_limit") == 200_000
    await api.client.put("log:", "soon", after="40s")
    await reaches(api, "mainspring_look_ahead", 1)
    await reaches(api, "mainspring_partition_look_ahead", 1)
    assert await total(api, "mainspring_partition_overdue_seconds") == 0
    for n in range(8):  # only two may be under way
        await api.client.put("log:", n)
    await reaches(api, "mainspring_partition_overdue_seconds", 0.2)
    gate.open.set()


@pytest.mark.parametrize("name", ["mainspring_expired_total", "mainspring_buried_total", "mainspring_dead_total"])
async def test_counters_that_alerts_watch_start_at_0(api: Api, name: str) -> None:
    text = (await api.get("/metrics")).body.decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    assert {one.value for one in samples} == {0.0}
    if name != "mainspring_dead_total":  # which is of partitions
        assert {one.labels["kind"] for one in samples} == {"log", "null"}


async def test_cancelled_expired_and_retried_tasks(api: Api, gate: Gate) -> None:
    gate.open.set()
    handle = await api.client.put("log:", after="1h")
    await api.client.cancel(handle.id)
    await reaches(api, "mainspring_cancelled_total", 1)
    await api.client.pause(target="log:")
    await api.client.put("log:", "late", expires="10ms")
    await until(lambda: _held(api), "it is held")
    await api.client.resume(target="log:")
    await reaches(api, "mainspring_expired_total", 1, kind="log")
    await api.client.put("log:", "fail")
    await reaches(api, "mainspring_failed_total", 1, kind="log")
    await reaches(api, "mainspring_retried_total", 1)


async def _held(api: Api) -> bool:
    now_ms = api.client.store.clock.now_ms()
    return any(one.expires_ms is not None and one.expires_ms < now_ms for one in (await api.client.list()).tasks)


async def test_an_open_breaker_is_counted(api: Api, gate: Gate) -> None:
    gate.open.set()
    for _ in range(4):
        await api.client.put("log:", "fail")
    await reaches(api, "mainspring_breakers_open", 1)


async def test_a_queue_is_shown_with_its_workers(api: Api) -> None:
    await api.client.put(TARGET, 1)
    await reaches(api, "mainspring_queue_ready", 1, queue="mail")
    await reaches(api, "mainspring_queue_oldest_seconds", 0.1, queue="mail")
    worker = HandWorker(api.client.store)
    job = await worker.take_one()
    await reaches(api, "mainspring_queue_running", 1, queue="mail")
    assert await total(api, "mainspring_queue_ready") == 0
    await worker.end(job)
    await reaches(api, "mainspring_done_total", 1)
    assert await total(api, "mainspring_queue_running") == 0


async def test_runs_that_overlap_are_skipped(api: Api, gate: Gate) -> None:
    await api.client.schedules.add("often", every="1s", target="log:")
    await reaches(api, "mainspring_skipped_total", 1, reason="overlap")
    await api.client.schedules.remove("often")
    gate.open.set()


async def test_partitions_that_are_taken_over_and_lost(api: Api, server: Server, gate: Gate) -> None:
    gate.open.set()
    assert await total(api, "mainspring_takeovers_total") == 4
    assert await total(api, "mainspring_leader") == 1
    keys = api.client.store.keys.partitions[0]
    # Another node as the server sees it: it has taken the partition, and this one has not heard of it.
    server.call("SET", keys.fence, "somebody-else:1")
    server.call("HSET", keys.own, "owner", "somebody/else")
    await reaches(api, "mainspring_fenced_total", 1)
    await reaches(api, "mainspring_takeovers_total", 5)


async def test_an_unreachable_server_does_not_delay_a_scrape(api: Api, server: Server) -> None:
    await reaches(api, "mainspring_store_up", 1)

    async def away() -> bool:
        return await total(api, "mainspring_store_up") == 0

    server.pause()
    try:
        await until(away, "the server is told to be away")
    finally:
        server.resume()
    await reaches(api, "mainspring_store_up", 1)
