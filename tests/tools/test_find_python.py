"""`tools/find-python`: with which Python `make` builds the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TOOL = ROOT / "tools" / "find-python"
GOOD, OLD, SLOW = 0, 1, 3


@pytest.fixture
def judged(tmp_path: Path) -> list[Path]:
    """Stand-ins that are as good as their names say, whatever they are asked."""
    made = []
    for name, code in (("good", GOOD), ("old", OLD), ("slow", SLOW)):
        one = tmp_path / name
        one.write_text(f"#!/bin/sh\nexit {code}\n")
        one.chmod(0o755)
        made.append(one)
    return made


def found(*candidates: object) -> tuple[str, str]:
    """Return the chosen Python, and the message about it."""
    told = subprocess.run([TOOL, *map(str, candidates)], capture_output=True, text=True, timeout=60, check=True)
    return told.stdout.strip(), told.stderr


def test_the_first_choice_is_taken_without_a_word(judged: list[Path]) -> None:
    good, old, slow = judged
    assert found(good, slow, old) == (str(good), "")


def test_a_slow_python_is_passed_over_and_that_is_reported(judged: list[Path]) -> None:
    good, old, slow = judged
    chosen, told = found(slow, old, good)
    assert chosen == str(good)
    assert f"PYTHON={slow} keeps it" in told


def test_a_slow_python_is_better_than_none(judged: list[Path], tmp_path: Path) -> None:
    _, old, slow = judged
    assert found(old, tmp_path / "none", slow) == (str(slow), "")


def test_if_no_python_is_suitable_the_first_is_named(judged: list[Path]) -> None:
    _, old, _ = judged
    assert found(old, old) == (str(old), "")


def test_a_real_python_is_judged(tmp_path: Path) -> None:
    chosen, _ = found(sys.executable, tmp_path / "none")
    assert chosen == sys.executable
