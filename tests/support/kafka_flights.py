"""Flights as a node makes them of entries, without a node."""

from types import SimpleNamespace
from typing import cast

from mainspring.engine.flight import Flight
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import Body
from mainspring.model.ids import idh_of
from mainspring.store.codec import decode, entry

START_MS = 1_700_000_000_000


def slice_from(from_ms: int = START_MS) -> LiveSlice:
    return cast("LiveSlice", SimpleNamespace(namespace="main", from_ms=from_ms))


def flight(number: int, body: Body, offset_ms: int = 0, live: LiveSlice | None = None) -> Flight:
    row = entry(offset_ms, 0, idh_of(str(number)), body)
    return Flight(decode(row), row, number, live or slice_from())


def plain(count: int) -> list[Flight]:
    """Tasks of which nothing is said but target and payload, three in a millisecond."""
    live = slice_from()
    return [flight(number, Body("kafka:t", b"%d" % number), number // 3, live) for number in range(count)]
