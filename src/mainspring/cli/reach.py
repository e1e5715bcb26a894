"""How a command finds its server: the options all commands share, and what is behind them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring.config import Config

if TYPE_CHECKING:
    from mainspring.store.store import Store

RedisUrl = Annotated[str | None, typer.Option(help="Server; without it, the embedded one of the data folder.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the embedded server.")]
Namespace = Annotated[str | None, typer.Option(help="Tenant boundary; default main.")]
Settings = Annotated[Path | None, typer.Option("--config", help="Settings; default ./mainspring.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(redis_url: str | None, data_dir: Path | None, namespace: str | None, file: Path | None) -> Config:
    flags = {"redis_url": redis_url, "data_dir": data_dir, "namespace": namespace, "config": file}
    return Config.load(flags, os.environ)


@contextlib.asynccontextmanager
async def server_url(config: Config) -> AsyncIterator[str]:
    """Of the given server, or of the embedded one: that of a running node, else one just for this command."""
    if config.redis_url is not None:
        yield config.redis_url
        return
    from mainspring.store import embedded

    server = await asyncio.to_thread(embedded.start, config.data_dir)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


@contextlib.asynccontextmanager
async def opened_store(config: Config) -> "AsyncIterator[Store]":
    from mainspring.store.store import Store

    async with (
        server_url(config) as url,
        contextlib.aclosing(
            await Store.open(url, namespace=config.namespace, partitions=config.partitions, options=config.links)
        ) as store,
    ):
        yield store
