"""`mainspring doctor`, `verify` and `notify`: is the setup sound, is every task accounted for, do notices arrive?"""

import asyncio
import contextlib
import secrets
import sys
import time
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from mainspring.cli.audited_client import record
from mainspring.cli.listing import Instant, Listing, connected, listing
from mainspring.cli.options import (
    Json,
    Namespace,
    Settings,
    completing,
    load,
    new_app,
    new_group,
    place_of,
    remote,
    server_url,
    to_try,
)
from mainspring.cli.output import ProgressBar, wrapped
from mainspring.cli.task import not_found, with_client
from mainspring.config.config import Config
from mainspring.model.delivery import Body, Dead, GivenDelivery, Outcome, Retry
from mainspring.model.errors import InvalidInput, Refused, Unavailable
from mainspring.model.explain import moment
from mainspring.model.ids import IDH_BYTES
from mainspring.model.notice import NOTIFY, Notice, Taken
from mainspring.model.text import escape
from mainspring.node.doctor import DoctorFinding, checkup
from mainspring.node.node import http_sink
from mainspring.sinks.notify import Digest, missing_for, send
from mainspring.store.keys import meta_key, slot_of
from mainspring.store.redis.servers import Servers
from mainspring.store.server_checks import Check
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.store.verify.report import KINDS, Report, ReportedFinding, TaskCounters

if TYPE_CHECKING:
    from mainspring.client.http import Api


doctor_app = new_app()


@doctor_app.command()
@connected
def doctor(
    config: "Config",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 at a warning as well.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Check the setup: servers, rights, speed, clocks, data, nodes, Kafka, this machine.

    Over an API the node looks at them in your place, which takes an admin's key.

    Exit codes: 0 ready to use, 1 something must be fixed first (with --strict: also at a warning), 2 the settings
    are wrong.
    """
    found = asyncio.run(_examine(config))
    if json:
        rows = [{"server": one.where} | msgspec.to_builtins(one.check) for one in found]
        print(msgspec.json.encode(rows).decode())
    else:
        for where, checks in groupby(found, lambda one: one.where):
            print(where)
            for one in checks:
                print(wrapped(f"  {one.check.status:8} {one.check.name}: {one.check.message}", indent=11))
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


verify_app = new_app()

MOST_SHOWN: Final = 20
"""Findings of one kind that are shown to people; JSON has more."""


@verify_app.command("verify")
@connected
def verify_(
    config: "Config",
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired; report each repair.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Prove that every accepted task is somewhere, and find orphans; nodes may keep running meanwhile.

    Exit code 1 when findings are left.
    """
    report = asyncio.run(_verify(config, repair=repair, shown=not json))
    if json:
        print(msgspec.json.encode(report.as_dict()).decode())
    else:
        print(wrapped(as_text(report, repair=repair), indent=4))
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
        raise InvalidInput(f"there is nothing to verify: {place_of(config)} does not exist")


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


notify_app = new_group(help="Channels of notices: list them, try one; beats of jobs that others run.")


@notify_app.command("list")
@listing
def list_channels(config: Config) -> Listing:
    """List the channels of the settings: where each leads, and which notices it gets."""
    channels = config.notify.of(config.namespace).values()
    rows = [(one.name, one.way.shown, one.rule.shown) for one in channels]
    return Listing(
        columns=("CHANNEL", "TO", "NOTICES"),
        rows=rows,
        value=[{"channel": name, "to": to, "notices": notices} for name, to, notices in rows],
        empty="no channel is set up",
        hint="a table [notify.<name>] in mainspring.toml",
    )


@notify_app.command("test")
def try_channel(
    channel: Annotated[str, typer.Argument(help="Name of the channel.", autocompletion=completing("channels"))],
    namespace: Namespace = None,
    config: Settings = None,
) -> None:
    """Send a notice through a channel of the settings, from this machine, and say whether it was accepted."""
    found = load(None, None, namespace, config)
    if channel not in found.notify:
        hint = f"there are {', '.join(found.notify)}" if found.notify else "add [notify.<name>] to the settings"
        raise InvalidInput(f"there is no channel {channel!r}; {hint}")
    outcome = asyncio.run(_try_channel(found, channel))
    if isinstance(outcome, Retry | Dead):
        print(f"mainspring: {escape(outcome.reason)}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"sent: {found.notify[channel].way.shown}")


async def _try_channel(config: Config, name: str) -> Outcome:
    now_ms = time.time_ns() // 1_000_000
    example = Notice(
        "failed", "schedule:example", now_ms, now_ms, reason="a test; nothing has failed", by="notify test"
    )
    digest = Digest(config.namespace, name, Taken({"failed": 1}, [example]))
    delivery = GivenDelivery(
        Body(f"{NOTIFY}:{name}", b"null"), config.namespace, secrets.token_bytes(IDH_BYTES), now_ms
    )
    channel, http = config.notify[name], http_sink(config)
    try:
        lacks = missing_for(channel, http)
        return Retry(lacks) if lacks is not None else await send(channel, digest, delivery, http)
    finally:
        await http.aclose()


@notify_app.command("beat")
@connected
def send_beat(
    config: "Config",
    name: Annotated[str, typer.Argument(help="Name of the job that has ended well.")],
    every: Annotated[str | None, typer.Option(help="How often beats are expected.")] = None,
    cron: Annotated[str | None, typer.Option(help="Cron line by which they are expected.")] = None,
    timezone: Annotated[str | None, typer.Option("--tz", "--timezone", help="Its time zone; UTC.")] = None,
    grace: Annotated[str | None, typer.Option(help="How late a beat may come; 1m.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Watch for this beat no more.")] = False,
) -> None:  # fmt: skip
    """Report that a job of another program has succeeded, and when the next beat is expected."""
    if not remove:
        when = {"every": every, "cron": cron, "timezone": timezone, "grace": grace}
        beat = with_client(config, lambda client: client.beat(name, **when))
        print(f"{name}: the next beat is expected until {moment(beat.deadline_ms)}")
    elif with_client(config, lambda client: client.remove_beat(name)):
        print(f"{name}: removed")
    else:
        error = not_found(config, f"there is no beat {name!r}")
        error.add_note(to_try(config, "mainspring notify beats"))
        raise error


@notify_app.command("beats")
@listing
def list_beats(config: "Config") -> Listing:
    """List the jobs of others that are watched: when they are expected, and when they last reported."""
    found = with_client(config, lambda client: client.beats())
    return Listing(
        columns=("NAME", "EXPECTED", "LAST", "DEADLINE"),
        rows=[(one.name, one.expected.shown, Instant(one.last_ms or None), Instant(one.deadline_ms)) for one in found],
        value=[one.as_dict() for one in found],
        empty="no beats are watched",
        hint="mainspring notify beat backup --every 1d",
    )
