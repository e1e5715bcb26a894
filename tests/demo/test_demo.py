"""The ticks demo with all its processes, on a real broker. Small counts, and nothing depends on the machine's speed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mainspring.demo.plan import TOPIC, DemoPlan
from mainspring.demo.run import TOPIC_PARTITIONS, DemoServers, Parts, Reconciliation, Second, ticks
from mainspring.testing.kafka import Broker
from mainspring.testing.servers import standalone
from tests.support.kafka_topics import read_topic, topics_of
from tests.support.serving import ENVIRON, MAIN

pytestmark = pytest.mark.timeout(300)

CALM_S = 30.0
"""A lease that no hiccup of a loaded machine uses up: nothing is delivered twice."""

FIELDS = {"sent", "accepted", "replaced", "fired", "consumed", "missing", "duplicated", "early", "p50_ms", "p99_ms"}


async def demo(kafka: Broker, plan: DemoPlan, **watching: Any) -> tuple[Reconciliation, list[Second]]:
    seconds: list[Second] = []
    found = await ticks(plan, DemoServers(kafka.url), watching.pop("tell", seconds.append), **watching)
    return found, seconds


def assert_whole(found: Reconciliation, sent: int) -> None:
    assert (found.sent, found.accepted) == (sent, sent)
    assert (found.missing, found.early, found.refused, found.pending) == (0, 0, 0, 0)
    assert found.fired == sent
    assert found.consumed == sent + found.duplicated


async def test_every_tick_is_posted_stored_fired_and_consumed_and_the_sums_agree(kafka: Broker) -> None:
    before = len(read_topic(kafka.servers, TOPIC)) if TOPIC in topics_of(kafka.servers) else 0
    found, seconds = await demo(kafka, DemoPlan(ids=400, within_ms=3_000, lease_s=CALM_S))
    assert_whole(found, 400)
    assert found.duplicated == 0
    assert sum(second.generated for second in seconds) == 400
    assert sum(second.scheduled for second in seconds) == 400
    assert sum(second.consumed for second in seconds) == 400
    assert len(read_topic(kafka.servers, TOPIC)) - before == 400, "kcat finds the same"
    assert found.p50_ms is not None
    assert found.p99_ms is not None
    assert 0 <= found.p50_ms <= found.p99_ms
    names = [one.name for one in found.processes]
    assert names == ["generator", "scheduler-1", "scheduler-2", "consumer", "server"]
    assert all(one.memory_mb > 1 for one in found.processes)
    assert sum(one.cpu_s for one in found.processes) > 0


async def test_the_topic_is_provisioned_and_gets_the_ticks_as_they_were_posted(kafka: Broker) -> None:
    await demo(kafka, DemoPlan(ids=20, within_ms=1_000, schedulers=1))
    assert topics_of(kafka.servers)[TOPIC] == TOPIC_PARTITIONS
    values = [json.loads(one.value) for one in read_topic(kafka.servers, TOPIC)]
    assert all(value.keys() == {"item", "at"} for value in values)
    assert {f"user{number}" for number in range(20)} <= {value["item"] for value in values}


@pytest.mark.parametrize("via", ["batch", "client"])
async def test_ticks_may_go_in_batches_or_by_the_client(kafka: Broker, via: Any) -> None:
    found, _ = await demo(kafka, DemoPlan(ids=500, within_ms=2_000, schedulers=1, via=via, batch=100, lease_s=CALM_S))
    assert_whole(found, 500)
    assert found.duplicated == 0


async def test_a_server_that_is_given_is_left_as_it_was(kafka: Broker) -> None:
    with standalone() as server:
        found = await ticks(
            DemoPlan(ids=30, within_ms=1_000, schedulers=1), DemoServers(kafka.url, server.url), lambda _: None
        )
        assert_whole(found, 30)
        assert server.call("DBSIZE") == 0


async def test_a_new_tick_of_an_item_moves_the_one_it_has(kafka: Broker) -> None:
    plan = DemoPlan(ids=10, within_ms=4_000, schedulers=1, seconds=4, rate=50, replace=True, lease_s=CALM_S)
    found, _ = await demo(kafka, plan)
    assert found.sent > 50
    assert found.replaced > 0
    assert found.accepted == found.replaced + found.consumed
    assert (found.missing, found.duplicated, found.early) == (0, 0, 0)


async def test_a_killed_scheduler_loses_nothing(kafka: Broker) -> None:
    """In the middle of it all: ticks on their way to it, in its memory, and in flight to Kafka."""
    parts: list[Parts] = []
    killed: list[int] = []

    def tell(second: Second) -> None:
        if second.consumed and not killed:
            victim = parts[0].schedulers[0].process.pid
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    found, _ = await demo(
        kafka, DemoPlan(within_ms=4_000, seconds=6, rate=300, lease_s=1), tell=tell, started=parts.append
    )
    assert killed, "ticks were consumed while others were still posted"
    assert parts[0].schedulers[0].process.returncode == -signal.SIGKILL
    assert found.sent > 300
    assert_whole(found, found.sent)
    assert found.processes[1].name == "scheduler-1", "what the killed one cost is known"


def test_the_command_prints_three_lines_a_second_and_json_at_the_end(kafka: Broker, tmp_path: Path) -> None:
    words = ("demo", "ticks", "--ids", "50", "--within", "1s", "--schedulers", "1", "--kafka", kafka.url, "--json")
    ran = subprocess.run(
        [*MAIN, *words], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() >= FIELDS
    assert (found["sent"], found["consumed"] - found["duplicated"], found["missing"]) == (50, 50, 0)
    first, second, *lines = ran.stderr.splitlines()
    assert first.startswith("starting ")
    assert second.startswith("scheduler-1 is process ")
    assert lines
    assert len(lines) % 3 == 0
    names = ("Generated ticks/s", "Scheduled items/s", "Consumed items/s")
    for at, line in enumerate(lines):
        assert line.startswith(names[at % 3])


def test_ctrl_c_ends_it_early_and_the_sums_still_agree(kafka: Broker, tmp_path: Path) -> None:
    words = ("demo", "ticks", "--within", "10s", "--rate", "200", "--schedulers", "1", "--kafka", kafka.url, "--json")
    process = subprocess.Popen(
        [*MAIN, *words], cwd=tmp_path, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = next(line for line in process.stderr if line.startswith("Consumed") and not line.endswith(" 0\n"))
    process.send_signal(signal.SIGINT)
    stopped_s = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (seen, err)
    assert err.count("Generated") <= time.monotonic() - stopped_s + 3, "one line a second until the end, too"
    found = json.loads(out)
    assert found["pending"] > 0
    assert found["accepted"] == found["sent"]
    assert (found["missing"], found["early"]) == (0, 0)


@pytest.mark.parametrize(
    "words",
    [
        ("--rate", "fast"),
        ("--ids", "0"),
        ("--within", "soon"),
        ("--kafka", "kafka://x:1", "--embedded"),
        ("--via", "fax"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [*MAIN, "demo", "ticks", *words]
    ran = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2, ran.stderr
