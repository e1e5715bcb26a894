"""`mainspring dead`: dead letters, which are tasks that were given up. List, replay, drop and export them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypedDict

import typer

from mainspring.cli.listing import Instant, Listing, connected, listing
from mainspring.cli.options import Json, OnlyLane, OnlyTarget, new_group
from mainspring.cli.output import ProgressBar, answer_lines, print_json, printable
from mainspring.cli.task import After, At, not_found, with_client
from mainspring.model.dead_letter import DeadLetter, ReplaySummary
from mainspring.model.errors import ConfigError, InvalidInput, NotFound
from mainspring.model.explain import moment
from mainspring.model.times import When

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.config.config import Config

app = new_group()

DeadIds = Annotated[list[str] | None, typer.Argument(help="Ids of dead letters; or choose them with filters or --all.")]
DeadReason = Annotated[str | None, typer.Option("--reason", help="Only where this is part of the reason.")]
DiedAfter = Annotated[str | None, typer.Option(help="Only what died from this time on.")]
DiedBefore = Annotated[str | None, typer.Option(help="Only what died before this time.")]
AllDead = Annotated[bool, typer.Option("--all", help="All dead letters.")]
DeadDryRun = Annotated[bool, typer.Option("--dry-run", help="Only report what would happen.")]

_OF_CONTENT: Final[tuple[Literal["target", "lane", "reason"], ...]] = ("target", "lane", "reason")
"""Filters for which dead letters have to be read."""


class Filters(TypedDict):
    """Return the filters as the client takes them."""

    target: str | None
    lane: str | None
    reason: str | None
    died_after: When | None
    died_before: When | None


@app.command("list")
@listing
def list_(
    config: "Config",
    limit: Annotated[int, typer.Option(help="Dead letters of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after the previous page.")] = None,
    target: OnlyTarget = None, lane: OnlyLane = None, reason: DeadReason = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
) -> Listing:  # fmt: skip
    """List dead letters, the newest first."""
    filters = _filters(target, lane, reason, died_after, died_before)
    page = with_client(config, lambda client: client.dead.list(limit=limit, cursor=cursor, **filters))
    return Listing(
        columns=("ID", "DIED", "TARGET", "REASON"),
        rows=[(one.id, Instant(one.died_ms), one.target or "(damaged)", one.reason) for one in page.letters],
        value={"letters": [one.as_dict(config.namespace) for one in page.letters], "next": page.next},
        empty="there are no dead letters" if not any(filters.values()) else "no dead letter matches",
        more=None if page.next is None else f"--cursor {page.next}",
    )


@app.command()
@connected
def show(
    config: "Config",
    id: Annotated[str, typer.Argument(help="The id of a task that was given up.")],
    lane: OnlyLane = None,
    json: Json = False,
) -> None:
    """Show one dead letter: why it died, every error, the task; exit code 1 if there is none."""
    dead_letter = with_client(config, lambda client: client.dead.get(id, lane=lane))
    if dead_letter is None:
        raise _not_found(config, [id])
    if json:
        print_json(dead_letter.as_dict(config.namespace))
    else:
        print("\n".join(map(printable, lines_of(dead_letter, config.namespace))))


@app.command()
@connected
def replay(
    config: "Config", ids: DeadIds = None, every: AllDead = False,
    target: OnlyTarget = None, lane: OnlyLane = None, reason: DeadReason = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    at: At = None, after: After = None,
    rate: Annotated[float | None, typer.Option(help="At most this many a second.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Give each a new idempotency key.")] = False,
    dry_run: DeadDryRun = False, json: Json = False,
) -> None:  # fmt: skip
    """Deliver dead letters again, now or at another time; exit code 1 if one could not be replayed.

    Each keeps its id, its lane and its idempotency key, and begins with attempt 1.
    """
    filters = _filters(target, lane, reason, died_after, died_before)
    _check_choice(ids, every, filters)

    async def work(client: "Client") -> ReplaySummary:
        if ids:
            return await _replay_ids(client, ids, lane, at, after, new_key, dry_run, bar)
        total = await _total(client, filters)
        return await client.dead.replay_many(
            **filters, at=at, after=after, rate=rate, new_key=new_key, dry_run=dry_run,
            progress=lambda so_far: bar(so_far.seen, total),
        )  # fmt: skip

    with ProgressBar("dead letters", shown=not json) as bar:
        summary = with_client(config, work)
    if json:
        print_json(summary)
    else:
        _print_replay(summary)
    if (unknown := [one.id for one in summary.problems if one.outcome == "unknown"]) and not json:
        raise _not_found(config, unknown)
    if summary.replayed < summary.seen:
        raise typer.Exit(1)


@app.command()
@connected
def drop(
    config: "Config", ids: DeadIds = None, every: AllDead = False,
    target: OnlyTarget = None, lane: OnlyLane = None, reason: DeadReason = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm: dropped dead letters do not come back.")] = False,
    dry_run: DeadDryRun = False, json: Json = False,
) -> None:  # fmt: skip
    """Forget dead letters for good; exit code 1 if one of the ids has none."""
    filters = _filters(target, lane, reason, died_after, died_before)
    _check_choice(ids, every, filters)
    if not yes and not dry_run:
        raise InvalidInput("dropped dead letters do not come back: add --yes, or look first with --dry-run")

    unknown: list[str] = []

    async def work(client: "Client") -> int:
        if ids:
            unknown.extend(await _drop_ids(client, ids, lane, dry_run, bar))
            return len(ids) - len(unknown)
        total = await _total(client, filters)
        return await client.dead.drop_many(**filters, dry_run=dry_run, progress=lambda count: bar(count, total))

    with ProgressBar("dead letters", shown=not json) as bar:
        count = with_client(config, work)
    if json:
        print_json({"dropped": 0 if dry_run else count, "matched": count})
    else:
        print(f"{count} {'would be dropped' if dry_run else 'dropped'}")
    if unknown:
        raise _not_found(config, unknown)


@app.command()
@connected
def export(
    config: "Config",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; default standard output.")] = None,
    target: OnlyTarget = None, lane: OnlyLane = None, reason: DeadReason = None,
    died_after: DiedAfter = None, died_before: DiedBefore = None,
) -> None:  # fmt: skip
    """Write dead letters as JSON lines, the oldest first."""
    filters = _filters(target, lane, reason, died_after, died_before)
    if output is None:
        # On a terminal the dead letters themselves show the progress.
        _export(config, sys.stdout.buffer.write, filters, shown=not sys.stdout.isatty())
        sys.stdout.flush()
        return
    try:
        opened = output.open("wb")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    with opened as file:
        count = _export(config, file.write, filters)
    print(f"{count} dead letters written to {output}", file=sys.stderr)


# -- inside ----------------------------------------------------------------------------------------------------


def _not_found(config: "Config", ids: list[str]) -> NotFound:
    return not_found(config, f"there is no dead letter {', '.join(map(repr, ids))}")


def _filters(
    target: str | None, lane: str | None, reason: str | None, died_after: str | None, died_before: str | None
) -> Filters:
    return Filters(target=target, lane=lane, reason=reason, died_after=died_after, died_before=died_before)


def _check_choice(ids: list[str] | None, every: bool, filters: Filters) -> None:
    filtered = any(value is not None for value in filters.values())
    if ids and (every or any(value is not None for name, value in filters.items() if name != "lane")):
        raise InvalidInput("give ids, or filters, or --all; not several of them (--lane may go with ids)")
    if not ids and not filtered and not every:
        raise InvalidInput("give ids, filters such as --target, or --all")


async def _total(client: "Client", filters: Filters) -> int | None:
    """Return the number of dead letters to go through, or None if they have to be read for that."""
    if any(filters[name] is not None for name in _OF_CONTENT):
        return None
    return await client.dead.count(died_after=filters["died_after"], died_before=filters["died_before"])


async def _replay_ids(
    client: "Client", ids: list[str], lane: str | None, at: When | None, after: str | None, new_key: bool,
    dry_run: bool, bar: ProgressBar,
) -> ReplaySummary:  # fmt: skip
    summary = ReplaySummary(dry_run)
    for id in ids:
        summary.add(await client.dead.replay(id, lane=lane, at=at, after=after, new_key=new_key, dry_run=dry_run))
        bar(summary.seen, len(ids))
    return summary


async def _drop_ids(client: "Client", ids: list[str], lane: str | None, dry_run: bool, bar: ProgressBar) -> list[str]:
    """Return the ids without a dead letter."""
    unknown = []
    for done, id in enumerate(ids, 1):
        if not await _drop_one(client, id, lane, dry_run):
            unknown.append(id)
        bar(done, len(ids))
    return unknown


async def _drop_one(client: "Client", id: str, lane: str | None, dry_run: bool) -> bool:
    if dry_run:
        return await client.dead.get(id, lane=lane) is not None
    return await client.dead.drop(id, lane=lane) == "dropped"


def _export(config: "Config", write: Callable[[bytes], Any], filters: Filters, *, shown: bool = True) -> int:
    async def work(client: "Client") -> int:
        total = await _total(client, filters)
        return await client.dead.export(write, **filters, progress=lambda count: bar(count, total))

    with ProgressBar("dead letters", shown=shown) as bar:
        return with_client(config, work)


def _print_replay(summary: ReplaySummary) -> None:
    for one in summary.problems:
        if one.outcome != "unknown":
            print(f"{one.id}: {one.outcome}: {one.note}", file=sys.stderr)
    left = summary.seen - summary.replayed - len(summary.problems)
    if left:
        print(f"and {left} more that were not replayed", file=sys.stderr)
    parts = [f"{count} {name}" for name, count in _not_replayed(summary).items() if count]
    done = "would be replayed" if summary.dry_run else "replayed"
    print(", ".join([f"{summary.replayed} {done}", *parts]))


def _not_replayed(summary: ReplaySummary) -> dict[str, int]:
    return {"in conflict": summary.conflict, "damaged": summary.damaged, "gone or unknown": summary.gone}


def lines_of(dead_letter: DeadLetter, namespace: str) -> list[str]:
    fields = dead_letter.as_dict(namespace)
    lines = [f"id          {dead_letter.id}", f"reason      {dead_letter.reason}"]
    lines += [f"died        {moment(dead_letter.died_ms)}", f"due         {moment(dead_letter.due_ms)}, originally"]
    if dead_letter.damaged:
        return [*lines, f"entry       {dead_letter.entry.hex()} (its bytes in hex; it cannot be replayed)"]
    lines += [f"target      {dead_letter.target}", f"attempts    {dead_letter.attempts}"]
    if dead_letter.lane is not None:
        lines.append(f"lane        {dead_letter.lane}")
    first = dead_letter.attempts - len(dead_letter.errors) + 1
    lines += [f"error {number:<5} {error}" for number, error in enumerate(dead_letter.errors, max(1, first))]
    lines += ["traceback", *(f"  {line}" for line in dead_letter.traceback.splitlines())] * bool(dead_letter.traceback)
    if dead_letter.response is not None:
        lines += answer_lines(dead_letter.response)
    lines.append(f"key         {fields['idempotency_key']}")
    payload = f"{dead_letter.payload.hex()} (bytes, in hex)" if dead_letter.raw else dead_letter.payload.decode()
    return [*lines, f"payload     {payload}"]
