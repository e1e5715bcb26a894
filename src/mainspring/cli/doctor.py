"""`mainspring doctor`: is everything as it should be, and if not, what to do."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from mainspring.checkup import Found, checkup
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, remote, server_url
from mainspring.config import Config
from mainspring.model.errors import Refused, Unavailable
from mainspring.store.checks import Check

if TYPE_CHECKING:
    from mainspring.cli.remote import Api

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def doctor(
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    config: Settings = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 at a warning as well.")] = False,
    json: Json = False,
) -> None:
    """Check the whole set-up: servers, rights, speed, clocks, data, nodes, Kafka, this machine.

    Over an API the node looks at them in your place, which takes an admin's key.

    Exit codes: 0 it can be used, 1 something must be set right first (with --strict: also at a warning), 2 the settings
    are wrong.
    """
    found = asyncio.run(_examine(load(redis_url, data_dir, namespace, config)))
    if json:
        rows = [{"server": one.where} | msgspec.to_builtins(one.check) for one in found]
        print(msgspec.json.encode(rows).decode())
    else:
        for where, check in found:
            print(f"{check.status:8} {where}  {check.name}: {check.message}")
    serious = ("error", "warning") if strict else ("error",)
    if any(one.check.status in serious for one in found):
        raise typer.Exit(1)


async def _examine(config: Config) -> list[Found]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return _over(api)
    async with server_url(config) as url:
        return await checkup(config, url)


def _over(api: "Api") -> list[Found]:
    """The road to the node, then what the node itself finds."""
    try:
        began = time.perf_counter()
        api.get("/livez")
        took_ms = (time.perf_counter() - began) * 1000
        rows = api.get("/v1/doctor")["checks"]
    except (Unavailable, Refused) as error:
        advice = "Is the node running, is the URL right, is the key one of an admin?"
        return [Found(api.where, Check("reach", "error", f"{error}. {advice}"))]
    reached = Found(api.where, Check("reach", "ok", f"the API answered within {took_ms:.0f} ms"))
    return [reached, *(Found(row.pop("server"), Check(**row)) for row in rows)]
