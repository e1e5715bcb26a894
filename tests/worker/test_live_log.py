"""Logs of running jobs: what a handler logs and a command prints can be followed before it is over."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mainspring.model.job import Job
from mainspring.model.run import RunLog
from mainspring.model.targets.command import read_command
from mainspring.store.job_queue import take
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


async def followed(place: Place, task_id: str, text: str, after: str = "0") -> RunLog:
    """Wait until the log of a job says this."""
    seen = RunLog("", after, False)

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


async def test_a_log_is_followed_through_the_death_of_its_worker_to_the_end_of_the_next_run(place: Place) -> None:
    goes_on = asyncio.Event()

    async def work() -> None:
        current().log("run 2 begins")
        await goes_on.wait()
        current().log("it is done")

    handle = await place.client.put(TARGET, id="job-1")
    jobs: list[Job] = []
    while not jobs:
        jobs = await take(place.store, "dead", {keys.number: {"mail": 1} for keys in place.store.keys.partitions})
    await publish_logs(place.store, [(jobs[0].partition, jobs[0].idh, "run 1 begins\n")])
    seen = await followed(place, handle.id, "run 1")
    assert not seen.over
    await place.worker(Handler(work, queue="mail", name="work"), lease_s=0.5)
    again = await followed(place, handle.id, "run 2", seen.next)
    assert (again.text, again.over) == ("run 2 begins\n", False)
    goes_on.set()
    await place.settled()
    rest = await followed(place, handle.id, "it is done", again.next)
    assert rest.text == "it is done\n"
    ends = [run.record.end for run in (await place.client.runs(id="job-1")).runs]
    assert ends == ["done", "lost"]


async def test_many_follow_a_log_and_each_reads_all_of_it(place: Place) -> None:
    goes_on = asyncio.Event()

    async def work() -> None:
        for number in range(3):
            current().log(f"line {number}")
        await goes_on.wait()

    await place.worker(Handler(work, queue="mail", name="work"))
    handle = await place.client.put(TARGET, id="job-1")

    async def follow() -> str:
        text, cursor = "", None
        while True:
            part = await place.client.run_log(handle.id, cursor=cursor)
            text, cursor = text + part.text, part.next
            if part.over:
                return text
            await asyncio.sleep(0)

    followers = [asyncio.create_task(follow()) for _ in range(30)]
    await followed(place, handle.id, "line 2")
    goes_on.set()
    assert set(await asyncio.gather(*followers)) == {"line 0\nline 1\nline 2\n"}
