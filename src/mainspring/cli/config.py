"""`mainspring config`: every setting, its value and source; and the settings that the namespace keeps."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mainspring.cli.listing import connected, print_rows
from mainspring.cli.options import Json, new_group, place_of, server_url
from mainspring.cli.output import print_message, wrapped
from mainspring.config.config import Config
from mainspring.config.settings import SECRETS, SETTINGS, read_sources
from mainspring.model.errors import ConfigError
from mainspring.model.schedule.view import span_text
from mainspring.model.shared_settings import checked_setting
from mainspring.model.targets.names import shown_target
from mainspring.model.text import Tables
from mainspring.store.redis.url import safe_url

if TYPE_CHECKING:
    from mainspring.store.store import Store

app = new_group()


@app.callback()
def config() -> None:
    """Settings: their values, and where each comes from."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any setting may be given as a flag, as other commands take it: --port 9000 --lease 10s.",
)
def show(
    context: typer.Context,
    file: Annotated[Path | None, typer.Option("--config", help="Settings; default ./mainspring.toml.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what has its default.")] = False,
    json: Json = False,
) -> None:
    """Print every setting with its value and its source; secrets are masked."""
    given = read_sources({"config": file, **_flags(context.args)}, os.environ)
    settings = Config.of(given)
    rows = [
        {"name": name, "value": shown(settings, name), "from": given[name].where if name in given else "default"}
        for name in SETTINGS
        if name in given or not changed
    ]
    if json:
        import msgspec

        print(msgspec.json.encode({row.pop("name"): row for row in rows}).decode())
        return
    lines = [("SETTING", "VALUE", "FROM"), *((row["name"], _spoken(row["value"]), row["from"]) for row in rows)]
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    second = min(second, 40)
    for name, value, source in lines:
        print(wrapped(f"{name:{first}}  {value:{second}}  {source}", indent=first + second + 4))


@app.command("set")
@connected
def set_(
    config: "Config",
    name: Annotated[str, typer.Argument(help="dedupe_window, max_payload_bytes, history_bytes, …")],
    value: Annotated[str, typer.Argument(help="Such as 2h, 65536 or park.")],
) -> None:  # fmt: skip
    """Change a setting that the namespace keeps, for all nodes, workers and clients; those that run follow."""
    kept = checked_setting(name, value)
    before = asyncio.run(_set(config, name, kept))
    former = "not set" if before is None else _span_spoken(before)
    print(f"{name} of namespace {config.namespace}: {former} -> {_span_spoken(kept)}")


async def _set(loaded: Config, name: str, value: str) -> str | None:
    from mainspring.cli.audited_client import record
    from mainspring.store import members

    async with _opened(loaded, makes=True) as store:
        before = await store.set_shared(name, value)
        await members.announce(store)
        await record(store, loaded.audit_entries, "config.set", name, {"value": before}, {"value": value})
        return before


@app.command()
@connected
def shared(config: "Config", json: Json = False) -> None:
    """Print the settings that the namespace keeps, on which nodes, workers and clients agree."""
    kept = asyncio.run(_shared(config))
    if json:
        import msgspec

        print(msgspec.json.encode(kept).decode())
        return
    if not kept:
        print_message(f"no settings are kept in {place_of(config)}")
        return
    print_rows(("SETTING", "VALUE"), [(name, _span_spoken(value)) for name, value in sorted(kept.items())])


async def _shared(loaded: Config) -> dict[str, str]:
    async with _opened(loaded, makes=False) as store:
        return store.shared.kept


@contextlib.asynccontextmanager
async def _opened(loaded: Config, *, makes: bool) -> "AsyncIterator[Store]":
    """Open the namespace without this process's values of shared settings: they are to be changed or shown."""
    from mainspring.store.store import Store

    async with (
        server_url(loaded) as url,
        contextlib.aclosing(
            await Store.open(
                url, namespace=loaded.namespace, partitions=loaded.partitions, options=loaded.links, makes=makes
            )
        ) as store,
    ):
        yield store


def _flags(args: list[str]) -> dict[str, object]:
    """Read settings given as flags, `--port 9000` or `--port=9000`."""
    found: dict[str, object] = {}
    rest = iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{word!r} is no option; settings are given as --port 9000")
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                raise ConfigError(f"option {name} needs a value")
        found[name.removeprefix("--").replace("-", "_")] = value
    return found


def shown(settings: Config, name: str) -> Any:
    """Return a value for people and programs, without secrets."""
    field = SETTINGS[name].field
    value = settings.value_of(field)
    if name == "redis_url":
        return None if value is None else safe_url(value)
    if name == "tick_target":
        return shown_target(value)
    if isinstance(value, Tables):
        return ", ".join(value) or None
    if name in ("api_token", "watchdog_url"):
        return None if value is None else "***"
    if name in (*SECRETS, "queue") or callable(value):
        return repr(value) if value else None  # their own words, which mask what is secret
    if field.endswith("_s") and isinstance(value, float):
        return span_text(round(value * 1000))
    if field.endswith("_ms") and value is not None:
        return span_text(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _span_spoken(value: str) -> str:
    """Return a setting of the namespace for people: `1h`, which is kept as `3600000ms`."""
    return span_text(int(value[:-2])) if value.endswith("ms") and value[:-2].isdigit() else value


def _spoken(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
