"""Dead letters on the server: pages of them, one of them, dropping them."""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ..model.dead import DeadFilter, DeadLetter, DeadPage
from ..model.errors import StoreError, Unavailable
from ..model.ids import IDH_BYTES
from .find import Reference
from .named import Patience
from .store import Group, Store
from .wire import Arg

__all__ = ["DeadLetter", "Kept", "Place", "count", "drop", "find_letter", "list_dead", "page", "parse_place", "walk"]

AT_ONCE: Final = 100
"""Letters read in one step: few, for each may carry 64 KiB."""

SEARCHED_AT_MOST: Final = 10_000
"""Letters one page looks through. Where few fit, the page is short and says where to go on."""

_STRETCH: Final = 128
"""Places of letters that are asked of a partition at once."""

_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode

Place = tuple[int, int, bytes]
"""Where a letter stands among all: time of death in ms, partition, idh."""


class Kept(NamedTuple):
    """A letter, and where it is kept."""

    place: Place
    letter: DeadLetter


# -- in order ------------------------------------------------------------------------------------------------


class _Merged:
    """The places of all partitions' letters in one order, with no more than a stretch of each in memory."""

    def __init__(self, store: Store, where: DeadFilter, after: Place | None, *, newest_first: bool) -> None:
        self._store = store
        self._newest_first = newest_first
        self._end_ms = where.from_ms if newest_first else where.to_ms
        start_ms = where.to_ms if newest_first else where.from_ms
        self._from = [_start(p, start_ms, after, newest_first) for p in range(len(store.keys))]
        self._read: list[list[Place]] = [[] for _ in self._from]
        self._open = set(range(len(self._from)))
        self._ready: deque[Place] = deque()

    async def more(self) -> bool:
        while not self._ready and (self._open or any(self._read)):
            await self._refill()
            self._settle()
        return bool(self._ready)

    async def take(self, count: int) -> list[Place]:
        taken: list[Place] = []
        while len(taken) < count and await self.more():
            taken.append(self._ready.popleft())
        return taken

    async def _refill(self) -> None:
        """Ask those partitions of which nothing is left to go through."""
        empty = [p for p in self._open if not self._read[p]]
        groups: list[Group] = []
        for p in empty:
            keys = self._store.keys.partitions[p]
            order = "newest" if self._newest_first else "oldest"
            call = self._store.scripts.call(
                "dead_page", [keys.dead_times], [order, *self._from[p], self._end_ms, _STRETCH]
            )
            groups.append((keys.slot, [call]))
        for p, result in zip(empty, await self._store.run(groups) if groups else [], strict=True):
            if isinstance(result, StoreError):
                raise result
            [reply] = result
            found = [(int(float(reply[i + 1])), p, reply[i]) for i in range(0, len(reply), 2)]
            if len(found) < _STRETCH:
                self._open.discard(p)
            if found:
                self._read[p] = found[::-1] if self._newest_first else found
                self._from[p] = (self._read[p][-1][0], self._read[p][-1][2])

    def _settle(self) -> None:
        """Nothing unread can stand before the nearest of the last places that were read."""
        lasts = [self._read[p][-1] for p in self._open]
        everything = [place for read in self._read for place in read]
        everything.sort(reverse=self._newest_first)
        if lasts:
            edge = max(lasts) if self._newest_first else min(lasts)
            everything = [place for place in everything if (place >= edge if self._newest_first else place <= edge)]
            self._read = [
                [place for place in read if (place < edge if self._newest_first else place > edge)]
                for read in self._read
            ]
        else:
            self._read = [[] for _ in self._read]
        self._ready.extend(everything)


def _start(partition: int, start_ms: int, after: Place | None, newest_first: bool) -> tuple[int, bytes]:
    """(time, idh) from which a partition is read: letters of the same time are in the order of partitions."""
    if after is None:
        return start_ms, b""
    time_ms, at, idh = after
    begin = (time_ms, idh) if partition == at else (time_ms + (partition < at), b"")
    limit = min if newest_first else max
    return limit(begin, (start_ms, b""))


async def walk(store: Store, where: DeadFilter, *, newest_first: bool = False) -> AsyncIterator[list[Kept]]:
    """All letters that fit, some at a time. Letters may go and come meanwhile: those that stay are met once."""
    merged = _Merged(store, where, None, newest_first=newest_first)
    while places := await merged.take(AT_ONCE):
        fitting = [one for one in await _read(store, places) if one is not None and where.fits(one.letter)]
        if fitting:
            yield fitting


async def page(store: Store, where: DeadFilter, *, after: Place | None, limit: int) -> DeadPage:
    """Letters that fit, the newest first."""
    merged = _Merged(store, where, after, newest_first=True)
    letters: list[DeadLetter] = []
    searched, last, left = 0, after, False
    while len(letters) < limit and searched < SEARCHED_AT_MOST:
        places = await merged.take(AT_ONCE if where.by_content else min(AT_ONCE, limit - len(letters)))
        if not places:
            break
        for place, one in zip(places, await _read(store, places), strict=True):
            if len(letters) == limit:
                left = True
                break
            last, searched = place, searched + 1
            if one is not None and where.fits(one.letter):
                letters.append(one.letter)
    left = left or await merged.more()
    return DeadPage(letters, _text(last) if left and last is not None else None)


async def count(store: Store, from_ms: int, to_ms: int) -> int:
    """How many letters died in [from_ms, to_ms); none of them is read."""
    groups: list[Group] = [
        (keys.slot, [("ZCOUNT", keys.dead_times, from_ms, f"({to_ms}")]) for keys in store.keys.partitions
    ]
    total = 0
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        total += int(result[0])
    return total


async def list_dead(store: Store, *, limit: int = 100) -> list[DeadLetter]:
    """The newest dead letters of all partitions."""
    return (await page(store, DeadFilter(), after=None, limit=limit)).letters


def _text(place: Place) -> str:
    return f"{place[0]}.{place[1]}.{place[2].hex()}"


def parse_place(text: str) -> Place:
    """A cursor; ValueError for what is none."""
    time_ms, partition, idh = text.split(".")
    place = int(time_ms), int(partition), bytes.fromhex(idh)
    if not 0 <= place[0] < 1 << 48 or not 0 <= place[1] < 1 << 16 or len(place[2]) != IDH_BYTES:
        raise ValueError(text)
    return place


# -- single letters --------------------------------------------------------------------------------------------


async def _read(store: Store, places: Sequence[Place]) -> list[Kept | None]:
    """None for a letter that has gone since."""
    by_partition: dict[int, list[int]] = {}
    for i, (_, p, _) in enumerate(places):
        by_partition.setdefault(p, []).append(i)
    groups: list[Group] = []
    for p, numbers in by_partition.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.dead, *[places[i][2] for i in numbers])]))
    found: list[Kept | None] = [None] * len(places)
    for numbers, result in zip(by_partition.values(), await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        for i, record in zip(numbers, result[0], strict=True):
            if record is not None:
                found[i] = Kept(places[i], _letter(places[i], record))
    return found


async def find_letter(store: Store, reference: Reference) -> Kept | None:
    """The letter of an id: from its own partition, or from any where a lane may have chosen another."""
    idh, home = reference.idh, reference.home
    partitions = [home, *(p for p in range(len(store.keys)) if reference.elsewhere and p != home)]
    groups: list[Group] = []
    for p in partitions:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("ZSCORE", keys.dead_times, idh), ("HGET", keys.dead, idh)]))
    for p, result in zip(partitions, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        score, record = result
        if score is not None and record is not None:
            place = (int(float(score)), p, idh)
            return Kept(place, _letter(place, record))
    return None


def _letter(place: Place, record: bytes) -> DeadLetter:
    """One that cannot be read is shown as what it is: a page must not fail for it."""
    try:
        return _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"the dead letter itself cannot be read: {error}"
        return DeadLetter(id=place[2].hex(), reason=reason, died_ms=place[0], due_ms=0, entry=record)


async def drop(store: Store, letters: Sequence[Kept], *, wait_s: float = 0.0) -> list[bool]:
    """Forget letters for good; False for one that had gone, or died again, before."""
    dropped = [False] * len(letters)
    unsure: set[int] = set()
    todo, patience = list(range(len(letters))), Patience(store, wait_s)
    while todo:
        by_partition: dict[int, list[int]] = {}
        for i in todo:
            by_partition.setdefault(letters[i].place[1], []).append(i)
        groups = [_drop_call(store, p, [letters[i].place for i in some]) for p, some in by_partition.items()]
        todo, failure = [], None
        for numbers, result in zip(by_partition.values(), await store.run(groups), strict=True):
            if isinstance(result, StoreError):
                failure = result
                todo += numbers
                unsure |= set(numbers if isinstance(result, Unavailable) and result.sent else ())
                continue
            for i, answer in zip(numbers, result[0], strict=True):
                # After a lost reply it was most likely our own call that took it away.
                dropped[i] = answer == 1 or i in unsure
        if failure is not None:
            await patience.after(failure)
    return dropped


def _drop_call(store: Store, partition: int, places: Sequence[Place]) -> Group:
    keys = store.keys.partitions[partition]
    args: list[Arg] = [len(places)]
    for died_ms, _, idh in places:
        args += (idh, died_ms)
    return keys.slot, [store.scripts.call("dead_drop", [keys.dead, keys.dead_times], args)]
