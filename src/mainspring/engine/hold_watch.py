"""Watches what holds tasks up: lanes whose failed head is gone, and holds that have ended."""

from collections.abc import Callable, Mapping
from typing import Final

from ..model.errors import StoreError
from ..store import holds
from ..store.store import Store
from .holds import Hold
from .live import LiveSlice
from .partition import Partition

HEADS_ASKED: Final = 256
"""Failed heads of a partition that are asked for at once."""


class HoldWatch:
    """Part of the look-ahead: asks the server, and lets go on what may."""

    def __init__(self, store: Store, owned: Mapping[int, Partition], fire: Callable[[], None]) -> None:
        self._store = store
        self._owned = owned
        self._fire = fire

    async def free_lanes(self) -> StoreError | None:
        """A failed head that somebody has cancelled or given up holds up nobody any more."""
        asked = {}
        for partition in self._owned.values():
            partition.held_work.look_at_all()
            if partition.quiet and (heads := partition.lanes.heads_to_ask(HEADS_ASKED)):
                asked[partition] = heads
        if not asked:
            return None
        wanted = {partition.number: list(heads.values()) for partition, heads in asked.items()}
        answers, failure = await holds.gone_heads(self._store, wanted), None
        for partition, heads in asked.items():
            gone = answers[partition.number]
            if isinstance(gone, StoreError):
                failure = gone
            elif gone and partition.quiet and self._owned.get(partition.number) is partition:
                for lane in (lane for lane, idh in heads.items() if idh in gone):
                    partition.head_is_gone(lane, heads[lane])
                self._fire()
        return failure

    async def open_ended(self) -> StoreError | None:
        """What was held back and may go out now is read like any slice."""
        wanted: dict[Partition, list[Hold]] = {}
        for partition in self._owned.values():
            if partition.held_work.holds.by_key:
                partition.held_work.look_again()
                if found := partition.held_work.to_find():
                    wanted[partition] = found
        if not wanted:
            return None
        places = {partition.number: [hold.place for hold in some] for partition, some in wanted.items()}
        answers, failure = await holds.scores(self._store, places), None
        for partition, some in wanted.items():
            scores = answers[partition.number]
            if isinstance(scores, StoreError):
                failure = scores
                continue
            for hold, g in zip(some, scores, strict=True):
                if hold.live is None and hold.open and not hold.pending:
                    live = None if g is None else LiveSlice(partition.keys, hold.place, g)
                    if live is not None:
                        partition.add(live)
                    partition.held_work.found(hold, live)
        return failure
