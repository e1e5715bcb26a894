"""Nodes die and hang, servers and networks fail; nothing is lost, early, or finished by a former owner.

`CHAOS_SEED=7` plans other faults; `make chaos-long` runs seed after seed.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mainspring.testing.history import HealedEvent, History
from tests.support.chaos import run as chaos_run
from tests.support.chaos.network import refused
from tests.support.chaos.profile import PROFILES, Profile
from tests.support.chaos.run import run

SEED = int(os.environ.get("CHAOS_SEED", "1"))


def _the_rest_is_slow(names: Iterable[str], kept: str) -> list[Any]:
    """One of each kind in every run of the tests; `make test-slow` has the others."""
    return [pytest.param(name, marks=() if name == kept else pytest.mark.slow) for name in names]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _the_rest_is_slow(PROFILES, kept="standalone"))
def test_no_promise_is_broken_under_faults(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(PROFILES[name], SEED, tmp_path)
    with capsys.disabled():
        print("\n" + "\n".join(report.lines()))  # noqa: T201  # the figures belong into the log of every run
    assert report.valid, report.failures
    assert report.failures == []
    assert report.recurring >= 50 * (report.seconds - 1), "50 schedules, a run a second each"
    assert report.drained_s is not None
    assert (report.untold, report.told_twice) == (0, 0)
    assert report.records >= report.deliveries - report.unpromised - report.duplicates
    assert (report.recurring > 0, report.missing) == (True, 0), "every planned time of every schedule has its run"
    if "partition" in report.faults and refused() is None:
        assert report.partitions == "by the kernel"


PARTED = Profile("parted", "standalone", {"partition": 1}, seconds=2.0, nodes=2, partitions=4, lease_s=1.0)


@pytest.mark.timeout(120)
def test_without_namespaces_proxies_part_the_network_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no `unshare`, so there can be no cable
    report = run(PARTED, SEED, tmp_path)
    assert report.failures == []
    assert report.partitions.startswith("by proxies (")
    assert "unshare" in report.partitions
    history = History.load(tmp_path / "history.jsonl")
    assert [one.within_us for one in history.events if isinstance(one, HealedEvent)] == [2_000_000], (
        "exactly two leases"
    )


SMALL = Profile(
    "small",
    "standalone",
    {"kill node": 4, "dropped reply": 2},
    seconds=8.0,
    nodes=2,
    partitions=4,
    server_config={"appendonly": "yes", "appendfsync": "always"},
)


IN_NODES = {"commit-before-delivery": "lost", "lane-order-ignored": "lane", "busy-ignored": "repeated"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", _the_rest_is_slow(IN_NODES, kept="commit-before-delivery"))
def test_a_bug_in_the_nodes_does_not_get_through(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it together, processes, roads, recorder and checker, must be able to fail."""
    monkeypatch.setattr(chaos_run, "_PATIENCE_S", 1.0)  # what is lost never comes
    report = run(SMALL, SEED, tmp_path, bugs=(bug,))
    assert IN_NODES[bug] in report.violations, report.failures


SCHEDULED = Profile("scheduled", "standalone", {"kill node": 1}, seconds=3.0, nodes=2, partitions=4, rate=20.0)
WORKING = Profile("working", "standalone", {"kill worker": 2}, seconds=5.0, nodes=2, workers=2, partitions=4)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_bug_in_the_chains_of_schedules_does_not_get_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "_PATIENCE_S", 1.0)  # what is lost never comes
    report = run(SCHEDULED, SEED, tmp_path, bugs=("next-run-not-put-at-begin",))
    assert "lost" in report.violations, report.failures
    assert report.missing > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_bug_between_nodes_and_workers_does_not_get_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "_PATIENCE_S", 1.0)  # what is counted twice never ends
    report = run(WORKING, SEED, tmp_path, bugs=("hand-off-without-done-bits",))
    assert "repeated" in report.violations, report.failures


IN_THE_HISTORY = {"run-not-kept": "untold", "run-kept-twice": "told_twice"}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", IN_THE_HISTORY)
def test_a_bug_in_the_history_does_not_get_through(bug: str, tmp_path: Path) -> None:
    report = run(SMALL, SEED, tmp_path, bugs=(bug,))
    assert getattr(report, IN_THE_HISTORY[bug]) > 0, report.failures
    assert any("the history" in one for one in report.failures)
