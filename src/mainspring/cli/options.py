"""Options that all commands share, how a command finds its server, and payloads from the command line."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from mainspring.model.errors import ConfigError, InvalidInput, MainspringError

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.client.http import Api
    from mainspring.config.config import Config
    from mainspring.store.store import Store


def new_app(**more: Any) -> typer.Typer:
    """Return an empty group of commands; the help pages of all groups look alike."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **more)


def new_group(**more: Any) -> typer.Typer:
    """Return a group of commands that prints its help when none of them is named."""
    return new_app(no_args_is_help=True, **more)


RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url", "--url", help="Server, or https://… of a node's API; default the embedded server of the folder."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the embedded server.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="A separate set of tasks; default main.")]
Settings = Annotated[Path | None, typer.Option("--config", help="Settings; default ./mainspring.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(redis_url: str | None, data_dir: Path | None, namespace: str | None, file: Path | None) -> "Config":
    """Return the settings; `api_url` is set only if a node's API is meant."""
    from mainspring.config.config import Config  # here: `--help` needs no settings
    from mainspring.config.settings import check_address, read_sources

    flags: dict[str, object] = {"redis_url": redis_url, "data_dir": data_dir, "namespace": namespace, "config": file}
    if redis_url is not None and redis_url.startswith(("http://", "https://")):
        flags |= {"redis_url": None, "api_url": redis_url}
    given = read_sources(flags, os.environ)
    loaded = Config.of(given)
    if flags["redis_url"] is not None or (data_dir is not None and "api_url" not in flags):
        # A server or a folder given on the command line precedes an API from the environment.
        return replace(loaded, api_url=None)
    if loaded.api_url is not None:
        check_address(given, "api_url", "api_token")
    # Do not request the default by name: the node may serve another namespace, and another tenant may own that one.
    return replace(loaded, api_namespace=loaded.namespace if "namespace" in given else None)


def to_try(config: "Config", command: str) -> str:
    """Return the line that suggests a command, with the namespace that was looked at."""
    namespace = config.namespace if config.api_url is None else config.api_namespace
    needed = namespace not in (None, "main") and command.startswith("mainspring ")
    return f"try: {command} -n {namespace}" if needed else f"try: {command}"


def place_of(config: "Config") -> str:
    """Return the namespace and the server that a command looked at, for messages."""
    if config.api_url is not None:
        named = f"namespace {config.api_namespace}" if config.api_namespace else "the namespace of the node"
        return f"{named} at {config.api_url}"
    if config.redis_url is None:
        from mainspring.store.embedded.folder import default_data_dir

        folder = str(config.data_dir or default_data_dir())
        home = str(Path.home())
        shown = f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder
        return f"namespace {config.namespace} on the embedded server in {shown}"
    from mainspring.store.redis.url import safe_url

    return f"namespace {config.namespace} on {safe_url(config.redis_url)}"


def remote(config: "Config") -> "Api":
    """Return the API that the settings name."""
    from mainspring.client.http import Api

    assert config.api_url is not None
    return Api(config.api_url, namespace=config.api_namespace, token=config.api_token)


@contextlib.asynccontextmanager
async def server_url(config: "Config") -> AsyncIterator[str]:
    """Yield the URL of the given server or of the embedded one, started for this command if no node runs it."""
    if config.api_url is not None:
        raise ConfigError(
            f"this command looks at the server itself, not at an API ({config.api_url}): give --redis-url"
        )
    if config.redis_url is not None:
        yield config.redis_url
        return
    from mainspring.store.embedded import guest

    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(
            stack.enter_context, guest(config.data_dir, memory_bytes=config.embedded_memory_bytes)
        )
        try:
            yield server.url
        finally:
            await asyncio.to_thread(stack.close)


@contextlib.asynccontextmanager
async def opened_store(config: "Config", *, makes: bool = False) -> "AsyncIterator[Store]":
    """Open the namespace of the settings. With `makes` a new one is created, with its partition count: a misspelt name
    must not be created by looking at it."""
    from mainspring.model.shared_settings import SharedSettings
    from mainspring.store.store import Store

    async with (
        server_url(config) as url,
        contextlib.aclosing(
            await Store.open(
                url,
                namespace=config.namespace,
                partitions=config.partitions,
                options=config.links,
                makes=makes,
                shared=SharedSettings(config.shared),
            )
        ) as store,
    ):
        yield store


def completing(
    kind: Literal["schedules", "lanes", "queues", "targets", "channels"],
) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion of names that the server knows; without a server that answers soon there are none."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from mainspring.cli.task import with_client

        given = context.params
        try:
            config = load(given.get("redis_url"), given.get("data_dir"), given.get("namespace"), given.get("config"))
            if kind == "channels":  # of the settings; no server is asked
                return sorted(name for name in config.notify if name.startswith(incomplete))
            names = with_client(config, lambda client: _names(config, client, kind))
        except (MainspringError, OSError, TimeoutError):
            return []
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


async def _names(config: "Config", client: "Client", kind: str) -> list[str]:
    async with asyncio.timeout(COMPLETION_S):
        match kind:
            case "schedules":
                return [view.name async for view in client.schedules.all()]
            case "lanes":
                return [one.lane for one in await client.lanes()]
            case "queues":
                return [one.name for one in await client.queues()]
            case _:
                queued = {target for one in await client.workers() for target in one.targets}
                return [*queued, *(f"target:{name}" for name in config.targets), "log:", "kafka:", "https://"]


COMPLETION_S: Final = 2.0
OnlyTarget = Annotated[
    str | None, typer.Option(help="Only this target; a * at its end is any.", autocompletion=completing("targets"))
]
OnlyLane = Annotated[str | None, typer.Option(help="Only this lane.", autocompletion=completing("lanes"))]
ScheduleName = Annotated[str, typer.Argument(help="The schedule.", autocompletion=completing("schedules"))]

STANDARD_INPUT: Final = "-"


def json_of(text: str, spoken: str) -> bytes:
    """Return JSON as it was written: no number changes its spelling."""
    data = (sys.stdin.buffer.read() if text == STANDARD_INPUT else os.fsencode(text)).strip()
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{spoken} is not JSON ({error}); a plain text needs quotes: '\"text\"'") from None
    return data
