"""One node under test: `python -m tests.support.chaos.node <socket of the recorder> [planted bug]`.

The node is the real one, with its settings in MAINSPRING_*. Its only sink hands every delivery to the recorder and
waits for the answer. Standard input takes orders: `jump 3600` sets every clock of the process an hour ahead. At the end
of the input the process ends at once.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.node.node import Node
from mainspring.store.owner import fire

from .recorder import RETRY_MS, Deliveries, Given, Teller
from .subject import main


class Calls:
    """The call that began the present entries of a partition. Wraps `fire.tick`, through which every begin goes."""

    def __init__(self) -> None:
        self._tick = fire.tick
        self.last: dict[int, tuple[str, int]] = {}
        fire.tick = self._watch

    async def _watch(self, store: Any, sections: Sequence[fire.Section]) -> Any:
        answers = await self._tick(store, sections)
        for section, answer in zip(sections, answers, strict=True):
            if isinstance(answer, fire.TickReply) and answer.status == "ok" and section.max_due_ms is not None:
                self.last[section.partition] = (section.token.decode(), section.seq)
        return answers


class ReportingSink:
    """Delivers to the recorder."""

    def __init__(self, node: str, teller: Teller, calls: Calls) -> None:
        self._node, self._teller, self._calls = node, teller, calls

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        # Before anything is awaited: the call that began these is the last one of their partitions.
        given = [self._given(one) for one in batch]
        answers = await self._teller.tell(Deliveries(self._node, given), answered=True)
        return [_outcome(answer) for answer in msgspec.msgpack.decode(answers, type=list[str])]

    def _given(self, one: Any) -> Given:
        token, seq = self._calls.last[one.live.partition]
        task = one.value()["task"] if one.body.occurrence is None else one.id
        return Given(task, one.idempotency_key, one.attempt, one.live.partition, token, seq)

    async def aclose(self) -> None:
        await self._teller.aclose()


def _outcome(answer: str) -> Outcome:
    match answer:
        case "done":
            return DONE
        case "retry":
            return Retry("the target is busy", after_ms=random.randint(*RETRY_MS))
        case _:
            return Dead("the target will never take it")


def jump(seconds: float) -> None:
    """Set the clocks of this process. Those that never go back in reality do not go back here."""
    ahead = max(seconds, 0.0)
    base, steady, gettime = time.time, time.monotonic, time.clock_gettime
    time.time = lambda: base() + seconds
    time.monotonic = lambda: steady() + ahead
    time.clock_gettime = lambda clock: gettime(clock) + (seconds if clock == time.CLOCK_REALTIME else ahead)


def obey(order: str) -> None:
    word, _, rest = order.partition(" ")
    if word == "jump":
        jump(float(rest))


async def node(config: Config, teller: Teller, started: Callable[[], None]) -> int:
    assert config.node_id is not None
    sink = ReportingSink(config.node_id, teller, Calls())
    return await Node(config, {"log": sink}).run_until_signal(started=started)


if __name__ == "__main__":
    sys.exit(main(node, obey))
