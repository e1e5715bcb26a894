"""`mainspring worker` as a process: killed, stopped, shared, and called wrongly."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from mainspring.model.task import Task
from mainspring.testing.servers import Server, standalone
from tests.support.serving import run
from tests.support.workers import Place, WorkerProcess, lines, open_place, until, until_async

APP = '''
import asyncio, json, os, time
from pathlib import Path
from mainspring import Config, Context, Scheduler, current
from mainspring.node import process

scheduler = Scheduler(Config(namespace="app"))
not_a_scheduler = 42

# A stop ends the process when it takes three seconds too long; a machine that stalls is no stop that hangs.
process.GRACE_S = 60.0


def note(**what):
    ctx = current()
    line = json.dumps({"pid": os.getpid(), "id": ctx.id, "key": ctx.idempotency_key, "attempt": ctx.attempt} | what)
    fd = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (line + "\\\\n").encode())
    os.close(fd)


@scheduler.handler(queue="mail")
async def send(to: str) -> None:
    note(to=to)


@scheduler.handler(queue="mail")
async def hold() -> None:
    """Runs until a file of its name is there."""
    note(event="begun")
    while not Path(current().id).exists():
        await asyncio.sleep(0.01)
    note(event="done")


@scheduler.handler(queue="mail")
def hang() -> None:
    note(event="begun")
    time.sleep(600)


@scheduler.handler(queue="mail")
async def go_on() -> None:
    note(event="begun")
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


@scheduler.handler(queue="mail", result_ttl="1m")
async def chain(n: int) -> str:
    """Puts tasks itself, through the worker's connections."""
    await send.now(id=f"follow-{n}").aput(to=f"follow-{n}")
    return "put"
'''.replace("\\\\n", "\\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone(aof=True) as made:
        yield made


@pytest.fixture
async def place(server: Server) -> AsyncIterator[Place]:
    async with open_place(server.url, "app", 4) as made:
        yield made


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    (tmp_path / "app.py").write_text(APP)
    made: list[WorkerProcess] = []

    def begin(*options: str, lease: str = "1s") -> WorkerProcess:
        made.append(WorkerProcess(tmp_path, "app:scheduler", "--redis-url", server.url, "--lease", lease, *options))
        return made[-1].wait_started()

    yield begin
    for one in made:
        one.remove()


async def test_the_job_of_a_killed_worker_runs_once_more_with_the_same_key(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    # Longer than any hiccup of a loaded machine: the job changes hands because its worker is dead.
    workers = [await asyncio.to_thread(start, lease="6s") for _ in range(2)]
    await place.client.put("queue:mail/hold", id="order-1")
    await until(lambda: lines(notes))
    victim = next(one for one in workers if one.pid == lines(notes)[0]["pid"])
    victim.process.kill()
    await until(lambda: len(lines(notes)) == 2)
    (tmp_path / "order-1").touch()
    await place.settled()
    first, second, end = lines(notes)
    assert (first["key"], first["attempt"]) == (second["key"], second["attempt"])
    assert second["pid"] == end["pid"] != first["pid"]
    assert end["event"] == "done"


async def test_a_killed_worker_leaves_the_list_and_its_queue_is_without_one(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = await asyncio.to_thread(start, "--node-id", "w1", lease="3s")
    [listed] = await place.client.workers()
    assert (listed.id, listed.pid, listed.lease_ms) == ("w1", worker.pid, 3000)
    await place.client.put("queue:mial/send", {"to": "a"}, id="typo")

    async def told() -> bool:
        return (await place.client.explain("typo")).code == "no-worker"

    await until_async(told)
    text = (await place.client.explain("typo")).text
    assert text.endswith(": no worker serves queue mial, only mail; did you mean mail?")
    mail, mial = await place.client.queues()
    assert (mail.workers, mail.nearest, mial.ready, mial.workers, mial.nearest) == (["w1"], None, 1, [], "mail")
    url = ("--redis-url", place.url, "--namespace", "app")
    rows = (await asyncio.to_thread(run, "queue", "list", *url, cwd=tmp_path)).stdout
    assert re.search(r"^mial +no worker .* 0; did you mean mail\?$", rows, re.MULTILINE)
    worker.process.kill()
    await until_async(lambda: gone(place))
    left = await asyncio.to_thread(run, "worker", "list", *url, cwd=tmp_path)
    assert left.stderr.startswith("no worker is running in namespace app on ")


async def gone(place: Place) -> bool:
    return await place.client.workers() == []


async def test_a_signal_ends_a_worker_when_its_jobs_are_done_and_what_was_not_begun_runs_elsewhere(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    patient = {"lease": "30s"}  # the running job stays where it is, even on a slow machine
    first = await asyncio.to_thread(start, "--concurrency", "2", "--shutdown-timeout", "60s", **patient)
    await place.client.put_many(Task("queue:mail/hold", None, id=f"job-{n}") for n in range(2))
    await until(lambda: len(lines(notes)) == 2)
    first.process.send_signal(signal.SIGTERM)
    await until(lambda: "stopping" in first.log)
    await place.client.put_many(Task("queue:mail/send", {"to": str(n)}, id=f"mail-{n}") for n in range(5))
    second = await asyncio.to_thread(start, **patient)
    await until(lambda: len(lines(notes)) == 7)
    for n in range(2):
        (tmp_path / f"job-{n}").touch()
    assert await asyncio.to_thread(first.process.wait, 60) == 0
    await place.settled()
    done = [one for one in lines(notes) if one.get("event") == "done"]
    assert {one["pid"] for one in done} == {first.pid}
    assert {one["pid"] for one in lines(notes) if "to" in one} == {second.pid}


async def test_a_second_signal_ends_a_worker_at_once(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = await asyncio.to_thread(start)
    await place.client.put("queue:mail/hang", id="hung")
    await until(lambda: lines(tmp_path / "notes"))
    worker.process.send_signal(signal.SIGTERM)
    await until(lambda: "stopping" in worker.log)

    def ended() -> bool:
        worker.process.send_signal(signal.SIGTERM)  # one that follows at once is taken for the echo of the first
        return worker.process.poll() is not None

    await until(ended)
    assert worker.process.returncode == 128 + signal.SIGTERM
    await place.client.cancel("hung")
    await asyncio.to_thread(start)
    await place.settled()


@pytest.mark.parametrize("handler", ["hang", "go_on"])
async def test_a_handler_that_does_not_end_does_not_keep_a_worker_from_stopping(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path, handler: str
) -> None:
    worker = await asyncio.to_thread(start, "--shutdown-timeout", "200ms")
    await place.client.put(f"queue:mail/{handler}", id="hung")
    await until(lambda: lines(tmp_path / "notes"))
    assert await asyncio.to_thread(worker.end) == 0
    assert "1 runs are cancelled" in worker.log
    await place.client.cancel("hung")
    await asyncio.to_thread(start)
    await place.settled()


async def test_a_worker_continues_after_an_outage_of_its_server(
    place: Place, server: Server, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    worker = await asyncio.to_thread(start)
    await place.client.put("queue:mail/hold", id="through")
    await place.client.put("queue:mail/send", {"to": "before"}, id="before")
    await until(lambda: len(lines(notes)) == 2)
    await asyncio.to_thread(server.restart)
    (tmp_path / "through").touch()
    await place.client.put("queue:mail/send", {"to": "after"}, id="after")
    await until(lambda: any(one["id"] == "after" for one in lines(notes)))
    await place.settled()
    assert worker.process.poll() is None
    assert [one["event"] for one in lines(notes) if one["id"] == "through"].count("done") >= 1


async def test_a_handler_puts_tasks_through_its_own_scheduler(
    place: Place, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    await asyncio.to_thread(start)
    handle = await place.client.put("queue:mail/chain", {"n": 1})
    assert await handle.result(timeout=60) == "put"
    await place.settled()
    assert [one["to"] for one in lines(tmp_path / "notes")] == ["follow-1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere:scheduler"], "'nowhere:scheduler': there is no module 'nowhere'"),
        (["app"], "'app' names no scheduler; write module:attribute"),
        (["app:missing"], "module 'app' has no 'missing'"),
        (["app:not_a_scheduler"], "app:not_a_scheduler is of type int, not a Scheduler"),
        (["app:scheduler", "--queues", "mail:x"], "the weight of mail is 'x'"),
        (["app:scheduler", "--queues", "mail,mail"], "mail is named twice"),
        (["app:scheduler", "--concurrency", "0"], "worker_concurrency is 0"),
        ([], "there is nothing to run: no handlers"),
    ],
)
def test_a_wrong_call_is_one_clear_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    ended = run("worker", *arguments, "--redis-url", "redis://127.0.0.1:1", cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
