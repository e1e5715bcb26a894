"""`mainspring cluster`: the nodes, who leads, who owns what."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store, remote

if TYPE_CHECKING:
    from mainspring.config import Config

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

EVERY_S: Final = 1.0
_CLEAR: Final = "\x1b[H\x1b[2J"


@app.callback()
def _group() -> None:
    """Look at the nodes of a namespace."""


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Print it anew every second, until Ctrl-C.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show every node: its partitions, what it holds ahead and in flight, and how far it is behind.

    Exit code 1 when a partition has no owner.
    """
    owned = asyncio.run(_status(load(redis_url, data_dir, namespace, config), watch=watch, json=json))
    if not owned:
        raise typer.Exit(1)


async def _status(config: "Config", *, watch: bool, json: bool) -> bool:
    async with _looking(config) as look:
        while True:
            told = await look()
            if json:
                print(msgspec.json.encode(told).decode(), flush=True)
            else:
                print((_CLEAR if watch and sys.stdout.isatty() else "") + _table(told), flush=True)
            if not watch:
                return not told["without_owner"]
            await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def _looking(config: "Config") -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """What reports on the cluster: the server itself, or a node's API."""
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:

            async def ask() -> dict[str, Any]:
                return dict(api.get("/v1/cluster"))

            yield ask
        return
    from mainspring.cluster.report import report
    from mainspring.store import members

    async with opened_store(config) as store:

        async def look() -> dict[str, Any]:
            return report(*await members.look(store))

        yield look


_COLUMNS: Final = ("NODE", "HOST", "PID", "PARTITIONS", "PLANNED", "LOOK-AHEAD", "IN FLIGHT", "LAG MS", "DELIVERED")


def _table(told: dict[str, Any]) -> str:
    rows = [_COLUMNS]
    for node in told["nodes"]:
        name = node["id"] + (" (leader)" if node["leader"] else "") + (" (leaving)" if node["leaving"] else "")
        counts = (len(node["partitions"]), len(node["planned"]), *(node[name] for name in _COUNTS))
        rows.append((name, node["host"], str(node["pid"]), *map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    lines.append(f"{told['partitions']} partitions, plan {told['plan']}, term {told['term']}")
    for what, words in (("without_owner", "have no owner"), ("moving", "are not where the plan wants them")):
        if told[what]:
            lines.append(f"{len(told[what])} {words}: {_listed(told[what])}")
    if not told["nodes"]:
        lines.append("no node is running; start one: mainspring serve")
    return "\n".join(lines)


_COUNTS: Final = ("look_ahead", "in_flight", "lag_ms", "delivered")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")
