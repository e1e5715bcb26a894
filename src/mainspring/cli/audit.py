"""`mainspring audit`: who changed what."""

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store, remote
from mainspring.cli.table import printable
from mainspring.model.audit import AuditPage, Change
from mainspring.model.explain import moment

if TYPE_CHECKING:
    from mainspring.config import Config

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def audit(
    limit: Annotated[int, typer.Option(help="Changes of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List the changes made through the API and by commands, the newest first."""
    page = asyncio.run(_page(load(redis_url, data_dir, namespace, config), limit, cursor))
    if json:
        print(msgspec.json.encode(page).decode())
        return
    for one in page.changes:
        change = one.change
        where = f" from {change.address}" if change.address else ""
        line = f"{moment(one.at_ms)}  {change.who}{where}  {change.what}  {change.object}  {_told(change)}"
        print(printable(line.rstrip()))
    if page.next is not None:
        print(f"more: --cursor {page.next}", file=sys.stderr)


async def _page(config: "Config", limit: int, cursor: str | None) -> AuditPage:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return msgspec.convert(api.get("/v1/audit", limit=limit, cursor=cursor), AuditPage)
    from mainspring.store.audit import trail

    async with opened_store(config) as store:
        return await trail(store, limit=limit, cursor=cursor)


def _told(change: Change) -> str:
    """`due_ms: 1 -> 2`: what was and what is; what says nothing is left out."""
    before, after = change.before or {}, change.after or {}
    steps = {name: [side[name] for side in (before, after) if name in side] for name in (*before, *after)}
    return ", ".join(
        f"{name}: {' -> '.join(map(_spoken, values))}"
        for name, values in steps.items()
        if any(value not in (None, []) for value in values)
    )


def _spoken(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
