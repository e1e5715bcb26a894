"""`mainspring doctor`: the checks that a node makes at its start, without starting one."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mainspring.config import Config
from mainspring.store import embedded
from mainspring.store.checks import Check, check_server
from mainspring.store.links import Links

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def doctor(
    redis_url: Annotated[str | None, typer.Option(help="Server; without it, the embedded one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the embedded server.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default ./mainspring.toml.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the server; exit code 1 if it cannot be used."""
    flags = {"redis_url": redis_url, "data_dir": data_dir, "config": config}
    found = asyncio.run(_examine(Config.load(flags, os.environ)))
    if json:
        rows = [{"server": address} | msgspec.to_builtins(check) for address, check in found]
        print(msgspec.json.encode(rows).decode())
    else:
        for address, check in found:
            print(f"{check.status:8} {address}  {check.name}: {check.message}")
    if any(check.status == "error" for _, check in found):
        raise typer.Exit(1)


async def _examine(config: Config) -> list[tuple[str, Check]]:
    with contextlib.ExitStack() as stack:
        url = config.redis_url
        if url is None:
            url = stack.enter_context(await asyncio.to_thread(embedded.start, config.data_dir)).url
        async with contextlib.aclosing(await Links.connect(url)) as links:
            return [(link.address, check) for link in links.all() for check in await check_server(link)]
