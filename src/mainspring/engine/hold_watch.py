"""Watches what holds tasks up: lanes whose failed head is gone, and holds that have ended."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..model.errors import StoreError
from ..store import failed_heads, holds
from ..store.failed_heads import Standing
from ..store.store import Store
from .holds import Hold
from .live import LiveSlice
from .partition import Partition

HEADS_ASKED: Final = 256
"""Failed heads of a partition that are asked for at once."""


LANES_AT_ONCE: Final = 256
"""Lanes of a partition whose held tasks come back at the same time; the others follow as these are done. A pause may
have held thousands: each has a slice to find, to read, to go through with every tick and to drop."""

LANES_SOON_S: Final = 0.02


class HoldWatch:
    """Part of the look-ahead: asks the server, and lets go on what may."""

    def __init__(self, store: Store, owned: Mapping[int, Partition], fire: Callable[[], None]) -> None:
        self._store = store
        self._owned = owned
        self._fire = fire
        self.more = False
        """Others may come back as soon as those before them are done."""

    async def free_lanes(self) -> StoreError | None:
        """A failed head that somebody has cancelled, given up or replaced holds up nobody any more."""
        asked = {}
        for partition in self._owned.values():
            partition.held_work.look_at_some()
            if partition.quiet and (heads := partition.lanes.heads_to_ask(HEADS_ASKED)):
                asked[partition] = heads
        if not asked:
            return None
        wanted = {partition.number: list(heads.values()) for partition, heads in asked.items()}
        answers, failure = await failed_heads.places(self._store, wanted), None
        moved: list[Standing] = []
        for partition, heads in asked.items():
            places = answers[partition.number]
            if isinstance(places, StoreError):
                failure = places
                continue
            standing = dict(zip(heads, places, strict=True))
            self._free(partition, {lane: heads[lane] for lane, place in standing.items() if place is None})
            moved += [
                Standing(partition.number, lane, heads[lane], place)
                for lane, place in standing.items()
                if place is not None and place != partition.lanes.places.get(lane)
            ]
        return failure or await self._free_replaced(moved)

    async def _free_replaced(self, heads: Sequence[Standing]) -> StoreError | None:
        """Of heads that stand elsewhere than they did: an id may have been given to a task of another lane."""
        try:
            gone = await failed_heads.replaced(self._store, heads) if heads else set()
        except StoreError as failure:
            return failure
        for one in heads:
            if (partition := self._owned.get(one.partition)) is None:
                continue
            if one in gone:
                self._free(partition, {one.lane: one.idh})
            else:
                partition.lanes.stands(one.lane, one.idh, one.place)
        return None

    def _free(self, partition: Partition, gone: Mapping[str, bytes]) -> None:
        if gone and partition.quiet and self._owned.get(partition.number) is partition:
            for lane, idh in gone.items():
                partition.head_is_gone(lane, idh)
            self._fire()

    async def open_ended(self) -> StoreError | None:
        """What was held back and may go out now is read like any slice."""
        wanted: dict[Partition, list[Hold]] = {}
        self.more = False
        for partition in self._owned.values():
            if partition.held_work.holds.by_key:
                room = LANES_AT_ONCE - _coming_back(partition)
                more = partition.held_work.look_again(room)
                if found := partition.held_work.to_find(room):
                    wanted[partition] = found
                self.more |= more or len(found) < len(partition.held_work.holds.to_find)
        if not wanted:
            return None
        places = {partition.number: [hold.place for hold in some] for partition, some in wanted.items()}
        answers, failure = await holds.scores(self._store, places), None
        for partition, some in wanted.items():
            scores = answers[partition.number]
            if isinstance(scores, StoreError):
                failure = scores
                continue
            lives = {
                hold: None if g is None else LiveSlice(partition.keys, hold.place, g)
                for hold, g in zip(some, scores, strict=True)
                if hold.live is None and hold.open and not hold.pending
            }
            partition.add(*(live for live in lives.values() if live is not None))
            for hold, live in lives.items():
                partition.held_work.found(hold, live)
        return failure


def _coming_back(partition: Partition) -> int:
    """Hold slices that are being read and worked off, or wait to be dropped."""
    return sum(place.is_hold and not live.suspended for place, live in partition.slices.items())
