"""`mainspring cluster`: the nodes, who leads, who owns what."""

import asyncio
import sys
from typing import Annotated, Final

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store
from mainspring.cluster.report import node_report, oldest_first, report
from mainspring.config import Config
from mainspring.store import members
from mainspring.store.members import Holding, View

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


async def _status(config: Config, *, watch: bool, json: bool) -> bool:
    async with opened_store(config) as store:
        while True:
            view, holdings = await members.look(store)
            if json:
                print(msgspec.json.encode(report(view, holdings)).decode(), flush=True)
            else:
                print((_CLEAR if watch and sys.stdout.isatty() else "") + _table(view, holdings), flush=True)
            if not watch:
                return all(one.owner for one in holdings)
            await asyncio.sleep(EVERY_S)


_COLUMNS: Final = ("NODE", "HOST", "PID", "PARTITIONS", "PLANNED", "LOOK-AHEAD", "IN FLIGHT", "LAG MS", "DELIVERED")


def _table(view: View, holdings: list[Holding]) -> str:
    rows = [_COLUMNS]
    for member in oldest_first(view):
        node = node_report(member, view, holdings)
        name = member.id + (" (leader)" if node["leader"] else "") + (" (leaving)" if member.leaving else "")
        counts = (len(node["partitions"]), len(node["planned"]), *(node[name] for name in _COUNTS))
        rows.append((name, node["host"], str(node["pid"]), *map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    told = report(view, holdings)
    lines.append("")
    lines.append(f"{told['partitions']} partitions, plan {view.version}, term {view.term}")
    for what, words in (("without_owner", "have no owner"), ("moving", "are not where the plan wants them")):
        if told[what]:
            lines.append(f"{len(told[what])} {words}: {_listed(told[what])}")
    if not view.members:
        lines.append("no node is running; start one: mainspring serve")
    return "\n".join(lines)


_COUNTS: Final = ("look_ahead", "in_flight", "lag_ms", "delivered")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")
