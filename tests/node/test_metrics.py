"""`GET /metrics` of a running node, as Prometheus reads it."""

import contextlib
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring.node.metrics import MOST_QUEUES, OTHER_QUEUES, largest
from mainspring.store.queue_state import Depth
from mainspring.testing.servers import standalone, wait_until
from tests.support.missing_parts import gap
from tests.support.paths import ROOT
from tests.support.serving import Serve, in_seconds, serving
from tests.support.workers import WorkerProcess

Values = dict[tuple[str, ...], float]


def scrape(node: Serve) -> str:
    with urllib.request.urlopen(node.url + "/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text: str = answer.read().decode()
    return text


def figures(text: str) -> dict[str, Values]:
    """Sample name -> values of its labels -> value."""
    found: dict[str, Values] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels.values())] = one.value
    return found


def total(found: dict[str, Values], name: str) -> float:
    return sum(found.get(name, {}).values())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Serve]:
    with serving(tmp_path) as start:
        yield start()


def put(node: Serve, **fields: Any) -> None:
    status, answer = node.call("/v1/tasks", {"payload": {}, **fields})
    assert status == 201, answer


def test_a_task_is_counted_on_its_way(node: Serve) -> None:
    put(node, target="log:", at=in_seconds(0.2))
    put(node, target="log:", after="1h", id="later")
    put(node, target="log:", after="1h", id="never")
    put(node, target="queue:mail/send", after="10ms")
    assert node.call("/v1/tasks/never/reschedule", {"after": "2h"})[0] == 200
    wait_until(lambda: total(figures(scrape(node)), "mainspring_done_total") >= 1, "the task is done", timeout_s=60)
    found: dict[str, Values] = {}

    def waits() -> bool:
        nonlocal found
        found = figures(scrape(node))
        return total(found, "mainspring_queue_ready") == 1

    wait_until(waits, "it waits in its queue")
    assert total(found, "mainspring_accepted_total") == 5  # moving one is one more that is accepted, and one replaced
    assert total(found, "mainspring_replaced_total") == 1
    assert total(found, "mainspring_partition_pending") == 2
    assert found["mainspring_delivered_total"] == {("log",): 1}
    assert found["mainspring_fired_total"] == {("log",): 1, ("queue",): 1}
    assert found["mainspring_lateness_seconds_count"] == {("log",): 1, ("queue",): 1}
    assert found["mainspring_delivery_seconds_count"] == {("log",): 1}
    assert found["mainspring_queue_ready"] == {("mail",): 1}
    assert found["mainspring_queue_workers"] == {("mail",): 0}
    assert found["mainspring_partitions_owned"] == found["mainspring_partitions"] == {(): 32}
    assert found["mainspring_leader"] == found["mainspring_store_up"] == found["mainspring_ready"] == {(): 1}
    assert total(found, "mainspring_store_seconds_count") > 0
    assert total(found, "process_resident_memory_bytes") > 1e6


def documented_metrics() -> tuple[set[str], set[str]]:
    """Return the documented metrics of a node, and of a worker."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    parts = [part.splitlines() for part in page.split("### Workers")]
    node, worker = ("\n".join(line for line in part if line.startswith("| `")) for part in parts)
    name = re.compile(r"`((?:mainspring|process)_[a-z_]+)`")
    return set(name.findall(node)), set(name.findall(worker))


def test_failures_and_skipped_work_are_counted_apart(node: Serve) -> None:
    put(node, target="https://127.0.0.1:1/", after="1ms", retry="max_attempts=2 base=10ms")
    wait_until(lambda: total(figures(scrape(node)), "mainspring_buried_total") == 1, "it is given up", timeout_s=60)
    wait_until(lambda: total(figures(scrape(node)), "mainspring_dead_total") == 1, "the server knows", timeout_s=60)
    assert figures(scrape(node))["mainspring_failed_total"] == {("https",): 1}
    assert node.call("/v1/pauses", {"target": "log:", "mode": "drop", "reason": "test"})[0] in (200, 201)
    put(node, target="log:", after="1ms")
    skipped = ("paused",)
    wait_until(lambda: figures(scrape(node))["mainspring_skipped_total"][skipped] == 1, "it is left out", timeout_s=60)
    assert total(figures(scrape(node)), "mainspring_delivered_total") == 0


def test_the_documented_metrics_exist_and_no_others(node: Serve) -> None:
    of_node, of_worker = documented_metrics()
    assert set(re.findall(r"^# TYPE (\S+) ", scrape(node), re.MULTILINE)) == of_node
    assert "mainspring_run_seconds" in of_worker - of_node, "whose own test looks at these"


def test_the_workers_of_a_queue_are_counted_whether_or_not_it_has_tasks(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from mainspring import Scheduler\nscheduler = Scheduler()\n"
        "@scheduler.handler(queue='mail')\nasync def send() -> None:\n    pass\n"
    )
    with standalone() as server, serving(tmp_path) as start:
        node = start("--redis-url", server.url)
        put(node, target="queue:mial/send", after="10ms")
        worker = WorkerProcess(tmp_path, "app:scheduler", "--redis-url", server.url).wait_started()

        def workers() -> Values:
            return figures(scrape(node)).get("mainspring_queue_workers", {})

        wait_until(lambda: workers() == {("mail",): 1, ("mial",): 0}, "it is counted", timeout_s=60)
        assert worker.end() == 0
        wait_until(lambda: workers() == {("mial",): 0}, "it is gone", timeout_s=60)


def test_promtool_finds_nothing_wrong(node: Serve) -> None:
    if shutil.which("promtool") is None:
        gap("promtool is not installed (Debian's package prometheus)")
    told = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(node), capture_output=True, text=True, check=False, timeout=60
    )
    assert (told.returncode, told.stderr) == (0, "")


def test_one_scrape_covers_all_processes(tmp_path: Path) -> None:
    with serving(tmp_path) as start:
        node = start("--processes", "2")

        def both() -> bool:
            with contextlib.suppress(OSError):
                found = figures(scrape(node))
                # Each its half: then none is on its way from one to the other.
                halves = sorted(found.get("mainspring_partitions_owned", {}).values())
                return found["mainspring_processes"] == {(): 2} and halves == [16, 16]
            return False

        wait_until(both, "both processes tell their figures", timeout_s=60)
        found = figures(scrape(node))
        assert set(found["mainspring_ready"]) == {("1",), ("2",)}
        assert total(found, "mainspring_leader") == 1
        assert len(found["mainspring_partition_pending"]) == 32
        assert node.end() == 0


def test_queues_beyond_the_largest_share_one_series() -> None:
    found = {f"q{n}": Depth(ready=n, running=1, oldest_ms=n) for n in range(MOST_QUEUES + 50)}
    shown = largest(found)
    assert len(shown) == MOST_QUEUES + 1
    assert shown[OTHER_QUEUES] == Depth(sum(range(50)), 50, 0)
    assert shown[f"q{MOST_QUEUES + 49}"] == found[f"q{MOST_QUEUES + 49}"]
