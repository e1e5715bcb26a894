"""`bench idle`: what a node costs that has nothing to do."""

import asyncio
from typing import Final

import msgspec

from ..engine.engine import Engine
from ..sinks.null import NullSink
from ..store.store import Store
from .ground import Reading, Where, ground
from .life import Progress

SETTLE_S: Final = 2.0
"""Taking over the partitions is work; idle begins after it."""


class Idle(msgspec.Struct, frozen=True):
    node_cpu_percent: float
    server_commands_per_s: float
    server_cpu_percent: float
    seconds: float

    @property
    def sound(self) -> bool:
        return True


async def idle(where: Where, seconds: float, progress: Progress) -> Idle:
    async with ground(where) as place:
        await place.time.stop()  # its questions would be counted; nothing here needs the server's clock
        store = await Store.open(place.url, namespace=place.namespace)
        engine = Engine(store, {"null": NullSink()})
        try:
            await engine.start()
            progress("settling", 0, 1)
            await asyncio.sleep(SETTLE_S)
            progress("idle", 0, 1)
            before = await place.read()
            await asyncio.sleep(seconds)
            used = (await place.read()).since(before)
            # The INFO that opens the stretch is counted by the one that ends it, on every server.
            commands = used.commands - len(place.links.all())
            if engine.crashed is not None:
                raise engine.crashed
        finally:
            await engine.stop()
            await store.aclose()
    return _figures(used, commands)


def _figures(used: Reading, commands: int) -> Idle:
    return Idle(
        node_cpu_percent=round(used.client_us / used.at_s / 10_000, 2),
        server_commands_per_s=round(commands / used.at_s, 1),
        server_cpu_percent=round(used.server_us / used.at_s / 10_000, 2),
        seconds=round(used.at_s, 2),
    )
