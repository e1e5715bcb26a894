"""A faulty network path to the server: replies that get lost or arrive late, commands that arrive late."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from ..model.errors import Unavailable
from ..store.redis.connection import RedisCommand
from ..store.redis.servers import Primary
from ..store.scripts import Scripts, _sha
from ..store.store import Store

Fault = Literal["lose reply", "never sent", "hold back", "late reply"]
Match = Callable[[Sequence[RedisCommand]], bool]


class NetworkFaults:
    """Every pipeline from a store to its servers, in order, and the faults that the next ones meet."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self.trips: list[tuple[str, Sequence[RedisCommand]]] = []
        """(address of the server, commands) of every pipeline."""
        self._faults: list[tuple[Fault, Match]] = []
        self._held: list[tuple[Any, Sequence[RedisCommand]]] = []
        self.late = 0
        """Replies that have not arrived yet; `deliver_late` delivers them."""
        self._arrive = asyncio.Event()

    def next(self, *faults: Fault, only: Match | None = None) -> None:
        """Queue faults for the next pipelines (that match), one fault per pipeline."""
        self._faults += [(fault, only or _any) for fault in faults]

    async def deliver_held(self) -> None:
        """Deliver the pipelines that were held back."""
        held, self._held = self._held, []
        for pipeline, commands in held:
            await pipeline(commands)

    def deliver_late(self) -> None:
        """Deliver the late replies now, and future ones at once."""
        self._arrive.set()

    @property
    def round_trips(self) -> int:
        """Largest number of pipelines that any one server received."""
        addresses = [address for address, _ in self.trips]
        return max((addresses.count(address) for address in set(addresses)), default=0)

    async def send(
        self, primary: Primary, pipeline: Any, commands: Sequence[RedisCommand], timeout_s: float | None
    ) -> Any:
        self.trips.append((primary.address, commands))
        at = next((i for i, (_, match) in enumerate(self._faults) if match(commands)), None)
        if at is None:
            return await pipeline(commands, timeout_s=timeout_s)
        fault, _ = self._faults.pop(at)
        # A server that does not know a script refuses EVALSHA, and the refusal would be the reply that gets lost.
        commands = [self._scripts.in_full(one) if one[0] == "EVALSHA" else one for one in commands]
        if fault == "late reply":
            replies = await pipeline(commands, timeout_s=timeout_s)
            self.late += 1
            await self._arrive.wait()
            return replies
        if fault == "hold back":
            self._held.append((pipeline, commands))
        elif fault == "lose reply":
            await pipeline(commands, timeout_s=timeout_s)
        raise Unavailable(f"a test broke the network path ({fault})", sent=fault != "never sent")


def _any(_: Sequence[RedisCommand]) -> bool:
    return True


def uses(word: str) -> Match:
    """Match pipelines with this command."""
    return lambda commands: any(command[0] == word for command in commands)


def calls(script: str) -> Match:
    """Match pipelines with a call of this script."""
    names = {_sha(script, manual) for manual in (False, True)}
    return lambda commands: any(command[0] == "EVALSHA" and command[1] in names for command in commands)


@contextmanager
def bad_road(store: Store) -> Iterator[NetworkFaults]:
    """Send every pipeline of the store over a faulty network path within the block."""
    network = NetworkFaults(store.scripts)
    servers = store.servers.all()
    for primary in servers:
        vars(primary)["pipeline"] = _over(network, primary, primary.pipeline)
    try:
        yield network
    finally:
        for primary in servers:
            del vars(primary)["pipeline"]


def _over(network: NetworkFaults, primary: Primary, pipeline: Any) -> Any:
    async def over(commands: Sequence[RedisCommand], *, timeout_s: float | None = None, requests: bool = False) -> Any:
        return await network.send(primary, partial(pipeline, requests=requests), commands, timeout_s)

    return over
