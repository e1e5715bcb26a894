"""The messages of a topic, read by kcat: a client that shares nothing with ours."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mainspring.testing.kafka import missing_kafka
from tests.support.missing_parts import gap


class Received(NamedTuple):
    key: str
    value: str
    headers: dict[str, str]
    at_ms: int
    partition: int


def need_kafka() -> None:
    """For tests that want a real broker, and kcat."""
    reason = missing_kafka() or (None if shutil.which("kcat") else "kcat is not on the PATH")
    if reason is not None:
        gap(reason)


def read_topic(servers: str, topic: str) -> list[Received]:
    return [_received(json.loads(line)) for line in _kcat(servers, topic, "-J").splitlines()]


def read_values(servers: str, topic: str) -> bytes:
    """The values themselves, one after the other with nothing between."""
    return _kcat(servers, topic, "-f", "%s")


def topics_of(servers: str) -> dict[str, int]:
    """Topics and how many partitions they have. Asks for none of them by name: that could create it."""
    told = subprocess.run(["kcat", "-b", servers, "-L", "-J"], capture_output=True, timeout=60, check=True).stdout
    return {topic["topic"]: len(topic["partitions"]) for topic in json.loads(told)["topics"]}


def _kcat(servers: str, topic: str, *options: str) -> bytes:
    command = ["kcat", "-b", servers, "-t", topic, "-C", "-o", "beginning", "-e", "-q", *options]
    return subprocess.run(command, capture_output=True, timeout=60, check=True).stdout


def _received(row: dict[str, Any]) -> Received:
    names, values = row["headers"][::2], row["headers"][1::2]
    headers = dict(zip(names, values, strict=True))
    return Received(row["key"], row["payload"], headers, row["ts"], row["partition"])


@contextmanager
def paused(broker: Any) -> Iterator[None]:
    """While it lasts the broker is there and does not answer."""
    broker.pause()
    try:
        yield
    finally:
        broker.resume()
