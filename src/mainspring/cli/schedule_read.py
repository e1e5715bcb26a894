"""`mainspring schedule list|show|history|lint`: what only looks."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from mainspring.cli import schedule_show as shown
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.table import aligned, printable
from mainspring.cli.task import print_json, with_client
from mainspring.model.errors import NotFound
from mainspring.model.schedule_view import ScheduleView, revision_as_dict
from mainspring.schedule_file import read_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.client import Client
    from mainspring.config import Config
    from mainspring.model.lint import Finding

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="At most so many; 0 for all.")] = 100,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List schedules by name, each with its next three runs."""

    async def work(client: "Client") -> list[ScheduleView]:
        return sorted([view async for view in client.schedules.all()], key=lambda view: view.name)

    views = with_client(load(redis_url, data_dir, namespace, config), work)
    chosen = views[:limit] if limit else views
    if json:
        print_json({"schedules": [view.as_dict() for view in chosen], "count": len(views)})
        return
    for line in aligned([shown.row(view) for view in chosen]):
        print(line)
    if len(chosen) < len(views):
        print(f"{len(views) - len(chosen)} more: --limit 0", file=sys.stderr)


@app.command()
def show(
    name: str,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show one schedule: its next runs, its last ones, what did not run; exit code 1 if there is none."""
    loaded = load(redis_url, data_dir, namespace, config)
    view = with_client(loaded, lambda client: client.schedules.get(name))
    if view is None:
        print(f"{name}: there is no such schedule", file=sys.stderr)
        raise typer.Exit(1)
    view = shown.with_outlook(view, loaded)
    if json:
        print_json(view.as_dict())
    else:
        print("\n".join(map(printable, shown.lines(view))))


@app.command()
def history(
    name: str,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show the revisions of a schedule, the present one first, and what each of them changed."""
    loaded = load(redis_url, data_dir, namespace, config)
    revisions = with_client(loaded, lambda client: client.schedules.history(name))
    if json:
        print_json({"name": name, "revisions": [revision_as_dict(one) for one in revisions]})
        return
    for one, former in zip(revisions, [*revisions[1:], None], strict=True):
        print("\n".join(shown.revision(one, former)))


@app.command()
def lint(
    names: Annotated[list[str] | None, typer.Argument(help="Schedules; default all.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Those of a file instead; needs no server.")] = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Say what is probably not meant: clock changes, retries longer than the interval, everyone at midnight.

    Exit code 1 if there is anything to say.
    """

    loaded = load(redis_url, data_dir, namespace, config)
    found = _of_server(loaded, names) if file is None else _of_file(loaded, names, file)
    if missing := set(names or ()) - found.keys():
        raise NotFound(f"there is no schedule {', '.join(map(repr, sorted(missing)))}")
    if json:
        print_json({"findings": {name: msgspec.to_builtins(some) for name, some in sorted(found.items()) if some}})
    else:
        for name, some in sorted(found.items()):
            for finding in some:
                print(f"{name}: {finding.message} [{finding.code}]")
    raise typer.Exit(1 if any(found.values()) else 0)


def _of_server(loaded: "Config", names: list[str] | None) -> "dict[str, Sequence[Finding]]":
    async def work(client: "Client") -> list[ScheduleView]:
        # One by one over an API, also when all are meant: its lists leave findings out.
        wanted = names or [view.name async for view in client.schedules.all()]
        return list((await client.schedules.get_many(wanted)).values())

    return {view.name: shown.with_outlook(view, loaded).findings for view in with_client(loaded, work)}


def _of_file(loaded: "Config", names: list[str] | None, file: Path) -> "dict[str, Sequence[Finding]]":
    from mainspring.schedule_outlook import findings_of

    now_ms = time.time_ns() // 1_000_000
    definitions = read_file(file, timezone=loaded.timezone).schedules
    return {one.name: findings_of(one, now_ms, loaded) for one in definitions if not names or one.name in names}
