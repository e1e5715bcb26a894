"""All peers in one run, one after the other; one that fails must not lose the rows of the others."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...model.errors import InvalidInput, MainspringError
from ...testing.servers import missing
from ..ground import Where
from ..life import Progress
from .homes import PeersMissing, python_with_peers
from .stage import Contender, Demand, measure

PEERS: Final = ("celery", "dramatiq", "rq", "arq", "huey")
OURSELVES: Final = "mainspring"

_HERE: Final = Path(__file__).parent
_SHARES: Final = {"rq": 0.25}
"""Of the tasks, for those that would take very long with all of them."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`None` where nothing was measured; `error` says why."""

    peer: str
    version: str | None = None
    tasks: int
    schedule_per_s: float | None = None
    bytes_per_pending_task: float | None = None
    drain_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    early: int | None = None
    duplicated: int | None = None
    lost: int | None = None
    error: str | None = None

    @property
    def sound(self) -> bool:
        """What others do to their tasks is theirs; ours must be right."""
        return self.peer != OURSELVES or not (self.early or self.duplicated or self.lost or self.error)


def server_of_choice() -> Where:
    """Redis where it is installed, for that is what the peers are made for; else the embedded Valkey."""
    return Where(server="valkey" if missing("redis") else "redis")


async def peers(
    where: Where, demand: Demand, only: Sequence[str], progress: Progress, *, install: bool = True
) -> list[Row]:
    if unknown := set(only) - {OURSELVES, *PEERS}:
        raise InvalidInput(f"--only {', '.join(sorted(unknown))}: there are {', '.join((OURSELVES, *PEERS))}")
    if demand.tasks < 1 or demand.rate < 1 or demand.seconds <= 0:
        raise InvalidInput("--tasks, --rate and --seconds must be more than 0")
    if where.url is not None:
        raise InvalidInput("peers are measured on private servers only: their keys could be mixed up with others'")
    return [
        await _row(name, where, demand, progress, install=install)
        for name in (OURSELVES, *PEERS)
        if name in (only or (OURSELVES, *PEERS))
    ]


async def _row(name: str, where: Where, demand: Demand, progress: Progress, *, install: bool) -> Row:
    tasks = max(1, round(demand.tasks * _SHARES.get(name, 1.0)))
    try:
        one = await _contender(name, progress, install=install)
    except PeersMissing as error:
        return Row(peer=name, tasks=tasks, error=str(error))
    return await row_of(one, where, msgspec.structs.replace(demand, tasks=tasks), progress)


async def _contender(name: str, progress: Progress, *, install: bool) -> Contender:
    file = _HERE / f"{name}.py"
    if name == OURSELVES:
        return Contender(name, file, Path(sys.executable), ("node", "consume"))
    progress(f"{name}: looking for its library, installing it if need be", 0, 1)
    return Contender(name, file, await python_with_peers(install=install))


async def row_of(one: Contender, where: Where, demand: Demand, progress: Progress) -> Row:
    try:
        measured = await measure(one, demand, where, progress)
    except (MainspringError, OSError) as error:
        return Row(peer=one.name, tasks=demand.tasks, error=str(error))
    return Row(peer=one.name, **msgspec.structs.asdict(measured))
