"""What every fault stands on: the servers, the nodes, the roads, and the journal that says what was broken."""

from dataclasses import dataclass

from ...store.keys import Keyspace
from ..events import Fault
from .fleet import Fleet
from .recorder import Journal, now_us
from .road import Road
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts of a run that can be broken."""

    stage: Stage
    fleet: Fleet
    roads: list[Road]
    """Of the load; each node has its own."""
    journal: Journal
    keys: Keyspace
    lease_s: float
    workers: Fleet | None = None
    """Where the profile has some."""

    def note(self, what: str, start_us: int, *, node: str | None, loses: bool = False, after_s: float = 0.0) -> None:
        """Something was broken from then until now, and its effects last a little longer."""
        self.journal.add(Fault(start_us, now_us() + int(after_s * 1e6), what, node, loses))
