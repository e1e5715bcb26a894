"""Rules of a supervisor: how long to wait, and the arguments of its children."""

from pathlib import Path

import pytest

from mainspring.config.config import Config
from mainspring.model.retry import RetryPolicy
from mainspring.node.supervisor import LONGEST_DELAY_S, RAN_WELL_S, Backoff, Child


def test_delays_double_up_to_a_bound() -> None:
    backoff = Backoff()
    delays = [backoff.after(0.1) for _ in range(10)]
    assert delays[:4] == [0.25, 0.5, 1.0, 2.0]
    assert delays[-1] == LONGEST_DELAY_S


def test_a_process_that_ran_well_for_a_while_starts_again_soon() -> None:
    backoff = Backoff()
    first = backoff.after(0.1)
    assert backoff.after(0.1) > first
    assert backoff.after(RAN_WELL_S) == first


def test_a_process_that_takes_long_to_fail_waits_ever_longer_too() -> None:
    child, backoff = Child(1), Backoff()
    assert [backoff.after(child.ready_s) for _ in range(3)] == [0.25, 0.5, 1.0], (
        "it was never ready, however long it lived"
    )


def test_a_process_that_lives_shorter_than_it_waited_has_not_run_well() -> None:
    backoff = Backoff()
    while backoff.after(0.1) < LONGEST_DELAY_S:
        pass
    assert backoff.after(LONGEST_DELAY_S - 1) == LONGEST_DELAY_S


def test_children_get_their_settings_from_the_environment_and_not_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        redis_url="redis://:pass%2Fword@host:1/2",
        namespace="shop",
        partitions=7,
        node_id="till-1",
        processes=3,
        lease_s=1.5,
        look_ahead=1000,
        shutdown_timeout_s=0.0,
        data_dir=tmp_path / "a folder",
        embedded_memory_bytes=1 << 30,
        port=0,
        tick_target="null:",
        dedupe_window_s=12.345,
        retry=RetryPolicy(max_attempts=9, base_ms=250, factor=1.5, cap_ms=1000, jitter="none"),
        log_format="json",
    )
    assert Config.load({}, config.to_environ()) == config
    (tmp_path / "mainspring.toml").write_text('namespace = "other"\npartitions = 5\nnode_id = "x"\n')
    monkeypatch.chdir(tmp_path)
    assert Config.load({}, Config().to_environ()) == Config()
