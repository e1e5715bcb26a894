"""`mainspring cluster`: the nodes, who leads, who owns what."""

import asyncio
import sys
from typing import Annotated, Any, Final

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store
from mainspring.config import Config
from mainspring.store import members
from mainspring.store.members import Holding, Member, View

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
                print(msgspec.json.encode(_report(view, holdings)).decode(), flush=True)
            else:
                print((_CLEAR if watch and sys.stdout.isatty() else "") + _table(view, holdings), flush=True)
            if not watch:
                return all(one.owner for one in holdings)
            await asyncio.sleep(EVERY_S)


def _holder(holding: Holding) -> str:
    return holding.owner.rpartition("/")[0]


def _report(view: View, holdings: list[Holding]) -> dict[str, Any]:
    return {
        "leader": view.leader,
        "term": view.term,
        "plan": view.version,
        "partitions": len(holdings),
        "without_owner": [number for number, one in enumerate(holdings) if not one.owner],
        "moving": [
            number
            for number, (planned, one) in enumerate(zip(view.owners, holdings, strict=True))
            if planned != _holder(one)
        ],
        "nodes": [_node(one, view, holdings) for one in _oldest_first(view)],
    }


def _oldest_first(view: View) -> list[Member]:
    return sorted(view.members.values(), key=lambda one: one.order)


def _node(member: Member, view: View, holdings: list[Holding]) -> dict[str, Any]:
    about = member.about
    return {
        "id": member.id,
        "leader": member.id == view.leader,
        "order": member.order,
        "host": about.host,
        "pid": about.pid,
        "roles": about.roles,
        "version": about.version,
        "concurrency": about.concurrency,
        "started_ms": about.started_ms,
        "leaving": member.leaving,
        "lease_left_ms": member.left_ms,
        "partitions": [number for number, one in enumerate(holdings) if _holder(one) == member.id],
        "planned": [number for number, node in enumerate(view.owners) if node == member.id],
        "look_ahead": about.look_ahead,
        "in_flight": about.in_flight,
        "lag_ms": about.lag_ms,
        "delivered": about.delivered,
    }


_COLUMNS: Final = ("NODE", "HOST", "PID", "PARTITIONS", "PLANNED", "LOOK-AHEAD", "IN FLIGHT", "LAG MS", "DELIVERED")


def _table(view: View, holdings: list[Holding]) -> str:
    rows = [_COLUMNS]
    for member in _oldest_first(view):
        node = _node(member, view, holdings)
        name = member.id + (" (leader)" if node["leader"] else "") + (" (leaving)" if member.leaving else "")
        counts = (len(node["partitions"]), len(node["planned"]), *(node[name] for name in _COUNTS))
        rows.append((name, node["host"], str(node["pid"]), *map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    report = _report(view, holdings)
    lines.append("")
    lines.append(f"{report['partitions']} partitions, plan {view.version}, term {view.term}")
    for what, words in (("without_owner", "have no owner"), ("moving", "are not where the plan wants them")):
        if report[what]:
            lines.append(f"{len(report[what])} {words}: {_listed(report[what])}")
    if not view.members:
        lines.append("no node is running; start one: mainspring serve")
    return "\n".join(lines)


_COUNTS: Final = ("look_ahead", "in_flight", "lag_ms", "delivered")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")
