"""`mainspring schedule apply|import`: schedules from files, ours and those of other programs."""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import typer

from mainspring.cli import schedule_view as shown
from mainspring.cli.audited_client import user
from mainspring.cli.listing import connected
from mainspring.cli.options import Json, new_app
from mainspring.cli.output import print_json
from mainspring.cli.task import with_client
from mainspring.model.errors import InvalidInput
from mainspring.model.schedule.definition import Definition
from mainspring.model.schedule.importers import Imported, read_celery, read_crontab, read_redbeat, to_toml
from mainspring.model.schedule.view import ScheduleView
from mainspring.node.schedule_file import Step, carry_out, plan, read_file

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.config.config import Config

app = new_app()

ApplyDryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")]
ScheduleSource = Annotated[
    str | None, typer.Option(help="Whose schedules these are; default what the file says, or its name.")
]


@app.command()
@connected
def apply(
    config: "Config",
    file: Annotated[Path, typer.Option("--file", "-f", help="TOML with [schedules.<name>] tables.")],
    prune: Annotated[bool, typer.Option("--prune", help="Remove those of this source that it lacks.")] = False,
    source: ScheduleSource = None, dry_run: ApplyDryRun = False, json: Json = False,
) -> None:  # fmt: skip
    """Apply the schedules of a file to the server; shows what changes, and is safe to repeat."""
    whose, wanted = read_file(file, source, timezone=config.timezone)
    applied = with_client(config, lambda client: _apply(client, wanted, whose, prune, dry_run), makes=not dry_run)
    _show_applied(applied, config, dry_run, json)


class _Applied(NamedTuple):
    steps: list[Step]
    written: dict[str, ScheduleView]
    """Schedules that the steps have written; empty in a dry run."""


async def _apply(client: "Client", wanted: list[Definition], source: str, prune: bool, dry_run: bool) -> _Applied:
    named = [msgspec.structs.replace(one, by=one.by or user()) for one in wanted]
    steps = await plan(client.schedules, named, source, prune=prune)
    if dry_run:
        return _Applied(steps, {})
    await carry_out(client.schedules, steps)
    names = [step.name for step in steps if step.action in ("create", "change")]
    return _Applied(steps, await client.schedules.get_many(names))


def _show_applied(applied: _Applied, config: "Config", dry_run: bool, json: bool) -> None:
    _warn(applied, config)
    steps = applied.steps
    if json:
        rows = [{"name": one.name, "action": one.action, "changes": dict(one.changes)} for one in steps]
        print_json({"steps": rows, "applied": not dry_run})
        return
    now_ms = time.time_ns() // 1_000_000
    for step in steps:
        if step.action != "same":
            print("\n".join(step.lines()))
        if step.action in ("create", "change") and step.definition is not None:
            print("\n".join(f"  {line}" for line in shown.next_lines(step.definition, now_ms)))
    same = sum(step.action in ("same", "over") for step in steps)
    print(f"{len(steps) - same} {'to change' if dry_run else 'changed'}, {same} as they were", file=sys.stderr)


def _warn(applied: _Applied, config: "Config") -> None:
    """Warn about the schedules as the server has them now, or in a dry run as the file has them."""
    from mainspring.node.schedule_lint import findings_of

    now_ms = time.time_ns() // 1_000_000
    for step in applied.steps:
        if step.name in applied.written:
            shown.warn(step.name, shown.with_outlook(applied.written[step.name], config).findings)
        elif step.action in ("create", "change") and step.definition is not None:
            shown.warn(step.name, findings_of(step.definition, now_ms, config))


ImportFormat = Literal["crontab", "celery", "redbeat"]


@app.command("import")
@connected
def import_(
    config: "Config",
    file: Annotated[Path | None, typer.Argument(help="The file; not for redbeat.")] = None,
    kind: Annotated[ImportFormat, typer.Option("--format", help="What wrote the file.")] = "crontab",
    tz: Annotated[str | None, typer.Option("--tz", "--timezone", help="Its time zone; default the settings'.")] = None,
    system: Annotated[bool, typer.Option("--system", help="A crontab with users, as /etc/crontab.")] = False,
    url: Annotated[str, typer.Option("--from", help="For redbeat: the server that has its keys.")] = "redis://localhost",
    prefix: Annotated[str, typer.Option(help="For redbeat: how its keys begin.")] = "redbeat:",
    out: Annotated[Path | None, typer.Option(help="Write a file for `apply` instead of adding them.")] = None,
    source: ScheduleSource = None, dry_run: ApplyDryRun = False, json: Json = False,
) -> None:  # fmt: skip
    """Import schedules of cron, Celery beat or RedBeat; exit code 1 if some could not be imported."""
    found = _read(kind, file, tz or config.timezone, system, url, prefix)
    whose = source or (file.stem if file is not None else kind)
    text = to_toml(found) if out is not None else ""
    for name, argv in found.commands.items():
        lines = f"[commands.{name}]\nargv = {msgspec.json.encode(argv).decode()}"
        print(f"add this to the mainspring.toml of the workers:\n{lines}", file=sys.stderr)
    for problem in found.problems:
        print(f"look at this: {problem}", file=sys.stderr)
    if out is not None:
        _write(out, text)
        print(f"{out}: {len(found.definitions)} schedules", file=sys.stderr)
    else:
        wanted = [msgspec.structs.replace(one, source=whose) for one in found.definitions]
        applied = with_client(config, lambda client: _apply(client, wanted, whose, False, dry_run), makes=not dry_run)
        _show_applied(applied, config, dry_run, json)
    raise typer.Exit(1 if found.problems else 0)


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None


def _read(kind: ImportFormat, file: Path | None, tz: str, system: bool, url: str, prefix: str) -> Imported:
    if kind == "redbeat":
        return read_redbeat(asyncio.run(_redbeat_keys(url, prefix)), zone=tz)
    if file is None:
        raise InvalidInput("give the file to import")
    try:
        text = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8: {error}") from None
    return read_crontab(text, zone=tz, system=system) if kind == "crontab" else read_celery(text, zone=tz)


async def _redbeat_keys(url: str, prefix: str) -> dict[str, str]:
    from mainspring.store.redbeat import hash_fields

    return await hash_fields(url, prefix, "definition")
