"""`mainspring pause`: let everything, a target, a queue or a lane stand still."""

from typing import Annotated

import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.task import print_json, when_of, with_client
from mainspring.cli.witness import user
from mainspring.model.errors import InvalidInput
from mainspring.model.explain import moment
from mainspring.model.pause import Mode, Pause

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Target = Annotated[str | None, typer.Option(help="This target; with a * at its end, all that begin so: 'kafka:*'.")]
Queue = Annotated[str | None, typer.Option(help="This queue.")]
Lane = Annotated[str | None, typer.Option(help="This lane.")]
All = Annotated[bool, typer.Option("--all", help="Everything.")]


@app.command("pause")
def pause(
    everything: All = False, target: Target = None, queue: Queue = None, lane: Lane = None,
    reason: Annotated[str, typer.Option(help="Why; shown to whoever asks.")] = "",
    who: Annotated[str | None, typer.Option(help="Who; default is the user of this machine.")] = None,
    for_: Annotated[str | None, typer.Option("--for", help="It ends by itself after so long: 30m, 1h.")] = None,
    until: Annotated[str | None, typer.Option(help="It ends by itself at this time.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="What comes due meanwhile goes to the dead letters.")] = False,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Let nothing go out: of everything, a target, a queue or a lane. What waits goes out after `resume`, in order."""
    check_scope(everything, target, queue, lane)
    mode: Mode = "drop" if drop else "hold"
    made = with_client(
        load(redis_url, data_dir, namespace, config),
        lambda client: client.pause(
            target=target, queue=queue, lane=lane, mode=mode, reason=reason,
            who=user() if who is None else who, until=when_of(until), for_=for_,
        ),
    )  # fmt: skip
    if json:
        print_json(as_dict(made))
    else:
        print(f"paused: {line_of(made)}")


def check_scope(everything: bool, target: str | None, queue: str | None, lane: str | None) -> None:
    given = sum((everything, target is not None, queue is not None, lane is not None))
    if given != 1:
        raise InvalidInput("say what: --all, --target, --queue or --lane")


def line_of(one: Pause) -> str:
    until = "" if one.until_ms is None else f", until {moment(one.until_ms)}"
    by = f" by {one.who}" if one.who else ""
    why = f": {one.reason}" if one.reason else ""
    drop = " (what comes due is dropped)" if one.mode == "drop" else ""
    return f"{one.scope.text}{drop}, since {moment(one.since_ms)}{until}{by}{why}"


def as_dict(one: Pause) -> dict[str, object]:
    return {
        "scope": one.scope.text,
        "mode": one.mode,
        "reason": one.reason,
        "who": one.who,
        "since_ms": one.since_ms,
        "until_ms": one.until_ms,
    }
