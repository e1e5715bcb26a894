"""Profiles of chaos runs: their servers and faults, how long they last, and which fault strikes when."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Servers = Literal["standalone", "cluster", "pair"]
Kind = Literal[
    "kill node", "stop node", "kill leader", "kill stopping node", "restart node", "extra node", "clock jump",
    "reset", "dropped reply", "delayed command", "blackhole", "lost cable", "partition",
    "kill server", "hang server", "slow server", "script flush",
    "slot migration", "failover", "promotion",
    "kill worker", "stop worker", "restart worker",
]  # fmt: skip

QUEUE: Final = "work"
HANDLER: Final = "run"
"""Queues and handlers of the workers, in a profile with workers."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of run. A run in which a fault happened less often than asked proves nothing and is invalid."""

    name: str
    servers: Servers
    faults: dict[Kind, int]
    """How often each fault must take effect."""
    seconds: float = 30.0
    """How long faults last; start, healing and checking come on top."""
    nodes: int = 3
    workers: int = 0
    """With some, all tasks and schedules go to them through a queue; without, to the sink of the nodes."""
    partitions: int = 16
    lease_s: float = 1.5
    rate: float = 120.0
    """Tasks put a second, about."""
    levels: tuple[str, ...] = ("server",)
    """Durability of the puts, in turn."""
    server_config: dict[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"queue:{QUEUE}/{HANDLER}" if self.workers else "log:"

    @property
    def within_s(self) -> float:
        """Two leases: within this time after healing all that is due must be delivered."""
        return 2 * self.lease_s


_NODES: Final[dict[Kind, int]] = {
    "kill node": 3, "stop node": 2, "kill leader": 2, "kill stopping node": 3, "restart node": 3, "extra node": 2,
    "clock jump": 2,
}  # fmt: skip
_ROADS: Final[dict[Kind, int]] = {
    "reset": 4, "dropped reply": 5, "delayed command": 4, "blackhole": 3, "lost cable": 1, "partition": 2
}  # fmt: skip

PROFILES: Final = {
    one.name: one
    for one in (
        Profile(
            "standalone",
            "standalone",
            _NODES | _ROADS | {"kill server": 2, "hang server": 1, "slow server": 2, "script flush": 3},
            server_config={"appendonly": "yes", "appendfsync": "always"},
        ),
        Profile(
            "cluster",
            "cluster",
            {
                "kill node": 2, "stop node": 1, "kill leader": 1, "kill stopping node": 2, "restart node": 2,
                "clock jump": 1,
                "reset": 2, "dropped reply": 3, "delayed command": 2, "partition": 1, "slow server": 1,
                "script flush": 2, "slot migration": 6, "failover": 2,
            },
            levels=("replicas=1",),
            rate=80.0,
        ),
        Profile(
            "promotion",
            "pair",
            {"promotion": 3, "kill node": 1, "dropped reply": 2, "reset": 1, "delayed command": 1},
            seconds=20.0,
            levels=("server", "replicas=1"),
            rate=80.0,
        ),
        Profile(
            "workers",
            "standalone",
            {
                "kill worker": 4, "stop worker": 2, "restart worker": 2, "kill node": 2, "stop node": 1,
                "restart node": 1, "dropped reply": 2, "script flush": 1, "kill server": 1,
            },
            seconds=14.0,
            workers=3,
            rate=40.0,
            server_config={"appendonly": "yes", "appendfsync": "always"},
        ),
    )
}  # fmt: skip


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
