"""`mainspring doctor` as a user runs it."""

import json
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring.testing.servers import Server, free_port, standalone, wait_until
from tests.support import serving as support
from tests.support.serving import Serve, run, serving
from tests.support.workers import WorkerProcess

Found = dict[str, dict[str, str]]


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone(aof=True) as made:
        yield made


def examined(folder: Path, url: str, *options: str, **environ: str) -> tuple[int, Found]:
    told = run("doctor", "--redis-url", url, "--json", *options, cwd=folder, **environ)
    assert "Traceback" not in told.stderr, told.stderr
    return told.returncode, {row["name"]: row for row in json.loads(told.stdout)}


def test_a_good_server_gets_nothing_but_ok_and_nothing_is_written(server: Server, tmp_path: Path) -> None:
    code, found = examined(tmp_path, server.url, "--strict")
    for _ in range(10):  # a loaded machine may need 5 ms for a round trip, and a warning is right then
        if found["latency"]["status"] == "ok":
            break
        code, found = examined(tmp_path, server.url, "--strict")
    assert {name: row["status"] for name, row in found.items()} == dict.fromkeys(
        [
            "version",
            "role",
            "eviction",
            "persistence",
            "clock",
            "latency",
            "memory",
            "rights",
            "data",
            "open files",
            "packages",
        ],
        "ok",
    )
    assert code == 0
    assert server.call("DBSIZE") == 0


def test_a_warning_counts_only_if_it_is_asked_to(server: Server, tmp_path: Path) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    code, found = examined(tmp_path, server.url)
    assert (code, found["eviction"]["status"]) == (0, "warning")
    assert "noeviction" in found["eviction"]["message"]
    assert examined(tmp_path, server.url, "--strict")[0] == 1


def test_a_server_that_is_nearly_full_is_reported(server: Server, tmp_path: Path) -> None:
    used = server.info("memory")["used_memory"]
    server.call("CONFIG", "SET", "maxmemory", str(int(used) + 100_000))
    _, found = examined(tmp_path, server.url)
    assert found["memory"]["status"] == "warning"
    assert "Raise maxmemory" in found["memory"]["message"]


def test_a_server_that_is_not_there_is_an_answer_and_no_trace(tmp_path: Path) -> None:
    code, found = examined(tmp_path, f"redis://:secret@127.0.0.1:{free_port()}")
    assert (code, found["reach"]["status"]) == (1, "error")
    assert "Is it running" in found["reach"]["message"]
    assert "secret" not in json.dumps(found)


def test_a_server_that_refuses_writes_is_examined_to_the_end(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path) as start:
        start("--redis-url", server.url)
        server.call("CONFIG", "SET", "min-replicas-to-write", 1)
        code, found = examined(tmp_path, server.url)
        server.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert (code, found["orphans"]["status"], "nodes" in found) == (0, "ok", True)


def test_a_wrong_password_is_no_question_of_firewalls(server: Server, tmp_path: Path) -> None:
    server.call("CONFIG", "SET", "requirepass", "secret")
    code, found = examined(tmp_path, server.url.replace("redis://", "redis://:wrong@"))
    assert (code, found["answers"]["status"]) == (1, "error")
    assert "AUTH was refused" in found["answers"]["message"]
    assert "firewall" not in found["answers"]["message"]


def test_an_unreachable_broker_is_reported(server: Server, tmp_path: Path) -> None:
    code, found = examined(tmp_path, server.url, MAINSPRING_KAFKA_URL=f"kafka://127.0.0.1:{free_port()}")
    assert (code, found["kafka"]["status"]) == (1, "error")
    assert "kafka_url" in found["kafka"]["message"]


def test_orphans_and_a_namespace_without_nodes_are_reported(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path) as start:
        node = start("--redis-url", server.url)
        _, found = examined(tmp_path, server.url)
        assert (found["nodes"]["status"], found["orphans"]["status"]) == ("ok", "ok")
        assert node.end() == 0
    server.call("SET", "{main}:stray", "1")
    code, found = examined(tmp_path, server.url)
    assert (code, found["nodes"]["status"], found["orphans"]["status"]) == (0, "warning", "warning")
    assert "{main}:stray" in found["orphans"]["message"]
    assert "mainspring verify" in found["orphans"]["message"]


def test_queues_that_no_worker_serves_are_reported_with_the_nearest_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from mainspring import Scheduler\nscheduler = Scheduler()\n"
        "@scheduler.handler(queue='mail')\nasync def send() -> None:\n    pass\n"
    )
    with serving(tmp_path) as start:
        node = start("--redis-url", server.url)
        assert examined(tmp_path, server.url)[1]["workers"]["status"] == "ok", "nothing waits for one"
        worker = WorkerProcess(tmp_path, "app:scheduler", "--redis-url", server.url).wait_started()
        assert node.call("/v1/tasks", {"target": "queue:mial/send", "payload": {}})[0] == 201

        def told() -> bool:
            return examined(tmp_path, server.url)[1]["workers"]["status"] == "warning"

        wait_until(told, "the task is in its queue", timeout_s=60)
        message = examined(tmp_path, server.url)[1]["workers"]["message"]
        assert message.startswith("no worker serves mial (1 task; did you mean mail?). Start one")
        worker.remove()


@pytest.fixture
def bare(tmp_path: Path) -> list[str]:
    """The command in an environment with everything that is installed here but the packages for webhooks and Kafka."""
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    [packages] = (tmp_path / "bare").glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("aiohttp", "confluent_kafka")):
            (packages / entry.name).symlink_to(entry)
    return [str(tmp_path / "bare" / "bin" / "python"), *support.MAIN[1:]]


def test_packages_that_this_machine_lacks_are_a_warning_with_the_command_that_installs_them(
    server: Server, tmp_path: Path, bare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "MAIN", bare)
    code, found = examined(tmp_path, server.url)
    assert (code, found["packages"]["status"]) == (0, "warning")
    for extra in ("mainspring[http]", "mainspring[kafka]"):
        assert f"pip install '{extra}'" in found["packages"]["message"]
    _, found = examined(tmp_path, server.url, MAINSPRING_KAFKA_URL="kafka://127.0.0.1:1")
    assert found["kafka"]["message"] == "the library is missing: pip install 'mainspring[kafka]'"


def test_doctor_and_explain_name_what_another_node_lacks_before_the_task_is_due(
    server: Server, tmp_path: Path, bare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--redis-url", server.url, "--node-id", "bare", "--kafka-url", "kafka://127.0.0.1:1")
    with monkeypatch.context() as there:
        there.setattr(support, "MAIN", bare)
        node = Serve(tmp_path, *options)
    try:
        node.wait_started()
        _, found = examined(tmp_path, server.url)
        assert found["packages"]["status"] == "ok", "this machine has both"
        assert found["nodes"]["status"] == "warning"
        assert "node bare cannot deliver to http:, https:, kafka:" in found["nodes"]["message"]
        hook = {"target": "http://shop.example/hook", "payload": 1, "after": "1h"}
        said = node.call(f"/v1/tasks/{node.call('/v1/tasks', hook)[1]['id']}/explain")[1]
        assert said["code"] == "not-due"
        assert "node bare, which owns its partition, cannot deliver to http: for want of a package" in said["text"]
        said = node.call(f"/v1/tasks/{node.call('/v1/tasks', hook | {'target': 'log:'})[1]['id']}/explain")
        assert "package" not in said[1]["text"]
        assert node.end() == 0
    finally:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def test_wrong_settings_are_exit_code_2(tmp_path: Path) -> None:
    assert run("doctor", "--redis-url", "ftp://nowhere", cwd=tmp_path).returncode == 2
    assert run("doctor", "--redis-url", "http://me:secret@nowhere", cwd=tmp_path).returncode == 2
