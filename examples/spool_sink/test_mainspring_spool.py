"""The sink keeps the promises of every sink."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mainspring_spool import SpoolSink

from mainspring.testing import Arrived, Receiver, SinkContract


class Folder(Receiver):
    target = "spool:orders"

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / "orders"
        self._folder.mkdir()

    def sink(self) -> SpoolSink:
        return SpoolSink(self._root)

    async def arrived(self) -> Sequence[Arrived]:
        return [_read(file) for file in self._folder.glob("[!.]*")]

    async def fail(self) -> None:
        self._folder.rename(self._root / "away")

    async def mend(self) -> None:
        (self._root / "away").rename(self._folder)


def _read(file: Path) -> Arrived:
    about, _, payload = file.read_bytes().partition(b"\n")
    return Arrived(payload, **json.loads(about))


class TestSpoolSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.root = tmp_path

    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[Receiver]:
        yield Folder(self.root)
