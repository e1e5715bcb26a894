"""Where a benchmark runs: a private server or the user's, the server's clock, and helper processes.

A delivery is early when its due time is later than the server's clock at the moment the sink receives it. From here
that clock is known only as an interval. Judging by its upper end never reports a punctual delivery as early and
never understates lateness. Early deliveries that this misses are bounded by the interval's width, `doubt_us`:

- a private server runs on this machine and reads the same clock as the bench: the interval is a point;
- for any other server the interval follows from TIME: asked at a and answered at b (by our clock) with s, the
  server's clock was ahead of ours by at least s - b and at most s - a. The tightest of many samples wins, and every
  sample widens by 200 ppm as it ages, because the two clocks drift.
"""

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import hiredis

from ..model.clock import DRIFT
from ..model.errors import Refused
from ..store.redis.servers import LinkOptions, Primary, Servers
from ..testing.servers import Kind, standalone

_SAMPLE_EVERY_S: Final = 0.05
_FIRST_SAMPLES: Final = 50


class ServerTime:
    """The server's clock. `ask` returns its TIME in microseconds; it is None if the server has this machine's clock."""

    def __init__(self, ask: Callable[[], Awaitable[int]] | None = None) -> None:
        self._ask = ask
        self._low_us = self._high_us = 0.0
        self._at_us = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._ask is None:
            return
        for _ in range(_FIRST_SAMPLES):
            await self._sample(self._ask)
        self._task = asyncio.create_task(self._keep(self._ask))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def latest_us(self) -> int:
        """Return the latest time that the server's clock can show now."""
        if self._ask is None:
            return time.time_ns() // 1000
        now_us = _local_us()
        return int(now_us + self._high_us + (now_us - self._at_us) * DRIFT)

    @property
    def doubt_us(self) -> float:
        """Width of the interval: how much earlier than `latest_us` the server's clock can be."""
        if self._ask is None:
            return 0.0
        return self._high_us - self._low_us + 2 * (_local_us() - self._at_us) * DRIFT

    def now_ms(self) -> int:
        return self.latest_us() // 1000

    async def until(self, when_ms: int) -> None:
        """Wait until that time has passed at both ends of the interval."""
        while True:
            left_ms = when_ms - (self.latest_us() - self.doubt_us) / 1000
            if left_ms <= 0:
                return
            await asyncio.sleep(left_ms / 1000)

    async def _keep(self, ask: Callable[[], Awaitable[int]]) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            await self._sample(ask)

    async def _sample(self, ask: Callable[[], Awaitable[int]]) -> None:
        asked_us = _local_us()
        server_us = await ask()
        answered_us = _local_us()
        low, high = server_us - answered_us, server_us - asked_us
        if self._at_us:
            aged = (answered_us - self._at_us) * DRIFT
            low, high = max(low, self._low_us - aged), min(high, self._high_us + aged)
        if low > high:  # the server's clock was set: earlier samples are worthless
            low, high = server_us - answered_us, server_us - asked_us
        self._low_us, self._high_us, self._at_us = low, high, answered_us


def _local_us() -> float:
    return time.monotonic_ns() / 1000


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """The server to use: `url`, or a private one of this kind, without persistence, over loopback TCP."""

    url: str | None = None
    server: Kind = "valkey"


_PLAIN: Final = {"latency-tracking": "no", "slowlog-log-slower-than": "-1"}
"""Settings of a private server. Command histograms (30 KiB each) and the slow log would count as cost of tasks."""


class Measurement(NamedTuple):
    """Readings for a stretch of work: read before and after, and subtract."""

    at_s: float
    client_us: float
    server_us: float
    """CPU seconds of the server's main thread (its bottleneck), if the server reports it."""
    server_all_us: float
    """CPU seconds of all the server's threads, including those that free memory in the background."""
    memory: int
    commands: int

    def since(self, before: "Measurement") -> "Measurement":
        return Measurement(*(now - then for now, then in zip(self, before, strict=True)))  # type: ignore[arg-type]


class BenchEnvironment:
    """A server, a fresh namespace, and the bench's own connections, apart from those it measures."""

    def __init__(self, url: str, servers: Servers, *, private: bool, socket_url: str | None = None) -> None:
        self.url = url
        self.nearest_url = socket_url or url
        """The unix socket of a private server: the path on which `mainspring serve` reaches its embedded server."""
        self.namespace = f"bench-{secrets.token_hex(4)}"
        self.servers = servers
        self.private = private
        self.time = ServerTime(None if private else self._server_us)

    async def read(self) -> Measurement:
        """Read the counters now; this costs each server one INFO."""
        reports = [await _info(primary) for primary in self.servers.all()]

        def total(*names: str) -> float:
            return sum(float(report.get(name, 0)) for report in reports for name in names)

        whole_us = 1e6 * total("used_cpu_user", "used_cpu_sys")
        main_us = 1e6 * total("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        return Measurement(
            time.perf_counter(),
            time.process_time() * 1e6,
            main_us or whole_us,
            whole_us,
            # Connection buffers grow and shrink with the load; they are not a cost of pending tasks.
            round(total("used_memory") - total("mem_clients_normal")),
            round(total("total_commands_processed")),
        )

    async def clear(self) -> None:
        await clear_namespace(self.servers, self.namespace)

    async def _server_us(self) -> int:
        [reply] = await self.servers.for_slot(0).pipeline([("TIME",)])
        seconds, micros = _checked(reply)
        return int(seconds) * 1_000_000 + int(micros)


async def clear_namespace(servers: Servers, namespace: str) -> None:
    """Remove every key of a namespace."""
    for primary in servers.all():
        cursor = b"0"
        while True:
            [page] = await primary.pipeline([("SCAN", cursor, "MATCH", f"{{{namespace}*", "COUNT", 5000)])
            cursor, keys = _checked(page)
            if keys:
                # One command per key: in a cluster the keys belong to many slots.
                await primary.pipeline([("UNLINK", key) for key in keys])
            if cursor == b"0":
                break


async def _info(primary: Primary) -> dict[str, str]:
    [reply] = await primary.pipeline([("INFO",)])
    rows = (line.partition(":") for line in _checked(reply).decode().splitlines())
    return {name: value for name, colon, value in rows if colon}


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise Refused(f"the server refused: {reply}")
    return reply


@contextlib.asynccontextmanager
async def open_environment(where: ServerChoice) -> AsyncIterator[BenchEnvironment]:
    """Open an environment to measure in; remove everything it created afterwards."""
    with contextlib.ExitStack() as stack:
        url, socket_url = where.url, None
        if url is None:
            server = stack.enter_context(standalone(where.server, extra_config=_PLAIN))
            url, socket_url = server.url, server.unix_url
        servers = await Servers.connect(url, LinkOptions(client_name="mainspring-bench"))
        made = BenchEnvironment(url, servers, private=where.url is None, socket_url=socket_url)
        try:
            await made.time.start()
            yield made
        finally:
            await made.time.stop()
            if not made.private:
                await made.clear()
            await servers.aclose()


@contextlib.asynccontextmanager
async def counterpart(module: str, name: str) -> AsyncIterator[str]:
    """Run a module as a helper process and yield its address. The first line it prints is its port."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, name, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()  # closing its standard input ends the process
        await process.wait()
