"""`bench peers`, with real processes on a real server. No figure here depends on how fast the machine is."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mainspring.bench.environment import ServerChoice
from mainspring.bench.peers import bench
from mainspring.bench.peers.bench import PEERS, Contender, Demand, PeerRow, python_at_hand, row_of
from mainspring.cli.bench import app
from tests.support.paths import ROOT

SUPPORT = ROOT / "tests" / "support"
FIGURES = {
    "peer",
    "version",
    "one_by_one_per_s",
    "at_once_per_s",
    "in_bulk_per_s",
    "bytes_per_pending_task",
    "drain_per_s",
    "p50_ms",
    "p99_ms",
    "early",
    "duplicated",
}
FEW = Demand(tasks=200, rate=100, seconds=1)
WORDS = ("peers", "--tasks", "2000", "--rate", "100", "--seconds", "1", "--json")


async def measured(file: str) -> PeerRow:
    one = Contender("mine", SUPPORT / file, Path(sys.executable))
    return await row_of(one, ServerChoice(), FEW, lambda *_: None)


def rows_of(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*WORDS, *words])
    assert result.exit_code == 0, (result.output, result.exception)
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def assert_full(row: dict[str, Any], name: str) -> None:
    assert row.keys() >= FIGURES
    assert row["error"] is None
    assert row["peer"] == name
    assert row["version"]
    assert (row["lost"], row["duplicated"]) == (0, 0)
    assert min(row["one_by_one_per_s"], row["bytes_per_pending_task"], row["drain_per_s"]) > 0
    assert row["p50_ms"] <= row["p99_ms"]


async def test_a_sound_peer_is_measured() -> None:
    row = await measured("sorted_set_peer.py")
    assert row.error is None
    assert (row.early, row.duplicated, row.lost) == (0, 0, 0)
    assert row.p50_ms is not None
    assert row.p50_ms >= 0
    assert row.bytes_per_pending_task is not None
    assert row.bytes_per_pending_task > 0
    assert row.at_once_per_s is None
    assert row.one_by_one_per_s is not None
    assert row.in_bulk_per_s is not None
    assert row.in_bulk_per_s > row.one_by_one_per_s > 0


async def test_early_and_repeated_runs_are_seen() -> None:
    row = await measured("hasty_peer.py")
    assert row.error is None
    assert row.early == 100, "the steady load is scheduled three seconds ahead"
    assert row.duplicated == 300


async def test_a_peer_that_breaks_says_so_in_its_row(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ModuleNotFoundError('no such library')\n")
    one = Contender("broken", tmp_path / "broken.py", Path(sys.executable))
    row = await row_of(one, ServerChoice(), FEW, lambda *_: None)
    assert row.error is not None
    assert "no such library" in row.error
    assert row.drain_per_s is None


@pytest.mark.slow
def test_mainspring_itself_is_a_row_with_real_workers() -> None:
    [row] = rows_of("--only", "mainspring", "--server", "valkey")
    assert_full(row, "mainspring")
    assert row["early"] == 0


@pytest.mark.slow
def test_without_the_libraries_the_other_rows_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("mainspring.bench.peers.bench.has_peers", lambda: False)
    ours, other = rows_of("--only", "mainspring", "--only", "huey", "--no-install")
    assert_full(ours, "mainspring")
    assert other["peer"] == "huey"
    assert "this installs them: " in other["error"]


@pytest.mark.parametrize("words", [("--only", "cron"), ("--tasks", "0"), ("--rate", "0"), ("--seconds", "0")])
def test_wrong_options_are_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["peers", *words])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_peers_are_the_five_that_the_readme_names() -> None:
    assert set(PEERS) == {"celery", "dramatiq", "rq", "arq", "huey"}
    assert bench.OURSELVES not in PEERS


# CI has no peers and skips nothing: there the two peers of this folder stand in for them.
if os.environ.get("CI") != "true":

    @pytest.mark.slow
    @pytest.mark.skipif(
        python_at_hand() is None, reason="the peers are not installed: `make bench-peers` installs them"
    )
    @pytest.mark.parametrize("name", PEERS)
    def test_real_peers_are_measured(name: str) -> None:
        # More of them: what a server allocates for itself meanwhile is more than 200 small tasks need.
        [row] = rows_of("--only", name, "--tasks", "2000")
        assert_full(row, name)
