"""Lists on a terminal, in a pipe and for programs; `status`; errors in the words that were typed."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mainspring.cli.listing import fitted
from mainspring.cli.output import relative
from mainspring.cli.run import stat_lines
from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Retry
from mainspring.model.explain import moment
from mainspring.model.run import BUCKETS, RunCounts
from mainspring.model.workers import WorkerInfo
from mainspring.store.members import worker_beat
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker
from tests.support.serving import ENVIRON, MAIN

HOUR_MS = 3_600_000


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    server.call("FLUSHALL")
    async with Client(server.url, partitions=4) as opened:
        yield opened


def on_terminal(*words: str, columns: int = 80) -> str:
    """Return what a command draws on a terminal of this width, without its colours."""
    ours, theirs = pty.openpty()
    environ = ENVIRON | {"COLUMNS": str(columns), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    with os.fdopen(ours, "rb", buffering=0) as screen, subprocess.Popen(
        [*MAIN, *words], stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL, env=environ
    ) as running:  # fmt: skip
        os.close(theirs)
        drawn = b""
        try:
            while chunk := os.read(screen.fileno(), 4096):
                drawn += chunk
        except OSError:  # the command has closed its end
            pass
        assert running.wait(60) == 0
    return re.sub("\x1b\\[[0-9;]*m", "", drawn.decode()).replace("\r\n", "\n")


def in_pipe(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([*MAIN, *words], capture_output=True, text=True, timeout=100, env=ENVIRON, check=False)
    assert ended.returncode == code, ended.stderr
    return ended


@pytest.mark.parametrize(
    ("apart_ms", "text"),
    [
        (999, "in 1 s"), (3_000, "in 3 s"), (59_400, "in 59 s"), (59_999, "in 1 min"), (60_000, "in 1 min"),
        (29 * 60_000 + 500, "in 29 min"), (HOUR_MS, "in 1 h"), (2 * HOUR_MS - 3_000, "in 2 h"),
        (47 * HOUR_MS, "in 47 h"), (48 * HOUR_MS, "in 2 d"), (-3_000, "3 s ago"), (0, "0 s ago"),
    ],
)  # fmt: skip
def test_times_are_said_as_people_say_them(apart_ms: int, text: str) -> None:
    assert relative(1_800_000_000_000 + apart_ms, 1_800_000_000_000) == text


async def test_a_list_fits_the_terminal_and_is_whole_in_a_pipe(server: Server, client: Client) -> None:
    long = await client.put("https://example.com/" + "path/" * 12, 1, after="2h")
    await client.put("log:", 1, after="30m", id="order-42")
    words = ("task", "list", "--redis-url", server.url)
    drawn = (await asyncio.to_thread(on_terminal, *words)).splitlines()
    assert max(map(len, drawn)) <= 80
    assert drawn[0].split() == ["ID", "DUE", "TARGET", "STATE"]
    assert re.search(r"^order-42 +in (29|30) min +log: +○ pending$", drawn[1].rstrip())
    assert "…" in drawn[2]
    assert long.id not in drawn[2]
    piped = (await asyncio.to_thread(in_pipe, *words)).stdout.splitlines()
    assert [line.split()[0] for line in piped] == ["ID", "order-42", long.id]
    assert re.search(r"  \d{4}-\d\d-\d\dT[\d:.]+Z  https://example.com/(path/){12}  pending$", piped[2])
    wide = (await asyncio.to_thread(on_terminal, *words, "-o", "wide")).splitlines()
    assert wide == piped
    utc = (await asyncio.to_thread(on_terminal, *words, "--utc")).splitlines()
    assert re.search(r"\d{4}-\d\d-\d\dT", utc[1])
    names = (await asyncio.to_thread(in_pipe, *words, "-o", "name")).stdout
    assert names == f"order-42\n{long.id}\n"
    for asked in (("-o", "json"), ("--json",)):
        page = json.loads((await asyncio.to_thread(in_pipe, *words, *asked)).stdout)
        assert [one["id"] for one in page["tasks"]] == ["order-42", long.id]
        assert [one["due"] for one in page["tasks"]] == [moment(one["due_ms"]) for one in page["tasks"]]


@pytest.mark.parametrize(
    ("words", "empty"),
    [
        ("task list", "no tasks are pending"),
        ("task list --state running", "no tasks are running"),
        ("dead list", "there are no dead letters"),
        ("dead list --target log:", "no dead letter matches"),
        ("schedule list", "there are no schedules"),
        ("lane list", "no lane is stalled"),
        ("pauses", "nothing is paused"),
        ("key list", "there are no keys"),
        ("notify beats", "no beats are watched"),
        ("notify list", "no channel is set up"),
        ("run list", "there are no runs"),
        ("run list --outcome failed", "no run matches"),
        ("queue list", "no queue has tasks or workers"),
        ("worker list", "no worker is running"),
        ("audit", "no change by a command or over the API is recorded"),
    ],
)
async def test_an_empty_list_says_what_is_empty_and_where(
    server: Server, client: Client, words: str, empty: str
) -> None:
    await client.count()  # makes the namespace
    ended = await asyncio.to_thread(in_pipe, *words.split(), "-n", "main", "--redis-url", server.url)
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"{empty} in namespace main on {server.url}\n")


@pytest.fixture
async def ticker(server: Server) -> AsyncIterator[Ticker]:
    server.call("FLUSHALL")
    clock = ManualClock(int(time.time() * 1000) - 60_000)
    async with Ticker(server.url, namespace="main", partitions=4, clock=clock) as opened:
        yield opened


async def test_runs_fit_the_terminal_with_ids_that_can_be_pasted(server: Server, ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Retry("the shop is closed today, come again tomorrow"))
    await ticker.client.put("log:", 1, id="order-" + "9" * 40, retry="2 base=1s")
    await ticker.advance(seconds=5)
    runs = (await ticker.client.runs()).runs
    assert {run.record.end for run in runs} == {"retry", "dead"}
    words = ("run", "list", "--redis-url", server.url)
    header, *rows = (await asyncio.to_thread(on_terminal, *words)).splitlines()
    assert header.split() == ["ID", "ENDED", "TASK", "OUTCOME", "TOOK", "TARGET", "REASON"]
    assert [re.search(r" (\d+ \w+ ago) ", row) is not None for row in rows] == [True, True]
    assert [row.split()[0] for row in rows] == [run.id for run in runs]
    assert max(map(len, rows)) <= 80
    assert "! retry" in rows[1]


async def test_charts_of_many_hours_fit_the_terminal(server: Server, client: Client) -> None:
    counts = [RunCounts(at_ms=at * HOUR_MS, ok=1) for at in range(700)]
    lines = stat_lines(counts)
    assert lines[0].endswith(", a column is 12 h")
    assert max(map(len, lines)) <= 80
    assert re.match(r"ok +█{58}\S?█?  700$", lines[1]), lines[1]


async def test_bars_of_both_charts_begin_in_one_column_and_the_last_hour_counts() -> None:
    durations = [0] * BUCKETS
    durations[0], durations[-1] = 1, 2
    late = RunCounts(at_ms=0, ok=3, durations=tuple(durations), latenesses=tuple(durations))
    lines = stat_lines([late, RunCounts(at_ms=HOUR_MS)])
    assert lines[0] == "1970-01-01T00:00:00.000Z to 1970-01-01T02:00:00.000Z, a column is 1 h"
    bars = [line for line in lines if "█" in line][1:]
    assert [bar.split()[0] for bar in bars] == ["took", "from", "late", "from"]
    assert len({bar.index("█") for bar in bars}) == 1


async def test_a_dead_task_leads_to_its_dead_letter_and_shows_its_last_attempt(server: Server, ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Retry("closed"))
    await ticker.client.put("log:", 1, id="bad", retry="2 base=1s")
    await ticker.advance(seconds=5)
    ended = await asyncio.to_thread(in_pipe, "task", "get", "bad", "--redis-url", server.url)
    assert re.search(r"^attempt +2$", ended.stdout, re.MULTILINE)
    assert ended.stderr == "try: mainspring dead show bad\n"


async def test_a_message_is_wrapped_between_words_on_a_terminal_and_the_home_folder_is_short(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = ENVIRON | {"HOME": str(tmp_path), "COLUMNS": "80", "XDG_STATE_HOME": ""}
    words = ("task", "get", "order-4711", "-n", "a-namespace-with-a-long-name", "--data-dir", str(tmp_path / "data"))
    with os.fdopen(ours, "rb", buffering=0) as screen:
        await asyncio.to_thread(subprocess.run, [*MAIN, *words], stderr=theirs, env=environ, timeout=100, check=False)
        os.close(theirs)
        drawn = screen.read(4096).decode().replace("\r\n", "\n")
    assert drawn == (
        "mainspring: there is no task 'order-4711' (namespace\n"
        "a-namespace-with-a-long-name on the embedded server in ~/data)\n"
        "try: mainspring task list -n a-namespace-with-a-long-name\n"
    )


async def test_a_log_of_nothing_says_so(server: Server, client: Client) -> None:
    ended = await asyncio.to_thread(in_pipe, "run", "log", "nope", "--redis-url", server.url)
    place = f"(namespace main on {server.url})"
    said = f"nope: nothing is written, or nothing of it is kept {place}\ntry: mainspring run list\n"
    assert (ended.stdout, ended.stderr) == ("", said)


async def test_watch_prints_again_until_it_is_interrupted(server: Server, client: Client) -> None:
    await client.put("log:", 1, after="30m", id="first")
    process = await asyncio.create_subprocess_exec(
        *MAIN, "task", "list", "-o", "name", "--watch", "--redis-url", server.url,
        stdout=asyncio.subprocess.PIPE, env=ENVIRON,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"first\n"
        await client.put("log:", 1, after="10m", id="second")
        assert b"second\n" in [await process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130


async def test_status_shows_one_namespace_on_one_screen(server: Server, client: Client) -> None:
    await client.put("log:", 1, after="30m", id="order-42")
    await client.schedules.add("nightly", cron="0 2 * * *", target="log:")
    await client.pause(target="kafka:*")
    words = ("status", "--redis-url", server.url)
    shown = (await asyncio.to_thread(in_pipe, *words, code=1)).stdout
    for line in (
        f"looked at     namespace main on {server.url}",
        "nodes         none; start one: mainspring serve",
        "tasks         2 pending",
        "schedules     1",
        "dead letters  0",
        "paused        target kafka:*",
        "Next due",
    ):
        assert line in shown.splitlines()
    assert re.search(r"^order-42 +\S+Z +log:$", shown, re.MULTILINE)
    told = json.loads((await asyncio.to_thread(in_pipe, *words, "--json", code=1)).stdout)
    assert told["tasks"] == {"pending": 2, "exact": True}
    assert told["cluster"]["nodes"] == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("task put --after soon 1", "--after: 'soon' is not a delay"),
        ("task put --in soon 1", "--in: 'soon' is not a delay"),
        ("task put --in=soon 1", "--in: 'soon' is not a delay"),
        ("task list --due-after soon", "--due-after: 'soon' is not"),
        ("task count --before soon", "--due-before: 'soon' is not"),
        ("task put --at soon 1", "--at: 'soon' is not"),
        ("pause --all --for x", "--for: 'x' is not a delay"),
        ("task list --limit 0", "--limit is 0"),
        ("task put --expires x 1", "--expires: 'x' is not"),
    ],
)
async def test_an_error_names_the_option_that_was_typed(server: Server, line: str, says: str) -> None:
    ended = await asyncio.to_thread(in_pipe, *line.split(), "--redis-url", server.url, code=2)
    assert ended.stderr.startswith(f"mainspring: {says}")


async def test_an_unknown_task_is_reported_with_the_place_that_was_looked_at(server: Server, client: Client) -> None:
    await client.count()
    ended = await asyncio.to_thread(in_pipe, "task", "get", "nope", "--redis-url", server.url, code=1)
    assert ended.stdout == ""
    place = f"(namespace main on {server.url})"
    assert ended.stderr == f"mainspring: there is no task 'nope' {place}\ntry: mainspring task list\n"
    for line, what in (
        ("task result nope", "task 'nope'"),
        ("schedule show nope", "schedule 'nope'"),
        ("schedule trigger nope", "schedule 'nope'"),
        ("schedule remove nope", "schedule 'nope'"),
        ("dead show nope", "dead letter 'nope'"),
        ("dead drop nope --yes", "dead letter 'nope'"),
        ("dead replay nope", "dead letter 'nope'"),
        ("task cancel nope", "task 'nope'"),
        ("task explain nope", "task 'nope'"),
        ("key revoke nope", "key 'nope'"),
        ("schedule lint nope", "schedule 'nope'"),
    ):
        ended = await asyncio.to_thread(in_pipe, *line.split(), "--redis-url", server.url, code=1)
        group = line.split()[0]
        assert ended.stderr == f"mainspring: there is no {what} {place}\ntry: mainspring {group} list\n"


async def test_default_retries_of_a_frequent_schedule_are_no_reason_to_warn(server: Server, client: Client) -> None:
    words = ("schedule", "add", "--target", "log:", "--redis-url", server.url)
    plain = await asyncio.to_thread(in_pipe, *words, "plain", "--every", "5s")
    assert plain.stderr == ""
    slow = await asyncio.to_thread(in_pipe, *words, "slow", "--every", "5s", "--timeout", "10s")
    assert "[too-long]" in slow.stderr


def test_version_names_the_parts() -> None:
    shown = in_pipe("version").stdout
    assert shown.startswith("mainspring ")
    assert f"Python {sys.version.split()[0]}" in shown


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("schedule show ni", ["nightly"]),
        ("schedule edit ", ["hourly", "nightly"]),
        ("task list --state ", ["pending", "fired", "queued", "running"]),
        ("task put --target lo", ["log:"]),
        ("pause --queue ", ["mail"]),
        ("run list --schedule n", ["nightly"]),
        ("run list --queue ", ["mail"]),
        ("run list --outcome d", ["done", "dead", "dropped"]),
        ("notify test o", ["ops"]),
        ("schedule add x --target lo", ["log:"]),
        ("task list --target lo", ["log:"]),
        ("schedule add x --overlap b", ["buffer_one", "buffer_all"]),
        ("schedule lint n", ["nightly"]),
        ("serve --log-level d", ["debug"]),
    ],
)
async def test_names_and_choices_are_completed(
    server: Server, client: Client, tmp_path: Path, line: str, completions: list[str]
) -> None:
    (tmp_path / "settings.toml").write_text('[notify.ops]\nurl = "https://example.com/hook"\n')
    for name in ("nightly", "hourly"):
        await client.schedules.add(name, cron="0 2 * * *", target="log:")
    await worker_beat(client.store, "w1/a", WorkerInfo(id="w1", queues={"mail": 1}, lease_ms=600_000))
    words = f"mainspring {line}".split(" ")
    asked = {
        "_MAINSPRING_COMPLETE": "complete_bash", "COMP_WORDS": "mainspring " + line, "COMP_CWORD": str(len(words) - 1),
        "MAINSPRING_REDIS_URL": server.url, "MAINSPRING_CONFIG": str(tmp_path / "settings.toml"),
    }  # fmt: skip
    found = await asyncio.to_thread(
        subprocess.run, MAIN, capture_output=True, text=True, timeout=60, env=ENVIRON | asked, check=False
    )
    assert found.stdout.split() == completions, found.stderr


def test_without_a_server_nothing_is_completed_and_nothing_is_said() -> None:
    asked = {
        "_MAINSPRING_COMPLETE": "complete_bash", "COMP_WORDS": "mainspring schedule show n", "COMP_CWORD": "3",
        "MAINSPRING_REDIS_URL": "redis://127.0.0.1:1",
    }  # fmt: skip
    found = subprocess.run(MAIN, capture_output=True, text=True, timeout=60, env=ENVIRON | asked, check=False)
    assert (found.stdout.strip(), found.stderr) == ("", "")


async def test_a_column_without_a_value_is_left_out(server: Server, client: Client) -> None:
    words = ("pauses", "--redis-url", server.url)
    await client.pause(target="kafka:*")
    drawn = await asyncio.to_thread(on_terminal, *words)
    assert drawn.splitlines()[0].split() == ["PAUSED", "SINCE", "UNTIL", "MODE"]
    await client.pause(queue="mail", reason="deploy", by="ops")
    drawn = await asyncio.to_thread(on_terminal, *words)
    assert drawn.splitlines()[0].split() == ["PAUSED", "SINCE", "UNTIL", "MODE", "BY", "REASON"]


def test_the_first_column_is_cut_last() -> None:
    assert fitted([14, 40, 40], 60) == [14, 21, 21]
    assert fitted([40, 10, 10], 40) == [16, 10, 10]
    assert fitted([40, 40, 40], 28) == [8, 8, 8]


def test_times_and_states_are_cut_when_nothing_else_can_be() -> None:
    assert fitted([20, 24, 30], 60, kept={1}) == [16, 24, 16]
    assert fitted([20, 24, 30], 46, kept={1}) == [10, 24, 8]
    assert fitted([20, 24, 30], 28, kept={1}) == [8, 8, 8]
