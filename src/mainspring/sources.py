"""Where settings come from: flags, then MAINSPRING_*, then mainspring.toml. Each value remembers its place."""

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from .model.errors import ConfigError, InvalidInput
from .secret import read_secret
from .settings import SECRETS, SETTINGS

PREFIX: Final = "MAINSPRING_"
FILE: Final = "mainspring.toml"
_IN_A_FILE: Final = "_file"
_HEADER: Final = re.compile(r"\s*\[+\s*[\"']?([A-Za-z0-9_-]+)")
_KEY: Final = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*[.=]")


class Given(NamedTuple):
    """The value of a setting, and who said it."""

    value: Any
    where: str
    """`flag --port`, `environment MAINSPRING_PORT`, `mainspring.toml line 3`."""


class _Said(NamedTuple):
    """What a source says, before it is read."""

    value: object
    spoken: str
    """The name in errors."""
    where: str


def read_sources(flags: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Given]:
    """Merge the sources; a flag that is None was not given. Unknown names are errors, never ignored."""
    given = {name: value for name, value in flags.items() if value is not None}
    file = given.pop("config", None) or environ.get(PREFIX + "CONFIG")
    options = {
        name: _Said(value, f"option --{_dashed(name)}", f"flag --{_dashed(name)}") for name, value in given.items()
    }
    return {
        **_read(_from_file(file), lambda name: name),
        **_read(_from_environ(environ), lambda name: PREFIX + name.upper()),
        **_read(options, _dashed),
    }


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _read(said: Mapping[str, _Said], typed: Any) -> dict[str, Given]:
    """Turn what one source says into values; `typed` is how a setting is spelt there."""
    found: dict[str, Given] = {}
    for name, (value, spoken, where) in said.items():
        setting = SETTINGS.get(name)
        if setting is None:
            close = get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {typed(close[0])}?" if close else ""
            raise ConfigError(f"{spoken} is not a setting{hint}")
        try:
            found[name] = Given(setting.read(value), where)
        except (InvalidInput, ValueError, TypeError) as error:
            raise ConfigError(f"{spoken}: {error}") from None
    return found


# -- the file ---------------------------------------------------------------------------------------------------


def _from_file(named: object) -> dict[str, _Said]:
    path = Path(str(named)) if named else Path(FILE)
    if not named and not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    retry = values.pop("retry", {})
    if not isinstance(retry, dict):
        raise ConfigError(f"{path}: retry is a table; write [retry] and its settings below")
    flat = values | {f"retry_{name}": value for name, value in retry.items()}
    places = _places(text)
    said = {
        name: _Said(value, f"{path}: {name}", f"{path} {places.get(name, '')}".strip()) for name, value in flat.items()
    }
    return _with_secrets(said)


def _places(text: str) -> dict[str, str]:
    """The line of every setting, for people who look for it; tomllib does not tell."""
    found: dict[str, str] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1]
            found.setdefault(table, f"[{table}] line {number}")
        elif key := _KEY.match(line):
            name = key[1] if not table else f"retry_{key[1]}" if table == "retry" else ""
            found.setdefault(name, f"line {number}")
    return found


# -- the environment ----------------------------------------------------------------------------------------------


def _from_environ(environ: Mapping[str, str]) -> dict[str, _Said]:
    said = {
        name.removeprefix(PREFIX).lower(): _Said(value, name, f"environment {name}")
        for name, value in environ.items()
        if name.startswith(PREFIX) and value and not _is_service_link(name, value)
    }
    said.pop("config", None)
    said = _with_secrets(said)
    if url := environ.get("REDIS_URL"):
        said.setdefault("redis_url", _Said(url, "REDIS_URL", "environment REDIS_URL"))
    return said


def _is_service_link(name: str, value: str) -> bool:
    """Kubernetes sets these for a service called "mainspring", a worker for the commands it runs: no settings."""
    return name.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_", PREFIX + "TASK_")) or (
        name == PREFIX + "PORT" and value.startswith("tcp://")
    )


def _with_secrets(said: Mapping[str, _Said]) -> dict[str, _Said]:
    """What is secret may lie in a file of its own: `redis_url_file` names it."""
    found = dict(said)
    for name in SECRETS:
        file = found.pop(name + _IN_A_FILE, None)
        if file is None:
            continue
        if name in found:
            raise ConfigError(f"{found[name].spoken} and {file.spoken} are both set; keep one")
        try:
            found[name] = _Said(read_secret(file.value), file.spoken, f"{file.where} ({file.value})")
        except InvalidInput as error:
            raise ConfigError(f"{file.spoken}: {error}") from None
    return found
