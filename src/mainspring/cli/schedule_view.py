"""`mainspring schedule list|show|history|lint`, and how schedules are shown as text."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mainspring.cli.listing import Cell, Instant, Listing, StateCell, connected, listing, print_rows
from mainspring.cli.options import Json, ScheduleName, completing, new_app
from mainspring.cli.output import print_json, print_message, printable, wrapped
from mainspring.cli.run import RUN_COLUMNS, run_row
from mainspring.cli.task import not_found, with_client
from mainspring.model.errors import NotFound
from mainspring.model.explain import span
from mainspring.model.run import KeptRun
from mainspring.model.schedule.chain import PastRun
from mainspring.model.schedule.definition import Definition
from mainspring.model.schedule.view import Finding, ScheduleView, describe_changes, revision_as_dict, written
from mainspring.model.schedule.zone import zone
from mainspring.node.schedule_file import read_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.client.client import Client
    from mainspring.config.config import Config

_RUNS_SHOWN: Final = 10
"""Runs of a schedule that `schedule show` prints from the history."""


def at(definition: Definition, ms: int) -> str:
    when = zone(definition.zone).datetime(ms)
    return f"{when.isoformat(sep=' ', timespec='milliseconds' if ms % 1000 else 'seconds')} {when.tzname()}"


def _row(view: ScheduleView) -> tuple[Cell, ...]:
    following = Instant(view.next_ms[0] if view.next_ms else None)
    definition = view.definition
    return view.name, StateCell(view.state), following, " | ".join(definition.times), definition.zone, definition.target


def lines(view: ScheduleView, *, past: bool = True) -> list[str]:
    """Describe a schedule; without `past`, leave its last runs to the history."""
    definition = view.definition
    shown = [f"{view.name}  ({view.state}, generation {view.generation})"]
    shown += [f"  {field:<12}{_plain(value)}" for field, value in written(definition).items()]
    if view.worst_case is not None:
        shown.append(f"  {'worst case':<12}{view.worst_case.text}")
    pause = definition.paused
    if view.state == "paused" and pause is not None:
        until = "" if pause.until_ms is None else f" until {at(definition, pause.until_ms)}"
        shown.append(
            f"  {'paused':<12}since {at(definition, pause.at_ms)}{until} ({pause.mode}) {pause.reason}".rstrip()
        )
    if definition.tz_version:
        shown.append(f"  {'tz data':<12}{definition.tz_version}")
    shown += [f"  {'next':<12}{at(definition, ms)}" for ms in view.next_ms]
    shown += [f"  {'ran':<12}{_run(definition, run)}" for run in view.last_runs if past]
    if view.running_since_ms is not None:
        shown.append(f"  {'running':<12}since {at(definition, view.running_since_ms)}")
    shown.append(f"  {'runs':<12}{view.runs}")
    if view.not_run:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(view.not_run.items()))
        shown.append(f"  {'not run':<12}{counts}")
    for slot in view.recent_not_run:
        shown.append(f"  {'':<12}{slot.count} {slot.reason} from {at(definition, slot.from_ms)}")
    return shown


def next_lines(definition: Definition, now_ms: int, runs: int = 0) -> list[str]:
    """Return the next three runs of a definition that is not stored, or was stored just now."""
    if definition.anchor_ms is None:
        definition = msgspec.structs.replace(definition, anchor_ms=now_ms - now_ms % 1000)
    return [f"  {'next':<12}{at(definition, ms)}" for ms in definition.next_runs(now_ms, runs=runs)]


def _run(definition: Definition, run: PastRun) -> str:
    took = "" if run.ended_ms is None else f" in {span(run.ended_ms - run.began_ms)}"
    return f"{at(definition, run.planned_ms)}  {run.outcome}{took}"


def _plain(value: Any) -> str:
    """Return a value for people: cron lines side by side, payloads as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        return " | ".join(value)
    return msgspec.json.encode(value).decode()


def revision(definition: Definition, former: Definition | None) -> list[str]:
    """Return a revision, and what it changed."""
    by = f" by {definition.by or definition.source or 'unknown'}"
    note = f": {definition.note}" if definition.note else ""
    head = f"{definition.generation:>4}  {at(definition, definition.at_ms)}{by}{note}"
    if former is None:
        return [head, f"      {' | '.join(definition.specs)} in {definition.zone}, {definition.target}"]
    return [head, *(f"    {line}" for line in _changed(describe_changes(former, definition)))]


def _changed(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    def said(value: Any) -> str:
        return "none" if value is None or value in ([], ()) else _plain(value)

    return [f"  {field}: {said(old)} -> {said(new)}" for field, (old, new) in changes.items()]


def with_outlook(view: ScheduleView, config: "Config") -> ScheduleView:
    """Add the worst case and the findings, unless a node's API has sent them, by the settings of this command."""
    from mainspring.node.schedule_lint import with_outlook as by_settings

    return by_settings(view, time.time_ns() // 1_000_000, config)


def warn(name: str, findings: Iterable[Finding]) -> None:
    """Print likely mistakes on standard error. That the default retries take long is reported by `lint` alone."""
    for finding in findings:
        if finding.code != "default-retries":
            print_message(f"warning: {name}: {finding.message} [{finding.code}]")


def show_changes(changes: Mapping[str, tuple[Any, Any]], json: bool) -> None:
    """Print what an edit would change."""
    if json:
        print_json({"changes": changes})
        return
    print("\n".join(_changed(changes)) or "nothing would change")


app = new_app()


@app.command("list")
@listing
def list_(config: "Config", limit: Annotated[int, typer.Option(help="At most this many; 0 for all.")] = 100) -> Listing:
    """List schedules by name, each with its next run."""

    async def work(client: "Client") -> list[ScheduleView]:
        return sorted([view async for view in client.schedules.all()], key=lambda view: view.name)

    views = with_client(config, work)
    chosen = views[:limit] if limit else views
    return Listing(
        columns=("NAME", "STATE", "NEXT", "TIMES", "ZONE", "TARGET"),
        rows=[_row(view) for view in chosen],
        value={"schedules": [view.as_dict() for view in chosen], "count": len(views)},
        empty="there are no schedules",
        hint="mainspring schedule add hello --every 10s --target log:",
        more="--limit 0" if len(chosen) < len(views) else None,
    )


@app.command()
@connected
def show(config: "Config", name: ScheduleName, json: Json = False) -> None:
    """Show one schedule: its next runs, its last ones, what did not run; exit code 1 if there is none."""

    async def work(client: "Client") -> tuple[ScheduleView | None, list[KeptRun]]:
        view = await client.schedules.get(name)
        return view, [] if view is None or json else (await client.runs(schedule=name, limit=_RUNS_SHOWN)).runs

    view, runs = with_client(config, work)
    if view is None:
        raise not_found(config, f"there is no schedule {name!r}")
    view = with_outlook(view, config)
    if json:
        print_json(view.as_dict())
    else:
        print("\n".join(map(printable, lines(view, past=not runs))))
        if runs:  # of the history, which has triggered ones and every attempt too
            print("\nLast runs")
            shown = [at for at, name in enumerate(RUN_COLUMNS) if name != "TARGET"]  # it is said above
            rows = [[row[at] for at in shown] for row in map(run_row, runs)]
            print_rows([RUN_COLUMNS[at] for at in shown], rows)


@app.command()
@connected
def history(config: "Config", name: ScheduleName, json: Json = False) -> None:
    """Show the revisions of a schedule, the present one first, and what each of them changed."""
    revisions = with_client(config, lambda client: client.schedules.history(name))
    if json:
        print_json({"name": name, "revisions": [revision_as_dict(one) for one in revisions]})
        return
    for one, former in zip(revisions, [*revisions[1:], None], strict=True):
        print("\n".join(revision(one, former)))


@app.command()
@connected
def lint(
    config: "Config",
    names: Annotated[
        list[str] | None, typer.Argument(help="Schedules; default all.", autocompletion=completing("schedules"))
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Those of a file instead; needs no server.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Report probable mistakes: clock changes, retries longer than the interval, many runs at midnight.

    Exit code 1 if there is anything to say.
    """

    found = _of_server(config, names) if file is None else _of_file(config, names, file)
    if missing := set(names or ()) - found.keys():
        what = f"there is no schedule {', '.join(map(repr, sorted(missing)))}"
        raise not_found(config, what) if file is None else NotFound(f"{what} in {file}")
    if json:
        print_json({"findings": {name: msgspec.to_builtins(some) for name, some in sorted(found.items()) if some}})
    else:
        for name, some in sorted(found.items()):
            for finding in some:
                print(wrapped(f"{name}: {finding.message} [{finding.code}]", indent=2))
        if not any(found.values()):
            print_message(f"nothing to report about {len(found)} {'schedule' if len(found) == 1 else 'schedules'}")
    raise typer.Exit(1 if any(found.values()) else 0)


def _of_server(loaded: "Config", names: list[str] | None) -> "dict[str, Sequence[Finding]]":
    async def work(client: "Client") -> list[ScheduleView]:
        # Over an API read them one by one, even if all are wanted: its lists leave out findings.
        wanted = names or [view.name async for view in client.schedules.all()]
        return list((await client.schedules.get_many(wanted)).values())

    return {view.name: with_outlook(view, loaded).findings for view in with_client(loaded, work)}


def _of_file(loaded: "Config", names: list[str] | None, file: Path) -> "dict[str, Sequence[Finding]]":
    from mainspring.node.schedule_lint import findings_of

    now_ms = time.time_ns() // 1_000_000
    definitions = read_file(file, timezone=loaded.timezone).schedules
    return {one.name: findings_of(one, now_ms, loaded) for one in definitions if not names or one.name in names}
