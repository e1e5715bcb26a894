"""The recorder: takes every delivery of every node, writes it down, and only then answers. It is never faulted."""

import asyncio
import contextlib
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from mainspring.testing.history import BegunEvent, Event, FaultEvent, FinishedAs, FinishedEvent, WroteEvent, encode

from .wire_log import Witness, Write

RETRY_MS: Final = (100, 400)
STALL: Final = "no time on the machine"


class Given(msgspec.Struct, frozen=True, array_like=True):
    """One delivery as a node reports it, with the call that began it."""

    task: str
    key: str
    attempt: int
    partition: int
    token: str
    seq: int


class Deliveries(msgspec.Struct, frozen=True, array_like=True, tag="deliveries"):
    node: str
    given: list[Given]


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag="stalled"):
    """The machine gave a node no time: unplanned, but a fault like any other."""

    node: str
    from_us: int
    until_us: int


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """A run of a worker: it begins, or its handler is over."""

    worker: str
    task: str
    key: str
    attempt: int
    queued_us: int
    over: bool


Message = Deliveries | Run | Stalled
Answer = Literal["done", "retry", "dead"]

pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Message).decode


def now_us() -> int:
    """This machine's clock, which is also that of the servers it runs."""
    return time.time_ns() // 1000


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """One message: four bytes of length, then that many bytes."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def answer_to(task: str, attempt: int) -> Answer:
    """How the target takes a delivery: its name says it, so every copy of an attempt gets the same answer."""
    if task.startswith("fails") and attempt <= 1 + (task[-1] in "05"):
        return "retry"
    return "dead" if task.startswith("dies") else "done"


class Journal:
    """A history on its way to disk, one event a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)
        self._file.write(encode(event) + b"\n")

    def close(self) -> None:
        self._file.close()

    def wrote(self, write: Write) -> None:
        self.add(WroteEvent(write.at_us, write.partition, write.token, write.what, write.settled))


class Holding:
    """Deliveries of one node that wait for their answer, in the order in which the node sent them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[list[Given], asyncio.StreamWriter]] = deque()

    @property
    def tasks(self) -> int:
        return sum(len(given) for given, _ in self.waiting)


class Recorder:
    """The target of all deliveries."""

    def __init__(self, journal: Journal, witness: Witness, path: Path) -> None:
        self._journal = journal
        self._witness = witness
        self.path = path
        self._server: asyncio.Server | None = None
        self.ended: set[str] = set()
        """Keys of what was delivered and needs no further attempt."""
        self.untold: list[Given] = []
        """Deliveries of a begin that no server has confirmed."""
        self._held: dict[str, Holding] = {}
        """By node."""

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                match _unpack(await read_frame(reader)):
                    case Deliveries(node, given):
                        self._note_begun(node, given)
                        if (held := self._held.get(node)) is not None:
                            held.waiting.append((given, writer))
                        else:
                            self._answer(given, writer)
                            await writer.drain()
                    case Run() as run:
                        self._note_run(run, writer)
                        await writer.drain()
                    case Stalled() as stalled:
                        self.stalled(stalled)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the node ended, one way or the other
        finally:
            writer.close()

    def stalled(self, stalled: Stalled) -> None:
        node = stalled.node or None
        self._journal.add(FaultEvent(stalled.from_us, stalled.until_us, STALL, node))

    def _note_run(self, run: Run, writer: asyncio.StreamWriter) -> None:
        """Without a token: claims of workers are none of an owner's."""
        if not run.over:
            self._journal.add(BegunEvent(now_us(), run.task, run.key, run.attempt, 0, "", run.worker, 0, run.queued_us))
            return
        answer = answer_to(run.task, run.attempt)
        self._journal.add(FinishedEvent(now_us(), run.task, run.key, run.attempt, answer, 0, ""))
        if answer != "retry":
            self.ended.add(run.key)
        writer.write(frame(pack(answer)))

    def hold(self, node: str) -> Holding | None:
        """Answer nothing that this node delivers from now on. None: another fault holds it already, and lets it go."""
        return None if node in self._held else self._held.setdefault(node, Holding())

    def let_go(self, node: str) -> None:
        """Answer what this node delivered meanwhile, as always."""
        for given, writer in self._held.pop(node).waiting:
            self._answer(given, writer)

    def fail(self, held: Holding, count: int) -> None:
        """Answer `count` of the deliveries that wait, the oldest first: the node shall try them again."""
        for _ in range(count):
            given, writer = held.waiting.popleft()
            self._answer(given, writer, "retry")

    def _note_begun(self, node: str, some: list[Given]) -> None:
        for given in some:
            try:
                begun_us = self._witness.begun_at(given.partition, given.token, given.seq)
            except KeyError:
                self.untold.append(given)
                begun_us = now_us()
            self._journal.add(
                BegunEvent(begun_us, given.task, given.key, given.attempt, given.partition, given.token, node)
            )

    def _answer(self, some: list[Given], writer: asyncio.StreamWriter, always: FinishedAs | None = None) -> None:
        answers: list[FinishedAs] = []
        for given in some:
            answers.append(answer := always or answer_to(given.task, given.attempt))
            self._journal.add(
                FinishedEvent(now_us(), given.task, given.key, given.attempt, answer, given.partition, "")
            )
            if answer != "retry":
                self.ended.add(given.key)
        writer.write(frame(pack(answers)))


_WATCH_S: Final = 0.05
# As they were when the process began: a fault sets its clocks.
_real_time, _real_monotonic = time.time, time.monotonic


class Teller:
    """Tells things in order; answers come in the same order."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._listener = asyncio.create_task(self._listen(reader))

    async def tell(self, message: Message, *, answered: bool) -> bytes:
        assert self._writer is not None
        self._writer.write(frame(pack(message)))
        if not answered:
            await self._writer.drain()
            return b""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        await self._writer.drain()
        return await answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the run is over
            while True:
                data = await read_frame(reader)
                answer = self._waiting.popleft()
                if not answer.done():  # done: its caller no longer waits
                    answer.set_result(data)

    async def aclose(self) -> None:
        if self._writer is not None and self._listener is not None:
            self._listener.cancel()
            self._writer.close()


async def watch_stalls(teller: Teller, node: str, limit_s: float) -> None:
    """Tell when this process got no time for long enough to matter."""
    while True:
        before = _real_monotonic()
        await asyncio.sleep(_WATCH_S)
        gap_s = _real_monotonic() - before
        if gap_s > limit_s:
            until_us = int(_real_time() * 1e6)
            await teller.tell(Stalled(node, until_us - int(gap_s * 1e6), until_us), answered=False)
