"""Posts random ticks to the nodes in turn; every second says how many, and how many the nodes delivered."""

import argparse
import asyncio
import itertools
import random
import re
import time
from datetime import UTC, datetime, timedelta

import aiohttp

DELIVERED = re.compile(r"^mainspring_delivered_total\{[^}]*\} (\S+)$", re.MULTILINE)


def tick(ids: int, within_s: float) -> dict[str, str]:
    due = datetime.now(UTC) + timedelta(seconds=random.uniform(0, within_s))
    at = due.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"item": f"user{random.randrange(ids)}", "at": at}


class Generator:
    def __init__(self, session: aiohttp.ClientSession, nodes: list[str], ids: int, within_s: float) -> None:
        self.session, self.nodes, self.ids, self.within_s = session, itertools.cycle(nodes), ids, within_s
        self.sent = self.refused = 0

    async def post_all(self, rate: float) -> None:
        """One of many connections: `rate` ticks a second each."""
        due = time.monotonic()
        while True:
            due = max(due + 1 / rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                async with self.session.post(f"{next(self.nodes)}/ticks", json=tick(self.ids, self.within_s)) as answer:
                    if answer.status < 300:
                        self.sent += 1
                    else:
                        self.refused += 1
            except aiohttp.ClientError:  # a node is away: the next post goes to another
                self.refused += 1


async def delivered(session: aiohttp.ClientSession, nodes: list[str]) -> float:
    total = 0.0
    for node in nodes:
        try:
            async with session.get(f"{node}/metrics") as answer:
                total += sum(map(float, DELIVERED.findall(await answer.text())))
        except aiohttp.ClientError:
            continue
    return total


async def report(generator: Generator, session: aiohttp.ClientSession, nodes: list[str]) -> None:
    before = (time.monotonic(), generator.sent, await delivered(session, nodes))
    while True:
        await asyncio.sleep(1)
        now = (time.monotonic(), generator.sent, await delivered(session, nodes))
        span = now[0] - before[0]
        print(
            f"Generated ticks/s {(now[1] - before[1]) / span:8.0f}"
            f"   Scheduled items/s {max(0, now[2] - before[2]) / span:8.0f}   refused so far {generator.refused}",
            flush=True,
        )
        before = now


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="+")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--within", type=float, default=600, help="seconds")
    parser.add_argument("--rate", type=float, default=2_000, help="ticks a second")
    parser.add_argument("--connections", type=int, default=32)
    given = parser.parse_args()
    connector = aiohttp.TCPConnector(limit=given.connections + 4)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as parts:
        generator = Generator(session, given.nodes, given.ids, given.within)
        parts.create_task(report(generator, session, given.nodes))
        for _ in range(given.connections):
            parts.create_task(generator.post_all(given.rate / given.connections))


if __name__ == "__main__":
    asyncio.run(main())
