"""Live workers, the queues they serve, and why no worker can run a task."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from .targets.names import queue_named
from .text import did_you_mean, nearest

MOST_TARGETS: Final = 200
"""Most handler and command names in a worker's record, which is written with every heartbeat."""
_NAMES_SHOWN: Final = 8


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker. It leaves the list when it stops, or one lease after its last heartbeat."""

    id: str
    """The name in results and `explain`. Two processes may share one."""
    host: str = ""
    pid: int = 0
    version: str = ""
    queues: dict[str, int] = {}
    """Weights of the queues it serves, by name; if `strict`, only their order counts."""
    strict: bool = False
    targets: tuple[str, ...] = ()
    """Targets it runs: `queue:<queue>/<handler>` and `command:<name>`."""
    targets_left_out: int = 0
    """Number of targets left out of the list."""
    concurrency: int = 0
    running: int = 0
    """Jobs it has taken that have not ended."""
    stopping: bool = False
    """True if it takes no more jobs, and ends when its jobs have."""
    started_ms: int = 0
    seen_ms: int = 0
    """Its last heartbeat."""
    lease_ms: int = 0
    """Without a heartbeat for this long it counts as dead."""

    def serves(self, queue: str) -> bool:
        """Return whether the worker takes jobs of this queue."""
        return queue in self.queues and not self.stopping


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that has tasks, had some in the last day, or is served by a live worker."""

    name: str
    ready: int
    """Tasks waiting for a worker."""
    running: int
    oldest_ms: int | None
    """When its oldest waiting task was handed to the queue."""
    paused: bool
    """True if workers take none of its tasks."""
    workers: list[str]
    """Ids of the live workers that serve the queue."""
    nearest: str | None = None
    """For a queue that no worker serves: the served queue with the most similar name. Only the first queues of a page
    have it: comparing names is slow."""


class QueuePage(msgspec.Struct, frozen=True):
    """Queues by name; pass `next` as cursor for the next page, None at the end."""

    queues: list[QueueInfo]
    next: str | None


def served_queues(workers: Iterable[WorkerInfo]) -> list[str]:
    return sorted({queue for one in workers if not one.stopping for queue in one.queues})


def why_no_worker(
    target: str, queue: str | None, workers: Sequence[WorkerInfo], may_name: Callable[[str], bool]
) -> str | None:
    """Say why no live worker can run a task, as part of a sentence; None if one can, or if the target needs no worker.

    `queue` is the one the task waits in, if it is queued: only then is a command's queue known. `may_name` says
    whether the caller may learn of a target, or of a queue as `queue:<name>/*`.
    """
    is_command = target.startswith("command:")
    if queue is None and not is_command:
        queue = queue_named(target, {})
        if queue is None:
            return None
    running = [one for one in workers if not one.stopping]
    if not running:
        return "no worker is running; start one: mainspring worker"
    serving = [one for one in running if queue is None or queue in one.queues]
    if queue is not None and not serving:
        return _unserved(queue, [name for name in served_queues(running) if may_name(f"queue:{name}/*")])
    if any(target in one.targets or one.targets_left_out for one in serving):
        return None
    prefix = "command:" if is_command else f"queue:{queue}/"
    listed = {name for one in serving for name in one.targets if name.startswith(prefix) and may_name(name)}
    # Compare without the common prefix, which would make any two names similar.
    near = nearest(target.removeprefix(prefix), [name.removeprefix(prefix) for name in sorted(listed)])
    meant = "" if near is None else f"; did you mean {prefix}{near}?"
    return f"no worker{'' if queue is None else f' of queue {queue}'} knows {target}{meant}"


def _unserved(queue: str, served: Sequence[str]) -> str:
    if not served:
        return f"no worker serves queue {queue}"
    rest = f" and {len(served) - _NAMES_SHOWN} more" if len(served) > _NAMES_SHOWN else ""
    shown = f"{', '.join(served[:_NAMES_SHOWN])}{rest}"
    return f"no worker serves queue {queue}, only {shown}{did_you_mean([queue], served)}"
