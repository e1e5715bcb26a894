"""Targets `spool:<folder>`: each task becomes a file, for folder watchers.

The folders lie below SPOOL_ROOT. A file has the task's key as its name, so a
repeat replaces it.
"""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from mainspring import DONE, Config, ConfigError, Dead, Delivery, Outcome, Retry


def make(config: Config) -> "SpoolSink":
    """Return the sink: the entry point names this function.

    `config` has the settings of the node; this package reads its own.
    """
    del config  # nothing in it is needed here
    root = os.environ.get("SPOOL_ROOT")
    if not root:
        raise ConfigError(
            "SPOOL_ROOT is not set; name the folder that holds the folders of"
            " spool: targets"
        )
    return SpoolSink(Path(root))


class SpoolSink:
    """One file a task, there as a whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        name = batch[0].target.partition(":")[2]
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            return [
                Dead(f"{name!r} can be no folder: use A-Z a-z 0-9 _ -")
            ] * len(batch)
        # In a thread: disks can be slow, and the event loop must renew leases.
        return await asyncio.to_thread(
            self._write_all, self._root / name, batch
        )

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _write_all(
        self, folder: Path, batch: Sequence[Delivery]
    ) -> list[Outcome]:
        return [_write(folder, one) for one in batch]


def _write(folder: Path, one: Delivery) -> Outcome:
    # After a crash, several attempts at one task may run at the same time: each
    # writes a file of its own.
    half = folder / f".{one.idh.hex()}.{one.attempt}.{os.urandom(4).hex()}"
    about = {
        "id": one.id,
        "key": one.idempotency_key,
        "due_ms": one.original_due_ms,
        "attempt": one.attempt,
    }
    try:
        with half.open("wb") as file:
            file.write(json.dumps(about).encode() + b"\n" + one.payload)
            file.flush()
            os.fsync(
                file.fileno()
            )  # done means that a power cut does not undo it
        half.rename(
            folder
            / f"{one.idh.hex()}-{one.original_due_ms}-{quote(one.namespace)}"
        )
    except OSError as error:
        return Retry(f"{folder.name}: {error.strerror}")
    return DONE
