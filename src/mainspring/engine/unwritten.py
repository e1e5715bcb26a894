"""What happened in a partition and has still to be written: done bits, retries, dead letters, heads of lanes."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from ..store.fire import Commit, Death, NewPlace, Touch
from .begun import Begun
from .holds import Taken
from .live import LiveSlice

_NOTHING: Final[Mapping[LiveSlice, Sequence[int]]] = {}


class Touched(NamedTuple):
    """Slices that a call writes to, what it writes there, and how many tasks are finished with it."""

    lives: list[LiveSlice]
    touches: list[Touch]
    finished: int


class Unwritten:
    """Taken along by the next call, and back again if the server wrote nothing of it."""

    def __init__(self) -> None:
        self.dirty: dict[LiveSlice, None] = {}
        """Slices with rows that are settled and not yet committed."""
        self.dirty_since = inf
        self.retries: list[NewPlace] = []
        self.deaths: list[Death] = []
        self.holds: list[tuple[str, bytes]] = []
        """Lanes and the failed heads they wait for; nothing, once they wait no more."""
        self.lost = 0
        """Repeats of one put that were dropped since the last commit."""

    @property
    def must_commit(self) -> bool:
        """There is something without which the done bits of its rows must not be written."""
        return bool(self.retries or self.deaths or self.holds or self.lost)

    def settled(self, live: LiveSlice, now_s: float) -> None:
        """Rows of this slice were settled: they have to be committed soon."""
        self.dirty[live] = None
        if self.dirty_since == inf:
            self.dirty_since = now_s

    def forget(self, lives: Iterable[LiveSlice]) -> None:
        """Of these nothing is left to be committed."""
        for live in lives:
            self.dirty.pop(live, None)
        if not self.dirty:
            self.dirty_since = inf  # else the dispatcher would come again and again for a commit of nothing

    def take_done(self, lives: Iterable[LiveSlice], begun: Mapping[LiveSlice, Sequence[int]] = _NOTHING) -> Touched:
        """The done bits of these slices and the fired bits of what begins there."""
        some, touches, finished = list(lives), [], 0
        for live in some:
            touches.append(live.touch(begun.get(live, ()), commit=True))
            finished, live.finished = finished + live.finished, 0
        self.forget(some)
        return Touched(some, touches, finished)

    def take_back(self, begun: Begun) -> None:
        """What was done has still to be committed."""
        finished = begun.section.finished
        for live, touch in zip(begun.touched, begun.section.touches, strict=True):
            if touch.d:
                # With the done bits goes their count: either both are written or none.
                live.finished, finished = live.finished + finished, 0
                live.bits.untake_dirty(touch.d_at, touch.d)
                self.settled(live, 0.0)

    def take_all(self, number: int, token: bytes, seq: int, taken: Taken) -> Commit:
        """All of it in one call, with the tasks that it moves into hold slices."""
        lost, self.lost = self.lost, 0
        done = self.take_done(self.dirty | dict.fromkeys(taken.lives))
        outcomes = self.retries, self.deaths, self.holds
        self.retries, self.deaths, self.holds = [], [], []
        return Commit(number, token, seq, done.finished, lost, done.touches, *outcomes, taken.moves, taken.records)
