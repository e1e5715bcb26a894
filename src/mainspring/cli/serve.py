"""`mainspring serve`: everything on one machine, until a signal ends it."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring.cli.loop import keep_what_is_there, run
from mainspring.config import Config

if TYPE_CHECKING:
    from mainspring.node import Node

log = logging.getLogger("mainspring.serve")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def serve(
    redis_url: Annotated[str | None, typer.Option(help="Server to use; without it, an embedded one.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Tenant boundary; default main.")] = None,
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
    dedupe_window: Annotated[str | None, typer.Option(help="How long a finished id is known; 1h.")] = None,
    kafka_url: Annotated[str | None, typer.Option(help="Brokers of kafka: targets, kafka://host:9092.")] = None,
    kafka_create_topics: Annotated[bool | None, typer.Option(help="Create Kafka topics that are missing.")] = None,
    catch_up_rate: Annotated[str | None, typer.Option(help="How fast overdue tasks go out, 5000/s; no bound.")] = None,
    http_allow: Annotated[str | None, typer.Option(help="Networks and names webhooks may reach.")] = None,
    http_timeout: Annotated[str | None, typer.Option(help="For a webhook's answer; 15s.")] = None,
    http_concurrency: Annotated[int | None, typer.Option(help="Requests to one host at one time; 64.")] = None,
    http_rate: Annotated[str | None, typer.Option(help="Webhooks to one host, 50/s; no bound.")] = None,
    http_result_ttl: Annotated[str | None, typer.Option(help="How long webhooks' answers are kept; 1h.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default ./mainspring.toml.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="human, json, or auto.")] = None,
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
    from mainspring.cli.logs import set_up

    set_up(settings.log_format, settings.log_level)
    if settings.processes > 1 and parent_fd is None:  # a child has the number too, and is one of them
        raise typer.Exit(asyncio.run(_supervise(settings)))
    raise typer.Exit(run(_serve(settings, listen_fd, parent_fd, metrics_socket)))


async def _serve(config: Config, listen_fd: int | None, parent_fd: int | None, metrics_socket: Path | None) -> int:
    from mainspring.api.server import ApiServer, inherit
    from mainspring.lifeline import Lifeline
    from mainspring.node import Node

    node = Node(config)
    # A child of a supervisor is renewed by this signal, and a closed terminal sends it as well.
    node.reloads_on_hangup = config.schedules is not None and parent_fd is None and not os.isatty(0)
    server = ApiServer(node, None if listen_fd is None else inherit(listen_fd))
    line = None if parent_fd is None else Lifeline(parent_fd, shutdown_timeout_s=config.shutdown_timeout_s)

    def started() -> None:
        keep_what_is_there()
        if line is None:
            _greet(config, server.url, node.where)
        else:
            server.open()
            line.ready()

    if metrics_socket is None:
        return await node.run_until_signal(server, started)
    async with _told_by_all(node, metrics_socket):
        return await node.run_until_signal(server, started)


@contextlib.asynccontextmanager
async def _told_by_all(node: "Node", metrics_socket: Path) -> AsyncIterator[None]:
    from mainspring.measures import collect
    from mainspring.siblings import Siblings

    node.siblings = Siblings(metrics_socket, lambda: collect(node))
    await node.siblings.start()
    try:
        yield
    finally:
        await node.siblings.stop()


async def _supervise(config: Config) -> int:
    from mainspring.api.server import listen, url_of
    from mainspring.supervisor import Supervisor, child_command

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
