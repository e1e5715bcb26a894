"""Webhooks: into a receiver in a process of its own, which answers 204 to everything."""

import asyncio
import statistics
import time
from typing import Final

from ..model.errors import MainspringError
from ..sinks.http import NEEDS, HttpOptions, HttpSink
from .counterpart import counterpart
from .drain import drain
from .ground import Where
from .life import Progress
from .sink_figures import SinkFigures

CONCURRENCY: Final = 64
PAYLOAD: Final = {"order": 42, "filler": "x" * 24}
_BODY: Final = b'{"order":42,"filler":"' + b"x" * 24 + b'"}'


async def http(where: Where, tasks: int, rounds: int, progress: Progress) -> SinkFigures:
    """Turn and turn about, so that what else the machine does falls on both."""
    through: list[float] = []
    bare: list[float] = []
    lost = 0
    async with counterpart("mainspring.bench.receiver") as receiver:
        url = f"{receiver}/hook"
        for number in range(rounds):
            progress(f"http, bare, round {number + 1}", 0, tasks)
            bare.append(await _bare(url, tasks))
            per_s, missing = await _through(where, url, tasks, progress)
            through.append(per_s)
            lost += missing
    ours, plain = statistics.median(through), statistics.median(bare)
    return SinkFigures(tasks, round(ours), round(plain), round(ours / plain, 3), lost)


async def _through(where: Where, url: str, tasks: int, progress: Progress) -> tuple[float, int]:
    sink = HttpSink(HttpOptions(concurrency=CONCURRENCY, allow=("127.0.0.1",)))
    try:
        return await drain(where, url, PAYLOAD, tasks, {"http": sink}, progress)
    finally:
        await sink.aclose()


async def _bare(url: str, tasks: int) -> float:
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise MainspringError(NEEDS) from None
    numbers = iter(range(tasks))
    connector = aiohttp.TCPConnector(limit=0)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=15)) as session:

        async def work() -> None:
            for number in numbers:
                headers = {
                    "User-Agent": "Mainspring",
                    "Content-Type": "application/json",
                    "Idempotency-Key": f"bench/{number:032x}/1700000000000",
                    "Mainspring-Id": f"{number:032x}",
                    "Mainspring-Due": "2023-11-14T22:13:20.000Z",
                    "Mainspring-Attempt": "1",
                }
                async with session.post(url, data=_BODY, headers=headers, allow_redirects=False) as answer:
                    answer.raise_for_status()
                    await answer.read()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return tasks / (time.perf_counter() - began)
