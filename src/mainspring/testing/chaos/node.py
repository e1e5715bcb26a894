"""One node under test: `python -m mainspring.testing.chaos.node <socket of the recorder> [planted bug]`.

The node is the real one, with its settings in MAINSPRING_*. Its only sink hands every delivery to the recorder and
waits for the answer. Standard input takes orders: `jump 3600` sets every clock of the process an hour ahead. At the end
of the input the process ends at once.
"""

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ...config import Config
from ...model.delivery import Delivery
from ...model.outcome import DONE, Dead, Outcome, Retry
from ...node import Node
from ...store import fire
from ..mutations import plant
from .recorder import RETRY_MS, Deliveries, Given, Message, Stalled, frame, pack, read_frame

_WATCH_S = 0.05
_real_time, _real_monotonic = time.time, time.monotonic
_real_gettime = time.clock_gettime


class Calls:
    """Which call began what stands in a partition now. Wraps `fire.tick`, through which every begin goes."""

    def __init__(self) -> None:
        self._tick = fire.tick
        self.last: dict[int, tuple[str, int]] = {}
        fire.tick = self._watch

    async def _watch(self, store: Any, sections: Sequence[fire.Section]) -> Any:
        answers = await self._tick(store, sections)
        for section, answer in zip(sections, answers, strict=True):
            if isinstance(answer, fire.Answer) and answer.status == "ok" and section.max_due_ms is not None:
                self.last[section.partition] = (section.token.decode(), section.seq)
        return answers


class ReportingSink:
    """Delivers to the recorder."""

    def __init__(self, node: str, path: str, calls: Calls) -> None:
        self._node, self._path, self._calls = node, path, calls
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        self._ends = await asyncio.open_unix_connection(self._path)

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        # Before anything is awaited: the call that began these is the last one of their partitions.
        given = [self._given(one) for one in batch]
        answers = await self.tell(Deliveries(self._node, given), answered=True)
        return [_outcome(answer) for answer in msgspec.msgpack.decode(answers, type=list[str])]

    def _given(self, one: Any) -> Given:
        token, seq = self._calls.last[one.live.partition]
        task = one.value() if one.body.occurrence is None else one.id
        return Given(task, one.idempotency_key, one.attempt, one.live.partition, token, seq)

    async def tell(self, message: Message, *, answered: bool) -> bytes:
        async with self._turn:
            assert self._ends is not None
            reader, writer = self._ends
            writer.write(frame(pack(message)))
            await writer.drain()
            return await read_frame(reader) if answered else b""

    async def aclose(self) -> None:
        if self._ends is not None:
            self._ends[1].close()


def _outcome(answer: str) -> Outcome:
    match answer:
        case "done":
            return DONE
        case "retry":
            return Retry("the target is busy", after_ms=random.randint(*RETRY_MS))
        case _:
            return Dead("the target will never take it")


def jump(seconds: float) -> None:
    """Set the clocks of this process. Those that never go back in life do not go back here."""
    ahead = max(seconds, 0.0)
    base, steady, gettime = time.time, time.monotonic, time.clock_gettime
    time.time = lambda: base() + seconds
    time.monotonic = lambda: steady() + ahead
    time.clock_gettime = lambda clock: gettime(clock) + (seconds if clock == time.CLOCK_REALTIME else ahead)


async def _orders() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        word, _, rest = line.decode().partition(" ")
        if word == "jump":
            jump(float(rest))
    os._exit(70)  # whoever started us is gone


async def _watch_stalls(sink: ReportingSink, node: str, limit_s: float) -> None:
    """Tell when this process got no time for long enough to matter."""
    while True:
        before = _real_monotonic()
        await asyncio.sleep(_WATCH_S)
        gap_s = _real_monotonic() - before
        if gap_s > limit_s:
            until_us = int(_real_time() * 1e6)
            await sink.tell(Stalled(node, until_us - int(gap_s * 1e6), until_us), answered=False)


async def run(recorder: str) -> int:
    config = Config.load({}, os.environ)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s", datefmt="%H:%M:%S", level="INFO")
    assert config.node_id is not None
    sink = ReportingSink(config.node_id, recorder, Calls())
    await sink.open()
    node = Node(config, {"log": sink})
    watchers = [
        asyncio.create_task(_orders()),
        asyncio.create_task(_watch_stalls(sink, config.node_id, config.lease_s / 3)),
    ]
    try:
        return await node.run_until_signal(started=_say_started)
    finally:
        for watcher in watchers:
            watcher.cancel()


def _say_started() -> None:
    sys.stdout.write("started\n")
    sys.stdout.flush()


def main() -> int:
    for bug in sys.argv[2:]:
        plant(bug)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(run(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
