"""`mainspring schedule add|edit|pause|…`: what changes schedules, and what runs them by hand."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mainspring.cli import schedule_show as shown
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.task import print_json, when_of, with_client
from mainspring.model.errors import InvalidInput
from mainspring.model.schedule import PauseMode
from mainspring.model.schedule_view import ScheduleView

if TYPE_CHECKING:
    from mainspring.client import Client

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Cron = Annotated[list[str] | None, typer.Option(help="'0 2 * * *', '@daily'; repeatable: it runs at all of them.")]
Every = Annotated[list[str] | None, typer.Option(help="30s, 5m: from when it was added, or from --start.")]
AfterEnd = Annotated[str | None, typer.Option(help="So long after the end of the run before.")]
Target = Annotated[str | None, typer.Option(help="command:backup, https://…, queue:mail/send, kafka:topic, log:")]
Payload = Annotated[str | None, typer.Option(help="JSON; - reads it from standard input.")]
Zone = Annotated[str | None, typer.Option("--tz", help="IANA time zone; default that of the settings, UTC.")]
Exclude = Annotated[list[str] | None, typer.Option(help="A date, dates a..b, or a cron line; repeatable.")]
Start = Annotated[str | None, typer.Option(help="Not before this time.")]
End = Annotated[str | None, typer.Option(help="Not after this time.")]
MaxRuns = Annotated[int | None, typer.Option(help="So many runs, then no more.")]
Gap = Annotated[str | None, typer.Option("--dst-gap", help="A fixed hour that is jumped over: shift or skip.")]
Twice = Annotated[str | None, typer.Option("--dst-overlap", help="One that comes twice: first, second, both.")]
Lane = Annotated[str | None, typer.Option(help="Runs are tasks of this lane.")]
Retry = Annotated[str | None, typer.Option(help="Retry policy, e.g. '3 base=200ms jitter=500ms'.")]
Retries = Annotated[int | None, typer.Option(help="Retries after the first attempt; for a policy made of options.")]
RetryBase = Annotated[str | None, typer.Option(help="The first wait of that policy.")]
RetryJitter = Annotated[str | None, typer.Option(help="Its jitter: full, equal, none, or a time such as 500ms.")]
Timeout = Annotated[str | None, typer.Option(help="How long one attempt may take.")]
Misfire = Annotated[str | None, typer.Option(help="When nobody was up: coalesce, skip, all(<most>).")]
Grace = Annotated[str | None, typer.Option(help="How late a run may begin before that counts; 60s.")]
Overlap = Annotated[
    str | None, typer.Option(help="While the run before goes on: skip, buffer_one, buffer_all(<n>), allow.")
]
Jitter = Annotated[str | None, typer.Option(help="Each run starts up to so much later.")]
Spread = Annotated[str | None, typer.Option(help="All runs start later by one part of this, by name.")]
Note = Annotated[str | None, typer.Option(help="Why; kept with the revision.")]
By = Annotated[str | None, typer.Option(help="Who; kept with the revision.")]


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """What was said on the command line, as the client takes it."""
    fields = {name: options[name] for name in _SAME if options.get(name) is not None}
    if options.get("tz") is not None:
        fields["timezone"] = options["tz"]
    for name in ("start", "end"):
        if options.get(name) is not None:
            fields[name] = when_of(options[name])
    if options.get("payload") is not None:
        fields["payload"] = _json(options["payload"])
    made = {"retries": "retries", "retry_base": "base", "retry_jitter": "jitter"}
    policy = {field: options[name] for name, field in made.items() if options.get(name) is not None}
    if policy:
        if "retry" in fields:
            raise InvalidInput("give either --retry or --retries, --retry-base and --retry-jitter")
        fields["retry"] = policy
    return fields


_SAME = (
    "cron", "every", "after_end", "target", "exclude", "max_runs", "dst_gap", "dst_overlap", "lane", "retry", "timeout",
    "misfire", "grace", "overlap", "jitter", "spread", "note", "by",
)  # fmt: skip


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(sys.stdin.read() if text == "-" else text)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"--payload is not JSON ({error}); a text needs quotes: '\"hello\"'") from None


def _show(view: ScheduleView, json: bool) -> None:
    if json:
        print_json(view.as_dict())
    else:
        print("\n".join(shown.lines(view)))


@app.command()
def add(
    name: str, cron: Cron = None, every: Every = None, after_end: AfterEnd = None, target: Target = None,
    payload: Payload = None, tz: Zone = None, exclude: Exclude = None, start: Start = None, end: End = None,
    max_runs: MaxRuns = None, dst_gap: Gap = None, dst_overlap: Twice = None, lane: Lane = None,
    retry: Retry = None, retries: Retries = None, retry_base: RetryBase = None, retry_jitter: RetryJitter = None,
    timeout: Timeout = None, misfire: Misfire = None, grace: Grace = None, overlap: Overlap = None,
    jitter: Jitter = None, spread: Spread = None, note: Note = None, by: By = None,
    replace: Annotated[bool, typer.Option("--replace", help="Edit the one of this name, if there is one.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Add a schedule; shows its next three runs."""
    fields = fields_of(locals())
    settings = load(redis_url, data_dir, namespace, config)
    fields.setdefault("timezone", settings.timezone)

    async def work(client: "Client") -> ScheduleView:
        view = await client.schedules.add(name, on_conflict="replace" if replace else "reject", **fields)
        shown.warn(view.definition, client.store.clock.now_ms())
        return view

    _show(with_client(settings, work), json)


@app.command()
def edit(
    name: str, cron: Cron = None, every: Every = None, after_end: AfterEnd = None, target: Target = None,
    payload: Payload = None, tz: Zone = None, exclude: Exclude = None, start: Start = None, end: End = None,
    max_runs: MaxRuns = None, dst_gap: Gap = None, dst_overlap: Twice = None, lane: Lane = None,
    retry: Retry = None, retries: Retries = None, retry_base: RetryBase = None, retry_jitter: RetryJitter = None,
    timeout: Timeout = None, misfire: Misfire = None, grace: Grace = None, overlap: Overlap = None,
    jitter: Jitter = None, spread: Spread = None, note: Note = None, by: By = None,
    generation: Annotated[int | None, typer.Option(help="Fail if it has another generation by now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Change some fields of a schedule, at once; what is not given stays."""
    fields = fields_of(locals())
    loaded = load(redis_url, data_dir, namespace, config)
    if dry_run:
        changes = with_client(loaded, lambda client: client.schedules.diff(name, **fields))
        return shown.show_changes(changes, json)
    _show(with_client(loaded, lambda client: client.schedules.edit(name, generation=generation, **fields)), json)
    return None


@app.command()
def diff(
    name: str, cron: Cron = None, every: Every = None, after_end: AfterEnd = None, target: Target = None,
    payload: Payload = None, tz: Zone = None, exclude: Exclude = None, start: Start = None, end: End = None,
    max_runs: MaxRuns = None, dst_gap: Gap = None, dst_overlap: Twice = None, lane: Lane = None,
    retry: Retry = None, retries: Retries = None, retry_base: RetryBase = None, retry_jitter: RetryJitter = None,
    timeout: Timeout = None, misfire: Misfire = None, grace: Grace = None, overlap: Overlap = None,
    jitter: Jitter = None, spread: Spread = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show what `edit` with the same options would change."""
    fields = fields_of(locals())
    changes = with_client(
        load(redis_url, data_dir, namespace, config), lambda client: client.schedules.diff(name, **fields)
    )
    shown.show_changes(changes, json)


@app.command()
def pause(
    name: str,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    by: Annotated[str, typer.Option(help="Who.")] = "",
    until: Annotated[str | None, typer.Option(help="Go on by itself: a time, or after 2h.")] = None,
    hold: Annotated[bool, typer.Option("--hold", help="What falls into it follows the misfire rule.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let a schedule rest."""
    mode: PauseMode = "hold" if hold else "drop"
    view = with_client(
        load(redis_url, data_dir, namespace, config),
        lambda client: client.schedules.pause(name, reason=reason, by=by, until=until, mode=mode),
    )
    _show(view, json)


@app.command()
def resume(
    name: str, by: Annotated[str, typer.Option(help="Who.")] = "",
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let a paused schedule go on."""
    loaded = load(redis_url, data_dir, namespace, config)
    _show(with_client(loaded, lambda client: client.schedules.resume(name, by=by)), json)


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
    by: Annotated[str, typer.Option(help="Who.")] = "",
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Make a former revision the present one again."""
    loaded = load(redis_url, data_dir, namespace, config)
    _show(with_client(loaded, lambda client: client.schedules.rollback(name, generation, by=by)), json)


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
    done = with_client(
        loaded, lambda client: client.schedules.backfill(name, start=first, end=last, rate=rate, dry_run=dry_run)
    )
    if json:
        print_json(msgspec.to_builtins(done))
    elif dry_run:
        print(f"{name}: {done.planned} runs were planned in this range")
    else:
        print(f"{name}: {done.created} runs put, {done.kept} were known")
