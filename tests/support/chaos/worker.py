"""One worker under test: `python -m tests.support.chaos.worker <socket of the recorder> [planted bug]`.

The worker is the real one, with its settings in MAINSPRING_*. Its only handler tells the recorder when a run begins and
when it ends, and takes its time in between, so that there is something to be killed in. At the end of its standard
input the process ends at once.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from mainspring.config.config import Config
from mainspring.model.delivery import Dead, Retry
from mainspring.scheduler.scheduler import Scheduler
from mainspring.scheduler.worker_process import Workplace
from mainspring.worker.context import Context

from .profile import HANDLER, QUEUE
from .recorder import RETRY_MS, Run, Teller
from .subject import main

_SHORT_S: Final = 0.03
_LONG_S: Final = 0.4
_LONG_SHARE: Final = 0.05


class Handler:
    """The handlers of the worker."""

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


async def worker(config: Config, teller: Teller, started: Callable[[], None]) -> int:
    assert config.node_id is not None
    scheduler = Scheduler(config)
    scheduler.handler(queue=QUEUE, name=HANDLER)(Handler(config.node_id, teller).run)
    return await Workplace(scheduler, config).run_until_signal(started=started)


if __name__ == "__main__":
    sys.exit(main(worker))
