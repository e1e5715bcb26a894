"""`mainspring lane`, `queue`, `pause`, `resume` and `pauses`: lanes, queues, and what is paused."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from mainspring.cli.audited_client import user
from mainspring.cli.listing import Instant, Listing, StateCell, connected, listing
from mainspring.cli.options import Json, completing, new_app, new_group
from mainspring.cli.output import print_json, printable
from mainspring.cli.task import with_client
from mainspring.model.errors import InvalidInput
from mainspring.model.explain import moment
from mainspring.model.lane import LaneAnswer, LaneInfo, Mode, Pause, Scope
from mainspring.model.workers import QueueInfo

if TYPE_CHECKING:
    from mainspring.config.config import Config

lane_app = new_group()

LaneArgument = Annotated[str, typer.Argument(help="The lane.", autocompletion=completing("lanes"))]

_ANSWERS: Final[dict[LaneAnswer, str]] = {
    "ok": "done",
    "too late": "its head is being delivered; look again in a moment",
    "no head": "it is not waiting for a failed task",
    "gone": "its head has ended; the lane resumes by itself",
}


@lane_app.command("list")
@listing
def list_(config: "Config") -> Listing:
    """List stalled lanes, those that have waited longest first."""
    found = with_client(config, lambda client: client.lanes())
    return Listing(
        columns=("LANE", "STATE", "SINCE", "BEHIND", "REASON"),
        rows=[
            (
                one.lane,
                StateCell(one.state),
                Instant(one.since_ms),
                "?" if one.behind is None else str(one.behind),
                _reason(one),
            )
            for one in found
        ],
        value=found,
        empty="no lane is stalled",
    )


@lane_app.command()
@connected
def show(config: "Config", lane: LaneArgument, json: Json = False) -> None:
    """Show the state of a lane."""
    one = with_client(config, lambda client: client.lane(lane))
    if json:
        print_json(one)
        return
    behind = "some or no" if one.behind is None else one.behind
    print(printable(f"{one.lane}: {one.state}, {behind} {'task' if behind == 1 else 'tasks'} behind"))
    for name, text in _rows(one):
        print(printable(f"  {name:9} {text}"))


@lane_app.command("retry-head")
@connected
def retry_head(config: "Config", lane: LaneArgument, json: Json = False) -> None:
    """Try the failed head of a lane now."""
    _print_answer(lane, with_client(config, lambda client: client.lane_retry_head(lane)), json)


@lane_app.command("skip-head")
@connected
def skip_head(
    config: "Config", lane: LaneArgument,
    reason: Annotated[str, typer.Option(help="Kept with the dead letter.")] = "skipped by hand",
    json: Json = False,
) -> None:  # fmt: skip
    """Give up the failed head of a lane: it becomes a dead letter, and the lane resumes."""
    _print_answer(lane, with_client(config, lambda client: client.lane_skip_head(lane, reason=reason)), json)


@lane_app.command()
@connected
def resume(config: "Config", lane: LaneArgument, json: Json = False) -> None:
    """Resume a parked or paused lane; a parked one begins with its head."""
    _print_answer(lane, with_client(config, lambda client: client.lane_resume(lane)), json)


def _print_answer(lane: str, answer: LaneAnswer, json: bool) -> None:
    """Exit code 1 when nothing was done."""
    if json:
        print_json({"lane": lane, "answer": answer})
    else:
        print(f"{lane}: {_ANSWERS[answer]}")
    if answer != "ok":
        raise typer.Exit(1)


def _reason(one: LaneInfo) -> str:
    if one.head_id is None:
        return f"{one.cause or one.state}{f': {one.reason}' if one.reason else ''}"
    error = f": {one.error}" if one.error else ""
    return f"head {one.head_id}, attempt {one.attempts}{error}"


def _rows(one: LaneInfo) -> list[tuple[str, str]]:
    rows = [
        ("since", None if one.since_ms is None else moment(one.since_ms)),
        ("head", one.head_id),
        ("attempts", None if one.attempts is None else str(one.attempts)),
        ("error", one.error),
        ("next", None if one.next_ms is None else moment(one.next_ms)),
        ("held by", one.cause),
        ("reason", one.reason),
        ("by", one.by),
        ("until", None if one.until_ms is None else moment(one.until_ms)),
    ]
    return [(name, text) for name, text in rows if text is not None]


queue_app = new_group()


@queue_app.callback()
def _queue() -> None:
    """Queues: how long they are, and which workers serve them."""


@queue_app.command("list")
@listing
def list_queues(config: "Config") -> Listing:
    """List queues: how long they are, which workers serve them, and a similar served name if none does."""
    found = with_client(config, lambda client: client.queues())
    return Listing(
        columns=("QUEUE", "STATE", "READY", "RUNNING", "OLDEST", "WORKERS"),
        rows=[
            (
                one.name, StateCell("paused" if one.paused else "active" if one.workers else "no worker"),
                str(one.ready), str(one.running), Instant(one.oldest_ms), _served(one),
            )
            for one in found
        ],
        value=found,
        empty="no queue has tasks or workers",
    )  # fmt: skip


def _served(one: QueueInfo) -> str:
    return str(len(one.workers)) if one.nearest is None else f"0; did you mean {one.nearest}?"


pause_app = new_app()

TargetOption = Annotated[
    str | None,
    typer.Option(
        help="This target; with a * at its end, all that begin so: 'kafka:*'.", autocompletion=completing("targets")
    ),
]
QueueOption = Annotated[str | None, typer.Option(help="This queue.", autocompletion=completing("queues"))]
LaneOption = Annotated[str | None, typer.Option(help="This lane.", autocompletion=completing("lanes"))]
Everything = Annotated[bool, typer.Option("--all", help="Everything.")]


@pause_app.command("pause")
@connected
def pause(
    config: "Config",
    everything: Everything = False, target: TargetOption = None, queue: QueueOption = None, lane: LaneOption = None,
    reason: Annotated[str, typer.Option(help="Why; shown with the pause.")] = "",
    by: Annotated[str | None, typer.Option("--by", "--who", help="Who; default is the user of this machine.")] = None,
    for_: Annotated[str | None, typer.Option("--for", help="End by itself after this long: 30m, 1h.")] = None,
    until: Annotated[str | None, typer.Option(help="End by itself at this time.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Drop what comes due meanwhile into the dead letters.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Pause everything, a target, a queue or a lane. What comes due meanwhile is sent after `resume`, in order."""
    check_scope(everything, target, queue, lane)
    mode: Mode = "drop" if drop else "hold"
    made = with_client(
        config,
        lambda client: client.pause(
            target=target, queue=queue, lane=lane, mode=mode, reason=reason,
            by=user() if by is None else by, until=until, for_=for_,
        ),
    )  # fmt: skip
    if json:
        print_json(as_dict(made))
    else:
        print(f"paused: {line_of(made)}")


def check_scope(everything: bool, target: str | None, queue: str | None, lane: str | None) -> None:
    given = sum((everything, target is not None, queue is not None, lane is not None))
    if given != 1:
        raise InvalidInput("give one of --all, --target, --queue or --lane")


def line_of(one: Pause) -> str:
    until = "" if one.until_ms is None else f", until {moment(one.until_ms)}"
    by = f" by {one.by}" if one.by else ""
    why = f": {one.reason}" if one.reason else ""
    drop = " (what comes due is dropped)" if one.mode == "drop" else ""
    return f"{one.scope.text}{drop}, since {moment(one.since_ms)}{until}{by}{why}"


def as_dict(one: Pause) -> dict[str, object]:
    return {
        "scope": one.scope.text,
        "mode": one.mode,
        "reason": one.reason,
        "by": one.by,
        "who": one.by,  # its old name
        "since_ms": one.since_ms,
        "until_ms": one.until_ms,
    }


pauses_app = new_app()


@pauses_app.command("pauses")
@listing
def pauses(config: "Config") -> Listing:
    """List what is paused, by whom, since when and why."""
    found = with_client(config, lambda client: client.pauses())
    return Listing(
        columns=("PAUSED", "SINCE", "UNTIL", "MODE", "BY", "REASON"),
        rows=[
            (one.scope.text, Instant(one.since_ms), Instant(one.until_ms), one.mode, one.by, one.reason)
            for one in found
        ],
        value=[as_dict(one) for one in found],
        empty="nothing is paused",
    )


resume_app = new_app()


@resume_app.command("resume")
@connected
def resume_pause(
    config: "Config",
    everything: Everything = False, target: TargetOption = None, queue: QueueOption = None, lane: LaneOption = None,
    json: Json = False,
) -> None:  # fmt: skip
    """End a pause. Exit code 1 when exactly this was not paused."""
    check_scope(everything, target, queue, lane)
    ended = with_client(config, lambda client: client.resume(target=target, queue=queue, lane=lane))
    scope = Scope.of(target, queue, lane).text
    if json:
        print_json({"scope": scope, "resumed": ended})
    else:
        print(f"resumed: {scope}" if ended else f"{scope} was not paused; see mainspring pauses")
    if not ended:
        raise typer.Exit(1)
