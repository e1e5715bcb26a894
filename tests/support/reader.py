"""A reader who does what a page says: saves its files, types its commands, and compares what they print."""

import contextlib
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mainspring import embedded
from mainspring.testing.servers import free_port, wait_until
from tests.support.pages import text_of
from tests.support.paths import ROOT
from tests.support.serving import ENVIRON
from tests.support.web_receiver import Answer, receiving

BLOCK = re.compile(r"(?:`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WEB = ("uvicorn ", "flask ", "python manage.py runserver")
STAYS = re.compile(r"mainspring serve|mainspring worker (?!list)|python3? \w+\.py$|" + "|".join(WEB))
"""Commands that run in a terminal of their own."""
LOOKS = re.compile(
    r"mainspring (\w+ (list|show|status|get|explain)|pauses|audit|cluster status|verify$)|curl .*/metrics"
)
"""Commands that change nothing: repeated until they print what the page shows, since other processes need a moment."""

_UNIT = r"(?:µs|ms|s|min|h|d|days?)"
VARYING = {
    "skip": ("…", ".*?"),
    "time": (r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)", None),
    "ms": (r"\b1\d{12}\b", r"1\d{12}"),
    "ago": (rf"\b(?:in\s\d+\s{_UNIT}(?:\s\d+\s{_UNIT})?|\d+\s{_UNIT}\sago)\b", r"(?:in\d+\w+|\d+\w+ago|now)"),
    "duration": (rf"\b\d+\s{_UNIT}\b", rf"\d+{_UNIT}"),
    "clock": (r"\b\d\d:\d\d:\d\d\b", r"\d\d:\d\d:\d\d"),
    "port": (r"\b[\w.-]+:\d{4,5}\b", r"[\w.-]+:\d{4,5}"),
    "version": (r"\b\d+\.\d+\.\d+\b", r"\d+\.\d+\.\d+"),
    "pid": (r"(?<=\()\d{4,5}(?=\))", r"\d+"),
    "number": (r"\b\d{4,}\b", r"\d+"),
    "worker": (r"\bweb\d-[0-9a-f]{6}\b", r"[\w.-]+-[0-9a-f]{6}"),
    "host": (r"\bweb\d\b", r"[\w.-]+"),
    "user": (r"\bops\b", r"\w+"),
    "key": (r"msk_[\w-]+", None),
    "key_id": (r"\bk[0-9a-f]{10}\b", r"k[0-9a-f]{10}"),
    "id": (r"\b[0-9a-f]{32}~[\w.]+", None),
}
"""What differs from run to run, as a page has it, and as it is matched without white space (None: the same way)."""
LEARNT = ("pid", "key_id")
"""Texts that later commands of the page repeat."""
_VARYING = re.compile("|".join(f"(?P<{name}>{shown})" for name, (shown, _) in VARYING.items()))


def compare(printed: str, shown: str) -> dict[str, str] | None:
    """Return None if it is not what the page shows, else what stands for each process and key of the page.

    White space does not count: pages break lines, and tables are as wide as their cells.
    """

    def fixed(text: str) -> str:
        return re.escape("".join(text.split()))

    parts: list[str] = []
    learnt: list[str] = []
    at = 0
    for found in _VARYING.finditer(shown):
        name = str(found.lastgroup)
        expected = VARYING[name][1] or VARYING[name][0]
        if name in LEARNT:
            learnt.append(found[0])
            expected = f"({expected})"
        parts += [fixed(shown[at : found.start()]), expected]
        at = found.end()
    whole = "".join([*parts, fixed(shown[at:])])
    if match := re.fullmatch(whole, "".join(printed.split()), re.DOTALL):
        return dict(zip(learnt, match.groups(), strict=True))
    return None


def commands(console: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with what it prints; a quote or a backslash continues a command."""
    command, shown, complete = "", "", True
    for line in console.splitlines(keepends=True):
        if complete and line.startswith("$ "):
            if command:
                yield command, shown
            command, shown, complete = line[2:], "", is_complete(line[2:])
        elif complete:
            shown += line
        else:
            command += line
            complete = is_complete(command)
    yield command, shown


def is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\\n")


class Reader:
    """Somebody at a machine of their own: one folder, one server, ports that are free."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        self.api = free_port()
        self.other = free_port()
        self._opened = opened
        self._stands_for: dict[str, str] = {}
        self._server = ""
        self._serving = False
        self._receiver = ""
        programs = Path(sys.executable).parent
        self.environ = ENVIRON | {
            "HOME": str(folder),
            "NO_COLOR": "1",
            "PATH": f"{programs}:{os.environ['PATH']}",
            "TERM": "dumb",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def follow(self, page: str, leave_out: tuple[str, ...] = ()) -> None:
        for name, language, code in BLOCK.findall(text_of(ROOT / page)):
            if language == "text" and self.running and "/guides/" in page:
                self.read_terminals(code)
            elif language == "console":
                for command, shown in commands(code):
                    if not command.startswith(leave_out):
                        self.type(command, shown)
            elif found := re.match(r"# ([\w./]+\.\w+|crontab)$", code.partition("\n")[0]):
                self.save(found[1], code)
            elif name:
                self.save(name, code)

    def own(self, text: str) -> str:
        """Put what this machine has in the place of ports and hosts that a page names."""
        text = text.replace("localhost:8000", f"localhost:{self.api}").replace("9001", str(self.other))
        text = text.replace("https://scheduler.example.com", f"http://localhost:{self.api}")
        for here, there in self._stands_for.items():
            text = text.replace(here, there)
        if "https://shop.example" in text:
            text = text.replace("https://shop.example", self.receiver)
        if "redis://" in text:
            text = re.sub(r"redis://[\w.]+(:\d+)?(?![\w.:@])", lambda _: self.server, text)
        return text

    @property
    def server(self) -> str:
        if not self._server:
            server = embedded.start(self.folder / "state" / "mainspring")
            self._opened.callback(server.stop)
            self._server = server.tcp_url
        return self._server

    @property
    def receiver(self) -> str:
        """A web server that is out of order; /gone answers 410."""
        if not self._receiver:
            receiver = self._opened.enter_context(receiving(lambda got: Answer(410 if got.path == "/gone" else 503)))
            self._receiver = f"http://127.0.0.1:{receiver.port}"
        return self._receiver

    @property
    def printed(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("terminal-*")))

    def save(self, name: str, code: str) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.own(code))

    def same(self, printed: str, shown: str) -> bool:
        found = compare(printed, self.own(shown))
        self._stands_for.update(found or {})
        return found is not None

    def type(self, command: str, shown: str = "") -> None:
        line = self.own(command).strip()
        fails = re.search("^mainspring: ", shown, re.MULTILINE) is not None
        if STAYS.match(command) and not fails:
            self.leave_running(line)
            self.read_terminals(shown)
        elif found := re.match(r"export (\w+)=(.*)", line):
            self.environ[found[1]] = found[2].replace("~", str(self.folder))
        elif (found := re.match(r"cat ([\w.]+)$", line)) and not (self.folder / found[1]).exists():
            self.save(found[1], shown)
        elif command.startswith("kill "):
            self.run(line)
            self.read_terminals(shown)
        else:
            self.read_answer(line, shown, fails=fails)

    def read_answer(self, line: str, shown: str, *, fails: bool) -> None:
        deadline = time.monotonic() + (20 if LOOKS.match(line) else 0)
        printed = self.run(line, fails=fails)
        while shown and not self.same(printed, shown):
            assert time.monotonic() < deadline, f"{line}\nprints\n{printed}\nand not\n{shown}\n{self.printed}"
            printed = self.run(line, fails=fails)

    def run(self, line: str, *, fails: bool = False) -> str:
        process, screen = on_a_terminal(line, self.folder, self.environ)
        printed = b"".join(chunks(screen)).decode()
        code = process.wait(60)
        assert (code != 0) == fails, f"{line}\nends with {code}\n{printed}\n{self.printed}"
        return printed

    def leave_running(self, line: str) -> None:
        log = self.folder / f"terminal-{len(self.running)}"
        port = free_port() if self._serving else self.api
        process, screen = on_a_terminal(f"exec {line}", self.folder, self.environ | {"MAINSPRING_PORT": str(port)})
        self.running.append(process)
        keeper = threading.Thread(target=keep, args=(screen, log.open("wb", buffering=0)))
        keeper.start()
        self._opened.callback(keeper.join)
        if "mainspring worker" in line:
            wait_until(lambda: "serving " in log.read_text(), f"the worker is ready: {log}", timeout_s=60)
        elif "mainspring serve" in line:
            self._serving = True
            wait_until(lambda: " at http://" in log.read_text(), f"serve is ready: {log}", timeout_s=60)
        elif line.startswith(WEB):
            wait_until(lambda: accepts(self.other), f"the application is ready: {log}", timeout_s=60)

    def read_terminals(self, shown: str) -> None:
        """Wait until the processes that were left running have printed these lines."""
        for line in shown.splitlines():
            wait_until(partial(self.is_on_a_terminal, line), f"{line!r} in {self.folder}", timeout_s=100)

    def is_on_a_terminal(self, line: str) -> bool:
        return any(self.same(printed, line) for printed in self.printed.splitlines())

    def check_that_all_run(self) -> None:
        """Refuse processes that failed, unless the page killed them."""
        assert all(process.poll() in (None, 0) for process in self.running), self.printed

    def go_home(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def on_a_terminal(line: str, folder: Path, environ: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command of the shell on a terminal of 80 columns; the number of the file to read it from goes with it."""
    screen, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    # Two commands, so that bash stays the parent, as it is for a person.
    command = ["bash", "-c", f"{line}\nexit $?"]
    process = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return process, screen


def keep(screen: int, log: BinaryIO) -> None:
    with log:
        log.writelines(chunks(screen))


def chunks(screen: int) -> Iterator[bytes]:
    try:
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(screen, 4096):
                yield chunk
    finally:
        os.close(screen)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    with ExitStack() as opened:
        one = Reader(folder, opened)
        try:
            yield one
        finally:
            one.go_home()
