"""`mainspring dead`: tasks that were given up. Look at them, send them again, let them go."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.result_lines import answer_lines
from mainspring.cli.table import aligned, printable
from mainspring.cli.task import At, In, print_json, when_of, with_client
from mainspring.model.dead import DeadLetter, ReplaySummary
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.explain import moment
from mainspring.model.times import When

if TYPE_CHECKING:
    from mainspring.client import Client

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

Ids = Annotated[list[str] | None, typer.Argument(help="Ids of dead letters; or say which with filters or --all.")]
Target = Annotated[str | None, typer.Option(help="Only this target, or with a * at the end what begins so.")]
Lane = Annotated[str | None, typer.Option(help="Only this lane.")]
Why = Annotated[str | None, typer.Option("--reason", help="Only where this is part of the reason.")]
DiedAfter = Annotated[str | None, typer.Option(help="Only what died from this time on.")]
DiedBefore = Annotated[str | None, typer.Option(help="Only what died before this time.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]

EVERY_S: Final = 1.0
"""How often progress is told."""


class Filters(TypedDict):
    """The choice of letters as the client takes it."""

    target: str | None
    lane: str | None
    reason: str | None
    died_after: When | None
    died_before: When | None


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="Letters of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    target: Target = None, lane: Lane = None, reason: Why = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List dead letters, the newest first."""
    loaded = load(redis_url, data_dir, namespace, config)
    filters = _filters(target, lane, reason, died_after, died_before)
    page = with_client(loaded, lambda client: client.dead_list(limit=limit, cursor=cursor, **filters))
    if json:
        print_json({"letters": [one.as_dict(loaded.namespace) for one in page.letters], "next": page.next})
        return
    rows = [(moment(one.died_ms), one.target or "(damaged)", one.id, one.reason) for one in page.letters]
    for line in aligned(rows):
        print(line)
    if page.next is not None:
        print(f"more: --cursor {page.next}", file=sys.stderr)


@app.command()
def show(
    id: str, lane: Lane = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show one dead letter: why it died, every error, the task; exit code 1 if there is none."""
    loaded = load(redis_url, data_dir, namespace, config)
    letter = with_client(loaded, lambda client: client.dead_get(id, lane=lane))
    if letter is None:
        print(f"{id}: there is no dead letter with this id", file=sys.stderr)
        raise typer.Exit(1)
    if json:
        print_json(letter.as_dict(loaded.namespace))
    else:
        print("\n".join(map(printable, lines_of(letter, loaded.namespace))))


@app.command()
def replay(
    ids: Ids = None, every: All = False,
    target: Target = None, lane: Lane = None, reason: Why = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    at: At = None, after: In = None,
    rate: Annotated[float | None, typer.Option(help="So many a second, at most.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="With another idempotency key than before.")] = False,
    dry_run: DryRun = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Deliver dead letters again, now or at another time; exit code 1 if one could not be replayed.

    Each keeps its id, its lane and its idempotency key, and begins with attempt 1.
    """
    loaded = load(redis_url, data_dir, namespace, config)
    filters = _filters(target, lane, reason, died_after, died_before)
    _check_choice(ids, every, filters)

    async def work(client: "Client") -> ReplaySummary:
        if not ids:
            tell = _Teller(lambda summary: f"{summary.replayed} replayed, {summary.seen - summary.replayed} not")
            return await client.dead_replay_many(
                **filters, at=when_of(at), after=after, rate=rate, new_key=new_key, dry_run=dry_run, progress=tell
            )
        return await _replay_ids(client, ids, lane, when_of(at), after, new_key, dry_run)

    summary = with_client(loaded, work)
    if json:
        print_json(summary)
    else:
        _tell_replay(summary)
    if summary.replayed < summary.seen:
        raise typer.Exit(1)


@app.command()
def drop(
    ids: Ids = None, every: All = False,
    target: Target = None, lane: Lane = None, reason: Why = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really: dropped letters do not come back.")] = False,
    dry_run: DryRun = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Forget dead letters for good; exit code 1 if one of the ids has none."""
    loaded = load(redis_url, data_dir, namespace, config)
    filters = _filters(target, lane, reason, died_after, died_before)
    _check_choice(ids, every, filters)
    if not yes and not dry_run:
        raise InvalidInput("dropped letters do not come back: say --yes, or look first with --dry-run")

    async def work(client: "Client") -> int:
        if not ids:
            tell = _Teller(lambda count: f"{count} letters")
            return await client.dead_drop_many(**filters, dry_run=dry_run, progress=tell)
        return sum([await _drop_one(client, id, lane, dry_run) for id in ids])

    count = with_client(loaded, work)
    if json:
        print_json({"dropped": 0 if dry_run else count, "matched": count})
    else:
        print(f"{count} {'would be dropped' if dry_run else 'dropped'}")
    if ids and count < len(ids):
        raise typer.Exit(1)


@app.command()
def export(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; default standard output.")] = None,
    target: Target = None, lane: Lane = None, reason: Why = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None,
) -> None:  # fmt: skip
    """Write dead letters as JSON lines, the oldest first."""
    loaded = load(redis_url, data_dir, namespace, config)
    filters = _filters(target, lane, reason, died_after, died_before)
    if output is None:
        with_client(loaded, lambda client: client.dead_export(sys.stdout.buffer.write, **filters))
        sys.stdout.flush()
        return
    try:
        opened = output.open("wb")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    with opened as file:
        count = with_client(loaded, lambda client: client.dead_export(file.write, **filters))
    print(f"{count} letters written to {output}", file=sys.stderr)


# -- inside ----------------------------------------------------------------------------------------------------


def _filters(
    target: str | None, lane: str | None, reason: str | None, died_after: str | None, died_before: str | None
) -> Filters:
    return Filters(
        target=target, lane=lane, reason=reason, died_after=when_of(died_after), died_before=when_of(died_before)
    )


def _check_choice(ids: list[str] | None, every: bool, filters: Filters) -> None:
    filtered = any(value is not None for value in filters.values())
    if ids and (every or any(value is not None for name, value in filters.items() if name != "lane")):
        raise InvalidInput("give ids, or filters, or --all; not several of them (--lane may go with ids)")
    if not ids and not filtered and not every:
        raise InvalidInput("say which: ids, filters such as --target, or --all")


async def _replay_ids(
    client: "Client", ids: list[str], lane: str | None, at: When | None, after: str | None, new_key: bool, dry_run: bool
) -> ReplaySummary:
    summary = ReplaySummary(dry_run)
    for id in ids:
        summary.add(await client.dead_replay(id, lane=lane, at=at, after=after, new_key=new_key, dry_run=dry_run))
    return summary


async def _drop_one(client: "Client", id: str, lane: str | None, dry_run: bool) -> bool:
    if dry_run:
        known = await client.dead_get(id, lane=lane) is not None
    else:
        known = await client.dead_drop(id, lane=lane) == "dropped"
    if not known:
        print(f"{id}: there is no dead letter with this id", file=sys.stderr)
    return known


def _tell_replay(summary: ReplaySummary) -> None:
    for one in summary.problems:
        print(f"{one.id}: {one.outcome}: {one.note}", file=sys.stderr)
    left = summary.seen - summary.replayed - len(summary.problems)
    if left:
        print(f"and {left} more that were not replayed", file=sys.stderr)
    parts = [f"{count} {name}" for name, count in _not_replayed(summary).items() if count]
    done = "would be replayed" if summary.dry_run else "replayed"
    print(", ".join([f"{summary.replayed} {done}", *parts]))


def _not_replayed(summary: ReplaySummary) -> dict[str, int]:
    return {"in conflict": summary.conflict, "damaged": summary.damaged, "gone or unknown": summary.gone}


def lines_of(letter: DeadLetter, namespace: str) -> list[str]:
    told = letter.as_dict(namespace)
    lines = [f"id          {letter.id}", f"reason      {letter.reason}"]
    lines.append(f"died        {letter.died_ms} ({moment(letter.died_ms)})")
    lines.append(f"due         {letter.due_ms} ({moment(letter.due_ms)}), originally")
    if letter.damaged:
        return [*lines, f"entry       {letter.entry.hex()} (its bytes in hex; it cannot be replayed)"]
    lines += [f"target      {letter.target}", f"attempts    {letter.attempts}"]
    if letter.lane is not None:
        lines.append(f"lane        {letter.lane}")
    first = letter.attempts - len(letter.errors) + 1
    lines += [f"error {number:<5} {error}" for number, error in enumerate(letter.errors, max(1, first))]
    if letter.response is not None:
        lines += answer_lines(letter.response)
    lines.append(f"key         {told['idempotency_key']}")
    payload = f"{letter.payload.hex()} (bytes, in hex)" if letter.raw else letter.payload.decode()
    return [*lines, f"payload     {payload}"]


class _Teller:
    """Tells how far a long call is, once a second: in place on a terminal, else line by line."""

    def __init__(self, words: Callable[[Any], str]) -> None:
        self._words = words
        self._told_s = time.monotonic()

    def __call__(self, so_far: Any) -> None:
        if time.monotonic() - self._told_s >= EVERY_S:
            self._told_s = time.monotonic()
            end = "\r" if sys.stderr.isatty() else "\n"
            print(self._words(so_far), end=end, file=sys.stderr, flush=True)
