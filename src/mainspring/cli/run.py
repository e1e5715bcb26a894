"""`mainspring run`: the history of runs. List and show them, count them over time, follow the log of a running one."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer

from mainspring.cli.listing import Cell, Instant, Listing, StateCell, connected, listing
from mainspring.cli.options import Json, OnlyTarget, completing, new_group, place_of, to_try
from mainspring.cli.output import aligned, answer_lines, output_lines, print_json, print_message, printable
from mainspring.cli.task import not_found, with_client
from mainspring.model.explain import moment, span
from mainspring.model.run import BUCKETS, KeptRun, RunCounts, RunEnd, RunRecord, RunsPage
from mainspring.model.targets.names import shown_target

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.config.config import Config

app = new_group()

RunSchedule = Annotated[
    str | None, typer.Option(help="Only runs of this schedule.", autocompletion=completing("schedules"))
]
RunQueue = Annotated[str | None, typer.Option("--queue", help="Only this queue.", autocompletion=completing("queues"))]
RunLane = Annotated[str | None, typer.Option(help="The task's lane, if several tasks have the id.")]

RUN_COLUMNS: Final = ("ID", "ENDED", "TASK", "ATTEMPT", "OUTCOME", "TOOK", "TARGET", "REASON")

_LOOK_S: Final = 0.5
_BARS: Final = " ▁▂▃▄▅▆▇█"
_COLUMNS: Final = 60
"""Most columns of a chart, so that it fits a terminal with its name and sum."""


@app.command("list")
@listing
def list_(
    config: "Config",
    schedule: RunSchedule = None, target: OnlyTarget = None, queue: RunQueue = None,
    id: Annotated[str | None, typer.Option("--id", help="Only attempts at this task.")] = None, lane: RunLane = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker or node.")] = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            help="done, retry, dead, …; failed for all failures.",
            autocompletion=lambda: ["failed", *get_args(RunEnd)],
        ),
    ] = None,
    ended_after: Annotated[str | None, typer.Option(help="Only what ended from this time on.")] = None,
    ended_before: Annotated[str | None, typer.Option(help="Only what ended before this time.")] = None,
    limit: Annotated[int, typer.Option(help="Runs of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after the previous page.")] = None,
) -> Listing:  # fmt: skip
    """List runs, the newest first."""
    filters: dict[str, Any] = {
        "schedule": schedule, "target": target, "queue": queue, "id": id, "lane": lane, "worker": worker,
        "outcome": outcome, "ended_after": ended_after, "ended_before": ended_before,
    }  # fmt: skip

    async def first_found(client: "Client") -> RunsPage:
        page = await client.runs(limit=limit, cursor=cursor, **filters)
        while not page.runs and page.next is not None:
            page = await client.runs(limit=limit, cursor=page.next, **filters)
        return page

    page = with_client(config, first_found)
    return Listing(
        columns=RUN_COLUMNS,
        rows=[run_row(run) for run in page.runs],
        value={"runs": [run.as_dict() for run in page.runs], "next": page.next},
        empty="there are no runs" if not any(filters.values()) else "no run matches",
        more=None if page.next is None else f"--cursor {page.next}",
        spare=("ATTEMPT",),
    )


def run_row(run: KeptRun) -> tuple[Cell, ...]:
    """Return the cells of RUN_COLUMNS."""
    record = run.record
    return (
        run.id, Instant(record.ended_ms), record.task_id, str(record.attempt), StateCell(record.end),
        _took(record) or "", shown_target(record.target), record.reason,
    )  # fmt: skip


def _took(record: RunRecord) -> str | None:
    return span(record.ended_ms - record.began_ms) if record.began_ms else None


@app.command()
@connected
def show(
    config: "Config",
    id: Annotated[str, typer.Argument(help="The id of a run, as `run list` shows it.")],
    json: Json = False,
) -> None:
    """Show one run with its response, output, log and traceback; exit code 1 if it is not kept."""
    run = with_client(config, lambda client: client.run(id))
    if run is None:
        raise not_found(config, f"there is no run {id!r}, or the history has it no more")
    if json:
        print_json(run.as_dict())
    else:
        print("\n".join(map(printable, lines_of(run))))


def lines_of(run: KeptRun) -> list[str]:
    """Describe a run for people."""
    record, details = run.record, run.details
    facts: list[tuple[str, object]] = [
        ("run", run.id), ("task", record.task_id), ("lane", record.lane), ("schedule", record.schedule),
        ("target", shown_target(record.target)), ("queue", record.queue), ("run by", record.by),
        ("outcome", record.end), ("code", record.code), ("reason", record.reason or None),
        ("attempt", record.attempt), ("due", moment(record.due_ms)),
        ("began", moment(record.began_ms) if record.began_ms else None),
        ("ended", moment(record.ended_ms)), ("took", _took(record)),
        ("next", None if record.next_ms is None else moment(record.next_ms)),
    ]  # fmt: skip
    lines = aligned([(name, str(value)) for name, value in facts if value is not None])
    if details is None:
        return lines
    lines += [f"log         {line}" for line in details.log]
    lines += [] if details.response is None else answer_lines(details.response)
    lines += [] if details.output is None else output_lines(details.output)
    return lines + ["traceback", *(f"  {line}" for line in details.traceback.splitlines())] * bool(details.traceback)


@app.command()
@connected
def log(
    config: "Config",
    id: Annotated[str, typer.Argument(help="The id of a task, also while it runs, or of a run.")], lane: RunLane = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run is over.")] = False,
) -> None:  # fmt: skip
    """Print what a run has written: log lines of a handler, or output of a command."""
    with_client(config, lambda client: _print_log(client, id, lane, follow, config))


async def _print_log(client: "Client", id: str, lane: str | None, follow: bool, config: "Config") -> None:
    part, written = await client.run_log(id, lane=lane), False
    while True:
        written = written or bool(part.text)
        print("\n".join(map(printable, part.text.split("\n"))), end="", flush=True)
        if part.over or (not part.text and not follow):
            break
        if not part.text:
            await asyncio.sleep(_LOOK_S)
        part = await client.run_log(id, lane=lane, cursor=part.next)
    if not written:
        kept = f"nothing is written{'' if part.over else ' yet'}, or nothing of it is kept"
        print_message(f"{id}: {kept} ({place_of(config)})\n{to_try(config, 'mainspring run list')}")


@app.command()
@connected
def stats(
    config: "Config", schedule: RunSchedule = None, target: OnlyTarget = None, queue: RunQueue = None,
    start: Annotated[str | None, typer.Option(help="From this time on; default a day ago, or an hour.")] = None,
    end: Annotated[str | None, typer.Option(help="Count until this time; default now.")] = None,
    step: Annotated[Literal["minute", "hour"], typer.Option(help="One count for each.")] = "hour",
    json: Json = False,
) -> None:  # fmt: skip
    """Count runs over time, with small charts; of one schedule, target or queue, or of all."""
    found = with_client(
        config,
        lambda client: client.run_stats(schedule=schedule, target=target, queue=queue, start=start, end=end, step=step),
    )
    if json:
        print_json(found)
        return
    if not any(one.runs for one in found.stats):
        print_message(f"there are no runs in this time in {place_of(config)}")
        return
    for line in stat_lines(found.stats):
        print(line)
    history = found.history
    print(f"history: {history.bytes:,} bytes, details {history.details_bytes:,}")
    if history.oldest_ms:
        print(f"complete since {moment(history.oldest_ms)}, failures since {moment(history.oldest_failed_ms)}")


def stat_lines(counts: Sequence[RunCounts]) -> list[str]:
    """Return a chart for each count over time, and the durations of all runs."""
    names = ("ok", "failed", "retried", "skipped")
    values = {name: [getattr(one, name) for one in counts] for name in names}
    width = -(-len(counts) // _COLUMNS)
    rows = [(name, _chart(some, width), f"{sum(some):,}") for name, some in values.items()]
    step_ms = width * (counts[1].at_ms - counts[0].at_ms if len(counts) > 1 else 0)
    column = f", a column is {span(step_ms)}" if step_ms else ""
    end_ms = counts[-1].at_ms + step_ms // width
    lines = [f"{moment(counts[0].at_ms)} to {moment(end_ms)}{column}", *aligned(rows), ""]
    bars: list[tuple[str, ...]] = []
    for title, field in (("took", "durations"), ("late", "latenesses")):
        sums = [sum(getattr(one, field)[i] for one in counts) for i in range(BUCKETS)]
        some = [i for i in range(BUCKETS) if sums[i]]
        bars += [
            (title if i == some[0] else "", _limit(i), "█" * round(30 * sums[i] / max(sums)), f"{sums[i]:,}")
            for i in some
        ]
    return lines + aligned(bars)


def _chart(values: Sequence[int], width: int) -> str:
    """Draw a column for each `width` values."""
    sums = [sum(values[at : at + width]) for at in range(0, len(values), width)]
    most = max(sums)
    return "".join(_BARS[-(-value * 8 // most) if most else 0] for value in sums)


def _limit(bucket: int) -> str:
    """Return the durations of a bucket in words."""
    return f"from {span(4 ** (bucket - 1))}" if bucket == BUCKETS - 1 else f"under {span(4**bucket)}"
