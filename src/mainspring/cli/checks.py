"""`mainspring doctor` and `mainspring verify`: is the setup sound, and is every task accounted for?"""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from mainspring.cli.audited_client import record
from mainspring.cli.options import DataDir, Json, Namespace, RedisUrl, Settings, load, remote, server_url
from mainspring.cli.output import ProgressBar
from mainspring.config.config import Config
from mainspring.model.errors import InvalidInput, Refused, Unavailable
from mainspring.node.doctor import DoctorFinding, checkup
from mainspring.store.keys import meta_key, slot_of
from mainspring.store.redis.servers import Servers
from mainspring.store.server_checks import Check
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.store.verify.report import KINDS, Report, ReportedFinding, TaskCounters

if TYPE_CHECKING:
    from mainspring.client.http import Api


doctor_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@doctor_app.command()
def doctor(
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    config: Settings = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 at a warning as well.")] = False,
    json: Json = False,
) -> None:
    """Check the whole set-up: servers, rights, speed, clocks, data, nodes, Kafka, this machine.

    Over an API the node looks at them in your place, which takes an admin's key.

    Exit codes: 0 ready to use, 1 something must be fixed first (with --strict: also at a warning), 2 the settings
    are wrong.
    """
    found = asyncio.run(_examine(load(redis_url, data_dir, namespace, config)))
    if json:
        rows = [{"server": one.where} | msgspec.to_builtins(one.check) for one in found]
        print(msgspec.json.encode(rows).decode())
    else:
        for where, check in found:
            print(f"{check.status:8} {where}  {check.name}: {check.message}")
    serious = ("error", "warning") if strict else ("error",)
    if any(one.check.status in serious for one in found):
        raise typer.Exit(1)


async def _examine(config: Config) -> list[DoctorFinding]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return _over(api)
    async with server_url(config) as url:
        return await checkup(config, url)


def _over(api: "Api") -> list[DoctorFinding]:
    """Check the connection to the node, then report what the node itself finds."""
    try:
        began = time.perf_counter()
        api.get("/livez")
        took_ms = (time.perf_counter() - began) * 1000
        rows = api.get("/v1/doctor")["checks"]
    except (Unavailable, Refused) as error:
        advice = "Is the node running, is the URL right, is the key one of an admin?"
        return [DoctorFinding(api.where, Check("reach", "error", f"{error}. {advice}"))]
    reached = DoctorFinding(api.where, Check("reach", "ok", f"the API answered within {took_ms:.0f} ms"))
    return [reached, *(DoctorFinding(row.pop("server"), Check(**row)) for row in rows)]


verify_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

MOST_SHOWN: Final = 20
"""Findings of one kind shown to people; JSON has more."""


@verify_app.command("verify")
def verify_(
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired; report each repair.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Prove that every accepted task is somewhere, and find orphans; nodes may keep running meanwhile.

    Exit code 1 when findings are left.
    """
    report = asyncio.run(_verify(load(redis_url, data_dir, namespace, config), repair=repair, shown=not json))
    print(msgspec.json.encode(report.as_dict()).decode() if json else as_text(report, repair=repair))
    if report.left:
        raise typer.Exit(1)


async def _verify(config: Config, *, repair: bool, shown: bool) -> Report:
    async with server_url(config) as url:
        await _check_there(url, config)
        opened = await Store.open(
            url, namespace=config.namespace, partitions=config.partitions, options=config.links, makes=False
        )
        async with contextlib.aclosing(opened) as store:
            with ProgressBar("partitions", shown=shown) as bar:
                report = await verify(store, repair=repair, progress=bar)
            if repaired := {kind: count for kind, count in report.repaired.items() if count}:
                await record(store, config.audit_entries, "verify.repair", report.namespace, None, repaired)
            return report


async def _check_there(url: str, config: Config) -> None:
    """Refuse a namespace without a partition count: misspelt, or lost by its server, it must not be called clean."""
    async with contextlib.aclosing(await Servers.connect(url, config.links)) as servers:
        namespace = config.namespace
        [found] = await servers.for_slot(slot_of(namespace)).pipeline([("HGET", meta_key(namespace), "partitions")])
    if found is None:
        raise InvalidInput(f"there is no namespace {namespace!r} on this server: nothing to verify")


def as_text(report: Report, *, repair: bool) -> str:
    total = report.total
    lines = [f"namespace {report.namespace}: {report.partitions} partitions, {report.slices} slices", _sum_of(total)]
    lines += [f"partition {number}: {_sum_of(counters)}" for number, counters in report.uneven.items()]
    if not report.found:
        return "\n".join([*lines, "the counters balance, nothing is orphaned"])
    for kind, count in report.found.items():
        reported = [one for one in report.reported if one.finding.kind == kind]
        lines += ["", f"{kind}: {KINDS[kind]} ({count})"]
        lines += [line for one in reported[:MOST_SHOWN] for line in _lines_of(one)]
        if count > MOST_SHOWN:
            lines.append(f"  and {count - MOST_SHOWN} more; --json lists them")
    end = f"{report.repaired.total()} repaired, {report.left} left" if repair else "to repair, add --repair"
    return "\n".join([*lines, "", f"findings: {report.found.total()}; {end}"])


def _lines_of(reported: ReportedFinding) -> list[str]:
    finding, repair = reported
    place = "" if finding.partition is None else f"partition {finding.partition}  "
    lines = [f"  {place}{finding.where}", f"    {finding.problem}"]
    if repair is not None:
        lines.append(f"    {'repaired' if repair.done else 'not repaired'}: {repair.text}")
    elif finding.advice:
        lines.append(f"    {finding.advice}")
    return lines


def _sum_of(counters: TaskCounters) -> str:
    parts = " + ".join(f"{name} {getattr(counters, name)}" for name in _PARTS)
    missing = f" + missing {counters.missing}" if counters.missing else ""
    return f"accepted {counters.accepted} = {parts}{missing}"


_PARTS: Final = ("pending", "fired", "queued", "done", "cancelled", "replaced", "dead")
