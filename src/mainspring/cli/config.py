"""`mainspring config show`: every setting, its value, and who said so."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mainspring.cli.options import Json
from mainspring.config.config import Config
from mainspring.config.settings import SECRETS, SETTINGS, read_sources
from mainspring.model.errors import ConfigError
from mainspring.model.schedule.view import span_text
from mainspring.model.targets.names import shown_target
from mainspring.store.redis.url import safe_url

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def config() -> None:
    """Settings: what holds, and where it comes from."""


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
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in ("name", "value")]
    for row in rows:
        print(f"{row['name']:{widths[0]}}  {_spoken(row['value']):{min(widths[1], 40)}}  {row['from']}")


def _flags(args: list[str]) -> dict[str, object]:
    """`--port 9000`, `--port=9000`: settings by the names they have as flags."""
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
    """A value for people and programs, without what is secret."""
    field = SETTINGS[name].field
    value = settings.value_of(field)
    if name == "redis_url":
        return None if value is None else safe_url(value)
    if name == "tick_target":
        return shown_target(value)
    if name == "api_token":
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


def _spoken(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
