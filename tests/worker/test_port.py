"""The port of a worker: probes and metrics of what it runs."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring import Context
from mainspring.model.delivery import Dead, Retry
from mainspring.model.errors import ConfigError
from mainspring.model.targets.url import HostPort
from mainspring.scheduler.worker_process import MAX_HEAD_BYTES, WorkerPort
from mainspring.store import store
from mainspring.testing.faults import bad_road, uses
from mainspring.worker.handler import Handler
from mainspring.worker.worker import Worker
from tests.node.test_metrics import documented_metrics
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import Place, open_place, until


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(worker: Worker) -> AsyncIterator[WorkerPort]:
    port = WorkerPort(worker, worker.store)
    await port.start(HostPort("127.0.0.1", 0))
    try:
        yield port
    finally:
        await port.aclose()


async def asked(port: WorkerPort, request: str) -> tuple[int, str, str]:
    """Status, head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), head, body


async def get(port: WorkerPort, path: str) -> tuple[int, str]:
    status, _, body = await asked(port, f"GET {path} HTTP/1.1\r\nhost: worker\r\n\r\n")
    return status, body


async def figures(port: WorkerPort) -> dict[tuple[str, str], float]:
    """By name and kind."""
    status, text = await get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, sample.labels.get("kind", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_metrics_show_how_late_runs_began_how_long_they_took_and_how_they_ended(place: Place) -> None:
    go = asyncio.Event()

    async def work(how: str, ctx: Context) -> None:
        if how == "fails" and ctx.attempt == 1:
            raise Retry("not now", after_ms=1)
        if how == "dies":
            raise Dead("never")
        if how == "waits":
            await go.wait()

    worker = await place.worker(Handler(work, queue="q"), concurrency=8)
    async with opened(worker) as port:
        told = await figures(port)
        assert told["mainspring_runs_dead_total", "queue"] == 0, "so that the first one is a rise"
        for how in ("works", "fails", "dies"):
            await place.client.put("queue:q/work", {"how": how})
        await place.settled()
        handle = await place.client.put("queue:q/work", {"how": "waits"}, id="waits")
        await until(lambda: any(run.started for run in worker.executor.runs))
        assert (await figures(port))["mainspring_runs_in_hand", ""] == 1
        await place.client.cancel(handle.id)
        await place.settled()
        told = await figures(port)
        endings = {
            fate: told[f"mainspring_runs_{fate}_total", "queue"] for fate in ("done", "failed", "dead", "cancelled")
        }
        assert endings == {"done": 2, "failed": 1, "dead": 1, "cancelled": 1}
        assert told["mainspring_run_seconds_count", "queue"] == 2, "of those that ended well"
        assert told["mainspring_run_lateness_seconds_count", "queue"] == 5, "of all that began"
        assert told["mainspring_runs_limit", ""] == 8
        assert told["process_cpu_seconds_total", ""] > 0


async def test_the_documented_metrics_of_workers_exist_and_no_others(place: Place) -> None:
    async def work() -> None: ...

    async with opened(await place.idle_worker([Handler(work, queue="q")])) as port:
        _, text = await get(port, "/metrics")
        told = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
        assert {name for name in told if name.startswith("mainspring_")} == documented_metrics()[1]
        assert {name for name in told if name.startswith("process_")} <= documented_metrics()[0]


async def test_probes_say_whether_it_works(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "REACH_S", 60.0)  # a machine that stalls for two seconds is no server that is away

    async def work() -> None: ...

    worker = await place.worker(Handler(work, queue="q"))
    async with opened(worker) as port:
        assert await get(port, "/livez") == (200, '{"status":"ok"}')
        assert await get(port, "/readyz?verbose=1") == (200, '{"status":"ok"}')
        with bad_road(worker.store) as road:
            for _ in {worker.store.servers.for_slot(one.slot) for one in worker.store.keys.partitions}:
                road.next("never sent", only=uses("HDEL"))
            status, body = await get(port, "/readyz")
            assert (status, json.loads(body)["detail"]) == (503, "the server does not answer")
            assert (await get(port, "/livez"))[0] == 200, "a restart would not help the server"
        worker.stopping = True
        status, body = await get(port, "/readyz")
        assert (status, "stopping" in body) == (503, True)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /else HTTP/1.1\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\n\r\n", 405),
        ("nonsense\r\n\r\n", 400),
        ("GET / " + "x" * 2 * MAX_HEAD_BYTES, 400),
        ("GET /metrics HTTP/1.1\r\nx: é\r\n\r\n", 200),
    ],
    ids=["unknown", "method", "nonsense", "endless", "odd header"],
)
async def test_any_other_question_is_answered_in_a_sentence(place: Place, request_: str, status: int) -> None:
    async def work() -> None: ...

    async with opened(await place.idle_worker([Handler(work, queue="q")])) as port:
        found, head, body = await asked(port, request_)
        assert found == status
        assert f"content-length: {len(body.encode())}" in head
        found, _, body = await asked(port, "HEAD /livez HTTP/1.1\r\n\r\n")
        assert (found, body) == (200, "")


async def test_a_port_that_is_taken_is_named(place: Place) -> None:
    async def work() -> None: ...

    worker = await place.idle_worker([Handler(work, queue="q")])
    async with opened(worker) as first:
        with pytest.raises(ConfigError, match=rf"worker_listen: 127\.0\.0\.1:{first.port} cannot be listened on"):
            await WorkerPort(worker, worker.store).start(HostPort("127.0.0.1", first.port))
