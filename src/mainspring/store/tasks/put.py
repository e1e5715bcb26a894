"""Put tasks without ids: plain commands, one transaction per partition. See docs/internals/protocol.md#put."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any, Final

from ...model.errors import StoreError, Unavailable
from ..codec import RESENT
from ..durability import SERVER, Durability, executed
from ..keys import HOUR_MS, SECOND_MS, WIDTHS_MS, Address, PartitionKeys, Slice, base36, r_of, score_of
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..store import Store

CROWDED: Final = 50_000
"""A slice past this many entries gets no more; further tasks go into finer ones."""

WAKE_MS: Final = 1_500
"""Tasks due sooner than this wake the owner; its polling finds later ones in time."""


SMALL_BATCH: Final = 1_024
_EXEC: Final[RedisCommand] = ("EXEC",)


class Widths:
    """Chooses slice widths: by distance, and finer where a slice turned out to be crowded."""

    def __init__(self) -> None:
        self._crowded: set[tuple[int, Slice]] = set()

    def place(self, partition: int, due_ms: int, now_ms: int) -> Slice:
        # The owner reads an hour slice whole when its hour comes: nothing may be written to it after that.
        width = HOUR_MS if due_ms - now_ms >= HOUR_MS else SECOND_MS
        place = Slice(width, due_ms - due_ms % width)
        if self._crowded:
            while (partition, place) in self._crowded and place.width_ms > 1:
                finer = WIDTHS_MS[WIDTHS_MS.index(place.width_ms) + 1]
                place = Slice.at(due_ms, finer)
        return place

    def saw(self, partition: int, place: Slice, length: int) -> None:
        if length > CROWDED:
            if len(self._crowded) > 10_000:
                self._crowded.clear()
            self._crowded.add((partition, place))


class PutRows:
    """Entries to write, grouped by partition and slice, in order of arrival."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[Slice, list[bytes]]] = {}
        self.size = 0

    def list_for(self, partition: int, place: Slice) -> list[bytes]:
        return self.groups.setdefault(partition, {}).setdefault(place, [])

    def add(self, partition: int, place: Slice, row: bytes) -> int:
        """Add a row; return its position among those of its slice."""
        rows = self.list_for(partition, place)
        rows.append(row)
        self.size += 1
        return len(rows) - 1


Places = dict[tuple[int, Slice], tuple[int, int]]
"""(partition, slice) -> (incarnation, index of the first row put there)."""


async def put_rows(
    store: Store,
    rows: PutRows,
    widths: Widths,
    places: Places,
    *,
    now_ms: int,
    wait_s: float = 0.0,
    durability: Durability = SERVER,
    short: set[int] | None = None,
) -> None:
    """Write all rows; `places` gets the known places, also if the call fails. A partition whose reply was lost is sent
    again, marked RESENT: once, or for `wait_s`. `short` gets partitions whose rows are stored but not confirmed."""
    todo, resent = list(rows.groups), False
    deadline = time.monotonic() + wait_s
    pause_s = 0.0
    while True:
        # If one server has all slots, send a small batch as one transaction: fewer calls matter more than shorter ones.
        together = not store.servers.cluster and rows.size <= SMALL_BATCH
        transactions = [todo] if together else [[p] for p in todo]
        groups = [_transaction(store, rows, members, now_ms, resent=resent) for members in transactions]
        failures: dict[int, StoreError] = {}
        results = await store.run(groups, durability)
        for members, (_, commands), result in zip(transactions, groups, results, strict=True):
            if isinstance(result, StoreError):
                failures.update(dict.fromkeys(members, result))
                if short is not None and executed(result):
                    short.update(members)
            if (done := executed(result)) is None:
                continue
            replies = iter(done[commands.index(_EXEC)])
            for p in members:
                _learn(p, rows.groups[p], replies, widths, places)
        if not failures:
            return
        lost = all(isinstance(failure, Unavailable) for failure in failures.values())
        if not lost or (pause_s and time.monotonic() >= deadline):
            raise next(iter(failures.values()))
        resent = resent or any(isinstance(one, Unavailable) and one.sent for one in failures.values())
        todo = list(failures)
        await asyncio.sleep(pause_s)
        pause_s = min(1.0, pause_s * 2 or 0.02)
        await store.recover()


def fresh_score(place: Slice) -> str:
    """Return a score for a slice that may not exist yet; the first score to arrive becomes its incarnation."""
    return repr(score_of(place.start_ms, random.getrandbits(20)))


def _transaction(store: Store, rows: PutRows, members: list[int], now_ms: int, *, resent: bool) -> Group:
    commands: list[RedisCommand] = [("MULTI",)]
    wakes: list[RedisCommand] = []
    for p in members:
        slices = rows.groups[p]
        keys = store.keys.partitions[p]
        commands += commands_for(keys, slices, resent=resent)
        if any(_comes_before(now_ms + WAKE_MS, place, some) for place, some in slices.items()):
            wakes.append(("SPUBLISH", keys.wake, "1"))
    # Not within the transaction: with a publish in it, Valkey does not check for keys that have left a moving slot, and
    # would create them again on the server that they have left.
    return store.keys.partitions[members[0]].slot, [*commands, _EXEC, *wakes]


def commands_for(keys: PartitionKeys, slices: dict[Slice, list[bytes]], *, resent: bool = False) -> list[RedisCommand]:
    """Return the commands of a put within its transaction; see docs/internals/protocol.md#put."""
    scores: list[Any] = []
    names = []
    pushes: list[RedisCommand] = []
    count = 0
    for place, entries in slices.items():
        name = place.name
        names.append(name)
        scores += (fresh_score(place), name)
        pushes.append(("RPUSH", keys.entries(name), *(map(_resent, entries) if resent else entries)))
        count += len(entries)
    return [
        ("ZADD", keys.slices, "NX", *scores),
        ("ZMSCORE", keys.slices, *names),
        *pushes,
        ("HINCRBY", keys.n, "accepted", count),
    ]


def _comes_before(until_ms: int, place: Slice, rows: list[bytes]) -> bool:
    # Rows start with their offset, so the smallest row is the earliest.
    return place.start_ms < until_ms and place.start_ms + int.from_bytes(min(rows)[:4], "big") < until_ms


def _resent(row: bytes) -> bytes:
    return row[:4] + bytes((row[4] | RESENT,)) + row[5:]


def _learn(
    partition: int, slices: dict[Slice, list[bytes]], replies: Iterator[Any], widths: Widths, places: Places
) -> None:
    """Read this partition's replies in the transaction: ZADD, scores, lengths, counter."""
    scores = next(reply for reply in replies if isinstance(reply, list))
    for (place, entries), score in zip(slices.items(), scores, strict=True):
        length = next(replies)
        widths.saw(partition, place, length)
        places[partition, place] = (r_of(float(score)), length - len(entries))


class AddressTexts:
    """The addresses of stored rows as they appear in ids. Within a slice they differ only at their end."""

    def __init__(self, places: Places) -> None:
        self._begun: dict[tuple[int, Slice], tuple[str, int]] = {
            (partition, place): (Address(partition, place, r, 0).text()[:-1], first)
            for (partition, place), (r, first) in places.items()
        }

    def of(self, partition: int, place: Slice, index: int) -> str:
        begin, first = self._begun[partition, place]
        return begin + base36(first + index)
