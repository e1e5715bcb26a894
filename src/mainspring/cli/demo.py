"""`mainspring demo …`: the whole path at full speed, with figures every second."""

import sys
from collections.abc import Callable
from typing import Annotated, TextIO

import msgspec
import typer
from rich.console import Console

from mainspring.bench.show import in_rows, side_by_side
from mainspring.cli.options import new_group
from mainspring.cli.serve import run
from mainspring.demo.plan import DemoPlan, Via
from mainspring.demo.run import DemoServers, Parts, Reconciliation, Second
from mainspring.demo.run import ticks as run_ticks
from mainspring.model.errors import InvalidInput
from mainspring.model.times import delay_ms

app = new_group()


@app.callback()
def _demo() -> None:
    """See it work: generator, schedulers and consumer as processes of their own."""


@app.command()
def ticks(
    ids: Annotated[int, typer.Option(help="How many items there are.")] = 1_000_000,
    within: Annotated[str, typer.Option(help="Ticks are due at random times within this span from now.")] = "10m",
    rate: Annotated[str, typer.Option(help="Ticks a second, or max.")] = "max",
    seconds: Annotated[
        float | None, typer.Option(help="How long ticks are posted; without it one for each item.")
    ] = None,
    schedulers: Annotated[int, typer.Option(help="Scheduler processes, each with an API of its own.")] = 2,
    via: Annotated[Via, typer.Option(help="POST /ticks one by one, /v1/tasks:batch, or the client.")] = "http",
    replace: Annotated[bool, typer.Option("--replace", help="A new tick of an item moves the one it has.")] = False,
    connections: Annotated[int, typer.Option(help="HTTP connections of the generator.")] = 64,
    kafka: Annotated[str | None, typer.Option("--kafka", help="Brokers, kafka://host:9092.")] = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="Start a broker here; the default.")] = False,
    redis_url: Annotated[str | None, typer.Option(help="Server to use; without it, an embedded one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the reconciliation as JSON.")] = False,
) -> None:
    """Post random ticks, fire them into Kafka, read them there; add it all up at the end. Ctrl-C ends it early."""
    if kafka is not None and embedded:
        raise InvalidInput("--kafka names brokers and --embedded starts one; give one of them")
    plan = DemoPlan(
        ids=ids,
        within_ms=delay_ms(within, field="within"),
        rate=_rate(rate),
        seconds=seconds,
        schedulers=schedulers,
        via=via,
        replace=replace,
        connections=connections,
    )
    stream = sys.stderr if json else sys.stdout
    print("starting schedulers and consumer, and what they need", file=sys.stderr, flush=True)
    found = run(run_ticks(plan, DemoServers(kafka, redis_url), _reporter(stream), started=_greet_on(stream)))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        _show(found)
    if not found.sound:
        typer.echo("demo ticks: ticks are missing, or came early", err=True)
        raise typer.Exit(1)


def _rate(text: str) -> float | None:
    if text == "max":
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--rate {text!r}: give a number of ticks a second, or max") from None


def _greet_on(stream: TextIO) -> Callable[[Parts], None]:
    def greet(parts: Parts) -> None:
        for one in parts.schedulers:
            print(f"{one.name} is process {one.process.pid}, {one.url}", file=stream, flush=True)

    return greet


def _reporter(stream: TextIO) -> Callable[[Second], None]:
    def report(second: Second) -> None:
        for name, value in (
            ("Generated ticks/s", second.generated),
            ("Scheduled items/s", second.scheduled),
            ("Consumed items/s", second.consumed),
        ):
            print(f"{name:<18} {value:>9,}", file=stream, flush=True)

    return report


def _show(found: Reconciliation) -> None:
    console = Console()
    cells = msgspec.structs.asdict(found)
    processes = cells.pop("processes")
    console.print(side_by_side("reconciliation", {"value": cells}))
    if processes:
        rows = [{"process": one.name, "cpu_s": one.cpu_s, "memory_mb": one.memory_mb} for one in processes]
        console.print(in_rows("processes", rows))
