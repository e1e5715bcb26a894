"""Which fault strikes when: all of it drawn from one seed, before the run begins."""

import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from .profile import Kind, Profile


class Planned(NamedTuple):
    """One fault. `pick` chooses its victim among those there are then, `size` how bad it is; both from 0 to 1."""

    at_s: float
    kind: Kind
    pick: float
    size: float

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s  {self.kind} (pick {self.pick:.3f}, size {self.size:.3f})"


Act = Callable[[Planned], Awaitable[bool]]
"""Carries out one fault; True when it took effect."""


def plan(profile: Profile, seed: int, seconds: float | None = None) -> list[Planned]:
    """The faults of one run, in order of time; the same for the same profile, seed and length."""
    length_s = profile.seconds if seconds is None else seconds
    # Longer runs have more of everything; none has less than asked.
    times = max(1.0, length_s / profile.seconds)
    rng = random.Random(f"{profile.name}/{seed}")
    kinds = [kind for kind, count in profile.faults.items() for _ in range(round(count * times))]
    rng.shuffle(kinds)
    gap_s = length_s / len(kinds)
    # One in each stretch of time, somewhere in it: never a pile of all at once, never a long peace.
    return [Planned((i + rng.random()) * gap_s, kind, rng.random(), rng.random()) for i, kind in enumerate(kinds)]
