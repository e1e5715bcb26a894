"""`mainspring schedule`: recurring work from the command line."""

import json as json_text
import os
import time
from typing import Annotated

import typer

from mainspring.cli import schedule_edit, schedule_files, schedule_view
from mainspring.cli.options import new_group
from mainspring.cli.output import print_message
from mainspring.config.config import Config
from mainspring.model.errors import InvalidInput
from mainspring.model.limits import LAST_SHOWN_MS, LAST_START_MS
from mainspring.model.schedule.input import local_ms
from mainspring.model.schedule.recurrence import Recurrence, read_spec
from mainspring.model.schedule.view import lint
from mainspring.model.schedule.zone import Gap, Overlap, zone

app = new_group()

for _part in (schedule_edit, schedule_view, schedule_files):
    app.registered_commands += _part.app.registered_commands

_MAX_COUNT = 10_000


@app.callback()
def _schedule() -> None:
    """Recurring work: cron and intervals."""


@app.command()
def preview(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="'0 9 * * MON-FRI', '@daily', '@every 30s'.")],
    tz: Annotated[
        str | None, typer.Option("--tz", "--timezone", help="IANA time zone; default that of the settings, UTC.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Runs after this ISO time (of the zone, if without offset); default now."),
    ] = None,
    count: Annotated[int, typer.Option(help="How many runs.")] = 10,
    gap: Annotated[
        Gap, typer.Option("--dst-gap", "--gap", help="What to do with a fixed hour that a clock change skips.")
    ] = "shift",
    overlap: Annotated[
        Overlap, typer.Option("--dst-overlap", "--overlap", help="Which of two equal hours after a clock change.")
    ] = "first",
    exclude: Annotated[list[str] | None, typer.Option(help="A date, dates a..b, or a cron line; repeatable.")] = None,
    name: Annotated[str, typer.Option(help="The schedule's name: decides where H falls.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the next runs of a schedule; needs no server. With several specs, the runs of any of them."""
    if not 1 <= count <= _MAX_COUNT:
        raise InvalidInput(f"--count is {count}; it must lie between 1 and {_MAX_COUNT}")
    where = Config.load({}, os.environ).timezone if tz is None else tz
    from_ms = time.time_ns() // 1_000_000 if start is None else _instant(start, where)
    recurrence = Recurrence.parse(
        [read_spec(text, name, from_ms) for text in specs],  # an interval counts from the beginning of the preview
        name=name, zone=where, gap=gap, overlap=overlap, exclude=exclude or (),
    )  # fmt: skip
    for finding in lint(recurrence, from_ms):
        print_message(f"warning: {finding.message} [{finding.code}]")
    _show(_runs(recurrence, from_ms, count), where, json)


def _instant(text: str, tz: str) -> int:
    """Without an offset it is a time of the zone: that is what a person previewing a local time means."""
    try:
        at_ms = local_ms(text, tz, "--from")
    except OverflowError:  # the offset moves it beyond the calendar
        at_ms = -1
    if not 0 <= at_ms < LAST_START_MS:
        raise InvalidInput(f"--from {text[:40]!r} lies outside of what can be shown: give a time from 1970 to 3084")
    return at_ms


def _runs(recurrence: Recurrence, from_ms: int, count: int) -> list[int]:
    runs: list[int] = []
    at_ms = recurrence.next_after(from_ms)
    while at_ms is not None and at_ms < LAST_SHOWN_MS and len(runs) < count:
        runs.append(at_ms)
        at_ms = recurrence.next_after(at_ms)
    return runs


def _show(runs: list[int], tz: str, as_json: bool) -> None:
    times = [zone(tz).datetime(run) for run in runs]
    if as_json:
        print(json_text.dumps({"runs": [at.isoformat() for at in times]}))
        return
    for number, at in enumerate(times, 1):
        print(f"{number:>4}  {at:%a}  {at.isoformat(sep=' ')}  {at.tzname()}")
    if not times:
        print("no run: everything is excluded")
