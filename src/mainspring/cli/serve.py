"""`mainspring serve` and `mainspring worker`: processes that run until a signal, their event loop and logs."""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

import msgspec
import typer
import typer.core

from mainspring.cli.listing import Instant, Listing, StateCell, listing
from mainspring.cli.options import Namespace, new_app
from mainspring.cli.output import printable
from mainspring.cli.task import with_client
from mainspring.config.config import Config, LogFormat
from mainspring.model.errors import ConfigError
from mainspring.model.text import clean

if TYPE_CHECKING:
    from mainspring.node.node import Node
    from mainspring.scheduler.scheduler import Scheduler

log = logging.getLogger("mainspring.serve")

worker_log = logging.getLogger("mainspring.worker")


Result = TypeVar("Result")

GC_THRESHOLDS: Final = (20_000, 20, 50)
"""Rare, because tasks are hidden from the collector: what it would scan is mostly long-lived, and frees nothing."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like `asyncio.run`, on uvloop if it is installed."""
    keep_what_is_there()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        import uvloop
    except ImportError:  # no wheel for this system: asyncio's own loop does the same, slower
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def keep_what_is_there() -> None:
    """Freeze what is loaded: it lives until the end, and the collector need not scan it again and again."""
    gc.collect()
    gc.freeze()


LogLevelOption = Annotated[
    str | None,
    typer.Option(help="debug, info, warning or error.", autocompletion=lambda: ["debug", "info", "warning", "error"]),
]
LogFormatOption = Annotated[
    str | None, typer.Option(help="human, json, or auto.", autocompletion=lambda: list(get_args(LogFormat)))
]

ABOUT: Final = ("task", "lane", "target", "schedule")
"""Given as `extra` of a line, these are fields of the JSON object."""


def set_up(form: LogFormat, level: str) -> None:
    """Send every log of this process to standard error."""
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanLines() if human else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At debug level asyncio logs which selector it uses, and little else.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class HumanLines(logging.Formatter):
    """`12:00:00 warning message`; the level only where it says something."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        # Text from outside (an id, a response) must not look like a line of the log, nor move the cursor.
        text = printable(clean(f"{at} {level}{record.getMessage()}").replace("\n", "\\n").replace("\r", "\\r"))
        return f"{text}\n{clean(self.formatException(record.exc_info))}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """Formats one JSON object per line; ids and targets have fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: str(value) for name in ABOUT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode({name: clean(value) for name, value in fields.items()}).decode()


serve_app = new_app()


@serve_app.command()
def serve(
    redis_url: Annotated[str | None, typer.Option(help="Server to use; without it, an embedded one.")] = None,
    namespace: Namespace = None,
    partitions: Annotated[int | None, typer.Option(help="For a new namespace; default 32.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the API; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API, 0 for any; default 8000.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the embedded server.")] = None,
    schedules: Annotated[Path | None, typer.Option(help="A file of schedules, applied whenever it changes.")] = None,
    timezone: Annotated[str | None, typer.Option(help="Time zone of schedules that name none; UTC.")] = None,
    tick_target: Annotated[str | None, typer.Option(help="Where ticks go; kafka:ticks, else log:.")] = None,
    lease: Annotated[str | None, typer.Option(help="How long partitions outlive a dead owner; 5s.")] = None,
    look_ahead: Annotated[int | None, typer.Option(help="Tasks held in memory at most; 200000.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Tasks in flight at most; 100000.")] = None,
    horizon: Annotated[str | None, typer.Option(help="How early tasks are read; 5s.")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this node; default a generated one.")] = None,
    shutdown_timeout: Annotated[str | None, typer.Option(help="For tasks in flight at a stop; 25s.")] = None,
    dedupe_window: Annotated[
        str | None, typer.Option(help="How long a finished id is known; as the namespace says, else 1h.")
    ] = None,
    kafka_url: Annotated[str | None, typer.Option(help="Brokers of kafka: targets, kafka://host:9092.")] = None,
    kafka_create_topics: Annotated[bool | None, typer.Option(help="Create Kafka topics that are missing.")] = None,
    catch_up_rate: Annotated[str | None, typer.Option(help="How fast overdue tasks go out, 5000/s; no bound.")] = None,
    http_allow: Annotated[str | None, typer.Option(help="Networks and names webhooks may reach.")] = None,
    http_timeout: Annotated[str | None, typer.Option(help="For a webhook's answer; 15s.")] = None,
    max_timeout: Annotated[
        str | None, typer.Option(help="Longest timeout that a webhook's task may have; 10m.")
    ] = None,
    http_concurrency: Annotated[int | None, typer.Option(help="Requests to one host at one time; 64.")] = None,
    http_rate: Annotated[str | None, typer.Option(help="Webhooks to one host, 50/s; no bound.")] = None,
    http_result_ttl: Annotated[str | None, typer.Option(help="How long webhooks' answers are kept; 1h.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default ./mainspring.toml.")] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    processes: Annotated[int | None, typer.Option(help="Node processes under one supervisor; 1.")] = None,
    roles: Annotated[str | None, typer.Option(help="What it does; default scheduler,api.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Answer everybody, without keys.")] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    metrics_socket: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a scheduler with its HTTP API. Ticks that come due are printed, one line each."""
    flags = dict(locals())
    for name in ("insecure", "listen_fd", "parent_fd", "metrics_socket"):
        del flags[name]
    if insecure:
        flags["access"] = "open"
    settings = Config.load(flags, os.environ)

    set_up(settings.log_format, settings.log_level)
    if settings.processes > 1 and parent_fd is None:  # a child has the number too, and is one of them
        raise typer.Exit(asyncio.run(_supervise(settings)))
    raise typer.Exit(run(_serve(settings, listen_fd, parent_fd, metrics_socket)))


async def _serve(config: Config, listen_fd: int | None, parent_fd: int | None, metrics_socket: Path | None) -> int:
    from mainspring.api.server import ApiServer, inherit
    from mainspring.node.node import Node
    from mainspring.node.supervisor import ParentWatch

    node = Node(config)
    # This signal restarts a child of a supervisor; a closed terminal sends it as well.
    node.reloads_on_hangup = config.schedules is not None and parent_fd is None and not os.isatty(0)
    server = ApiServer(node, None if listen_fd is None else inherit(listen_fd))
    parent = None if parent_fd is None else ParentWatch(parent_fd, shutdown_timeout_s=config.shutdown_timeout_s)

    def started() -> None:
        keep_what_is_there()
        if parent is None:
            _greet(config, server.url, node.where)
        else:
            server.open()
            parent.ready()

    if metrics_socket is None:
        return await node.run_until_signal(server, started)
    async with _metrics_of_all_processes(node, metrics_socket):
        return await node.run_until_signal(server, started)


@contextlib.asynccontextmanager
async def _metrics_of_all_processes(node: "Node", metrics_socket: Path) -> AsyncIterator[None]:
    from mainspring.node.metrics import collect
    from mainspring.node.supervisor import ProcessMetrics

    node.process_metrics = ProcessMetrics(metrics_socket, lambda: collect(node))
    await node.process_metrics.start()
    try:
        yield
    finally:
        await node.process_metrics.stop()


async def _supervise(config: Config) -> int:
    from mainspring.api.server import listen, url_of
    from mainspring.node.supervisor import Supervisor, child_command

    listener = listen(config.host, config.port)
    url = url_of(listener, tls=config.api_tls_cert is not None)
    supervisor = Supervisor(config, child_command(), listener)
    return await supervisor.run(started=lambda: _greet(config, url, supervisor.where))


def _greet(config: Config, url: str, where: str) -> None:
    log.info("the API is at %s" if "api" in config.roles else "probes and metrics are at %s", url)
    log.info("the data is at %s", where)
    if "api" in config.roles:
        _suggest(config, url)
    if sys.stderr.isatty():
        log.info("Ctrl-C stops it")


def _suggest(config: Config, url: str) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=10)).strftime("%Y-%m-%dT%H:%M:%SZ")
    tick = f'{{"item": "hello", "at": "{soon}"}}'
    key = "-H 'authorization: Bearer msk_…' " if config.needs_keys else ""
    log.info("try: curl %s/ticks %s-H 'content-type: application/json' -d '%s'", url, key, tick)


class _WorkerGroup(typer.core.TyperGroup):
    """`mainspring worker MODULE` runs a worker: `run` may be left out."""

    def spelled_out(self, args: list[str]) -> list[str]:
        named = args[:1] and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return args if named else ["run", *args]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.spelled_out(args))


worker_app = new_app(
    cls=_WorkerGroup, help="Run handlers and commands from queues (run, which may be left out); list the workers."
)


@worker_app.command("list")
@listing
def list_workers(config: Config) -> Listing:
    """List the live workers: the queues they serve, where they run, how busy they are."""
    found = with_client(config, lambda client: client.workers())
    return Listing(
        columns=("WORKER", "STATE", "QUEUES", "BUSY", "HANDLERS", "WHERE", "STARTED"),
        rows=[
            (
                one.id, StateCell("stopping" if one.stopping else "active"),
                ",".join(f"{name}:{weight}" for name, weight in one.queues.items()),
                f"{one.running}/{one.concurrency}", str(len(one.targets) + one.targets_left_out),
                f"{one.host} {one.pid}", Instant(one.started_ms),
            )
            for one in found
        ],
        value=found,
        empty="no worker is running",
        hint="mainspring worker myapp:scheduler",
    )  # fmt: skip


@worker_app.command("run")
def worker(
    module: Annotated[str | None, typer.Argument(help="module:scheduler; for commands alone none is needed.")] = None,
    queues: Annotated[str | None, typer.Option(help="mail:3,reports:1 with weights; default all of its own.")] = None,
    strict: Annotated[bool | None, typer.Option("--strict", help="Serve queues in this order, not by weight.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Jobs run at one time; 64.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port for /livez, /readyz and /metrics; none.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Server to use; without it, the embedded one.")] = None,
    namespace: Namespace = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the embedded server.")] = None,
    lease: Annotated[str | None, typer.Option(help="How long jobs outlive a dead worker; 5s.")] = None,
    shutdown_timeout: Annotated[str | None, typer.Option(help="For jobs that run at a stop; 25s.")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this worker; default a generated one.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default ./mainspring.toml.")] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Run handlers and commands from queues."""
    flags = {
        "queues": queues, "strict_queues": strict, "worker_concurrency": concurrency,
        "worker_listen": listen, "redis_url": redis_url,
        "namespace": namespace, "data_dir": data_dir, "lease": lease, "shutdown_timeout": shutdown_timeout,
        "node_id": node_id, "config": config, "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    settings = Config.load(flags, os.environ)

    set_up(settings.log_format, settings.log_level)
    code = run(_work(_scheduler(module, settings)))
    # Not typer.Exit: a handler that hangs in its thread must not keep a worker that has stopped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scheduler(spec: str | None, settings: Config) -> "Scheduler":
    from mainspring.scheduler.scheduler import Scheduler

    if spec is None:
        return Scheduler(settings)
    name, colon, attribute = spec.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"{spec!r} names no scheduler; write module:attribute, e.g. myapp:scheduler")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the module may lie in the working folder
    try:
        found = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise ConfigError(f"{spec!r}: there is no module {error.name!r}, neither here nor installed") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"module {name!r} has no {attribute!r}; name its Scheduler, e.g. {name}:scheduler")
        found = getattr(found, part)
    if not isinstance(found, Scheduler):
        raise ConfigError(f"{spec} is of type {type(found).__name__}, not a Scheduler")
    found.configure(settings)
    return found


async def _work(scheduler: "Scheduler") -> int:
    from mainspring.node.process import end_all
    from mainspring.scheduler.worker_process import Workplace

    place = Workplace(scheduler)

    def greet() -> None:
        keep_what_is_there()
        served = ", ".join(f"{name}:{weight}" for name, weight in place.queues.items())
        worker_log.info("serving %s of namespace %s at %s", served, scheduler.config.namespace, place.where)
        if place.port is not None:
            worker_log.info("probes and metrics are at port %d", place.port)

    code = await place.run_until_signal(started=greet)
    if await end_all():
        logging.shutdown()
        os._exit(code)  # the loop would wait for these handlers for ever
    return code
