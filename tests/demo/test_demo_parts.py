"""The parts of the demo that need neither server nor broker."""

import asyncio
import os
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message

from mainspring.demo import generator as roads
from mainspring.demo.consumer import Reader, values_of
from mainspring.demo.generator import ApiConnections, NoSchedulerAnswers, Posts, Request, TickLoad, request
from mainspring.demo.plan import (
    MOST_IDS,
    DemoPlan,
    Journal,
    JournalComparison,
    Ticks,
    compare,
    id_of,
    lines_of,
    numbers_of,
    text_of,
)
from mainspring.demo.processes import Inside, Usages, usage_of
from mainspring.model.errors import InvalidInput

AT_MS = 1_800_000_000_000


# -- ticks -------------------------------------------------------------------------------------------------


def test_each_item_gets_one_tick_within_the_window() -> None:
    plan = DemoPlan(ids=500, within_ms=10_000)
    before_ms = time.time_ns() // 1_000_000
    source = Ticks(plan)
    numbers = [*source.take(200), *source.take(400)]
    assert source.take(1) == []
    after_ms = time.time_ns() // 1_000_000
    assert sorted(number % plan.ids for number in numbers) == list(range(500))
    assert all(before_ms + 1000 <= number // plan.ids <= after_ms + 10_000 for number in numbers)


def test_with_a_time_limit_items_come_again() -> None:
    source = Ticks(DemoPlan(ids=3, seconds=1))
    items = [number % 3 for most in (4, 0, 5) for number in source.take(most)]
    assert sorted(items) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_tick_is_known_again_by_its_text() -> None:
    number = AT_MS * MOST_IDS + 42
    text = text_of(number, MOST_IDS)
    assert text == b'{"item":"user42","at":%d}' % AT_MS
    assert numbers_of([text], MOST_IDS) == [number]
    assert id_of(number, MOST_IDS) == f"user42@{AT_MS}"
    line = b'{"target":"kafka:ticks","at":%d,"payload":%b' % (AT_MS, text)
    assert lines_of([number], MOST_IDS, "kafka:ticks", named=False) == line + b"}"
    named = line + b',"id":"user42@%d"}' % AT_MS
    assert lines_of([number, number], MOST_IDS, "kafka:ticks", named=True) == named + b"\n" + named
    assert b'"target":"kafka:100%d"' in lines_of([number], MOST_IDS, "kafka:100%d", named=False)


def test_messages_of_other_senders_are_distinguished() -> None:
    ours = text_of(AT_MS * 10 + 3, 10)
    others = [
        b"not json",
        b"[1]",
        b'{"item":"user77","at":1}',
        b'{"item":"bob","at":1}',
        '{"item":"user²","at":1}'.encode(),
    ]
    assert numbers_of([ours, *others], 10) == [AT_MS * 10 + 3, None, None, None, None, None]


def test_lateness_is_counted_from_the_due_time(tmp_path: Path) -> None:
    came = Journal(tmp_path / "came")
    reader = Reader(10, came)
    reader.take([text_of(AT_MS * 10, 10), text_of((AT_MS + 5) * 10, 10), b"foreign"], AT_MS + 4)
    assert reader.count == 3, "nobody has looked yet"
    assert (reader.read_some(), reader.read_some()) == (True, False)
    came.close()
    assert (reader.count, reader.early, reader.foreign) == (2, 1, 1)
    assert reader.late_ms == array("f", [4, -1])
    assert reader.late_by(0.5) == 4


@pytest.mark.parametrize(
    ("ramp_ms", "per_s"), [(200, 28 / 1.4), (1_000, 33 / 1.8)], ids=["between the ramps", "nothing lies between them"]
)
def test_the_rate_is_that_of_the_time_between_the_ramps(tmp_path: Path, ramp_ms: float, per_s: float) -> None:
    came = Journal(tmp_path / "came")
    reader = Reader(10, came)
    counts = [0, 1, 1, *[2] * 15, 1, 1]  # every 100 ms: one at first, then two, one in the end
    for number, count in enumerate(counts):
        reader.take([text_of(AT_MS * 10, 10)] * count, AT_MS + number * 100)
    while reader.read_some():
        pass
    came.close()
    assert reader.per_s(ramp_ms) == pytest.approx(per_s)


def test_the_library_may_bring_nothing_at_all(tmp_path: Path) -> None:
    came = Journal(tmp_path / "came")
    assert Reader(10, came).per_s(100) == 0
    came.close()


def test_notices_of_the_library_itself_are_no_messages() -> None:
    good, empty = Message(value=b"a"), Message()
    told = Message(value=b"Broker: no more", error=KafkaError(KafkaError._PARTITION_EOF))
    assert values_of([good, good]) == [b"a", b"a"]
    assert values_of([good, told, good]) == [b"a", b"a"]
    assert values_of([told, empty, good]) == [b"", b"a"], "a message without a value is one"


@pytest.mark.parametrize(
    "wrong",
    [{"ids": 0}, {"ids": MOST_IDS + 1}, {"within_ms": 1}, {"rate": 0.0}, {"seconds": -1.0}, {"schedulers": 0},
     {"replace": True, "via": "batch"}],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        DemoPlan(**wrong)  # type: ignore[arg-type]


# -- journals ----------------------------------------------------------------------------------------------


def written(path: Path, numbers: list[int]) -> Path:
    journal = Journal(path)
    journal.add_all(numbers[:1])
    for number in numbers[1:]:
        journal.add(number)
    assert journal.count == len(numbers)
    journal.close()
    return path


def test_ticks_that_did_not_arrive_are_missing_and_repeated_ones_duplicated(tmp_path: Path) -> None:
    numbers = [(AT_MS + late_ms) * 10 + item for late_ms in (0, 999, 1000, 70_000) for item in range(10)]
    sent = written(tmp_path / "sent", numbers)
    came = written(tmp_path / "came", [*numbers[1:], numbers[5], numbers[5], 7])
    assert compare(sent, came, 10) == JournalComparison(missing=1, duplicated=2, unexpected=1)


def test_ticks_that_all_arrived_once_compare_clean(tmp_path: Path) -> None:
    numbers = [AT_MS * 10 + item for item in range(10)]
    paths = written(tmp_path / "sent", numbers), written(tmp_path / "came", numbers[::-1])
    assert compare(*paths, 10) == JournalComparison(0, 0, 0)


# -- the generator -----------------------------------------------------------------------------------------


def test_the_load_keeps_to_the_rate() -> None:
    load = TickLoad(DemoPlan(rate=0.001), Inside())
    assert len(load.take(5)) == 5, "the first may go at once"
    assert load.take(5) == []
    assert not load.over


def test_the_load_ends_after_the_last_item_or_on_request() -> None:
    inside = Inside()
    load = TickLoad(DemoPlan(ids=3), inside)
    assert len(load.take(2)) == 2
    assert len(load.take(2)) == 1
    assert load.over
    endless = TickLoad(DemoPlan(), inside)
    assert not endless.over
    inside.stopped = True
    assert endless.over


def test_only_what_was_taken_is_written_down(tmp_path: Path) -> None:
    plan = DemoPlan(via="batch", batch=3)
    sent = Journal(tmp_path / "sent")
    posts = Posts(plan, TickLoad(plan, Inside()), sent)
    request = posts.next()
    assert request is not None
    assert request.data.count(b'"target"') == 3
    posts.answered(request, 200, b'{"summary":{"lines":3,"failed":0,"complete":true}}')
    assert (sent.count, posts.refused) == (3, 0)
    posts.answered(request, 200, b'{"summary":{"lines":3,"failed":1,"complete":true}}')
    assert (sent.count, posts.refused) == (3, 3)
    assert posts.over, "what is refused once is so the next time"
    sent.close()


# -- the road ----------------------------------------------------------------------------------------------


class Server:
    """Answers as set, and counts what it got."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                answer = (
                    self.answers.pop(0) if self.answers else b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok"
                )
                if answer is None:
                    return
                for byte in answer:  # in pieces: an answer need not come whole
                    writer.write(bytes([byte]))
                    await writer.drain()
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def listening(one: Server) -> AsyncIterator[str]:
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Few:
    def __init__(self, count: int) -> None:
        self.left = list(range(count))
        self.got: list[tuple[int, int, bytes]] = []

    @property
    def over(self) -> bool:
        return not self.left

    def next(self) -> Request | None:
        return request("/ticks", "application/json", b"%d" % self.left[0], (self.left.pop(0),)) if self.left else None

    def answered(self, sent: Request, status: int, body: bytes) -> None:
        self.got.append((sent.about[0], status, body))


async def test_every_request_gets_its_answer() -> None:
    source, server = Few(20), Server([])
    async with listening(server) as url:
        await ApiConnections([url], 3, source).run()
    assert sorted(source.got) == [(number, 202, b"ok") for number in range(20)]
    assert sorted(map(int, server.bodies)) == list(range(20))


async def test_a_lost_answer_and_a_refusal_for_now_mean_the_same_request_again() -> None:
    full = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    source, server = Few(2), Server([None, full])
    async with listening(server) as url:
        await ApiConnections([url], 1, source).run()
    assert sorted(source.got) == [(0, 202, b"ok"), (1, 202, b"ok")]
    assert len(server.bodies) == 4


async def test_if_one_scheduler_is_gone_the_others_take_all() -> None:
    source, server = Few(10), Server([])
    async with listening(Server([])) as gone:
        pass
    async with listening(server) as url:
        await ApiConnections([gone, url], 4, source).run()
    assert len(source.got) == 10


async def test_a_generator_without_any_scheduler_gives_up_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roads, "GIVE_UP_S", 0.2)
    async with listening(Server([])) as gone:
        pass
    with pytest.raises(NoSchedulerAnswers, match="none of 1 schedulers"):
        await ApiConnections([gone], 2, Few(1)).run()


# -- what processes cost -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_cost_of_a_process_is_known_after_its_end() -> None:
    usages = Usages()
    program = "print('up', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n", "before that it has no memory of its own"
    usages.watch("one", process.pid)
    usages.watch("never", 2**22 + 1)
    usages.look()
    process.communicate(b"\n")
    usages.look()
    [known] = usages.all()
    assert (known.name, known.pid) == ("one", process.pid)
    assert known.memory_mb > 1
    ours = usage_of("ours", os.getpid())
    assert ours is not None
    assert ours.cpu_s > 0
