"""The guides can be followed: every command of theirs is typed, in a folder of its own, and answers as they say."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring.testing.servers import free_port, wait_until
from tests.support.missing_parts import gap
from tests.support.paths import ROOT
from tests.support.serving import ENVIRON

GUIDES = ROOT / "docs" / "guides"
WEB = ("uvicorn ", "flask ", "python manage.py runserver")
STAYS = ("mainspring serve", "mainspring worker", "python3 ", *WEB)
"""What runs in a terminal of its own."""


def blocks(guide: str) -> Iterator[tuple[str, str]]:
    text = (GUIDES / guide).read_text()
    yield from re.findall(r"```(console|python|toml|crontab|text)\n(.*?)```", text, re.DOTALL)


class Reader:
    """Somebody who does what a guide says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api = free_port()
        self.other = free_port()
        programs = Path(sys.executable).parent
        self.environ = ENVIRON | {"PATH": f"{programs}:{os.environ['PATH']}", "MAINSPRING_PORT": str(self.api)}
        self.running: list[subprocess.Popen[bytes]] = []

    def own(self, text: str) -> str:
        """Ports of this run in the place of those that a person would use."""
        return text.replace("localhost:8000", f"localhost:{self.api}").replace("9001", str(self.other))

    @property
    def printed(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("terminal-*")))

    def save(self, code: str) -> None:
        name = code.splitlines()[0].removeprefix("# ")
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.own(code))

    def type(self, command: str, shown: list[str]) -> None:
        line = self.own(command)
        if command.startswith(STAYS):
            self.leave_running(line)
            return
        printed = self.run(line)
        if command.startswith(("cat ", "tail ")):
            assert printed.splitlines() == shown
        for expected in shown:
            assert masked(expected) in masked(printed), (command, printed)

    def run(self, line: str) -> str:
        told = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # a terminal shows both
            text=True,
            check=False,
            timeout=120,
        )
        assert told.returncode == 0, (line, told.stdout, self.printed)
        return told.stdout

    def leave_running(self, line: str) -> None:
        log = self.folder / f"terminal-{len(self.running)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environ, stdout=out, stderr=out
            )
        self.running.append(process)
        if "mainspring serve" in line:
            wait_until(lambda: "the API is at" in log.read_text(), f"serve is ready: {log}", timeout_s=60)
        elif line.startswith(WEB):
            wait_until(lambda: accepts(self.other), f"the application is ready: {log}", timeout_s=60)

    def read_terminals(self, shown: str) -> None:
        """Wait until the processes that were left running have printed these lines."""
        lines = set(shown.splitlines())
        wait_until(lambda: lines <= set(self.printed.splitlines()), f"{lines} in {self.folder}", timeout_s=60)

    def go_home(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def masked(text: str) -> str:
    """Times and numbers are others each time."""
    return re.sub(r"\d+", "#", text)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path)
    try:
        yield one
    finally:
        one.go_home()


def follow(reader: Reader, guide: str) -> None:
    for language, code in blocks(guide):
        if language == "text":
            reader.read_terminals(code)
            continue
        if language != "console":
            reader.save(code)
            continue
        for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", code, re.MULTILINE):
            reader.type(command, shown.splitlines())


def test_a_cron_job_that_fails_is_told(reader: Reader) -> None:
    follow(reader, "know-when-a-cron-job-fails.md")


def test_an_order_expires_unless_it_is_paid(reader: Reader) -> None:
    follow(reader, "order-expiry.md")
    wait_until(lambda: '{"order": 43}' in reader.printed, "the unpaid order has expired", timeout_s=60)
    assert '{"order": 42}' not in reader.printed


def test_a_url_is_called_again_and_again(reader: Reader) -> None:
    follow(reader, "recurring-http.md")
    wait_until(lambda: "/poll main/poll%40" in reader.printed, "the receiver was called", timeout_s=60)


def test_one_of_many_workers_runs_a_command(reader: Reader) -> None:
    follow(reader, "commands-on-pods.md")
    get = ["mainspring", "task", "get", "backup-by-hand", "--data-dir", "data"]

    def done() -> bool:
        told = subprocess.run(
            get, cwd=reader.folder, env=reader.environ, capture_output=True, text=True, check=False, timeout=60
        )
        return re.search(r"^state +(done|finished)$", told.stdout, re.MULTILINE) is not None

    wait_until(done, "a worker has run the command", timeout_s=60)


@pytest.mark.parametrize("framework", ["django", "fastapi", "flask"])
def test_an_order_of_a_web_application_expires_unless_it_is_paid(reader: Reader, framework: str) -> None:
    if shutil.which("curl") is None:
        gap("curl is not installed")
    follow(reader, f"{framework}.md")
    assert "order 42 has expired" not in reader.printed
    late = urllib.request.Request(f"http://127.0.0.1:{reader.other}/orders/43/payment", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(late, timeout=60)
    refused.value.close()
    assert refused.value.code == 409


@pytest.mark.parametrize("scheduler", ["apscheduler", "celery-beat", "rq-scheduler"])
def test_a_program_that_moved_from_another_scheduler_runs(reader: Reader, scheduler: str) -> None:
    follow(reader, f"from-{scheduler}.md")


def test_the_commands_of_a_crontab_run_on_a_worker_and_in_a_program(reader: Reader) -> None:
    follow(reader, "from-crontab.md")
    wait_until((reader.folder / "src.tar").exists, "the worker has run the command", timeout_s=60)
    wait_until(
        lambda: "archive" in reader.run("mainspring schedule list -o name").split(),
        "the program has declared its schedule",
        timeout_s=60,
    )
    reader.type("mainspring schedule trigger archive", [])
    wait_until((reader.folder / "archive.tar").exists, "the program has run the command", timeout_s=60)


def test_ticks_go_where_the_guide_says(reader: Reader) -> None:
    """Without a broker here: the lines that need none, into the log."""
    if shutil.which("curl") is None:
        gap("curl is not installed")
    reader.leave_running("mainspring serve --data-dir data")
    text = (GUIDES / "kafka-ticks.md").read_text()
    lines = re.search(r"^\$ cat ticks.ndjson\n(.*?)^\$", text, re.DOTALL | re.MULTILINE)
    assert lines is not None
    (reader.folder / "ticks.ndjson").write_text(lines[1].replace("kafka:ticks", "log:"))
    for command, shown in re.findall(r"^\$ (curl (?:.*\\\n)*.*)\n((?:\{.*\n)*)", text, re.MULTILINE):
        reader.type(command, shown.splitlines())
    wait_until(lambda: '{"item": "user1234", "at": ' in reader.printed, "the tick has fired", timeout_s=60)
