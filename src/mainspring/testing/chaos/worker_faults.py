"""Faults of workers: killed and stopped in the middle of their runs; and restarts, which are no faults."""

from .fleet import Fleet
from .ground import Ground
from .member_faults import exchange, kill, stop
from .profile import Kind
from .schedule import Act, Planned


class WorkerFaults:
    """What happens to worker processes."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self.acts: dict[Kind, Act] = {
            "kill worker": self._kill_worker,
            "stop worker": self._stop_worker,
            "restart worker": self._restart_worker,
        }

    @property
    def _workers(self) -> Fleet:
        assert self._on.workers is not None, "the profile has no workers"
        return self._on.workers

    async def _kill_worker(self, planned: Planned) -> bool:
        """Its runs belong to others one lease later."""
        workers = self._workers
        return await kill(self._on, workers, workers.pick(planned.pick), "kill worker", planned.size, leases=2)

    async def _stop_worker(self, planned: Planned) -> bool:
        """It wakes up in runs that others have taken over and ended."""
        return await stop(self._on, self._workers.pick(planned.pick), "stop worker", planned.size)

    async def _restart_worker(self, planned: Planned) -> bool:
        """What it ran is finished, what it had not begun is given back."""
        return await exchange(self._workers, self._workers.pick(planned.pick))
