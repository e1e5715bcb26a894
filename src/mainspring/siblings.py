"""The processes of one `serve --processes N` know each other's figures: whoever is scraped answers for all.

They share one port, so a scrape reaches any of them. Each listens on a socket in a folder of the parent's, on which
it tells its own figures; the one that is asked by Prometheus asks the others, and marks each with its number.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from .model.metrics import Family, labelled, merged, single

log = logging.getLogger("mainspring.metrics")

Collect = Callable[[], Awaitable[list[Family]]]

WAIT_S: Final = 4.0
"""For another process: one that hangs must not keep the figures of the others from anybody."""
_SUFFIX: Final = ".metrics"


class Siblings:
    """One process among the others; `place` is its own socket, `<folder>/<number>.metrics`."""

    def __init__(self, place: Path, collect: Collect) -> None:
        self._place = place
        self._collect = collect
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._place.unlink(missing_ok=True)  # of one that was killed
        self._server = await asyncio.start_unix_server(self._tell, self._place)
        self._place.chmod(0o600)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._place.unlink(missing_ok=True)

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(msgspec.msgpack.encode(await self._collect()))
            await writer.drain()
        writer.close()

    async def everybody(self) -> list[Family]:
        """The figures of all processes that answer, each sample with the number of its process."""
        places = sorted(self._place.parent.glob(f"*{_SUFFIX}"), key=lambda one: (len(one.name), one.name))
        told = await asyncio.gather(*(self._ask(place) for place in places))
        heard = [labelled(one, "process", place.stem) for place, one in zip(places, told, strict=True) if one]
        return merged([*heard, _count(len(heard))])

    async def _ask(self, place: Path) -> Sequence[Family]:
        if place == self._place:
            return await self._collect()
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(place)
                try:
                    return msgspec.msgpack.decode(await reader.read(), type=list[Family])
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("process %s does not tell its figures: %s", place.stem, str(error) or type(error).__name__)
            return ()


def _count(processes: int) -> list[Family]:
    return [single("mainspring_processes", "gauge", "Processes whose figures these are.", processes)]
