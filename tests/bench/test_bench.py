"""The benches measure what they say. No figure here depends on how fast the machine is."""

import json
from array import array
from typing import Any

import pytest
from typer.testing import CliRunner

from mainspring.bench.environment import ServerTime
from mainspring.bench.lifecycle import BenchLoad, DeliveryTally, Shape, SteadyLoad, judge, payload_texts
from mainspring.cli.bench import app
from mainspring.testing.servers import standalone
from tests.support.missing_parts import need_server

FIGURES = {
    "tasks",
    "put_per_s",
    "fire_per_s",
    "server_cpu_us_per_task",
    "client_cpu_us_per_task",
    "bytes_per_pending_task",
    "lost",
    "duplicated",
    "early",
}
LATENESS = {"p50_ms", "p99_ms", "max_ms", "early", "lost", "server_cpu_us_per_task"}


def bench(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def assert_sound(figures: dict[str, Any]) -> None:
    assert (figures["lost"], figures["duplicated"], figures["early"]) == (0, 0, 0)


CLUSTER = {
    "lease_s",
    "takeover_kill_p50_s",
    "takeover_kill_max_s",
    "takeover_term_max_s",
    "moved_share_on_join",
    "imbalance",
    "fire_per_s_1",
    "fire_per_s_4",
}


# -- the commands --------------------------------------------------------------------------------------


def test_compare_shows_both_designs_and_slices_cost_the_server_less() -> None:
    both = bench("compare", "--tasks", "20000", "--spread", "0.5", "--rounds", "1")
    for design in ("cycle", "baseline"):
        assert both[design].keys() >= FIGURES
        assert both[design]["tasks"] == 20_000
        assert_sound(both[design])
    assert both["server_cpu_ratio"] < 1
    assert both["bytes_ratio"] < 1
    assert both["put_ratio"] > 0
    assert both["fire_ratio"] > 0


@pytest.mark.slow
def test_a_fleet_of_processes_shares_the_work_takes_over_and_loses_nothing() -> None:
    figures = bench("cluster", "--kills", "2", "--lease", "1", "--tasks", "20000")
    assert figures.keys() >= CLUSTER
    assert figures["lost"] == 0
    assert figures["imbalance"] <= 1
    assert 0 < figures["moved_share_on_join"] <= 1.5 / 5
    assert figures["takeover_kill_max_s"] > 0.5, "a lease cannot be taken over before it ends"
    assert min(figures["fire_per_s_1"], figures["fire_per_s_4"]) > 0


@pytest.mark.parametrize("design", ["cycle", "baseline"])
def test_cancelled_tasks_do_not_fire_and_the_others_do(design: str) -> None:
    figures = bench(design, "--tasks", "4000", "--spread", "0.2", "--ids", "--cancel", "0.95")
    assert figures.keys() >= FIGURES
    assert_sound(figures)
    assert figures["cancelled"] == 3_800
    assert figures["fired_after_cancel"] == 0


@pytest.mark.parametrize("design", ["mainspring", "baseline"])
def test_lateness_is_measured_under_a_steady_load(design: str) -> None:
    words = ["--baseline"] if design == "baseline" else []
    figures = bench("lateness", "--rate", "1000", "--seconds", "1", "--warmup", "2", *words)
    assert figures.keys() >= LATENESS
    assert_sound(figures)
    assert 0 <= figures["min_ms"] <= figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert figures["server_cpu_us_per_task"] > 0


def test_growth_prints_a_row_for_each_number_of_pending_tasks() -> None:
    rows = bench("growth", "--max", "3000", "--tasks", "2000", "--rounds", "1")
    assert [row["pending"] for row in rows] == [3_000]
    assert rows[0]["server_cpu_us_per_task"] > 0
    assert_sound(rows[0])


def test_idle_counts_the_commands_of_the_node_only() -> None:
    figures = bench("idle", "--seconds", "5")  # renewals of leases come in bursts, a few in that time
    assert 0 < figures["server_commands_per_s"] <= 100
    assert 0 < figures["node_cpu_percent"] < 100


def test_a_bench_on_a_given_server_leaves_nothing_there() -> None:
    with standalone() as server:
        figures = bench("sparse", "--tasks", "3000", "--redis-url", server.url)
        assert figures["bytes_per_pending_task"] > 48
        assert figures["pending"] == 3_000
        assert server.call("DBSIZE") == 0


def test_sparse_runs_on_redis() -> None:
    need_server("redis")
    assert bench("sparse", "--tasks", "3000", "--server", "redis")["pending"] == 3_000


@pytest.mark.parametrize(
    "words",
    [
        ("cycle", "--tasks", "0"),
        ("cycle", "--payload-bytes", "3"),
        ("cycle", "--cancel", "1"),
        ("lateness", "--rate", "0"),
        ("lateness", "--warmup", "0.5"),
        ("cycle", "--redis-url", "http://localhost"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


# -- the judge -----------------------------------------------------------------------------------------

DUE_MS = 1_800_000_000_000


def _load(tasks: int, **shape: Any) -> BenchLoad:
    return BenchLoad(Shape(tasks, **shape), DUE_MS, 10_000)


def _block(load: BenchLoad | SteadyLoad, *numbers: int) -> bytes:
    return b"".join(
        b'"%b"' % text.encode() for number in numbers for text in payload_texts(number, number + 1, load.payload_bytes)
    )


def _late_enough(load: BenchLoad) -> int:
    return load.last_due_ms * 1000


def test_every_number_once_is_sound() -> None:
    load = _load(4)
    verdict = judge(load, [(_late_enough(load), _block(load, 2, 0)), (_late_enough(load), _block(load, 1, 3))])
    assert (verdict.lost, verdict.duplicated, verdict.early) == (0, 0, 0)


def test_missing_tasks_are_lost_and_repeated_ones_duplicated() -> None:
    load = _load(4)
    verdict = judge(load, [(_late_enough(load), _block(load, 0, 0, 0, 1))])
    assert (verdict.lost, verdict.duplicated) == (2, 2)


def test_a_task_that_comes_a_microsecond_before_its_time_is_early() -> None:
    load = _load(1)
    due_us = load.due_ms(0) * 1000
    assert judge(load, [(due_us - 1, _block(load, 0))]).early == 1
    assert judge(load, [(due_us, _block(load, 0))]).early == 0


def test_a_cancelled_task_that_fires_is_seen_and_one_that_does_not_is_not_lost() -> None:
    load = _load(4, cancel=0.5)
    cancelled = [number for number in range(4) if load.cancelled(number)]
    fired = [number for number in range(4) if not load.cancelled(number)]
    assert len(cancelled) == 2
    assert len(fired) == load.firing
    when = _late_enough(load)
    assert judge(load, [(when, _block(load, *fired))]).lost == 0
    assert judge(load, [(when, _block(load, *fired, cancelled[0]))]).fired_after_cancel == 1


def test_a_lane_out_of_order_is_seen() -> None:
    load = _load(10, lanes=True)
    in_order = sorted(range(10), key=load.due_ms)
    when = _late_enough(load)
    assert judge(load, [(when, _block(load, *in_order))]).misordered == 0
    assert judge(load, [(when, _block(load, *reversed(in_order)))]).misordered == 9


def test_lateness_is_kept_of_what_is_due_after_the_warm_up() -> None:
    load = SteadyLoad(4, 1000, DUE_MS)
    received_us = (DUE_MS + 10) * 1000
    verdict = judge(load, [(received_us, _block(load, 0, 1, 2, 3))], late_from_ms=DUE_MS + 2)
    assert verdict.lateness_ms == array("d", [8.0, 7.0])


async def test_a_tally_is_complete_with_its_last_task() -> None:
    tally = DeliveryTally(3, ServerTime())
    tally.take([b"a", b"b"])
    assert not tally.complete.is_set()
    tally.take([b"c"])
    assert await tally.wait()


async def test_the_time_of_a_distant_server_is_bounded_from_above() -> None:
    with standalone() as server:

        async def ask() -> int:
            seconds, micros = server.call("TIME")
            return int(seconds) * 1_000_000 + int(micros)

        clock = ServerTime(ask)
        await clock.start()
        try:
            # This server shares our clock, so its time is known exactly: the bound must hold it.
            exact = ServerTime()
            before_us = exact.latest_us()
            latest_us, doubt_us = clock.latest_us(), clock.doubt_us
            assert latest_us >= before_us
            assert latest_us - doubt_us <= exact.latest_us()
        finally:
            await clock.stop()
