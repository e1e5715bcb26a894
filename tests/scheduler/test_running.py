"""A scheduler started in the background, in an event loop and in threads: what runs, what stops, who agrees."""

import asyncio
import contextlib
import gc
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mainspring import Config, Entry, Scheduler, SchedulerRunning, __version__, current
from mainspring.client.client import Client
from mainspring.client.sync import SyncClient
from mainspring.model.errors import InvalidInput, MainspringError, NotFound, Unavailable
from mainspring.scheduler.worker_process import Workplace
from mainspring.testing.servers import Server, standalone, wait_until
from tests.support.serving import ENVIRON, is_gone
from tests.support.workers import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standalone() as made:
        yield made


_count = 0


@pytest.fixture
def config(server: Server) -> Config:
    global _count
    _count += 1
    return Config(redis_url=server.url, namespace=f"life-{_count}", partitions=4, lease_s=2, shutdown_timeout_s=10)


def wait_for(condition: Any, what: str) -> None:
    wait_until(lambda: bool(condition()), what, timeout_s=PATIENCE_S)


_strangers: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def those_before() -> None:
    """Other tests in this process may have left plain handlers that never end: there is no way to end a thread."""
    global _strangers
    _strangers = set(threading.enumerate())


def check_nobody_left() -> None:
    """No thread of ours: those of loops are joined by the stop, those of plain handlers end a moment later."""

    def ours() -> list[str]:
        since = set(threading.enumerate()) - _strangers
        return [one.name for one in since if one.name.startswith("mainspring-")]

    assert not [name for name in ours() if not name.startswith("mainspring-handler-")]
    wait_for(lambda: not ours(), "the threads of handlers end")


def test_a_started_scheduler_runs_its_schedules_and_can_be_started_again(config: Config) -> None:
    scheduler = Scheduler(config)
    ran: list[str] = []

    @scheduler.every("1s", name="tick", kwargs={"word": "on time"})
    @scheduler.handler(retries=2)
    def note(word: str) -> None:
        ran.append(f"{word} {current().id.partition('@')[0]}")

    for turn in range(2):
        ran.clear()
        with scheduler:
            wait_for(lambda: ran.count("on time tick") >= 2, "two ticks")
            wait_for(lambda: scheduler.healthy, "it is well")
            note.now(id=f"by hand {turn}").put(word="also")
            wait_for(lambda t=turn: f"also by hand {t}" in ran, "the task")
        scheduler.stop()
        assert scheduler.state == "stopped"
        check_nobody_left()
    assert scheduler.entry("tick").retries == 2


async def test_in_an_event_loop_coroutine_handlers_run_in_that_very_loop(config: Config) -> None:
    scheduler = Scheduler(config)
    mine, ran = asyncio.get_running_loop(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @scheduler.handler()
    async def note() -> None:
        loops.append(asyncio.get_running_loop())
        ran.set()

    async with scheduler:
        await note.now().aput()
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        assert await scheduler.aentries() == []
        with pytest.raises(MainspringError, match="stop it there, with astop"):
            await asyncio.to_thread(scheduler.stop)
    await scheduler.astop()
    assert set(loops) == {mine}
    check_nobody_left()


async def test_a_handler_that_blocks_its_loop_does_not_cost_the_node_its_partitions(config: Config) -> None:
    config = replace(config, lease_s=6)  # of which a hiccup of a loaded machine is a small part
    scheduler = Scheduler(config)
    renewed: list[bool] = []

    def leases() -> dict[int, float]:
        assert scheduler._running is not None
        node = scheduler._running._node
        assert node is not None
        assert node.engine is not None
        return {number: one.lease_until for number, one in node.engine.owned.items()}

    @scheduler.handler()
    async def block() -> None:
        before, end = leases(), time.monotonic() + PATIENCE_S / 2
        while not all(leases().get(number, 0) > until_s for number, until_s in before.items()):
            if time.monotonic() > end:
                break
            time.sleep(0.01)  # noqa: ASYNC251  # the loop stands still, as in somebody's handler
        renewed.append(time.monotonic() <= end)

    async with scheduler:
        running = scheduler._running
        assert running is not None
        node = running._node
        assert node is not None
        await until(lambda: len(node.engine.owned) == 4 if node.engine else False)
        assert node.engine is not None
        tokens = {number: one.token for number, one in node.engine.owned.items()}
        await block.now().aput()
        await until(lambda: renewed)
        assert renewed == [True], "no lease was renewed while the handler blocked its loop"
        assert {number: one.token for number, one in node.engine.owned.items()} == tokens


def test_registering_while_it_runs_is_refused_and_changes_nothing(config: Config) -> None:
    scheduler = Scheduler(config)

    @scheduler.cron("0 9 * * *", name="morning")
    def work() -> None: ...

    def late() -> None: ...

    with scheduler:
        for attempt in (
            lambda: scheduler.cron("* * * * *", work, name="other"),
            lambda: scheduler.every("1m", late),
            lambda: scheduler.once("2030-01-01T00:00:00Z", "log:", name="one"),
            lambda: scheduler.register("r", "log:", every="1m"),
            lambda: scheduler.handler()(late),
            lambda: scheduler.command("ls", ["ls"]),
            lambda: scheduler.unregister("morning"),
            lambda: scheduler.configure(config),
            scheduler.start,
        ):
            with pytest.raises(SchedulerRunning, match="the scheduler is running"):
                attempt()
        assert [one.name for one in scheduler.entries()] == ["morning"]
        assert len(scheduler.registry) == 1
    scheduler.unregister("morning")
    assert scheduler.entries() == []


def test_a_schedule_in_the_store_is_edited_while_it_runs_and_the_edit_counts_at_once(config: Config) -> None:
    scheduler = Scheduler(config)
    ran: list[int] = []

    @scheduler.cron("0 0 1 1 *", name="yearly", kwargs={"n": 1})
    def note(n: int) -> None:
        ran.append(n)

    with scheduler:
        before = scheduler.entry("yearly")
        assert (before.spec, before.generation, before.last_runs) == ("0 0 1 1 *", 1, ())
        scheduler.sync_client().schedules.edit("yearly", cron="* * * * * *", payload={"n": 2})
        wait_for(lambda: 2 in ran, "a run of the edited schedule")
        wait_for(lambda: len(scheduler.entry("yearly").last_runs) >= 1, "its history")
        after = scheduler.entry("yearly")
        assert (after.spec, after.generation, after.paused) == ("* * * * * *", 2, False)
        assert after.last_runs[0].outcome == "done"
        assert after.last_runs[0].duration is not None
        wait_for(lambda: len(after.runs()) >= 1, "a record of the run")
        [*_, first] = after.runs()
        assert (first.record.schedule, first.record.end, first.record.attempt) == ("yearly", "done", 1)
        assert len(after.runs(limit=1)) == 1
        assert len(after.next_runs) == 3
        scheduler.sync_client().schedules.pause("yearly")
        assert scheduler.entry("yearly").paused
    assert 1 not in ran


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_run_on_a_worker_is_known_before_the_next_one(config: Config, fails: bool) -> None:
    scheduler = Scheduler(config)

    @scheduler.cron("0 0 1 1 *", name="yearly")
    @scheduler.handler(retries=0)
    def work() -> None:
        if fails:
            raise OSError("no")

    with scheduler:
        client = scheduler.sync_client()
        client.schedules.edit("yearly", cron="* * * * * *", max_runs=1)
        wait_for(lambda: scheduler.entry("yearly").last_runs, "the end of its only run")
        entry = scheduler.entry("yearly")
    [run] = entry.last_runs
    assert (run.outcome, entry.running_since, entry.next_runs) == ("dead" if fails else "done", None, ())
    assert run.duration is not None
    assert run.duration.total_seconds() < PATIENCE_S


def test_a_stop_lets_active_work_finish_and_breaks_off_what_takes_too_long(server: Server) -> None:
    config = Config(redis_url=server.url, namespace="drain", partitions=4, shutdown_timeout_s=5)
    scheduler = Scheduler(config)
    begun, go_on, ended = threading.Semaphore(0), threading.Event(), list[str]()

    @scheduler.handler()
    def quick() -> None:
        begun.release()
        go_on.wait(PATIENCE_S)
        ended.append("quick")

    @scheduler.handler()
    async def endless() -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    scheduler.start()
    quick.now().put()
    endless.now(id="endless").put()
    for _ in range(2):
        assert begun.acquire(timeout=PATIENCE_S)
    threading.Timer(0.2, go_on.set).start()
    scheduler.stop()
    assert sorted(ended) == ["cancelled", "quick"]
    with SyncClient(server.url, namespace="drain") as client:
        assert client.get("endless").state in ("queued", "running"), "what was broken off runs again"


def test_a_stop_leaves_behind_what_does_not_heed_it(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(redis_url=server.url, namespace="heed", partitions=4, shutdown_timeout_s=0.2)
    scheduler = Scheduler(config)
    begun = threading.Event()

    @scheduler.handler()
    async def go_on() -> None:
        begun.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    scheduler.start()
    go_on.now(id="on").put()
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=scheduler.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert "keep running although they were cancelled" in caplog.text
    with SyncClient(server.url, namespace="heed") as client:
        assert client.get("on").state in ("queued", "running"), "what was broken off runs again"
    gc.collect()  # here, and not in the middle of another test


async def test_an_interrupted_handler_leaves_nothing_in_the_programs_own_loop(config: Config) -> None:
    scheduler = Scheduler(replace(config, shutdown_timeout_s=0.2))
    began = asyncio.Event()

    @scheduler.handler()
    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    ours = asyncio.all_tasks()
    for number in range(2):
        async with scheduler:
            await endless.after("0s", id=f"endless-{number}").aput()
            await asyncio.wait_for(began.wait(), PATIENCE_S)
            began.clear()
        assert asyncio.all_tasks() == ours


def test_a_stop_waits_for_what_ends_in_time(server: Server) -> None:
    scheduler = Scheduler(Config(redis_url=server.url, namespace="wait", partitions=4, shutdown_timeout_s=PATIENCE_S))
    begun, go_on = threading.Event(), threading.Event()

    @scheduler.handler()
    async def patient() -> None:
        begun.set()
        await asyncio.to_thread(go_on.wait, PATIENCE_S)

    scheduler.start()
    patient.now(id="patient").put()
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=scheduler.stop)
    stopping.start()
    wait_until(lambda: scheduler.state == "stopping", "it begins to stop")
    go_on.set()
    stopping.join(PATIENCE_S)
    with SyncClient(server.url, namespace="wait") as client:
        assert client.get("patient").state == "done"


def test_a_failed_start_says_why_and_leaves_nothing_behind(server: Server) -> None:
    scheduler = Scheduler(Config(redis_url="redis://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="cannot connect"):
        scheduler.start()
    assert scheduler.state == "stopped"
    check_nobody_left()
    other = Scheduler(Config(redis_url=server.url, namespace="lanes"))
    other.every("1h", "log:", name="hourly", lane="a")
    with other:
        pass
    moved = Scheduler(Config(redis_url=server.url, namespace="lanes"))
    moved.every("1h", "log:", name="hourly", lane="b")
    with pytest.raises(InvalidInput, match="its lane cannot be changed"):
        moved.start()
    assert moved.state == "stopped"
    check_nobody_left()


def test_without_a_server_the_embedded_one_comes_and_goes_with_the_scheduler(tmp_path: Path) -> None:
    scheduler = Scheduler(Config(data_dir=tmp_path, shutdown_timeout_s=10))
    ran: list[int] = []

    @scheduler.handler()
    def note(n: int) -> None:
        ran.append(n)

    note.now().put(n=1)  # before the start: the put brings the server up, and the start takes it over
    for turn in (1, 2):
        with scheduler:
            wait_for(lambda t=turn: t in ran, "the task")
            pid = json.loads((tmp_path / "server.json").read_text())["pid"]
            note.after("1ms", id=f"turn {turn}").put(n=turn + 1)
            wait_for(lambda t=turn: t + 1 in ran, "the next")
        wait_for(lambda p=pid: is_gone(p), "the server ends")
    check_nobody_left()


def test_a_handler_that_calls_stop_gets_an_error_because_it_would_wait_for_itself(config: Config) -> None:
    scheduler = Scheduler(config)
    said: list[str] = []

    @scheduler.handler()
    async def end() -> None:
        try:
            scheduler.stop()
        except MainspringError as error:
            said.append(str(error))

    @scheduler.handler()
    def end_in_a_thread() -> None:
        try:
            scheduler.stop()
        except MainspringError as error:
            said.append(str(error))

    with scheduler:
        end.now().put()
        end_in_a_thread.now().put()
        wait_for(lambda: len(said) == 2, "both answers")
    assert all("called by a handler" in one for one in said)


async def test_a_handler_that_awaits_astop_gets_an_error_too_and_one_that_starts_it_does_not(config: Config) -> None:
    scheduler = Scheduler(config)
    said, stops = list[str](), list[asyncio.Task[None]]()
    begun = asyncio.Event()

    @scheduler.handler()
    async def end() -> None:
        try:
            await scheduler.astop()
        except MainspringError as error:
            said.append(str(error))
        stops.append(asyncio.create_task(scheduler.astop()))
        await asyncio.sleep(0)  # the task has its turn while this handler runs
        begun.set()

    await scheduler.astart()
    await end.now(id="end").aput()
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.wait_for(stops[0], PATIENCE_S)
    assert "called by a handler" in said[0]
    assert scheduler.state == "stopped"
    async with Client(config.redis_url or "", namespace=config.namespace) as client:
        assert (await client.get("end")).state == "done"
    check_nobody_left()


async def test_cancelling_the_wait_for_astop_does_not_interrupt_it(config: Config) -> None:
    scheduler = Scheduler(config)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @scheduler.handler()
    async def patient() -> None:
        begun.set()
        await go_on.wait()

    ours = asyncio.all_tasks()
    await scheduler.astart()
    await patient.now(id="patient").aput()
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    waiting = asyncio.create_task(scheduler.astop())
    await until(lambda: scheduler.state == "stopping")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert scheduler.state == "stopping"
    go_on.set()
    await until(lambda: scheduler.state == "stopped")
    await until(lambda: asyncio.all_tasks() == ours)
    check_nobody_left()


@pytest.mark.parametrize("in_hand", [False, True], ids=["idle", "with a job in hand"])
def test_an_event_loop_that_ends_without_astop_stops_the_scheduler(
    config: Config, in_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, ran = Scheduler(config), []

    @scheduler.handler()
    async def note(again: bool) -> None:
        ran.append(again)
        if not again:
            await asyncio.Event().wait()

    async def use(again: bool) -> None:
        await scheduler.astart()
        if again or in_hand:
            await note.now().aput(again=again)
            await until(lambda: again in ran)

    asyncio.run(use(again=False))
    assert scheduler.state == "stopped"
    assert "without `await astop()`" in caplog.text
    check_nobody_left()
    asyncio.run(use(again=True))
    assert scheduler.state == "stopped"
    check_nobody_left()


@pytest.mark.parametrize("then", ["stop", "start"])
def test_a_scheduler_whose_event_loop_was_closed_can_be_stopped_and_started_again(
    config: Config, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(config)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(scheduler.astart())
    loop.close()
    assert (scheduler.state, scheduler.healthy) == ("stopping", False)
    if then == "start":
        scheduler.start()
        assert scheduler.healthy
    scheduler.stop()
    assert scheduler.state == "stopped"
    assert "is closed: stopping it now" in caplog.text
    check_nobody_left()


async def test_astop_in_another_event_loop_names_the_loop_to_await_it_in(config: Config) -> None:
    scheduler = Scheduler(config)

    @scheduler.handler()
    async def nothing() -> None: ...

    async with scheduler:
        with pytest.raises(MainspringError, match="started in another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(scheduler.astop()))
        assert scheduler.healthy
    assert scheduler.state == "stopped"
    await asyncio.to_thread(lambda: asyncio.run(scheduler.astop()))  # it does nothing any more
    check_nobody_left()


def test_a_program_that_ends_in_the_middle_of_a_stop_leaves_nothing_that_fires(config: Config) -> None:
    scheduler = Scheduler(config)

    async def main() -> None:
        begun = asyncio.Event()

        @scheduler.handler()
        async def endless() -> None:
            begun.set()
            await asyncio.Event().wait()

        await scheduler.astart()
        await endless.now().aput()
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        stopping = asyncio.create_task(scheduler.astop())
        await until(lambda: scheduler.state == "stopping")
        stopping.cancel()

    asyncio.run(main())  # whatever is left is cancelled at its end
    assert scheduler.state == "stopped"
    check_nobody_left()


def test_a_command_runs_by_its_schedule(config: Config, tmp_path: Path) -> None:
    scheduler = Scheduler(config)
    notes = tmp_path / "notes"
    scheduler.command("note", ["/bin/sh", "-c", f"echo $MAINSPRING_TASK_ID >> {notes}"], queue="shell")
    scheduler.cron("* * * * * *", "command:note", name="note")
    with scheduler:
        wait_for(lambda: notes.exists() and len(notes.read_text().split()) >= 2, "two runs")
    ran = notes.read_text().split()
    assert {one.partition("@")[0] for one in ran} == {"note"}
    assert len(set(ran)) == len(ran), "each planned time ran once"


# -- many threads ---------------------------------------------------------------------------------------------


def test_thirty_two_threads_declare_and_look_at_the_same_time() -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))
    start = threading.Barrier(32)

    def work(number: int) -> int:
        start.wait(PATIENCE_S)
        for i in range(20):
            name = f"{number}-{i}"
            scheduler.handler(name=name)(lambda: None)
            scheduler.every("1h", "log:", name=name)
            shown = scheduler.entries()
            assert all(isinstance(one, Entry) for one in shown)
            assert any(one.name == name for one in shown)
            if i % 2:
                scheduler.unregister(name)
        return number

    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(work, range(32))) == list(range(32))
    assert len(scheduler.entries()) == 32 * 10
    assert len(scheduler.registry) == 32 * 20


def test_one_of_thirty_two_threads_that_declare_one_name_wins() -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))

    def declare(number: int) -> int | None:
        try:
            scheduler.every("1h", "log:", name="one", payload=number)
        except InvalidInput:
            return None
        return number

    with ThreadPoolExecutor(32) as pool:
        won = [one for one in pool.map(declare, range(32)) if one is not None]
    assert len(won) == 1


def test_thirty_two_threads_put_look_edit_start_and_stop_at_the_same_time(config: Config) -> None:
    scheduler = Scheduler(config)
    ran: list[int] = []

    @scheduler.handler()
    def note(n: int) -> None:
        ran.append(n)

    for i in range(8):
        scheduler.every("1s", note, name=f"tick-{i}", kwargs={"n": -1})

    def reader(number: int) -> None:
        for _ in range(30):
            assert [one.name for one in scheduler.entries()] == [f"tick-{i}" for i in range(8)]

    def writer(number: int) -> None:
        client = scheduler.sync_client()
        for i in range(5):
            client.put(note.handler.target, {"n": number * 100 + i})
            with contextlib.suppress(SchedulerRunning):
                scheduler.every("1h", "log:", name="late")
            client.schedules.edit(f"tick-{number % 8}", every=f"{number + 2}s")

    def stopper(_number: int) -> None:
        wait_for(lambda: len([n for n in ran if n >= 0]) == 12 * 5, "all tasks")
        scheduler.stop()

    with pytest.raises(SchedulerRunning), scheduler:
        scheduler.start()
    scheduler.start()
    roles = [*[reader] * 18, *[writer] * 12, *[stopper] * 2]
    with ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(role, number) for number, role in enumerate(roles)]:
            future.result(PATIENCE_S * 2)
    assert scheduler.state == "stopped"
    check_nobody_left()


# -- many programs --------------------------------------------------------------------------------------------


def program(config: Config, spec: str = "0 9 * * *", **fields: Any) -> Scheduler:
    scheduler = Scheduler(config)
    scheduler.cron(spec, "log:", name="morning", **fields)
    return scheduler


async def generation(config: Config) -> tuple[int, str]:
    assert config.redis_url is not None
    async with Client(config.redis_url, namespace=config.namespace) as client:
        view = await client.schedules.get("morning")
        assert view is not None
        return view.generation, view.definition.specs[0]


async def started_once(scheduler: Scheduler) -> None:
    async with scheduler:
        pass


async def test_copies_of_one_program_write_a_schedule_once(config: Config) -> None:
    copies = [program(config) for _ in range(4)]
    for copy in copies:
        await copy.astart()
    assert await generation(config) == (1, "0 9 * * *")
    for copy in copies:
        await copy.astop()
    await started_once(program(config))
    assert await generation(config) == (1, "0 9 * * *")


async def test_a_changed_declaration_replaces_once_and_the_program_that_starts_last_has_its_way(config: Config) -> None:
    await started_once(program(config))
    for _ in range(2):
        await started_once(program(config, "30 9 * * *"))
    assert await generation(config) == (2, "30 9 * * *")
    for _ in range(2):
        await started_once(program(config))  # rolled back: the former declaration counts again
    assert await generation(config) == (3, "0 9 * * *")
    await started_once(program(config, "45 9 * * *"))
    assert await generation(config) == (4, "45 9 * * *")


async def test_old_and_new_that_start_at_the_same_moment_end_with_one_of_them(config: Config) -> None:
    specs = ["0 9 * * *", "30 9 * * *"] * 3
    copies = [program(config, spec) for spec in specs]
    await asyncio.gather(*(copy.astart() for copy in copies))
    written, spec = await generation(config)
    assert written <= len(specs), "each copy writes once at most"
    await asyncio.gather(*(copy.astop() for copy in copies))
    assert await generation(config) == (written, spec), "nothing is written after the start"
    await started_once(program(config, spec))
    assert await generation(config) == (written, spec)


async def test_an_edit_by_hand_lasts_until_the_next_start_unless_it_is_pinned_and_a_pause_longer(
    config: Config,
) -> None:
    await started_once(program(config))
    assert config.redis_url is not None
    async with Client(config.redis_url, namespace=config.namespace) as client:
        await client.schedules.edit("morning", cron="0 10 * * *", pinned=True)
        await client.schedules.pause("morning")
        await started_once(program(config))
        assert (await generation(config))[1] == "0 10 * * *"
        await client.schedules.edit("morning", pinned=False)
        await started_once(program(config, "0 11 * * *"))
        view = await client.schedules.get("morning")
        assert view is not None
        assert (view.definition.specs, view.state) == (("0 11 * * *",), "paused")
        await client.schedules.remove("morning")
        await started_once(program(config, "0 11 * * *"))
        assert (await generation(config))[1] == "0 11 * * *", "what the code declares is there when it starts"


async def test_a_worker_alone_writes_what_its_module_declares(config: Config) -> None:
    scheduler = program(config)

    @scheduler.handler()
    async def work() -> None: ...

    place = Workplace(scheduler)
    await place.start()
    await place.stop()
    assert await generation(config) == (1, "0 9 * * *")


async def test_once_runs_once_although_the_program_starts_again(config: Config) -> None:
    ran: list[str] = []
    at_ms = time.time_ns() // 1_000_000 + 6_000  # the start must be over by then

    def once(at: int, name: str = "launch") -> Scheduler:
        scheduler = Scheduler(config)

        @scheduler.once(at, name=name)
        async def launch() -> None:
            ran.append(current().id)

        return scheduler

    for _ in range(2):
        async with once(at_ms):
            await until(lambda: ran)
    assert len(ran) == 1
    async with once(at_ms - 3_600_000, "too late") as late:
        [entry] = await late.aentries()
        assert (entry.name, entry.next_runs, entry.generation) == ("too late", (), 0), "over, and declared all the same"
    with pytest.raises(InvalidInput, match="at"):
        Scheduler(config).once("30m", "log:", name="relative")


def test_entries_of_a_scheduler_that_does_not_run_are_what_the_code_says(config: Config) -> None:
    scheduler = Scheduler(Config(redis_url=config.redis_url, timezone="Europe/Paris"))
    scheduler.cron("0 9 * * MON-FRI", "log:", name="b", timezone="Asia/Tokyo")
    scheduler.register("a", "log:", cron=["0 9 * * *", "0 18 * * *"], retry="3 base=1s")
    a, b = scheduler.entries()
    assert (a.name, a.zone, a.spec, a.retries, a.generation) == ("a", "Europe/Paris", "0 9 * * * or 0 18 * * *", 2, 0)
    assert (b.zone, {run.hour for run in b.next_runs}, {str(run.tzinfo) for run in b.next_runs}) == (
        "Asia/Tokyo",
        {9},
        {"Asia/Tokyo"},
    )
    assert scheduler.entry("a") == a
    with pytest.raises(NotFound, match="no schedule 'c'"):
        scheduler.entry("c")
    with pytest.raises(AttributeError):
        a.name = "z"  # type: ignore[misc]


def test_declarations_that_cannot_work_are_refused_where_they_are_made() -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))

    @scheduler.handler(queue="mail")
    async def send(to: str) -> None: ...

    wrong: Any = scheduler  # type checkers find these mistakes as well
    for attempt, said in (
        (lambda: wrong.cron("0 9 * *", send, kwargs={"to": "a"}), "cron"),
        (lambda: wrong.cron("0 9 * * *", send), "missing a required argument: 'to'"),
        (lambda: wrong.cron("0 9 * * *", send, kwargs={"to": 5}), "Expected `str`, got `int`"),
        (lambda: wrong.cron("0 9 * * *", send, payload={"to": "a"}), "gets args and kwargs, not a payload"),
        (lambda: wrong.cron("0 9 * * *", send, args=("a",), timezone="Mars/Olympus"), "Mars/Olympus"),
        (lambda: scheduler.register(None, "log:", cron="0 9 * * *"), "needs a name"),
        (lambda: wrong.cron("0 9 * * *", "nowhere", name="n"), "no known scheme"),
        (lambda: wrong.cron("0 9 * * *", send, args=("a",), jiter="1s"), "did you mean jitter"),
        (lambda: scheduler.every("soon", send, args=("a",)), "soon"),
        (lambda: scheduler.every("1s", send, args=("a",), retry="9 base=2m"), "one run may take"),
        (lambda: wrong.cron("0 0 31 2 *", send, args=("a",)), "0 0 31 2"),
    ):
        with pytest.raises(InvalidInput, match=said):
            attempt()

    def plain(n: int) -> None: ...

    with pytest.raises(InvalidInput, match="missing"):
        scheduler.every("1m", plain)
    assert (scheduler.entries(), len(scheduler.registry)) == ([], 1)
    made = scheduler.every("1m", plain, args=(1,))
    assert made.handler.target == "queue:default/plain"
    scheduler.unregister(made)
    assert (scheduler.entries(), len(scheduler.registry)) == ([], 1)
    for nothing in (None, 5):
        with pytest.raises(InvalidInput, match="neither a handler nor a function"):
            scheduler.register("n", nothing, every="1m")  # type: ignore[arg-type]


def test_a_handler_whose_runs_may_last_longer_than_the_interval_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))

    @scheduler.handler(retries=2, timeout="5s")
    def slow() -> None: ...

    for span, said in (("1h", 0), ("10s", 1)):
        scheduler.every(span, slow, name=span)
        assert caplog.text.count("one run may take 3 x 5 s") == said
    scheduler.every("10s", slow, name="beside", overlap="allow")
    assert len(caplog.records) == 1


def test_a_handler_is_warned_of_by_the_retries_it_really_has(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"mail": {"retry": {"retries": 3, "base": "5s", "factor": 1, "jitter": "none"}}}
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid", queue=settings))  # type: ignore[arg-type]

    @scheduler.handler(queue="mail")
    def of_the_queue() -> None: ...

    @scheduler.handler()
    def of_the_defaults() -> None: ...

    @scheduler.handler(queue="mail", retries=0)
    def of_its_own() -> None: ...

    # Nobody chose the default retries: they are no reason for a warning.
    for handler, waits in ((of_the_queue, "3 x 5 s"), (of_the_defaults, ""), (of_its_own, "")):
        caplog.clear()
        scheduler.every("10s", handler)
        assert ("one run may take" in caplog.text, waits in caplog.text) == (bool(waits), True)
        caplog.clear()
        scheduler.every("1h", handler, name=f"{handler.handler.name} hourly")
        assert caplog.text == ""


def test_a_webhook_whose_runs_may_last_longer_than_the_interval_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    retry = {"retries": 5, "base": "2s"}
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid", retry=retry))  # type: ignore[arg-type]
    scheduler.register("hook", "https://example.com/?key=secret", every="1m")
    assert "schedule 'hook' of https://example.com/?…: one run may take 6 x 15 s" in caplog.text
    caplog.clear()
    scheduler.register("hourly", "https://example.com/", every="1h")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("target", "extra"), [("https://example.com/", "http"), ("kafka:orders", "kafka"), ("target:bill", "kafka")]
)
def test_a_package_that_is_missing_is_named_when_the_schedule_is_declared(
    target: str, extra: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {"bill": {"address": "kafka:bills"}}
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid", targets=targets))  # type: ignore[arg-type]
    scheduler.register("with", target, every="1h", retries=0)
    assert caplog.text == ""
    monkeypatch.setattr("mainspring.scheduler.declarations.find_spec", lambda _: None)
    scheduler.register("without", target, every="1h", retries=0)
    assert f"pip install 'mainspring[{extra}]'" in caplog.text


def test_a_handlers_timeout_counts_with_the_retries_of_its_schedule(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))

    @scheduler.handler(timeout="8s")
    def slow() -> None: ...

    scheduler.every("10s", slow, retry="2 base=1s")
    assert "one run may take 2 x 8 s + 1 s = 17 s" in caplog.text


def test_entries_show_the_retries_of_the_nearest_policy() -> None:
    config = Config(
        redis_url="redis://nobody.invalid",
        queue={"mail": {"retry": "3 base=1s"}},  # type: ignore[arg-type]
        targets={"bill": {"url": "https://example.com/x", "retry": "4 base=1s"}},  # type: ignore[arg-type]
        retry="5 base=1s",  # type: ignore[arg-type]
    )
    scheduler = Scheduler(config)

    @scheduler.handler(queue="mail")
    def send() -> None: ...

    @scheduler.handler(queue="mail", retries=7)
    def own() -> None: ...

    scheduler.every("1h", send)
    scheduler.every("1h", own)
    scheduler.register("bill", "target:bill", every="1h")
    scheduler.register("elsewhere", "queue:mail/other", every="1h")
    scheduler.register("log", "log:", every="1h")
    scheduler.register("said", "target:bill", every="1h", retry="9 base=1s")
    assert {one.name: one.retries for one in scheduler.entries()} == {
        "send": 2, "own": 7, "bill": 3, "elsewhere": 2, "log": 4, "said": 8,
    }  # fmt: skip


def test_one_plain_function_may_have_several_schedules() -> None:
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))

    def plain(n: int) -> None: ...

    scheduler.every("1m", plain, name="often", args=(1,))
    with pytest.raises(InvalidInput, match="often"):
        scheduler.every("1m", plain, name="often", args=(1,))
    scheduler.cron("@daily", plain, name="daily", args=(2,))
    assert [(one.name, one.target) for one in scheduler.entries()] == [
        ("daily", "queue:default/plain"), ("often", "queue:default/plain"),
    ]  # fmt: skip
    other = plain

    def plain(n: str) -> None: ...  # type: ignore[no-redef]

    with pytest.raises(InvalidInput, match="registered twice"):
        scheduler.every("1m", plain, name="other", args=("1",))
    with pytest.raises(NotFound):
        scheduler.unregister(plain)
    scheduler.unregister(other)
    assert (scheduler.entries(), len(scheduler.registry)) == ([], 0)


def test_schedules_that_a_program_adds_by_hand_have_the_zone_of_its_settings(config: Config) -> None:
    scheduler = Scheduler(replace(config, timezone="Asia/Tokyo"))
    try:
        view = scheduler.sync_client().schedules.add("by-hand", cron="0 9 * * *", target="log:")
        assert view.definition.zone == "Asia/Tokyo"
    finally:
        scheduler.close()


# -- as the whole of a program ---------------------------------------------------------------------------------


def test_run_in_another_thread_ends_when_the_scheduler_is_stopped(config: Config) -> None:
    scheduler = Scheduler(config)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    wait_for(lambda: scheduler.state == "running", "it runs")
    scheduler.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    check_nobody_left()


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_run_ends_in_good_order_at_a_signal_whenever_it_comes(config: Config, tmp_path: Path, moment: str) -> None:
    code = """
import logging, os
from mainspring import Config, Scheduler
logging.basicConfig(level="INFO")
scheduler = Scheduler(Config.load({}, os.environ))

@scheduler.every("100ms")
async def tick():
    print("tick", flush=True)

class Telling(Scheduler):
    def start(self):
        print("starting", flush=True)
        super().start()

scheduler.__class__ = Telling
scheduler.run()
print("stopped", scheduler.state, flush=True)
"""
    environ = ENVIRON | config.to_environ()
    program = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    said = [program.stdout.readline()]
    if moment == "running":
        said.append(program.stdout.readline())
    program.send_signal(signal.SIGTERM)
    said += program.communicate(timeout=PATIENCE_S)[0].splitlines(keepends=True)
    assert program.returncode == 0
    assert said[0] == "starting\n"
    assert said[-1] == "stopped stopped\n"
    assert moment == "starting" or "tick\n" in said


ANNOUNCED = """
import logging, os, signal, sys
from mainspring import Config, Scheduler

scheduler = Scheduler(Config.load({}, os.environ))
if "log" in sys.argv:
    logging.basicConfig(level="INFO", format="%(message)s")

@scheduler.cron("0 3 1 1 *", timezone="Europe/Paris")
@scheduler.handler(queue="reports")
def yearly(): ...

@scheduler.every("100ms", retries=0)
def tick():
    os.kill(os.getpid(), signal.SIGINT)

scheduler.run(quiet="quiet" in sys.argv)
"""


@pytest.mark.parametrize("how", ["print", "log", "quiet"])
def test_run_says_what_runs_and_how_to_stop_it(config: Config, tmp_path: Path, how: str) -> None:
    environ = ENVIRON | config.to_environ()
    command = [sys.executable, "-c", ANNOUNCED, how]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    if how == "quiet":
        assert "namespace" not in done.stderr
    elif how == "log":
        assert f"running on {config.redis_url}, namespace {config.namespace}\n" in done.stderr
        assert "Ctrl-C" not in done.stderr
    else:
        said = done.stderr[done.stderr.index("mainspring 0") :]  # below what the server's persistence is warned of
        first, *schedules, by_default, reports, last = said.splitlines()
        assert first == f"mainspring {__version__} on {config.redis_url}, namespace {config.namespace}"
        tick, yearly = schedules
        assert re.fullmatch(r"  schedule tick    next \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  \(@every 100ms\)", tick)
        assert re.fullmatch(r"  schedule yearly  next \d{4}-01-01 03:00:00 CET  \(0 3 1 1 \*\)", yearly)
        assert (by_default, reports, last) == ("  queue default", "  queue reports", "Ctrl-C stops it.")


FORKED = """
import os, signal, socket, threading
from mainspring import Config, Scheduler

silent = socket.create_server(("127.0.0.1", 0))
scheduler = Scheduler(Config(redis_url=f"redis://127.0.0.1:{silent.getsockname()[1]}"))
reading, never = threading.Event(), threading.Event()

class Slow(list):
    def __iter__(self):
        reading.set()
        never.wait()

@scheduler.handler()
def nothing(): ...

threading.Thread(target=lambda: nothing.now().put(), daemon=True).start()
connection = silent.accept()  # the server that never answers keeps the first thread at opening a client
threading.Thread(target=lambda: scheduler.cron(Slow(["0 2 * * *"]), "log:", name="slow"), daemon=True).start()
reading.wait()
child = os.fork()
if not child:
    signal.alarm(60)  # one that waits all the same does not stay for ever
    scheduler.close()
    scheduler.cron("0 2 * * *", "log:", name="quick")
    scheduler.stop()
    os._exit(len(scheduler.entries()))
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_was_forked_while_other_threads_were_at_work_does_not_wait_for_them() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], env=ENVIRON, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1, "the one schedule that the child has declared"
