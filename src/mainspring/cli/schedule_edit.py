"""`mainspring schedule add|edit|pause|…`: what changes schedules, and what runs them by hand."""

import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mainspring.cli import schedule_show as shown
from mainspring.cli.progress import Bar
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.schedule_fields import takes_fields
from mainspring.cli.task import print_json, when_of, with_client
from mainspring.cli.witness import user
from mainspring.config import Config
from mainspring.model.schedule import PauseMode
from mainspring.model.schedule_input import edited_by
from mainspring.model.schedule_view import ScheduleView

if TYPE_CHECKING:
    from mainspring.client import Client
    from mainspring.schedules import OnExisting

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

By = Annotated[str | None, typer.Option(help="Who; default is the user of this machine.")]

_EMPTY: Final = (
    "Of --cron, --every and --after-end those that are not given stay. "
    "An empty text takes away what was there: --cron '', --end '', --jitter '', --exclude ''."
)


def _show(view: ScheduleView, loaded: Config, json: bool, *, warns: bool = False) -> None:
    view = shown.with_outlook(view, loaded)
    if warns:
        shown.warn(view.name, view.findings)
    if json:
        print_json(view.as_dict())
    else:
        print("\n".join(shown.lines(view)))


def _who(by: str | None) -> str:
    return user() if by is None else by


@app.command()
@takes_fields
def add(
    name: str, fields: dict[str, Any],
    replace: Annotated[bool, typer.Option("--replace", help="Edit the one of this name, if there is one.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Add a schedule; shows its next three runs."""

    def work(client: "Client") -> "Coroutine[Any, Any, ScheduleView]":
        rule: OnExisting = "replace" if replace else "reject"
        return client.schedules.add(name, on_conflict=rule, **{"by": user(), **fields})

    loaded = load(redis_url, data_dir, namespace, config)
    _show(with_client(loaded, work, makes=True), loaded, json, warns=True)


@app.command(epilog=_EMPTY)
@takes_fields
def edit(
    name: str, fields: dict[str, Any],
    generation: Annotated[int | None, typer.Option(help="Fail if it has another generation by now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Change some fields of a schedule, at once; what is not given stays."""
    loaded = load(redis_url, data_dir, namespace, config)
    if dry_run:
        return _show_diff(loaded, name, fields, json)

    def work(client: "Client") -> "Coroutine[Any, Any, ScheduleView]":
        return client.schedules.edit(name, generation=generation, **{"by": user(), **fields})

    return _show(with_client(loaded, work), loaded, json, warns=True)


@app.command(epilog=_EMPTY)
@takes_fields
def diff(
    name: str, fields: dict[str, Any],
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show what `edit` with the same options would change, and the next three runs after it."""
    _show_diff(load(redis_url, data_dir, namespace, config), name, fields, json)


def _show_diff(loaded: Config, name: str, fields: dict[str, Any], json: bool) -> None:
    async def work(client: "Client") -> tuple[dict[str, tuple[Any, Any]], ScheduleView | None]:
        return await client.schedules.diff(name, **fields), await client.schedules.get(name)

    changes, view = with_client(loaded, work)
    shown.show_changes(changes, json)
    if changes and view is not None and not json:
        edited = edited_by(view.definition, fields)
        print("\n".join(shown.next_lines(edited, time.time_ns() // 1_000_000, view.runs)))


@app.command()
def pause(
    name: str,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    by: By = None,
    until: Annotated[str | None, typer.Option(help="Go on by itself: a time, or after 2h.")] = None,
    hold: Annotated[bool, typer.Option("--hold", help="What falls into it follows the misfire rule.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let a schedule rest."""
    mode: PauseMode = "hold" if hold else "drop"
    loaded = load(redis_url, data_dir, namespace, config)
    view = with_client(
        loaded, lambda client: client.schedules.pause(name, reason=reason, by=_who(by), until=until, mode=mode)
    )
    _show(view, loaded, json)


@app.command()
def resume(
    name: str, by: By = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let a paused schedule go on."""
    loaded = load(redis_url, data_dir, namespace, config)
    _show(with_client(loaded, lambda client: client.schedules.resume(name, by=_who(by))), loaded, json)


@app.command()
def remove(
    name: str,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Remove a schedule and cancel its planned run; exit code 1 if there is none."""
    removed = with_client(load(redis_url, data_dir, namespace, config), lambda client: client.schedules.remove(name))
    if json:
        print_json({"name": name, "removed": removed})
    else:
        print(f"{name}: removed" if removed else f"{name}: there is no such schedule")
    raise typer.Exit(0 if removed else 1)


@app.command()
def rollback(
    name: str,
    generation: Annotated[int | None, typer.Argument(help="Which; default the one before this.")] = None,
    by: By = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Make a former revision the present one again."""
    loaded = load(redis_url, data_dir, namespace, config)
    view = with_client(loaded, lambda client: client.schedules.rollback(name, generation, by=_who(by)))
    _show(view, loaded, json, warns=True)


@app.command()
def trigger(
    name: str,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Run a schedule now, once more; its planned runs stay as they are."""
    loaded = load(redis_url, data_dir, namespace, config)
    handle = with_client(loaded, lambda client: client.schedules.trigger(name))
    if json:
        print_json({"id": handle.id, "due_ms": handle.due_ms})
    else:
        print(handle.id)


@app.command()
def backfill(
    name: str,
    start: Annotated[str, typer.Option("--from", help="The first time, included.")],
    end: Annotated[str, typer.Option("--to", help="The last time, not included.")],
    rate: Annotated[float | None, typer.Option(help="So many runs a second, at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many there are.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Run what was planned in a range and has passed; what ran already is left alone."""
    loaded = load(redis_url, data_dir, namespace, config)
    first, last = when_of(start) or start, when_of(end) or end
    with Bar("runs", shown=not json) as bar:
        done = with_client(
            loaded,
            lambda client: client.schedules.backfill(
                name, start=first, end=last, rate=rate, dry_run=dry_run, progress=bar
            ),
        )
    if json:
        print_json(msgspec.to_builtins(done))
    elif dry_run:
        print(f"{name}: {done.planned} runs were planned in this range")
    else:
        print(f"{name}: {done.created} runs put, {done.kept} were known")
