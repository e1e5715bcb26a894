"""Commands and handlers with cron schedules, really executed by workers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mainspring.model.targets.command import read_command
from mainspring.testing.servers import standalone
from mainspring.worker.command import CommandWork
from tests.support.workers import Place, open_place, until


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with standalone() as server:
        async with open_place(server.url, "app", 4) as made:
            yield made


def script(name: str, text: str) -> CommandWork:
    return CommandWork(name, read_command({"argv": ["/bin/sh", "-c", text], "retry": "1"}))


async def test_a_command_runs_every_second_once_for_each_planned_time(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    await place.worker(script("mark", f"echo $MAINSPRING_TASK_ID >> {log}"))
    await place.client.schedules.add("marks", cron="* * * * * *", target="command:mark", overlap="allow")
    await until(lambda: log.exists() and len(log.read_text().splitlines()) >= 4)
    await place.client.schedules.pause("marks")
    ran = Counter(log.read_text().splitlines())
    assert set(ran.values()) == {1}, "inserted again, it still runs once"
    assert all(name.startswith("marks@20") for name in ran)


async def test_a_command_that_is_still_running_is_not_started_again(place: Place, tmp_path: Path) -> None:
    started, end = tmp_path / "started", tmp_path / "end"
    await place.worker(script("slow", f"echo x >> {started}; while [ ! -e {end} ]; do sleep 0.05; done"))
    await place.client.schedules.add("slow", every="1s", target="command:slow")

    async def skipped() -> int:
        view = await place.client.schedules.get("slow")
        assert view is not None
        return view.not_run.get("overlap", 0)

    await until(started.exists)
    async with asyncio.timeout(60):
        while await skipped() < 2:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.05)
    assert started.read_text() == "x\n"
    end.touch()
    await until(lambda: len(started.read_text().splitlines()) >= 2)
    await place.client.schedules.pause("slow")
