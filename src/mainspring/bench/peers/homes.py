"""Which Python has the peers: this one, where `mainspring[peers]` is installed, else one in the cache folder.

The environment that people work in is never changed.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from ...model.errors import MainspringError

DISTRIBUTIONS: Final = ("arq", "celery", "dramatiq", "huey", "redis", "rq")
PINS: Final = Path(__file__).parents[4] / "requirements" / "peers.txt"

FROM_PYPI: Final = "pip install 'mainspring[peers]'"
_STAMP: Final = "complete"


class PeersMissing(MainspringError):
    """The peers are not installed, and could not or should not be."""


def python_at_hand() -> Path | None:
    """The interpreter, if nothing has to be installed for it."""
    if has_peers():
        return Path(sys.executable)
    if not PINS.exists():
        return None
    folder = cache_folder()
    return folder / "bin" / "python" if (folder / _STAMP).exists() else None


async def python_with_peers(*, install: bool) -> Path:
    """The interpreter; makes the environment in the cache folder if need be and allowed."""
    if (python := python_at_hand()) is not None:
        return python
    if not PINS.exists():
        raise PeersMissing(f"the peers are not installed here: {FROM_PYPI}, best in an environment of its own")
    folder = cache_folder()
    if not install:
        raise PeersMissing(f"the peers are not installed here; this does it: {commands(folder)}")
    with _alone(folder):
        if not (folder / _STAMP).exists():
            await _make(folder)
    return folder / "bin" / "python"


def has_peers() -> bool:
    """Here, in this environment."""
    for name in DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return False
    return True


def cache_folder() -> Path:
    """One for each set of pins and each Python: a change of either makes a new one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()
    return cache / "mainspring" / f"peers-{digest[:12]}"


def commands(folder: Path) -> str:
    """What `_make` does, for people."""
    pip = f"{folder}/bin/python -m pip install --require-hashes -r {PINS}"
    return f"{sys.executable} -m venv {folder} && {pip} && touch {folder}/{_STAMP}"


async def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    await _call(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    await _call(*pip, "--require-hashes", "-r", str(PINS))
    (folder / _STAMP).touch()


async def _call(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        tail = said.decode(errors="replace").strip()[-400:]
        raise PeersMissing(f"the peers could not be installed by `{' '.join(command)}`: {tail}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two benches at one moment make one environment, not half of two."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
