"""Where a bench runs: a private server that is gone afterwards, or the user's with a namespace of its own."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import hiredis

from ..model.errors import Refused
from ..store.link import Link, LinkOptions
from ..store.links import Links
from ..testing.servers import Kind, standalone
from .server_time import ServerTime


@dataclass(frozen=True, slots=True)
class Where:
    """Which server: `url`, or a private one of this kind, without persistence, over loopback TCP."""

    url: str | None = None
    server: Kind = "valkey"


_PLAIN: Final = {"latency-tracking": "no", "slowlog-log-slower-than": "-1"}
"""A histogram of 30 KiB for every kind of command, and the log of slow calls, are not what a pending task costs."""


class Reading(NamedTuple):
    """Everything a stretch of work is measured by: read before and after, and subtract."""

    at_s: float
    client_us: float
    server_us: float
    """Of the server's main thread, where it says so: the one that limits what it can do."""
    server_all_us: float
    """Of all its threads: also those that free memory in the background."""
    memory: int
    commands: int

    def since(self, before: "Reading") -> "Reading":
        return Reading(*(now - then for now, then in zip(self, before, strict=True)))  # type: ignore[arg-type]


class Ground:
    """A server, a fresh namespace, and connections of the bench's own beside those it measures."""

    def __init__(self, url: str, links: Links, *, private: bool, socket_url: str | None = None) -> None:
        self.url = url
        self.nearest_url = socket_url or url
        """Of a private server its unix socket: the way on which `mainspring serve` reaches the server of its own."""
        self.namespace = f"bench-{secrets.token_hex(4)}"
        self.links = links
        self.private = private
        self.time = ServerTime(None if private else self._server_us)

    async def read(self) -> Reading:
        """Costs each server one INFO."""
        reports = [await _info(link) for link in self.links.all()]

        def total(*names: str) -> float:
            return sum(float(report.get(name, 0)) for report in reports for name in names)

        whole_us = 1e6 * total("used_cpu_user", "used_cpu_sys")
        main_us = 1e6 * total("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        return Reading(
            time.perf_counter(),
            time.process_time() * 1e6,
            main_us or whole_us,
            whole_us,
            # Buffers of connections come and go with the load; they are not what a pending task costs.
            round(total("used_memory") - total("mem_clients_normal")),
            round(total("total_commands_processed")),
        )

    async def clear(self) -> None:
        await clear_namespace(self.links, self.namespace)

    async def _server_us(self) -> int:
        [reply] = await self.links.for_slot(0).pipeline([("TIME",)])
        seconds, micros = _checked(reply)
        return int(seconds) * 1_000_000 + int(micros)


async def clear_namespace(links: Links, namespace: str) -> None:
    """Remove every key of a namespace."""
    for link in links.all():
        cursor = b"0"
        while True:
            [page] = await link.pipeline([("SCAN", cursor, "MATCH", f"{{{namespace}*", "COUNT", 5000)])
            cursor, keys = _checked(page)
            if keys:
                # One command a key: in a cluster they belong to many slots.
                await link.pipeline([("UNLINK", key) for key in keys])
            if cursor == b"0":
                break


async def _info(link: Link) -> dict[str, str]:
    [reply] = await link.pipeline([("INFO",)])
    rows = (line.partition(":") for line in _checked(reply).decode().splitlines())
    return {name: value for name, colon, value in rows if colon}


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        raise Refused(f"the server refused: {reply}")
    return reply


@contextlib.asynccontextmanager
async def ground(where: Where) -> AsyncIterator[Ground]:
    """A place to measure on; nothing of it is left behind."""
    with contextlib.ExitStack() as stack:
        url, socket_url = where.url, None
        if url is None:
            server = stack.enter_context(standalone(where.server, extra_config=_PLAIN))
            url, socket_url = server.url, server.unix_url
        links = await Links.connect(url, LinkOptions(client_name="mainspring-bench"))
        made = Ground(url, links, private=where.url is None, socket_url=socket_url)
        try:
            await made.time.start()
            yield made
        finally:
            await made.time.stop()
            if not made.private:
                await made.clear()
            await links.aclose()
