"""One worker under test: `python -m mainspring.testing.chaos.worker <socket of the recorder> [planted bug]`.

The worker is the real one, with its settings in MAINSPRING_*. Its only handler tells the recorder when a run begins and
when it ends, and takes its time in between, so that there is something to be killed in. At the end of its standard
input the process ends at once.
"""

import asyncio
import logging
import os
import random
import sys
from typing import Final

import msgspec

from ...config import Config
from ...model.outcome import Dead, Retry
from ...scheduler import Scheduler
from ...worker.context import Context
from ...workplace import Workplace
from ..mutations import plant
from .profile import HANDLER, QUEUE
from .recorder import RETRY_MS, Run
from .teller import Teller, watch_stalls

_SHORT_S: Final = 0.03
_LONG_S: Final = 0.4
_LONG_SHARE: Final = 0.05


class Handler:
    """What the worker runs."""

    def __init__(self, worker: str, teller: Teller) -> None:
        self._worker, self._teller = worker, teller

    async def run(self, task: str, ctx: Context) -> None:
        name = task if ctx.job.body.occurrence is None else ctx.id
        # The number of an entry of a stream begins with the server's time.
        queued_us = int(ctx.job.entry.partition(b"-")[0]) * 1000
        run = Run(self._worker, name, ctx.idempotency_key, ctx.attempt, queued_us, over=False)
        await self._teller.tell(run, answered=False)
        await asyncio.sleep(random.random() * (_LONG_S if random.random() < _LONG_SHARE else _SHORT_S))
        answer = await self._teller.tell(msgspec.structs.replace(run, over=True), answered=True)
        match msgspec.msgpack.decode(answer, type=str):
            case "retry":
                raise Retry("the target is busy", after_ms=random.randint(*RETRY_MS))
            case "dead":
                raise Dead("the target will never take it")


async def _until_input_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    os._exit(70)  # whoever started us is gone


async def run(recorder: str) -> int:
    config = Config.load({}, os.environ)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s", datefmt="%H:%M:%S", level="INFO")
    assert config.node_id is not None
    teller = Teller(recorder)
    await teller.open()
    scheduler = Scheduler(config)
    scheduler.handler(queue=QUEUE, name=HANDLER)(Handler(config.node_id, teller).run)
    watchers = [
        asyncio.create_task(_until_input_ends()),
        asyncio.create_task(watch_stalls(teller, config.node_id, config.lease_s / 3)),
    ]
    try:
        return await Workplace(scheduler, config).run_until_signal(started=_say_started)
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
