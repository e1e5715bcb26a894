"""`mainspring bench …`: every figure in the README, measured here and now."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ..bench.baseline import baseline as run_baseline
from ..bench.cluster import cluster as run_cluster
from ..bench.cycle import compare as run_compare
from ..bench.cycle import cycle as run_cycle
from ..bench.environment import ServerChoice
from ..bench.history import history as run_history
from ..bench.http import e2e as run_e2e
from ..bench.http import http as run_http
from ..bench.idle import growth as run_growth
from ..bench.idle import idle as run_idle
from ..bench.idle import sparse as run_sparse
from ..bench.lateness import Steady, compare_lateness
from ..bench.lateness import lateness as run_lateness
from ..bench.lifecycle import BenchProgress, Shape
from ..bench.peers.bench import Demand, server_of_choice
from ..bench.peers.bench import peers as run_peers
from ..bench.schedules import schedules as run_schedules
from ..bench.show import MeasuringBar, table_of
from ..bench.sinks import sinks as run_sinks
from ..model.errors import MainspringError
from ..testing.servers import Kind, missing
from .options import new_group
from .serve import run


async def all_in_short(where: ServerChoice, tasks: int, progress: BenchProgress) -> dict[str, Any]:
    spread_s = 2.0
    results: dict[str, Any] = {
        "compare": await run_compare(where, Shape(tasks, spread_s=spread_s), 1, progress),
        "compare --ids": await run_compare(where, Shape(tasks, ids=True, spread_s=spread_s), 1, progress),
        "compare --ids --cancel 0.95": await run_compare(
            where, Shape(tasks, ids=True, cancel=0.95, spread_s=spread_s), 1, progress
        ),
        "lateness --compare": await compare_lateness(where, Steady(10_000, 5.0), progress),
        "growth": await run_growth(where, 500_000, min(tasks, 100_000), 1, progress),
        "idle": await run_idle(where, 5.0, progress),
    }
    if where.url is None and missing("redis") is None:
        where = ServerChoice(server="redis")  # the promise on memory is for Redis 7.0
    results["sparse"] = await run_sparse(where, 10 * tasks, 48, progress)
    return results


app = new_group(help="Measure speed, cost, lateness and memory on this machine.")

Tasks = Annotated[int, typer.Option("--tasks", help="How many tasks.")]
PayloadBytes = Annotated[int, typer.Option("--payload-bytes", help="Bytes of each payload.")]
WithIds = Annotated[bool, typer.Option("--ids", help="Give tasks ids of the caller.")]
WithLanes = Annotated[bool, typer.Option("--lanes", help="Ten tasks each share a lane.")]
CancelShare = Annotated[float, typer.Option("--cancel", help="Share that is cancelled before it fires.")]
Spread = Annotated[float, typer.Option("--spread", help="Seconds over which due times are spread.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds; medians count.")]
Seconds = Annotated[float, typer.Option("--seconds", help="How long to measure.")]
MeasuredUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Measure there, in a namespace that is removed afterwards.")
]
ServerKind = Annotated[Kind, typer.Option("--server", help="Kind of the private server used without a URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _run(title: str, work: Callable[[BenchProgress], Awaitable[Any]], as_json: bool) -> None:
    """Measure and print; exit with 1 if a task was lost, duplicated or early."""

    async def main() -> Any:
        return await work(bar)

    try:
        with MeasuringBar(shown=not as_json) as bar:
            result = run(main())
    except MainspringError as error:
        typer.echo(f"bench {title}: {error}", err=True)
        raise typer.Exit(2) from None
    parts = result if isinstance(result, dict) else {title: result}
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        console = Console()
        for name, part in parts.items():
            console.print(table_of(f"bench {name}", part))
    for part in parts.values():
        if warning := getattr(part, "warning", None):
            typer.echo(f"bench {title}: {warning}", err=True)
    if not all(_sound(part) for part in parts.values()):
        typer.echo(f"bench {title}: tasks were lost, duplicated, early or out of order", err=True)
        raise typer.Exit(1)


def _sound(result: Any) -> bool:
    return all(row.sound for row in result) if isinstance(result, list) else bool(result.sound)


@app.command()
def cycle(
    tasks: Tasks = 1_000_000,
    payload_bytes: PayloadBytes = 48,
    ids: WithIds = False,
    lanes: WithLanes = False,
    cancel: CancelShare = 0.0,
    spread: Spread = 10.0,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Put tasks in bulk and fire them through the engine: rates, CPU and memory per task."""
    where = ServerChoice(redis_url, server)
    _run(
        "cycle",
        lambda report: run_cycle(where, Shape(tasks, payload_bytes, ids, lanes, cancel, spread), report),
        json,
    )


@app.command()
def baseline(
    tasks: Tasks = 1_000_000,
    payload_bytes: PayloadBytes = 48,
    ids: WithIds = False,
    cancel: CancelShare = 0.0,
    spread: Spread = 10.0,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Do the same work with a careful hand-written design: ZADD + HSET, Lua claims with leases, acks."""
    where = ServerChoice(redis_url, server)
    _run(
        "baseline",
        lambda report: run_baseline(where, Shape(tasks, payload_bytes, ids, False, cancel, spread), report),
        json,
    )


@app.command()
def compare(
    tasks: Tasks = 1_000_000,
    payload_bytes: PayloadBytes = 48,
    ids: WithIds = False,
    lanes: WithLanes = False,
    cancel: CancelShare = 0.0,
    spread: Spread = 10.0,
    rounds: Rounds = 3,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Measure both in one run, in turns; ratios are Mainspring by baseline."""
    where = ServerChoice(redis_url, server)
    _run(
        "compare",
        lambda report: run_compare(where, Shape(tasks, payload_bytes, ids, lanes, cancel, spread), rounds, report),
        json,
    )


@app.command()
def lateness(
    rate: Annotated[int, typer.Option("--rate", help="Tasks a second.")] = 10_000,
    seconds: Seconds = 10.0,
    payload_bytes: PayloadBytes = 48,
    warmup: Annotated[float, typer.Option("--warmup", help="Seconds left out at the start.")] = 3.0,
    baseline: Annotated[bool, typer.Option("--baseline", help="Measure the hand-written design.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Measure both, one after the other.")] = False,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Put a steady load two seconds ahead from another process: how late tasks arrive, what one costs."""
    where = ServerChoice(redis_url, server)

    async def work(report: BenchProgress) -> Any:
        steady = Steady(rate, seconds, warmup, payload_bytes)
        if compare:
            return await compare_lateness(where, steady, report)
        return await run_lateness(where, steady, "baseline" if baseline else "mainspring", report)

    _run("lateness", work, json)


@app.command()
def growth(
    most: Annotated[int, typer.Option("--max", min=1, help="Most tasks pending.")] = 5_000_000,
    tasks: Tasks = 100_000,
    rounds: Rounds = 9,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Measure what a task costs the server while 50 k, 500 k and 5 M others are pending."""
    _run("growth", lambda report: run_growth(ServerChoice(redis_url, server), most, tasks, rounds, report), json)


@app.command()
def idle(
    seconds: Seconds = 10.0,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Measure what an idle node costs that owns all partitions."""
    _run("idle", lambda report: run_idle(ServerChoice(redis_url, server), seconds, report), json)


@app.command()
def cluster(
    lease: Annotated[float, typer.Option("--lease", min=0.5, help="Seconds; takeovers are judged by it.")] = 2.0,
    kills: Annotated[int, typer.Option("--kills", min=1, help="Nodes killed, one after the other.")] = 20,
    tasks: Tasks = 1_000_000,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Run four node processes: takeover after a kill and a stop, what moves, what they fire together."""
    where = ServerChoice(redis_url, server)
    _run("cluster", lambda report: run_cluster(where, lease_s=lease, kills=kills, tasks=tasks, progress=report), json)


@app.command()
def sinks(
    tasks: Tasks = 20_000,
    rounds: Rounds = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="Kind of target; may be repeated.")] = None,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Deliver through the engine to real targets, beside the same library in a plain loop."""
    _run("sinks", lambda report: run_sinks(ServerChoice(redis_url, server), only or (), tasks, rounds, report), json)


@app.command()
def sparse(
    tasks: Tasks = 10_000_000,
    payload_bytes: PayloadBytes = 48,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Measure the memory of a pending task when tasks are spread thinly over a year."""
    _run("sparse", lambda report: run_sparse(ServerChoice(redis_url, server), tasks, payload_bytes, report), json)


@app.command()
def peers(
    tasks: Tasks = 20_000,
    rate: Annotated[int, typer.Option("--rate", help="Tasks a second where lateness is measured.")] = 500,
    seconds: Seconds = 10.0,
    only: Annotated[list[str] | None, typer.Option("--only", help="Name of a peer; may be repeated.")] = None,
    server: Annotated[Kind | None, typer.Option("--server", help="redis where it is installed, else valkey.")] = None,
    install: Annotated[
        bool, typer.Option(help="Install missing peers into an environment of their own in the cache folder.")
    ] = True,
    json: AsJson = False,
) -> None:
    """Compare Mainspring with Celery, Dramatiq, RQ, arq and Huey: the same tasks, one producer, one consumer."""
    where = ServerChoice(server=server) if server else server_of_choice()
    demand = Demand(tasks, rate, seconds)
    _run("peers", lambda report: run_peers(where, demand, only or (), report, install=install), json)


@app.command()
def http(
    seconds: Seconds = 5.0,
    rounds: Rounds = 3,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Post ticks one by one and tasks in batches over HTTP, beside a bare application on the same web server."""
    _run("http", lambda report: run_http(ServerChoice(redis_url, server), seconds, rounds, report), json)


@app.command()
def e2e(
    rate: Annotated[float, typer.Option("--rate", help="Tasks a second.")] = 60_600,
    seconds: Seconds = 30.0,
    schedulers: Annotated[int, typer.Option("--schedulers", min=1, help="Scheduler processes.")] = 2,
    kafka: Annotated[str | None, typer.Option("--kafka", help="Brokers; without it one is started.")] = None,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Run the whole path at a steady rate: batches in over HTTP, messages out to Kafka, read there again."""
    where = ServerChoice(redis_url, server)
    _run("e2e", lambda report: run_e2e(where, rate, seconds, schedulers, kafka, report), json)


@app.command()
def schedules(
    count: Annotated[int, typer.Option("--schedules", min=1, help="How many schedules.")] = 100_000,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Add schedules that are all due in the same second: rates, how long that second takes, memory of each."""
    _run("schedules", lambda report: run_schedules(ServerChoice(redis_url, server), count, report), json)


@app.command()
def history(
    runs: Annotated[int, typer.Option("--runs", min=1_000, help="How many runs are written.")] = 1_000_000,
    tasks: Tasks = 20_000,
    rounds: Rounds = 5,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Measure the memory of the history of runs, how soon runs are found in it, and its cost where tasks fire."""
    where = ServerChoice(redis_url, server)
    _run("history", lambda report: run_history(where, runs, tasks, rounds, report), json)


@app.command("all")
def everything(
    tasks: Tasks = 200_000,
    redis_url: MeasuredUrl = None,
    server: ServerKind = "valkey",
    json: AsJson = False,
) -> None:
    """Run all of them in short, in about three minutes."""
    _run("all", lambda report: all_in_short(ServerChoice(redis_url, server), tasks, report), json)


if __name__ == "__main__":
    app()
