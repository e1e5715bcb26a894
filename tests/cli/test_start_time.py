"""Simple commands start fast: what they do not need is not imported. And what is piped is plain text."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

HEAVY = (
    "aiohttp", "confluent_kafka", "hiredis", "httptools", "pydantic", "uvicorn", "uvloop", "mainspring.client.client",
    "mainspring.engine.engine", "mainspring.node.node", "mainspring.store.store", "mainspring.api.app",
)  # fmt: skip
_RUN = """
import sys
from mainspring.cli import main
try:
    wanted = int(sys.argv[1])
    sys.argv = ["mainspring", *sys.argv[2:]]
    main()
except SystemExit as end:
    assert (end.code or 0) == wanted, end.code
print("loaded:", *sorted(sys.modules), file=sys.stderr)
"""


def _modules(*arguments: str, code: int = 0) -> set[str]:
    command = [sys.executable, "-c", _RUN, str(code), *arguments]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return set(told.stderr.rpartition("loaded:")[2].split())


@pytest.mark.parametrize(
    "line",
    [
        "--version",
        "--help",
        "task --help",
        "task put --help",
        "dead --help",
        "serve --help",
        "acl",
        "config show",
        "schedule preview @hourly",
        "schedule preview --count 2 @hourly",
        "lane list --help",
        "key generate",
        "cluster status --help",
        "audit --help",
        "pause --help",
        "key --help",
    ],
)
def test_nothing_heavy_is_imported_by(line: str) -> None:
    assert _modules(*line.split()).isdisjoint(HEAVY)


def test_a_command_that_needs_a_server_imports_what_it_needs() -> None:
    """The list above is not empty of meaning: the same look finds these where they are used."""
    command = [sys.executable, "-c", "import sys, mainspring.node.node; print(*sys.modules)"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert {"hiredis", "mainspring.node.node", "mainspring.store.store"} <= set(told.stdout.split())


@pytest.mark.parametrize("line", ["--help", "task put --help", "config show", "acl --help", "nonsense"])
def test_piped_output_has_no_colours(line: str) -> None:
    command = [sys.executable, "-m", "mainspring", *line.split()]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert told.stdout + told.stderr
    assert "\x1b" not in told.stdout + told.stderr


@pytest.mark.parametrize(("words", "found"), [("mainspring ta", "task"), ("mainspring task resc", "reschedule")])
def test_the_shell_can_complete_commands(words: str, found: str) -> None:
    environ = {"_MAINSPRING_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "from mainspring.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100, env=environ
    )
    assert told.stdout.split() == [found]


def test_looking_at_a_task_loads_only_what_it_needs() -> None:
    """Schedules, sinks and nodes are none of its business; a refused connection shows that it came that far."""
    gone = ("task", "get", "x", "--redis-url", "redis://127.0.0.1:1")
    loaded = _modules(*gone, code=1)
    assert "mainspring.client.client" in loaded
    assert loaded.isdisjoint(set(HEAVY) - {"hiredis", "mainspring.client.client", "mainspring.store.store"})
    assert loaded.isdisjoint(
        {"mainspring.client.schedules", "mainspring.model.schedule.cron", "mainspring.store.tasks.explain", "zoneinfo"}
    )


def test_over_http_the_client_of_the_server_is_not_loaded() -> None:
    loaded = _modules("task", "get", "x", "--url", "http://127.0.0.1:1", code=1)
    assert "mainspring.client.http" in loaded
    assert loaded.isdisjoint({*HEAVY, "mainspring.model.schedule.cron", "zoneinfo"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("task list --limit 3x", "'3x' is not a whole number"),
        ("dead replay --all --rate fast", "valid number"),
        ("task get", "Missing argument"),
        ("task cancel", "Missing argument"),
        ("task list --limit", "requires an argument"),
        ("task list --data-dir=", "Invalid value for '--data-dir': it is empty"),
    ],
)
def test_a_wrong_value_is_reported_in_the_words_of_the_library(line: str, words: str) -> None:
    command = [sys.executable, "-m", "mainspring", *line.split()]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert told.returncode == 2
    assert words in told.stderr


@pytest.mark.parametrize(
    "line", ["task --help", "lane --help", "dead --help", "cluster --help", "key --help", "audit -h"]
)
def test_help_needs_no_settings(line: str) -> None:
    assert _modules(*line.split()).isdisjoint({"mainspring.config.config", "mainspring.config.settings"})


def _show_into(out: int | IO[str], unbuffered: str = "", *options: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", "from mainspring.cli import main; main()", "config", "show", *options],
        stdout=out, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, timeout=100,
        check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_failure(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert _show_into(write, unbuffered) == (0, "")
    finally:
        os.close(write)


FULL = (1, "mainspring: the output cannot be written: No space left on device\n")
no_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")


@no_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_a_failure(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        assert _show_into(full, unbuffered) == FULL


@no_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_failure_before_all_output_is_printed_is_reported_in_the_same_way(
    tmp_path: Path, unbuffered: str, options: tuple[str, ...]
) -> None:
    """It is larger than any buffer, so the disk is full in the middle of it."""
    settings = tmp_path / "mainspring.toml"
    settings.write_text("".join(f'[targets.t-{n}]\nurl = "https://example.com/{n:0100}"\n' for n in range(2_000)))
    with Path("/dev/full").open("w") as full:
        assert _show_into(full, unbuffered, "--config", str(settings), *options) == FULL
