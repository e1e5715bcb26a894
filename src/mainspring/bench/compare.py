"""`bench compare`: both designs in one run, taking turns, so that whatever the machine does hits both."""

from statistics import median

import msgspec

from .baseline import baseline
from .cycle import cycle
from .ground import Where
from .life import Figures, Progress
from .load import Shape


class Comparison(msgspec.Struct, frozen=True):
    """Medians of all rounds; ratios are Mainspring by baseline. Faults are added up, not evened out."""

    cycle: Figures
    baseline: Figures
    server_cpu_ratio: float
    bytes_ratio: float
    put_ratio: float
    fire_ratio: float
    rounds: int

    @property
    def warning(self) -> str | None:
        return self.cycle.warning  # to the baseline it makes no difference

    @property
    def sound(self) -> bool:
        return self.cycle.sound and self.baseline.sound


async def compare(where: Where, shape: Shape, rounds: int, progress: Progress) -> Comparison:
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for number in range(1, rounds + 1):

        def told(what: str, done: int, total: int, number: int = number) -> None:
            progress(f"round {number} of {rounds}: {what}", done, total)

        theirs.append(await baseline(where, shape, told))
        ours.append(await cycle(where, shape, told))
    us, them = middle(ours), middle(theirs)
    return Comparison(
        cycle=us,
        baseline=them,
        server_cpu_ratio=round(us.server_cpu_us_per_task / them.server_cpu_us_per_task, 4),
        bytes_ratio=round(us.bytes_per_pending_task / them.bytes_per_pending_task, 4),
        put_ratio=round(us.put_per_s / them.put_per_s, 3),
        fire_ratio=round(us.fire_per_s / them.fire_per_s, 3),
        rounds=rounds,
    )


_FAULTS = ("lost", "duplicated", "early", "fired_after_cancel", "misordered")


def middle(rounds: list[Figures]) -> Figures:
    """Field by field the median; of faults the sum."""
    rows = [msgspec.structs.asdict(one) for one in rounds]
    return Figures(**{name: (sum if name in _FAULTS else median)(row[name] for row in rows) for name in rows[0]})
