"""`mainspring lane`: lanes that stand still behind a failed head, a pause or an open breaker."""

from typing import Annotated, Final

import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.table import aligned, printable
from mainspring.cli.task import print_json, with_client
from mainspring.model.explain import moment
from mainspring.model.lane import LaneAnswer, LaneInfo

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

Lane = Annotated[str, typer.Argument(help="The lane.")]

_ANSWERS: Final[dict[LaneAnswer, str]] = {
    "ok": "done",
    "too late": "its head is being delivered right now; look again in a moment",
    "no head": "it waits for no failed task",
    "gone": "its head is over; the lane goes on by itself",
}


@app.command("list")
def list_(
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List lanes that stand still, those that wait longest first."""
    found = with_client(load(redis_url, data_dir, namespace, config), lambda client: client.lanes())
    if json:
        print_json(found)
        return
    rows = []
    for one in found:
        behind = "some or none" if one.behind is None else one.behind
        rows.append((one.lane, one.state, f"{behind} behind", _why(one)))
    for line in aligned(rows):
        print(line)
    if not found:
        print("no lane stands still")


@app.command()
def show(
    lane: Lane,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Show how a lane stands."""
    one = with_client(load(redis_url, data_dir, namespace, config), lambda client: client.lane(lane))
    if json:
        print_json(one)
        return
    behind = "some or no" if one.behind is None else one.behind
    print(printable(f"{one.lane}: {one.state}, {behind} tasks behind"))
    for name, text in _rows(one):
        print(printable(f"  {name:9} {text}"))


@app.command("retry-head")
def retry_head(
    lane: Lane,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Try the failed head of a lane now."""
    loaded = load(redis_url, data_dir, namespace, config)
    _tell(lane, with_client(loaded, lambda client: client.lane_retry_head(lane)), json)


@app.command("skip-head")
def skip_head(
    lane: Lane,
    reason: Annotated[str, typer.Option(help="Kept with the dead letter.")] = "skipped by hand",
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Give the failed head of a lane up: it goes to the dead letters, and the lane goes on."""
    loaded = load(redis_url, data_dir, namespace, config)
    _tell(lane, with_client(loaded, lambda client: client.lane_skip_head(lane, reason=reason)), json)


@app.command()
def resume(
    lane: Lane,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let a parked or paused lane go on; a parked one with its head."""
    loaded = load(redis_url, data_dir, namespace, config)
    _tell(lane, with_client(loaded, lambda client: client.lane_resume(lane)), json)


def _tell(lane: str, answer: LaneAnswer, json: bool) -> None:
    """Exit code 1 when nothing was done."""
    if json:
        print_json({"lane": lane, "answer": answer})
    else:
        print(f"{lane}: {_ANSWERS[answer]}")
    if answer != "ok":
        raise typer.Exit(1)


def _why(one: LaneInfo) -> str:
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
        ("who", one.who),
        ("until", None if one.until_ms is None else moment(one.until_ms)),
    ]
    return [(name, text) for name, text in rows if text is not None]
