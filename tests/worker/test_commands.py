"""Commands: programs that workers start, and only those that were named."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mainspring import Output, TaskFailed
from mainspring.model.targets.command import read_command
from mainspring.testing.servers import standalone
from mainspring.worker.command import CommandWork
from tests.support.workers import Place, WorkerProcess, exists, open_place, until


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with standalone() as server:
        async with open_place(server.url, "app", 4) as made:
            yield made


def command(name: str, *argv: str, **settings: Any) -> CommandWork:
    settings.setdefault("retry", "1")
    return CommandWork(name, read_command({"argv": list(argv), **settings}))


def script(name: str, text: str, **settings: Any) -> CommandWork:
    return command(name, "/bin/sh", "-c", text, **settings)


async def test_output_and_exit_code_are_kept(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mainspring.worker")
    await place.worker(script("hello", "echo out; echo err >&2"))
    handle = await place.client.put("command:hello")
    output = await handle.result(timeout=60)
    assert output == Output(0, b"out\n", b"err\n", 4, 4)
    assert re.search(f"command hello: task {re.escape(handle.id[:32])}.* ended after ", caplog.text)


async def test_a_command_that_fails_is_tried_again_and_its_last_words_are_kept(place: Place) -> None:
    await place.worker(script("fail", "echo progress; echo 'disk is full' >&2; exit 3", retry="2 base=1ms cap=1ms"))
    handle = await place.client.put("command:fail", id="backup-1")
    with pytest.raises(TaskFailed, match="is dead: exit code 3: disk is full") as caught:
        await handle.result(timeout=60)
    result = caught.value.result
    assert result.output is not None
    assert (result.output.exit_code, result.output.stdout) == (3, b"progress\n")
    assert result.attempt == 2
    dead_letter = await place.client.dead_get("backup-1")
    assert dead_letter is not None
    assert dead_letter.errors == ("exit code 3: disk is full",) * 2


async def test_the_environment_is_what_was_named_and_what_the_task_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "not for commands")
    await place.worker(command("env", "/usr/bin/env", env={"LEVEL": "3"}, output_bytes=60_000))
    handle = await place.client.put("command:env", id="env-1")
    output = await handle.result(timeout=60)
    found = dict(line.split("=", 1) for line in output.stdout.decode().splitlines())
    assert found["LEVEL"] == "3"
    assert found["MAINSPRING_TASK_ID"] == "env-1"
    assert found["MAINSPRING_TASK_KEY"] == f"app/env-1/{handle.due_ms}"
    assert found["MAINSPRING_TASK_ATTEMPT"] == "1"
    assert set(found) <= {
        "LEVEL", "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LOGNAME",
        "MAINSPRING_TASK_ID", "MAINSPRING_TASK_KEY", "MAINSPRING_TASK_ATTEMPT", "MAINSPRING_TASK_DUE",
    }  # fmt: skip


async def test_a_task_may_add_arguments_only_where_allowed_and_never_a_shell(place: Place, tmp_path: Path) -> None:
    evil = f"; touch {tmp_path}/evil; $(touch {tmp_path}/evil) `touch {tmp_path}/evil`"
    await place.worker(
        command("echo", "/bin/echo", "fixed", arguments=True), command("closed", "/bin/echo", result_ttl="1m")
    )
    handle = await place.client.put("command:echo", {"args": ["--flag", evil]})
    assert (await handle.result(timeout=60)).stdout.decode() == f"fixed --flag {evil}\n"
    for payload, said in (
        ({"args": ["x"]}, "takes no arguments from tasks; arguments = true in its definition allows them"),
        ({"argv": ["/bin/rm"]}, "unknown field `argv`"),
        ({"args": "x"}, "Expected `array`, got `str`"),
        (["rm"], "Expected `object"),
        (b"bytes", "its payload is bytes"),
    ):
        refused = await place.client.put("command:closed", payload)
        with pytest.raises(TaskFailed, match=said):
            await refused.result(timeout=60)
    assert not (tmp_path / "evil").exists()


async def test_only_named_commands_run(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = tmp_path / "ran"
    await place.worker(command("known", "/bin/true"), retry=read_command({"argv": ["x"], "retry": "1"}).retry)
    names = ("unknown", "/bin/sh", f"touch {marker}", "known/../sh")
    for name in names:
        await place.client.put(f"command:{name}", {"args": [str(marker)]}, id=name)
    await until(lambda: all(f"this worker does not know command:{name}" in caplog.text for name in names))
    assert [(await place.client.get(name)).attempt for name in names] == [1, 1, 1, 1]
    assert not (await place.client.dead_list()).letters
    assert not marker.exists()


async def test_a_command_that_takes_too_long_is_ended_with_its_whole_group(place: Place, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = f"trap '' TERM; echo $$ >> {pids}; while :; do sleep 1; done"
    (tmp_path / "child").write_text(child)
    # Both shells must be up and deaf by then, also on a loaded machine.
    deaf = f"trap '' TERM; sh {tmp_path}/child & echo $$ >> {pids}; wait; wait; wait"
    await place.worker(script("deaf", deaf, timeout="5s", kill_after="200ms"))
    handle = await place.client.put("command:deaf")
    with pytest.raises(TaskFailed, match="timed out after 5 s"):
        await handle.result(timeout=60)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    await until(lambda: not any(map(exists, started)))


async def test_a_command_that_heeds_the_request_to_end_may_clean_up(place: Place, tmp_path: Path) -> None:
    marker = tmp_path / "clean"
    await place.worker(
        script("polite", f"trap 'touch {marker}; exit 0' TERM; while :; do sleep 0.05; done", timeout="4s")
    )
    handle = await place.client.put("command:polite")
    with pytest.raises(TaskFailed, match="timed out"):
        await handle.result(timeout=60)
    assert marker.exists()


async def test_processes_that_a_command_leaves_in_its_group_are_ended(place: Place, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    await place.worker(script("daemon", f"sleep 600 & echo $! > {pid}; echo started"))
    handle = await place.client.put("command:daemon")
    output = await handle.result(timeout=60)
    assert output.stdout == b"started\n"
    await until(lambda: not exists(int(pid.read_text())))


async def test_a_running_command_can_be_cancelled(place: Place, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    await place.worker(script("long", f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 600"), lease_s=6.0)
    handle = await place.client.put("command:long", id="long-1")
    await until(pid.exists)
    await place.client.cancel("long-1")
    with pytest.raises(TaskFailed, match="is cancelled"):
        await handle.result(timeout=60)
    await until(lambda: not exists(int(pid.read_text())))
    await place.settled()


async def test_both_ends_of_long_output_are_kept_and_the_rest_is_counted(place: Place) -> None:
    loud = "import sys; sys.stdout.write('begin' + 'x' * 3_000_000 + 'end'); sys.stderr.write('y' * 100_000)"
    await place.worker(command("loud", sys.executable, "-c", loud, output_bytes=10))
    output = await (await place.client.put("command:loud")).result(timeout=60)
    assert (output.stdout, output.stdout_bytes) == (b"begin\n[2999998 bytes left out]\nxxend", 3_000_008)
    assert (output.stderr, output.stderr_bytes) == (b"yyyyy\n[99990 bytes left out]\nyyyyy", 100_000)


async def test_a_command_that_cannot_be_started_says_why(place: Place, tmp_path: Path) -> None:
    forbidden = tmp_path / "program"
    forbidden.write_text("no program")
    await place.worker(
        command("missing", "/no/such/program"),
        command("forbidden", str(forbidden)),
        command("folder", "/bin/true", cwd="/no/such/folder"),
    )
    for name, said in (
        ("missing", "command 'missing' cannot be started: '/no/such/program': .*No such file"),
        ("forbidden", "command 'forbidden' cannot be started: .*Permission denied"),
        ("folder", "its folder '/no/such/folder' is missing or forbidden"),
    ):
        handle = await place.client.put(f"command:{name}")
        with pytest.raises(TaskFailed, match=said):
            await handle.result(timeout=60)


async def test_one_occurrence_runs_once_on_many_workers(place: Place, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    work = script("note", f"echo $MAINSPRING_TASK_ID >> {notes}")
    for _ in range(3):
        await place.worker(work)
    for _ in range(3):
        for minute in range(20):
            await place.client.put("command:note", id=f"note@{minute:02}", after="300ms")
    await place.settled()
    assert sorted(notes.read_text().split()) == [f"note@{minute:02}" for minute in range(20)]


async def test_a_worker_for_commands_needs_no_module(place: Place, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "mainspring.toml").write_text(
        f'[commands.touch]\nargv = ["touch", "{marker}"]\n[commands.elsewhere]\nargv = ["true"]\nqueue = "other"\n'
    )
    worker = WorkerProcess(tmp_path, "--queues", "commands,other", "--redis-url", place.url, "--namespace", "app")
    try:
        await asyncio.to_thread(worker.wait_started)
        await place.client.put("command:touch")
        await place.client.put("command:elsewhere")
        await place.settled()
        assert marker.exists()
        assert (await place.client.dead_list()).letters == []
        assert await asyncio.to_thread(worker.end) == 0
    finally:
        worker.remove()


async def test_the_commands_of_a_killed_worker_end_with_it_and_run_elsewhere(place: Place, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    go = tmp_path / "go"
    # A moment later than it began: a worker that dies while it starts a program cannot have told anybody of it.
    text = f"sleep 1; echo $$ >> {pids}; while [ ! -e {go} ]; do sleep 0.05; done; echo $MAINSPRING_TASK_ATTEMPT"
    (tmp_path / "mainspring.toml").write_text(f'[commands.wait]\nargv = ["/bin/sh", "-c", "{text}"]\n')
    options = ("--queues", "commands", "--redis-url", place.url, "--namespace", "app", "--lease", "6s")
    workers = [WorkerProcess(tmp_path, *options)]
    try:
        await asyncio.to_thread(workers[0].wait_started)
        handle = await place.client.put("command:wait", id="wait-1")
        await until(lambda: pids.exists() and pids.read_text())
        first = int(pids.read_text())
        workers[0].process.kill()
        await until(lambda: not exists(first))
        workers.append(WorkerProcess(tmp_path, *options))
        await until(lambda: len(pids.read_text().split()) == 2)
        go.touch()
        assert (await handle.result(timeout=60)).stdout == b"1\n"
    finally:
        for one in workers:
            one.remove()
