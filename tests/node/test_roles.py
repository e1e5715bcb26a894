"""`roles`: a node that only takes requests, and one that only fires."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mainspring.config.config import Config
from mainspring.node.node import Node
from mainspring.store import members, store
from mainspring.testing.servers import cluster, standalone, wait_until
from tests.support.api_calls import LATER, serving_api
from tests.support.serving import Serve, in_seconds, run, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    with serving(tmp_path) as start:
        yield start


@pytest.fixture(autouse=True)
def patient_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits two seconds for the server; a machine that stalls for longer is no server that is away."""
    monkeypatch.setattr(store, "REACH_S", 60.0)


async def until_healthy(node: Node, wanted: bool) -> None:
    async with asyncio.timeout(60):
        while node.healthy is not wanted:  # noqa: ASYNC110  # the node tells nothing: there is only polling
            await asyncio.sleep(0.02)


async def test_a_node_without_the_scheduler_takes_requests_owns_nothing_and_is_ready(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path / "data", port=0, roles=("api",))
    async with serving_api(config) as api:
        await until_healthy(api.node, True)
        assert [(await api.get(path)).status for path in ("/livez", "/readyz", "/healthy")] == [200, 200, 200]
        assert (await api.post("/v1/tasks", {"target": "log:", "at": LATER, "id": "a"})).status == 201
        assert (await api.post("/ticks", {"item": "b", "at": LATER})).status == 202
        view, holdings = await members.look(api.client.store)
        assert (api.node.engine, view.members, {one.owner for one in holdings}) == (None, {}, {""})
        figures = (await api.get("/metrics")).body.decode().splitlines()
        assert {"mainspring_ready 1", "mainspring_healthy 1", "mainspring_store_up 1"} <= set(figures)
        assert not [line for line in figures if line.startswith("mainspring_partition")]


async def test_a_node_without_the_scheduler_logs_an_outage_of_the_server_and_its_end() -> None:
    with standalone(aof=True) as server:
        async with serving_api(Config(redis_url=server.url, port=0, roles=("api",))) as api:
            server.kill()
            assert (await api.get("/readyz")).problem == "unavailable"
            await until_healthy(api.node, False)
            assert [(await api.get(path)).status for path in ("/livez", "/healthy")] == [200, 503]
            server.start()
            await until_healthy(api.node, True)
            assert [(await api.get(path)).status for path in ("/readyz", "/healthy")] == [200, 200]


@pytest.mark.parametrize("role", ["scheduler", "api"])
async def test_a_node_is_not_ready_while_the_server_refuses_every_write(role: str) -> None:
    with standalone() as server:
        async with serving_api(Config(redis_url=server.url, port=0, roles=(role,))) as api:
            assert (await api.get("/readyz")).status == 200
            server.call("CONFIG", "SET", "min-replicas-to-write", 1)
            answer = await api.get("/readyz")
            assert (answer.status, answer.problem) == (503, "unavailable")
            assert "refuses every write: NOREPLICAS" in answer.json["detail"]
            await until_healthy(api.node, False)
            server.call("CONFIG", "SET", "min-replicas-to-write", 0)
            assert (await api.get("/readyz")).status == 200
            await until_healthy(api.node, True)


async def test_a_node_is_not_ready_while_its_cluster_is_down() -> None:
    with cluster(3) as nodes:
        async with serving_api(Config(redis_url=nodes.url, port=0, partitions=8)) as api:
            assert (await api.get("/readyz")).status == 200
            for master in nodes.masters:
                master.call("CLUSTER", "DELSLOTS", 0)
            answer = await api.get("/readyz")
            assert (answer.status, answer.problem) == (503, "unavailable")
            assert "CLUSTERDOWN" in answer.json["detail"]
            assert (await api.get("/livez")).status == 200, "a restart would not help the cluster"
            nodes.masters[0].call("CLUSTER", "ADDSLOTS", 0)
            nodes.wait_ok()
            assert (await api.get("/readyz")).status == 200


async def test_a_node_stays_ready_while_the_server_is_full() -> None:
    """It fires, cancels and drops dead letters, which frees memory: it must stay within reach."""
    with standalone() as server:
        async with serving_api(Config(redis_url=server.url, port=0)) as api:
            server.call("CONFIG", "SET", "maxmemory", 1)
            assert (await api.post("/v1/tasks", {"target": "log:", "at": LATER})).status == 507
            assert (await api.get("/readyz")).status == 200


async def test_a_node_without_the_api_answers_only_monitoring(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path / "data", port=0, roles=("scheduler",))
    async with serving_api(config) as api:
        for path in ("/livez", "/readyz", "/healthy", "/metrics"):
            assert (await api.get(path)).status == 200
        for path in ("/v1/tasks", "/v1/cluster", "/docs", "/openapi.json"):
            assert (await api.get(path)).problem == "not-found"
        assert (await api.post("/ticks", {"item": "a", "at": LATER})).problem == "not-found"
        assert api.node.engine is not None


async def test_without_the_api_open_metrics_need_no_key_at_the_start(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path / "data", port=0, roles=("scheduler",), access="keys", metrics_open=True)
    async with serving_api(config) as api:
        assert (await api.get("/metrics")).status == 200


def test_one_process_takes_what_another_fires(serve: Callable[..., Serve], tmp_path: Path) -> None:
    """Each in a folder of its own, so that their output does not mix."""
    (tmp_path / "asked").mkdir()
    with standalone() as server, serving(tmp_path / "asked") as start:
        door = start("--redis-url", server.url, "--roles", "api")
        engine = serve("--redis-url", server.url, "--roles", "scheduler")
        tick = {"item": "a", "at": in_seconds(1)}
        assert door.status("/ticks", tick) == 202
        wait_until(lambda: engine.lines == [json.dumps(tick)], "the other fires it")
        assert engine.status("/ticks", tick) == 404
        status, cluster = door.call("/v1/cluster")
        assert (status, [one["roles"] for one in cluster["nodes"]]) == (200, [["scheduler"]])
        assert (door.end(), engine.end(), door.lines) == (0, 0, [])


def test_the_processes_of_a_supervisor_have_the_roles_they_were_given(serve: Callable[..., Serve]) -> None:
    node = serve("--roles", "scheduler", "--processes", "2")
    node.wait_well("/readyz")
    assert node.status("/v1/tasks") == 404
    assert node.end() == 0


@pytest.mark.parametrize(
    ("roles", "message"), [("scheduler,cook", "roles names 'cook'"), ("", "roles is empty"), (",", "roles is empty")]
)
def test_roles_that_are_unknown_or_none_at_all_are_refused(tmp_path: Path, roles: str, message: str) -> None:
    ended = run("serve", "--roles", roles, cwd=tmp_path, MAINSPRING_DATA_DIR=str(tmp_path / "data"))
    assert ended.returncode == 2
    assert f"{message}; give one or both of scheduler, api" in ended.stderr
