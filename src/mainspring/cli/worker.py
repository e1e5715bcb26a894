"""`mainspring worker`: runs the handlers of a module, and commands, until a signal ends it."""

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring.cli.loop import keep_what_is_there, run
from mainspring.config import Config
from mainspring.model.errors import ConfigError

if TYPE_CHECKING:
    from mainspring.scheduler import Scheduler

log = logging.getLogger("mainspring.worker")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def worker(
    module: Annotated[str | None, typer.Argument(help="module:scheduler; for commands alone none is needed.")] = None,
    queues: Annotated[str | None, typer.Option(help="mail:3,reports:1 with weights; default all of its own.")] = None,
    strict: Annotated[bool | None, typer.Option("--strict", help="Serve queues in this order, not by weight.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Jobs run at one time; 64.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port for /livez, /readyz and /metrics; none.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Server to use; without it, the embedded one.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Tenant boundary; default main.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the embedded server.")] = None,
    lease: Annotated[str | None, typer.Option(help="How long jobs outlive a dead worker; 5s.")] = None,
    shutdown_timeout: Annotated[str | None, typer.Option(help="For jobs that run at a stop; 25s.")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of this worker; default a generated one.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default ./mainspring.toml.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="human, json, or auto.")] = None,
) -> None:
    """Run handlers and commands from queues."""
    flags = {
        "queues": queues, "strict_queues": strict, "worker_concurrency": concurrency,
        "worker_listen": listen, "redis_url": redis_url,
        "namespace": namespace, "data_dir": data_dir, "lease": lease, "shutdown_timeout": shutdown_timeout,
        "node_id": node_id, "config": config, "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    settings = Config.load(flags, os.environ)
    from mainspring.cli.logs import set_up

    set_up(settings.log_format, settings.log_level)
    code = run(_work(_scheduler(module, settings)))
    # Not typer.Exit: a handler that hangs in its thread must not keep a worker that has stopped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scheduler(spec: str | None, settings: Config) -> "Scheduler":
    from mainspring.scheduler import Scheduler

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
        raise ConfigError(f"{spec} is a {type(found).__name__}, not a Scheduler")
    found.configure(settings)
    return found


async def _work(scheduler: "Scheduler") -> int:
    from mainspring.background import end_all
    from mainspring.workplace import Workplace

    place = Workplace(scheduler)

    def greet() -> None:
        keep_what_is_there()
        served = ", ".join(f"{name}:{weight}" for name, weight in place.queues.items())
        log.info("serving %s of namespace %s at %s", served, scheduler.config.namespace, place.where)
        if place.port is not None:
            log.info("probes and metrics are at port %d", place.port)

    code = await place.run_until_signal(started=greet)
    if await end_all():
        logging.shutdown()
        os._exit(code)  # the loop would wait for these handlers for ever
    return code
