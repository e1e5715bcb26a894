"""Faults of workers: killed and stopped in the middle of their runs; and restarts, which are no faults."""

import asyncio
import signal

from .fleet import Fleet
from .ground import Ground
from .profile import Kind
from .recorder import now_us
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
        """SIGKILL: its runs belong to others one lease later."""
        member = self._workers.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        await self._workers.kill(member)
        self._on.note(f"kill worker {member.name}", start_us, node=member.name, after_s=2 * self._on.lease_s)
        await asyncio.sleep(planned.size * self._on.lease_s)
        await self._workers.join()
        return True

    async def _stop_worker(self, planned: Planned) -> bool:
        """SIGSTOP for longer than the lease: it wakes up in runs that others have taken over and ended."""
        member = self._workers.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        member.stopped = True
        member.signal(signal.SIGSTOP)
        await asyncio.sleep(self._on.lease_s * (1.2 + planned.size))
        member.signal(signal.SIGCONT)
        member.stopped = False
        self._on.note(f"stop worker {member.name}", start_us, node=member.name, after_s=self._on.lease_s)
        return True

    async def _restart_worker(self, planned: Planned) -> bool:
        """A clean stop and a new one: what it ran is finished, what it had not begun is given back."""
        member = self._workers.pick(planned.pick)
        if member is None:
            return False
        await self._workers.join()
        await self._workers.leave(member)
        return True
