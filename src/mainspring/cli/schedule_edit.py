"""`mainspring schedule add|edit|pause|…`: commands that change schedules or run them by hand, and their options."""

import functools
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mainspring.cli import schedule_view as shown
from mainspring.cli.audited_client import user
from mainspring.cli.listing import connected
from mainspring.cli.options import (
    DataDir,
    Json,
    Namespace,
    RedisUrl,
    ScheduleName,
    Settings,
    completing,
    json_of,
    load,
    new_app,
)
from mainspring.cli.output import ProgressBar, print_json
from mainspring.cli.task import not_found, with_client
from mainspring.config.config import Config
from mainspring.model.errors import InvalidInput
from mainspring.model.schedule.definition import PauseMode
from mainspring.model.schedule.input import edited_by
from mainspring.model.schedule.view import ScheduleView
from mainspring.model.schedule.zone import Gap, Overlap

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.client.schedules import OnExisting


OPTIONS: Final[dict[str, Any]] = {
    "cron": Annotated[
        list[str] | None, typer.Option(help="'0 2 * * *', '@daily'; repeatable: it runs at all of them.")
    ],
    "every": Annotated[list[str] | None, typer.Option(help="30s, 5m: from when it was added, or from --start.")],
    "after_end": Annotated[str | None, typer.Option(help="This long after the end of the previous run.")],
    "target": Annotated[
        str | None,
        typer.Option(
            help="command:backup, https://…, queue:mail/send, kafka:topic, log:",
            autocompletion=completing("targets"),
        ),
    ],
    "payload": Annotated[str | None, typer.Option(help="JSON; - reads it from standard input.")],
    "tz": Annotated[
        str | None, typer.Option("--tz", "--timezone", help="IANA time zone; default that of the settings, UTC.")
    ],
    "exclude": Annotated[list[str] | None, typer.Option(help="A date, dates a..b, or a cron line; repeatable.")],
    "start": Annotated[str | None, typer.Option(help="Not before this time.")],
    "end": Annotated[str | None, typer.Option(help="Not after this time.")],
    "max_runs": Annotated[int | None, typer.Option(help="End after this many runs; 0: no limit.")],
    "dst_gap": Annotated[Gap | None, typer.Option(help="What to do with a fixed hour that a clock change skips.")],
    "dst_overlap": Annotated[Overlap | None, typer.Option(help="Which of two equal hours after a clock change.")],
    "lane": Annotated[str | None, typer.Option(help="Runs are tasks of this lane.")],
    "retry": Annotated[str | None, typer.Option(help="Retry policy, e.g. '3 base=200ms jitter=500ms'.")],
    "retries": Annotated[int | None, typer.Option(help="Further attempts after a failed first one.")],
    "retry_base": Annotated[str | None, typer.Option(help="Old: the base of --retry.", hidden=True)],
    "retry_jitter": Annotated[str | None, typer.Option(help="Old: the jitter of --retry.", hidden=True)],
    "timeout": Annotated[str | None, typer.Option(help="How long one attempt may take.")],
    "misfire": Annotated[
        str | None,
        typer.Option(
            help="Runs missed while no node was running: coalesce, skip, all(<most>).",
            autocompletion=lambda: ["coalesce", "skip", "all"],
        ),
    ],
    "grace": Annotated[
        str | None, typer.Option(help="How late a run may begin before it counts as missed; default 60s.")
    ],
    "overlap": Annotated[
        str | None,
        typer.Option(
            help="If the previous run has not ended: skip, buffer_one, buffer_all(<n>), allow.",
            autocompletion=lambda: ["skip", "buffer_one", "buffer_all", "allow"],
        ),
    ],
    "jitter": Annotated[str | None, typer.Option(help="Start each run up to this much later.")],
    "spread": Annotated[
        str | None, typer.Option(help="Start all runs later by a fixed part of this, chosen by the name.")
    ],
    "pinned": Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Keep it as it is when a program declares it otherwise.")
    ],
    "note": Annotated[str | None, typer.Option(help="Reason; kept with the revision.")],
    "by": Annotated[
        str | None, typer.Option(help="Author; kept with the revision; default is the user of this machine.")
    ],
}
_POLICY: Final = {"retry_base": "base", "retry_jitter": "jitter"}
"""Old options for parts of a policy, without `--retry`."""

_TAKES_AWAY: Final[dict[str, tuple[Any, Any]]] = {
    **dict.fromkeys(("start", "end", "retry", "timeout", "jitter", "spread", "after_end"), ("", None)),
    **dict.fromkeys(("exclude", "cron", "every"), ([""], [])),
    "max_runs": (0, None),
}
"""Empty values with which an edit removes a field, and what the client gets instead."""


def takes_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all of these options; it gets the given values as `fields`.

    A command line is made from the signature of a function: this one has the options in the place of `fields`.
    """

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(fields=fields_of({option: given.pop(option) for option in OPTIONS}), **given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        if one.name == "fields":
            parameters += [inspect.Parameter(name, kind, default=None, annotation=OPTIONS[name]) for name in OPTIONS]
        else:
            parameters.append(one)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the command line as the client takes them."""
    fields = {name: value for name, value in options.items() if value is not None and name not in _POLICY}
    if "tz" in fields:
        fields["timezone"] = fields.pop("tz")
    for name, (empty, nothing) in _TAKES_AWAY.items():
        if fields.get(name) == empty:
            fields[name] = nothing
    if "payload" in fields:
        fields["payload"] = msgspec.json.decode(json_of(fields["payload"], "--payload"))
    policy = {field: options[name] for name, field in _POLICY.items() if options.get(name) is not None}
    if policy:
        if "retry" in fields:
            raise InvalidInput("--retry-base and --retry-jitter are old; write them into --retry: '3 base=200ms'")
        fields["retry"] = policy | {name: fields.pop(name) for name in ("retries",) if name in fields}
    return fields


app = new_app()

ChangedBy = Annotated[str | None, typer.Option(help="Who; default is the user of this machine.")]

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


def _author(by: str | None) -> str:
    return user() if by is None else by


@app.command()
@takes_fields
def add(
    name: Annotated[str, typer.Argument(help="A name for it.")], fields: dict[str, Any],
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
    name: ScheduleName, fields: dict[str, Any],
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
    name: ScheduleName, fields: dict[str, Any],
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show what `edit` with the same options would change, and the next three runs afterwards."""
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
@connected
def pause(
    config: "Config", name: ScheduleName,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    by: ChangedBy = None,
    until: Annotated[str | None, typer.Option(help="Resume by itself: at a time, or after a delay such as 2h.")] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Treat runs during the pause by the misfire rule.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Pause a schedule."""
    mode: PauseMode = "hold" if hold else "drop"
    view = with_client(
        config, lambda client: client.schedules.pause(name, reason=reason, by=_author(by), until=until, mode=mode)
    )
    _show(view, config, json)


@app.command()
@connected
def resume(config: "Config", name: ScheduleName, by: ChangedBy = None, json: Json = False) -> None:
    """Resume a paused schedule."""
    _show(with_client(config, lambda client: client.schedules.resume(name, by=_author(by))), config, json)


@app.command()
@connected
def remove(config: "Config", name: ScheduleName, json: Json = False) -> None:
    """Remove a schedule and cancel its planned run; exit code 1 if there is none."""
    removed = with_client(config, lambda client: client.schedules.remove(name))
    if json:
        print_json({"name": name, "removed": removed})
        raise typer.Exit(0 if removed else 1)
    if not removed:
        raise not_found(config, f"there is no schedule {name!r}")
    print(f"{name}: removed")


@app.command()
@connected
def rollback(
    config: "Config", name: ScheduleName,
    generation: Annotated[int | None, typer.Argument(help="Which; default the one before this.")] = None,
    by: ChangedBy = None, json: Json = False,
) -> None:  # fmt: skip
    """Restore a former revision."""
    view = with_client(config, lambda client: client.schedules.rollback(name, generation, by=_author(by)))
    _show(view, config, json, warns=True)


@app.command()
@connected
def trigger(config: "Config", name: ScheduleName, json: Json = False) -> None:
    """Run a schedule now, in addition to its planned runs."""
    handle = with_client(config, lambda client: client.schedules.trigger(name))
    if json:
        print_json({"id": handle.id, "due_ms": handle.due_ms})
    else:
        print(handle.id)


@app.command()
@connected
def backfill(
    config: "Config", name: ScheduleName,
    start: Annotated[str, typer.Option("--start", "--from", help="The first time, included.")],
    end: Annotated[str, typer.Option("--end", "--to", help="The last time, not included.")],
    rate: Annotated[float | None, typer.Option(help="At most this many runs a second.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many there are.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Run what was planned in a past range, except what has run already."""
    with ProgressBar("runs", shown=not json) as bar:
        done = with_client(
            config,
            lambda client: client.schedules.backfill(
                name, start=start, end=end, rate=rate, dry_run=dry_run, progress=bar
            ),
        )
    if json:
        print_json(msgspec.to_builtins(done))
    elif dry_run:
        print(f"{name}: {done.planned} runs were planned in this range")
    else:
        print(f"{name}: {done.created} runs put, {done.kept} were known")
