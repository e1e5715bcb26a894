"""`mainspring doctor`: the checks that a node makes at its start, without starting one."""

import asyncio
import contextlib

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, RedisUrl, Settings, load, server_url
from mainspring.config import Config
from mainspring.store.checks import Check, check_server
from mainspring.store.links import Links

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def doctor(
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    config: Settings = None,
    json: Json = False,
) -> None:
    """Check the server; exit code 1 if it cannot be used."""
    found = asyncio.run(_examine(load(redis_url, data_dir, None, config)))
    if json:
        rows = [{"server": address} | msgspec.to_builtins(check) for address, check in found]
        print(msgspec.json.encode(rows).decode())
    else:
        for address, check in found:
            print(f"{check.status:8} {address}  {check.name}: {check.message}")
    if any(check.status == "error" for _, check in found):
        raise typer.Exit(1)


async def _examine(config: Config) -> list[tuple[str, Check]]:
    async with server_url(config) as url, contextlib.aclosing(await Links.connect(url, config.links)) as links:
        return [(link.address, check) for link in links.all() for check in await check_server(link)]
