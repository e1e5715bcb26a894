"""`mainspring task`: single tasks from the command line."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
import typer

from mainspring.cli.audited_client import AuditedClient
from mainspring.cli.listing import Instant, Listing, StateCell, connected, listing
from mainspring.cli.options import (
    Json,
    OnlyLane,
    OnlyTarget,
    completing,
    json_of,
    new_group,
    opened_store,
    place_of,
    remote,
    to_try,
)
from mainspring.cli.output import lines_of, print_json, print_message, printable, relative, wrapped
from mainspring.model.errors import Ambiguous, NotConfirmed, NotFound, Unavailable
from mainspring.model.explain import moment, span
from mainspring.model.job import Result
from mainspring.model.task import BulkCancelOutcome, Handle, OnConflict
from mainspring.model.times import delay_ms

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.config.config import Config

app = new_group()
T = TypeVar("T")
POLL_S: Final = 0.2

TaskId = Annotated[str, typer.Argument(help="The id of a task.")]
TaskLane = Annotated[str | None, typer.Option(help="The lane the task was put with; '' for a task without one.")]
At = Annotated[str | None, typer.Option(help="2030-01-01T09:00:00Z, or epoch milliseconds.")]
After = Annotated[str | None, typer.Option("--after", "--in", help="A delay from now: 30m, 1h30m, PT10M.")]
DueAfter = Annotated[str | None, typer.Option("--due-after", "--after", help="Only tasks due from this time on.")]
DueBefore = Annotated[str | None, typer.Option("--due-before", "--before", help="Only tasks due before this time.")]
ShownState = Literal["pending", "fired", "queued", "running"]


@app.command()
@connected
def put(
    config: "Config",
    payload: Annotated[str, typer.Argument(help="JSON; - reads it from standard input.")] = "null",
    target: Annotated[
    str, typer.Option(help="Where it goes, e.g. log: or https://…", autocompletion=completing("targets"))
    ] = "log:",
    at: At = None,
    after: After = None,
    id: Annotated[str | None, typer.Option(help="With it, a repeated put is one task.")] = None,
    lane: Annotated[str | None, typer.Option(help="Tasks of one lane are delivered one at a time.")] = None,
    expires: Annotated[str | None, typer.Option(help="Not delivered after this time or delay.")] = None,
    retry: Annotated[str | None, typer.Option(help="Its own retry policy, e.g. '5 base=200ms 4xx=dead'.")] = None,
    retries: Annotated[int | None, typer.Option(help="Further attempts after a failed first one.")] = None,
    timeout: Annotated[str | None, typer.Option(help="How long one attempt may take, e.g. 30s.")] = None,
    on_conflict: Annotated[OnConflict, typer.Option(help="What to do if a task has this id already.")] = "keep",
    durability: Annotated[str, typer.Option(help="server, disk or replicas=n.")] = "server",
    json: Json = False,
) -> None:  # fmt: skip
    """Put one task, to be delivered at its time."""
    value = msgspec.Raw(json_of(payload, "the payload"))
    try:
        handle = with_client(
            config,
            lambda client: client.put(
                target, value, at=at, after=after, id=id, lane=lane, expires=expires,
                retry=retry, retries=retries, timeout=timeout, on_conflict=on_conflict, durability=durability,
            ),
            makes=True,
        )  # fmt: skip
    except NotConfirmed as error:
        # The task is stored: without its id it could not be found again.
        if error.handles and error.handles[0] is not None:
            _show_handle(error.handles[0], json)
        raise
    _show_handle(handle, json)


@app.command()
@connected
def get(config: "Config", id: TaskId, lane: TaskLane = None, json: Json = False) -> None:
    """Show one task; exit code 1 if it is unknown."""
    info = with_client(config, lambda client: client.get(id, lane=lane))
    if json:
        print_json(info)
    elif info.state == "unknown":
        raise not_found(config, f"there is no task {printable(id)!r}")
    else:
        for name, value in msgspec.to_builtins(info).items():
            if value not in (None, ()) and (name != "attempt" or info.due_ms is not None):
                print(printable(f"{name.removesuffix('_ms'):10} {_spoken(name, value)}"))
        if info.state in ("dead", "done"):  # too little of it is kept here
            more = "dead show" if info.state == "dead" else "task result"
            print_message(to_try(config, f"mainspring {more} {printable(id)}"))
    if info.state == "unknown":
        raise typer.Exit(1)


@app.command()
@connected
def explain(config: "Config", id: TaskId, lane: TaskLane = None, json: Json = False) -> None:
    """Say why a task has not run; exit code 1 if it is unknown."""
    found = with_client(config, lambda client: client.explain(id, lane=lane))
    if json:
        print_json(found)
    else:
        print(wrapped(printable(f"{found.id}: {found.text}"), indent=2))
    if found.code == "unknown" and not json:
        raise not_found(config, f"there is no task {printable(id)!r}")
    if found.code == "unknown":
        raise typer.Exit(1)


@app.command()
@connected
def result(
    config: "Config", id: TaskId, lane: TaskLane = None,
    wait: Annotated[str, typer.Option(help="How long to wait for its end, e.g. 30s.")] = "0s",
    json: Json = False,
) -> None:  # fmt: skip
    """Show how a task ended: the answer of a webhook, the output of a command, the value of a handler.

    Exit code 1 if it has not ended, or if nothing of it is kept. The server may be unavailable while this waits.
    """
    wait_ms = delay_ms(wait, field="wait")
    found = _awaited(config, id, lane, wait_ms / 1000)
    if found is None:
        print(f"{id} is not over", file=sys.stderr)
        raise typer.Exit(1)
    if json:
        print_json(found.as_dict())
    else:
        print("\n".join(lines_of(found)))


def _awaited(config: "Config", id: TaskId, lane: str | None, wait_s: float) -> Result | None:
    """Wait for the end of a task. While the server or node is unavailable, try again on a new connection."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return with_client(config, lambda client: _ended(client, id, lane, until))
        except Unavailable:
            if (left_s := until - time.monotonic()) <= 0:
                raise
            time.sleep(min(POLL_S, left_s))


async def _ended(client: "Client", id: str, lane: str | None, until: float) -> Result | None:
    found = await client.find_result(id, lane=lane)
    while found is None and (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(min(POLL_S, left_s))
        found = await client.find_result(id, lane=lane)
    return found


@app.command("list")
@listing
def list_(
    config: "Config",
    limit: Annotated[int, typer.Option(help="Tasks of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after the previous page.")] = None,
    due_after: DueAfter = None,
    due_before: DueBefore = None,
    state: Annotated[ShownState, typer.Option(help="Only tasks in this state.")] = "pending",
    target: OnlyTarget = None,
    lane: OnlyLane = None,
) -> Listing:
    """List tasks, the earliest first: those that are pending, or in another state."""
    page = with_client(
        config,
        lambda client: client.list(
            due_after=due_after, due_before=due_before, state=state, target=target, lane=lane,
            limit=limit, cursor=cursor,
        ),
    )  # fmt: skip
    return Listing(
        columns=("ID", "DUE", "TARGET", "STATE"),
        rows=[(one.id, Instant(one.due_ms), one.target or "", StateCell(one.state)) for one in page.tasks],
        value=page,
        empty=f"no tasks are {state}",
        hint="mainspring task put --after 10s '\"hello\"'" if state == "pending" else "mainspring task list",
        more=None if page.next is None else f"--cursor {page.next}",
    )


@app.command()
@connected
def count(config: "Config", due_after: DueAfter = None, due_before: DueBefore = None, json: Json = False) -> None:
    """Count pending tasks."""
    found = with_client(
        config,
        lambda client: client.count(due_after=due_after, due_before=due_before),
    )
    if json:
        print_json(found)
    else:
        print(found.pending if found.exact else f"about {found.pending}")


@app.command()
@connected
def cancel(
    config: "Config",
    ids: Annotated[list[str], typer.Argument(help="Ids of tasks.")],
    lane: TaskLane = None,
    json: Json = False,
) -> None:
    """Cancel tasks; exit code 1 if one had begun or is not known."""
    outcomes, several = with_client(config, lambda client: _cancelled(client, ids, lane))
    if json:
        print_json([{"id": id, "outcome": outcome} for id, outcome in zip(ids, outcomes, strict=True)])
    else:
        for id, outcome in zip(ids, outcomes, strict=True):
            print(printable(f"{id}: {outcome}"))
    for error in several:
        print(printable(f"mainspring: {error} (--lane)"), file=sys.stderr)
    unknown = [printable(id) for id, outcome in zip(ids, outcomes, strict=True) if outcome == "unknown"]
    if unknown and not json:
        raise not_found(config, f"there is no task {', '.join(map(repr, unknown))}")
    if any(outcome != "cancelled" for outcome in outcomes):
        raise typer.Exit(1)


async def _cancelled(
    client: "Client", ids: list[str], lane: str | None
) -> tuple[list[BulkCancelOutcome], list[Ambiguous]]:
    """Return each answer; for an id that tasks of several lanes have, those lanes."""
    outcomes = await client.cancel_many(ids, lane=lane)
    several: list[Ambiguous] = []
    for id in dict.fromkeys(id for id, outcome in zip(ids, outcomes, strict=True) if outcome == "ambiguous"):
        try:
            await client.get(id, lane=lane)
        except Ambiguous as error:
            several.append(error)
    return outcomes, several


@app.command()
@connected
def reschedule(
    config: "Config", id: TaskId, at: At = None, after: After = None, lane: TaskLane = None, json: Json = False,
) -> None:  # fmt: skip
    """Move a pending task to another time."""
    handle = with_client(
        config,
        lambda client: client.reschedule(id, at=at, after=after, lane=lane),
    )
    _show_handle(handle, json)


# -- inside ----------------------------------------------------------------------------------------------------


def with_client(config: "Config", work: "Callable[[Client], Coroutine[Any, Any, T]]", *, makes: bool = False) -> T:
    """Run `work` with a client. With `makes` a new namespace is created."""

    async def run() -> T:
        async with _client(config, makes) as client:
            return await work(cast("Client", AuditedClient.of(client, config.audit_entries)))

    try:
        return asyncio.run(run() if config.api_url is None else _over_http(config, work))
    except NotFound as error:
        raise not_found(config, str(error)) from None


def not_found(config: "Config", what: str) -> NotFound:
    """Return the error for a name that does not exist, with the place that was looked at."""
    return NotFound(f"{what} ({place_of(config)})")


async def _over_http(config: "Config", work: "Callable[[Client], Coroutine[Any, Any, T]]") -> T:
    from mainspring.client.http import RemoteClient

    with contextlib.closing(remote(config)) as api:
        # RemoteClient has the methods that commands call, under the same names: a test compares them.
        return await work(cast("Client", RemoteClient(api)))


@contextlib.asynccontextmanager
async def _client(config: "Config", makes: bool) -> "AsyncIterator[Client]":
    from mainspring.client.client import Client

    async with opened_store(config, makes=makes) as store:
        yield Client.over(store, timezone=config.timezone)


def _show_handle(handle: Handle, json: bool) -> None:
    if json:
        print_json(handle)
        return
    past = " (past: at once)" if handle.past else ""
    print(printable(f"{handle.id}: {handle.outcome}, due {moment(handle.due_ms)}{past}"))


def _spoken(name: str, value: Any) -> str:
    if name in ("due_ms", "expires_ms", "since_ms"):
        return f"{moment(value)} ({relative(value, time.time_ns() // 1_000_000)})"
    if name == "timeout_ms":
        return span(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
