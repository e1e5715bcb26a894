"""`mainspring verify`: do the books add up, is anything orphaned; and repair."""

import asyncio
import contextlib
from typing import Annotated, Final

import msgspec
import typer

from mainspring.cli.progress import Bar
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, server_url
from mainspring.cli.witness import record
from mainspring.config import Config
from mainspring.model.errors import InvalidInput
from mainspring.store.keys import meta_key, slot_of
from mainspring.store.links import Links
from mainspring.store.store import Store
from mainspring.store.verify import Books, Report, verify
from mainspring.store.verify_report import KINDS, Told

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

MOST_SHOWN: Final = 20
"""Findings of one kind that people get to see; programs get more."""


@app.command("verify")
def verify_(
    repair: Annotated[bool, typer.Option("--repair", help="Set right what can be; every repair is told.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Prove that every accepted task is somewhere, and find what belongs to nothing; nodes may go on meanwhile.

    Exit code 1 when findings are left.
    """
    report = asyncio.run(_verify(load(redis_url, data_dir, namespace, config), repair=repair, shown=not json))
    print(msgspec.json.encode(report.as_dict()).decode() if json else as_text(report, repair=repair))
    if report.left:
        raise typer.Exit(1)


async def _verify(config: Config, *, repair: bool, shown: bool) -> Report:
    async with server_url(config) as url:
        await _check_there(url, config)
        opened = await Store.open(url, namespace=config.namespace, partitions=config.partitions, options=config.links)
        async with contextlib.aclosing(opened) as store:
            with Bar("partitions", shown=shown) as bar:
                report = await verify(store, repair=repair, progress=bar)
            if repaired := {kind: count for kind, count in report.repaired.items() if count}:
                await record(store, config.audit_entries, "verify.repair", report.namespace, None, repaired)
            return report


async def _check_there(url: str, config: Config) -> None:
    """To open a namespace makes it; one that was misspelt must not be made, and not be called clean."""
    async with contextlib.aclosing(await Links.connect(url, config.links)) as links:
        namespace = config.namespace
        [found] = await links.for_slot(slot_of(namespace)).pipeline([("EXISTS", meta_key(namespace))])
    if found == 0:
        raise InvalidInput(f"there is no namespace {namespace!r} on this server: nothing to verify")


def as_text(report: Report, *, repair: bool) -> str:
    total = report.total
    lines = [f"namespace {report.namespace}: {report.partitions} partitions, {report.slices} slices", _sum_of(total)]
    lines += [f"partition {number}: {_sum_of(books)}" for number, books in report.uneven.items()]
    if not report.found:
        return "\n".join([*lines, "the books are even, nothing is orphaned"])
    for kind, count in report.found.items():
        told = [one for one in report.told if one.finding.kind == kind]
        lines += ["", f"{kind}: {KINDS[kind]} ({count})"]
        lines += [line for one in told[:MOST_SHOWN] for line in _lines_of(one)]
        if count > MOST_SHOWN:
            lines.append(f"  and {count - MOST_SHOWN} more; --json tells them")
    end = f"{report.repaired.total()} repaired, {report.left} left" if repair else "to repair, add --repair"
    return "\n".join([*lines, "", f"findings: {report.found.total()}; {end}"])


def _lines_of(told: Told) -> list[str]:
    finding, repair = told
    place = "" if finding.partition is None else f"partition {finding.partition}  "
    lines = [f"  {place}{finding.where}", f"    {finding.problem}"]
    if repair is not None:
        lines.append(f"    {'repaired' if repair.done else 'not repaired'}: {repair.text}")
    elif finding.advice:
        lines.append(f"    {finding.advice}")
    return lines


def _sum_of(books: Books) -> str:
    parts = " + ".join(f"{name} {getattr(books, name)}" for name in _PARTS)
    missing = f" + missing {books.missing}" if books.missing else ""
    return f"accepted {books.accepted} = {parts}{missing}"


_PARTS: Final = ("pending", "fired", "queued", "done", "cancelled", "replaced", "dead")
