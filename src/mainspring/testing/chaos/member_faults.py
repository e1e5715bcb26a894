"""What can happen to any process of a fleet, node or worker: killed, stopped for longer than the lease, exchanged."""

import asyncio
import signal

from .fleet import Fleet, Member
from .ground import Ground
from .recorder import now_us


async def kill(on: Ground, fleet: Fleet, member: Member | None, what: str, size: float, *, leases: float) -> bool:
    """SIGKILL, and another one after a while. Its effects last so many leases."""
    if member is None:
        return False
    start_us = now_us()
    await fleet.kill(member)
    on.note(f"{what} {member.name}", start_us, node=member.name, after_s=leases * on.lease_s)
    await asyncio.sleep(size * on.lease_s)
    await fleet.join()
    return True


async def stop(on: Ground, member: Member | None, what: str, size: float) -> bool:
    """SIGSTOP for longer than the lease: it wakes up and believes that it still has everything."""
    if member is None:
        return False
    start_us = now_us()
    member.stopped = True
    member.signal(signal.SIGSTOP)
    await asyncio.sleep(on.lease_s * (1.2 + size))
    member.signal(signal.SIGCONT)
    member.stopped = False
    on.note(f"{what} {member.name}", start_us, node=member.name, after_s=on.lease_s)
    return True


async def exchange(fleet: Fleet, member: Member | None) -> bool:
    """A new one and a clean stop: no fault at all, so nothing may be delivered twice for it."""
    if member is None:
        return False
    await fleet.join()
    await fleet.leave(member)
    return True
