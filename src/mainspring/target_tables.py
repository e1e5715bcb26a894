"""Named targets as settings have them: tables in TOML, JSON in the environment, secrets in files of their own."""

import json
from collections.abc import Mapping
from typing import Any, Final

from .model.errors import InvalidInput
from .model.named import Targets
from .secret import read_secret

_FILE: Final = "_file"
_KEPT: Final = frozenset({"ca_file"})
"""Settings that name a file and mean the file."""


def read_targets(value: object) -> Targets:
    """Read every `[targets.<name>]`, or the same as one JSON text."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise InvalidInput("expected a table of tables; write [targets.<name>] and its settings below")
    return Targets.read({name: _with_secrets(name, table) for name, table in value.items()})


def write_targets(targets: Targets) -> str:
    """The JSON text from which `read_targets` makes these again."""
    return json.dumps(targets.tables()) if targets else ""


def _with_secrets(where: str, table: object) -> object:
    """A table with the contents of the files it names in place of their names, at every depth."""
    if not isinstance(table, Mapping):
        return table
    found: dict[str, Any] = {}
    for name, value in table.items():
        plain = name.removesuffix(_FILE)
        if plain == name or name in _KEPT:
            found[name] = _with_secrets(f"{where}.{name}", value)
        elif plain in table:
            raise InvalidInput(f"{where}: {plain} and {name} are both set; keep one")
        else:
            text = _secret(f"{where}.{name}", value)
            found[plain] = text.split() if plain == "secrets" else text
    return found


def _secret(where: str, path: object) -> str:
    try:
        return read_secret(path)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
