"""Logs of running jobs: what a handler logs and a command prints can be followed before it is over."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mainspring.client.runs import RunLog
from mainspring.model.targets.command import read_command
from mainspring.store.runs import publish_logs
from mainspring.store.tasks.find import Reference
from mainspring.testing.servers import standalone
from mainspring.worker.command import CommandWork
from mainspring.worker.context import current
from mainspring.worker.handler import Handler
from tests.support.workers import Place, open_place, until_async

TARGET = "queue:mail/work"


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with standalone() as server:
        async with open_place(server.url, "app", 4) as made:
            yield made


async def followed(place: Place, task_id: str, text: str) -> RunLog:
    """Wait until the log of a job says this."""
    seen = RunLog("", "0", False)

    async def says_it() -> bool:
        nonlocal seen
        part = await place.client.run_log(task_id, cursor=seen.next)
        seen = RunLog(seen.text + part.text, part.next, part.over)
        return text in seen.text

    await until_async(says_it)
    return seen


async def test_log_lines_of_a_handler_are_readable_while_it_runs(place: Place) -> None:
    goes_on = asyncio.Event()

    async def work() -> None:
        current().log("half of it is done")
        await goes_on.wait()

    await place.worker(Handler(work, queue="mail", name="work"))
    handle = await place.client.put(TARGET, id="job-1")
    seen = await followed(place, handle.id, "half")
    assert (seen.text, seen.over) == ("half of it is done\n", False)
    goes_on.set()
    await place.settled()
    assert (await place.client.run_log(handle.id, cursor=seen.next)).over


async def test_the_output_of_a_command_is_readable_while_it_runs_and_at_its_end(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    text = f"echo begun; while [ ! -e {go} ]; do sleep 0.05; done; echo over"
    await place.worker(CommandWork("slow", read_command({"argv": ["/bin/sh", "-c", text]})))
    handle = await place.client.put("command:slow")
    seen = await followed(place, handle.id, "begun")
    assert (seen.text, seen.over) == ("begun\n", False)
    go.touch()
    await place.settled()
    assert (await place.client.run_log(handle.id, cursor=seen.next)).text == "over\n"


async def test_a_job_that_is_soon_over_publishes_nothing(place: Place) -> None:
    goes_on = asyncio.Event()

    async def work(*, waits: bool) -> None:
        current().log("at work")
        if waits:
            await goes_on.wait()

    await place.worker(Handler(work, queue="mail", name="work"))
    await place.client.put(TARGET, {"waits": False}, id="short")
    await place.settled()
    await place.client.put(TARGET, {"waits": True}, id="long")
    await followed(place, "long", "at work")
    reference = Reference.parse("short", None, len(place.store.keys))
    keys = place.store.keys.partitions[reference.home]
    assert await place.store.run_one(keys.slot, [("EXISTS", keys.run_log(reference.idh))]) == [0]
    goes_on.set()
    await place.settled()


async def test_a_command_that_prints_much_at_once_takes_little_memory(place: Place) -> None:
    text = "head -c 400000000 /dev/zero | tr '\\0' x"
    await place.worker(CommandWork("noisy", read_command({"argv": ["/bin/sh", "-c", text]})))
    tracemalloc.start()
    try:
        await place.client.put("command:noisy")
        await place.settled()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000


async def test_a_long_log_is_read_in_portions_and_bounded(place: Place) -> None:
    handle = await place.client.put("log:", after="1h")
    reference = Reference.parse(handle.id, None, len(place.store.keys))
    parts = [f"{n:05}" * 3_200 for n in range(400)]
    for part in parts:
        await publish_logs(place.store, [(reference.home, reference.idh, part)])
    first = await place.client.run_log(handle.id)
    assert 0 < len(first.text) <= 64 * 16_000
    text, log = first.text, first
    while (log := await place.client.run_log(handle.id, cursor=log.next)).text:
        text += log.text
    assert 2_000_000 < len(text) < 5_000_000, "most of it fits, and what does not is the beginning"
    assert "".join(parts).endswith(text)
