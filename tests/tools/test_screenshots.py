"""`make screenshots`: the pictures of the docs come from real commands."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def test_the_picture_shows_what_commands_print_and_asks_no_other_server(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / "screenshots", tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    svg = (tmp_path / "terminal.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert "mainspring task cancel order-42" in svg
    assert "order-42: cancelled" in svg
    assert "url(http" not in svg
    assert "@font-face" not in svg
