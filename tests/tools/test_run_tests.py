"""`tools/run-tests`: a failure is repeated alone, and a run is green only if everything passed in the end."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fleets import KINDS
from tests.support.paths import ROOT

FLAKY = """
from pathlib import Path

def test_that_needs_a_second_try():
    tried = Path(__file__).with_name("tried")
    first = not tried.exists()
    tried.touch()
    assert not first, "the first try"
"""


def run_tests(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, str(ROOT / "tools" / "run-tests"), *options, "test_it.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p tests.support.suite"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_a_test_that_passes_alone_is_flaky_and_the_run_passes(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FLAKY + "\ndef test_that_passes(): pass\n")
    assert done.returncode == 0, done.stdout
    told = done.stdout.partition("--- FLAKY")[2]
    assert "test_it.py::test_that_needs_a_second_try" in told
    assert "AssertionError: the first try" in told
    assert told.endswith("\n2 passed, 0 failed, 0 skipped\n")


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FLAKY + "\ndef test_that_fails(): assert False\n")
    assert done.returncode == 1
    assert "test_that_fails" not in done.stdout.partition("--- FLAKY")[2]
    assert done.stdout.endswith("\n1 passed, 1 failed, 0 skipped\n")


def test_an_error_after_a_test_is_a_failure(tmp_path: Path) -> None:
    program = "import pytest\n@pytest.fixture\ndef bad():\n    yield\n    assert False\ndef test_it(bad): pass\n"
    done = run_tests(tmp_path, program)
    assert done.returncode == 1
    assert done.stdout.endswith("\n0 passed, 1 failed, 0 skipped\n")


def test_a_failure_that_is_skipped_when_repeated_still_fails_the_run(tmp_path: Path) -> None:
    program = FLAKY.replace("assert not first", "import pytest; first or pytest.skip('no'); assert not first")
    done = run_tests(tmp_path, program)
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


@pytest.mark.parametrize("program", ["import nothing_of_that_name", ""], ids=["not importable", "no test"])
def test_a_run_that_did_not_do_its_work_is_not_green(tmp_path: Path, program: str) -> None:
    assert run_tests(tmp_path, program).returncode > 1


def test_processes_that_collect_different_tests_are_a_failure(tmp_path: Path) -> None:
    program = "import os, pytest\n@pytest.mark.parametrize('n', [os.getpid()])\ndef test_it(n): pass\n"
    done = run_tests(tmp_path, program, "-n", "2")
    assert done.returncode == 1
    assert "Different tests were collected" in done.stdout


def test_many_failures_are_no_accident_and_not_repeated(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "".join(f"def test_{n}(): assert False\n" for n in range(21)))
    assert done.returncode == 1
    assert "repeated" not in done.stdout
    assert done.stdout.endswith("\n0 passed, 21 failed, 0 skipped\n")


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def without_kind(test: str) -> str:
    name, _, params = test.partition("[")
    return f"{name} {[part for part in params.rstrip(']').split('-') if part not in KINDS]}"


def test_each_test_runs_on_one_kind_of_server_unless_it_is_asked_for_on_others() -> None:
    file = "tests/store/tasks/test_put.py"
    everywhere, once = collected(file, "--all-servers"), collected(file)
    assert set(once) < set(everywhere)
    assert {without_kind(test) for test in once} == {without_kind(test) for test in everywhere}
    assert set(Counter(map(without_kind, once)).values()) == {1}
    assert all(any(kind in test for test in once) for kind in KINDS)
    assert collected(*everywhere) == everywhere  # by name
