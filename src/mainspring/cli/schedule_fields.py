"""The options that say what a schedule is: listed once, for every command that takes them."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import typer

from mainspring.cli.payload import json_of
from mainspring.cli.task import when_of
from mainspring.model.errors import InvalidInput

OPTIONS: Final[dict[str, Any]] = {
    "cron": Annotated[
        list[str] | None, typer.Option(help="'0 2 * * *', '@daily'; repeatable: it runs at all of them.")
    ],
    "every": Annotated[list[str] | None, typer.Option(help="30s, 5m: from when it was added, or from --start.")],
    "after_end": Annotated[str | None, typer.Option(help="So long after the end of the run before.")],
    "target": Annotated[str | None, typer.Option(help="command:backup, https://…, queue:mail/send, kafka:topic, log:")],
    "payload": Annotated[str | None, typer.Option(help="JSON; - reads it from standard input.")],
    "tz": Annotated[
        str | None, typer.Option("--tz", "--timezone", help="IANA time zone; default that of the settings, UTC.")
    ],
    "exclude": Annotated[list[str] | None, typer.Option(help="A date, dates a..b, or a cron line; repeatable.")],
    "start": Annotated[str | None, typer.Option(help="Not before this time.")],
    "end": Annotated[str | None, typer.Option(help="Not after this time.")],
    "max_runs": Annotated[int | None, typer.Option(help="So many runs, then no more; 0: no bound.")],
    "dst_gap": Annotated[str | None, typer.Option(help="A fixed hour that is jumped over: shift or skip.")],
    "dst_overlap": Annotated[str | None, typer.Option(help="One that comes twice: first, second, both.")],
    "lane": Annotated[str | None, typer.Option(help="Runs are tasks of this lane.")],
    "retry": Annotated[str | None, typer.Option(help="Retry policy, e.g. '3 base=200ms jitter=500ms'.")],
    "retries": Annotated[int | None, typer.Option(help="Retries after the first attempt; for a policy of options.")],
    "retry_base": Annotated[str | None, typer.Option(help="The first wait of that policy.")],
    "retry_jitter": Annotated[str | None, typer.Option(help="Its jitter: full, equal, none, or a time such as 500ms.")],
    "timeout": Annotated[str | None, typer.Option(help="How long one attempt may take.")],
    "misfire": Annotated[str | None, typer.Option(help="When nobody was up: coalesce, skip, all(<most>).")],
    "grace": Annotated[str | None, typer.Option(help="How late a run may begin before that counts; 60s.")],
    "overlap": Annotated[
        str | None, typer.Option(help="While the run before goes on: skip, buffer_one, buffer_all(<n>), allow.")
    ],
    "jitter": Annotated[str | None, typer.Option(help="Each run starts up to so much later.")],
    "spread": Annotated[str | None, typer.Option(help="All runs start later by one part of this, by name.")],
    "note": Annotated[str | None, typer.Option(help="Why; kept with the revision.")],
    "by": Annotated[str | None, typer.Option(help="Who; kept with the revision; default is the user.")],
}
_POLICY: Final = {"retries": "retries", "retry_base": "base", "retry_jitter": "jitter"}
_TAKES_AWAY: Final[dict[str, tuple[Any, Any]]] = {
    **dict.fromkeys(("start", "end", "retry", "timeout", "jitter", "spread", "after_end"), ("", None)),
    **dict.fromkeys(("exclude", "cron", "every"), ([""], [])),
    "max_runs": (0, None),
}
"""By what an edit takes away what it finds, and how the client is told."""


def takes_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all of these options; it gets what was said as `fields`.

    A command line is made from the signature of a function: this one has the options in the place of `fields`.
    """

    @functools.wraps(command)
    def call(**said: Any) -> None:
        command(fields=fields_of({option: said.pop(option) for option in OPTIONS}), **said)

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
    """What was said on the command line, as the client takes it."""
    fields = {name: value for name, value in options.items() if value is not None and name not in _POLICY}
    if "tz" in fields:
        fields["timezone"] = fields.pop("tz")
    for name, (empty, nothing) in _TAKES_AWAY.items():
        if fields.get(name) == empty:
            fields[name] = nothing
    for name in ("start", "end"):
        if name in fields:
            fields[name] = when_of(fields[name])
    if "payload" in fields:
        fields["payload"] = msgspec.json.decode(json_of(fields["payload"], "--payload"))
    policy = {field: options[name] for name, field in _POLICY.items() if options.get(name) is not None}
    if policy:
        if "retry" in fields:
            raise InvalidInput("give either --retry or --retries, --retry-base and --retry-jitter")
        fields["retry"] = policy
    return fields
