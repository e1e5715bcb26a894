"""The figures that `bench peers` computes from the runs of a peer; no server, no peer."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from mainspring.bench.peers import bench, other_side
from mainspring.bench.peers.bench import OURSELVES, PEERS, PeerRow, PeersMissing, RunFile, judge, python_with_peers

DUE_MS = 1_800_000_000_000


def at_ns(late_ms: float) -> int:
    return round((DUE_MS + late_ms) * 1_000_000)


# -- judging -----------------------------------------------------------------------------------------------


def test_missing_runs_are_lost_repeated_ones_duplicated_and_premature_ones_early() -> None:
    times = {0: [at_ns(5)], 1: [at_ns(-0.001)], 2: [at_ns(9), at_ns(7)]}
    verdict = judge(times, ((number, DUE_MS) for number in range(4)))
    assert (verdict.lost, verdict.duplicated, verdict.early) == (1, 1, 1)
    assert (verdict.first_ns, verdict.last_ns) == (at_ns(-0.001), at_ns(7))


def test_lateness_is_that_of_the_first_run_of_each_task() -> None:
    times = {number: [at_ns(number + 1), at_ns(500)] for number in range(100)}
    verdict = judge(times, ((number, DUE_MS) for number in range(100)))
    assert verdict.late_by(0.5) == 51
    assert verdict.late_by(0.99) == 100
    assert verdict.duplicated == 100


def test_no_tasks_have_no_lateness() -> None:
    verdict = judge({}, [(0, DUE_MS)])
    assert (verdict.lost, verdict.late_by(0.5), verdict.seconds) == (1, None, 0)


def test_our_own_row_must_be_right_and_that_of_others_need_not() -> None:
    assert not PeerRow(peer=OURSELVES, tasks=1, early=1).sound
    assert not PeerRow(peer=OURSELVES, tasks=1, error="gone").sound
    assert PeerRow(peer=OURSELVES, tasks=1, early=0, duplicated=0, lost=0).sound
    assert PeerRow(peer="rq", tasks=1, early=126).sound


# -- the file of runs --------------------------------------------------------------------------------------


async def test_runs_of_several_processes_are_counted_as_they_come(tmp_path: Path) -> None:
    runs = RunFile(tmp_path / "runs")
    first, second = (other_side.noting(str(runs.path)) for _ in range(2))
    for number in range(3):
        first(number)
        second(number + 3)
    assert runs.count == 6
    assert await runs.wait(range(1, 6), lambda _: None)
    assert all(len(times) == 1 for times in runs.times().values())


async def test_a_peer_that_stops_running_tasks_is_not_waited_for(tmp_path: Path) -> None:
    runs = RunFile(tmp_path / "runs")
    other_side.noting(str(runs.path))(0)
    assert not await runs.wait(range(2), lambda _: None, stall_s=0.01)


def test_a_run_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    runs = RunFile(tmp_path / "runs")
    other_side.noting(str(runs.path))(7)
    with runs.path.open("ab") as file:
        file.write(b"half")
    assert list(runs.times()) == [7]


# -- the other side ----------------------------------------------------------------------------------------


class Remembers:
    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], float]] = []

    def one_by_one(self, first: int, dues_ms: list[int]) -> None:
        self.calls.append((first, dues_ms, time.time() * 1000))


def test_a_steady_load_is_scheduled_in_order_and_each_task_no_sooner_than_its_lead() -> None:
    peer = Remembers()
    due_ms = round(time.time() * 1000) + 60
    order = {"way": "one_by_one", "first": 10, "tasks": 50, "rate": 1000, "due_ms": due_ms, "lead_ms": 50}
    answer = other_side.steady(peer, order)
    dues = [due for _, dues_ms, _ in peer.calls for due in dues_ms]
    assert dues == [due_ms + number for number in range(50)]
    assert peer.calls[0][0] == 10
    assert all(dues_ms[-1] - called_ms <= 51 for _, dues_ms, called_ms in peer.calls)
    assert answer["least_lead_ms"] <= 50


def test_tasks_that_are_due_at_one_moment_are_scheduled_in_one_call() -> None:
    peer = Remembers()
    assert other_side.at_once(peer, {"way": "one_by_one", "first": 3, "tasks": 4, "due_ms": DUE_MS})["seconds"] >= 0
    assert [(first, dues_ms) for first, dues_ms, _ in peer.calls] == [(3, [DUE_MS] * 4)]


def test_each_peer_is_a_file_with_the_same_class_and_the_name_of_its_distribution() -> None:
    folder = Path(other_side.__file__).parent
    for name in (OURSELVES, *PEERS):
        text = (folder / f"{name}.py").read_text()
        assert f'DISTRIBUTION: Final = "{name}"' in text
        for line in (
            "class Peer:",
            "def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:",
            "def consume(",
        ):
            assert line in text, (name, line)


def test_the_other_side_imports_nothing_of_ours() -> None:
    """The environment of the peers has no Mainspring."""
    folder = Path(other_side.__file__).parent
    for name in ("other_side", *PEERS):
        text = (folder / f"{name}.py").read_text()
        assert "import mainspring" not in text
        assert "from mainspring" not in text
        assert "from ." not in text


# -- where the peers are -----------------------------------------------------------------------------------


async def test_without_leave_to_install_the_exact_commands_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "has_peers", lambda: False)
    with pytest.raises(PeersMissing) as caught:
        await python_with_peers(install=False)
    assert f"{sys.executable} -m venv {tmp_path}" in str(caught.value)
    assert "--require-hashes -r" in str(caught.value)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_the_peers_are_pinned_with_hashes() -> None:
    pins = bench.PINS.read_text()
    for name in bench.DISTRIBUTIONS:
        assert f"\n{name}==" in pins, name
    assert pins.count("==") <= pins.count("--hash=sha256:")


def test_answers_are_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    other_side.say({"seconds": 1.5})
    assert json.loads(capsys.readouterr().out) == {"seconds": 1.5}
