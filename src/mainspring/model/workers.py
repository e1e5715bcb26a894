"""Workers as others see them, the queues they serve, and why a task finds none that runs it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from .targets.names import queue_named
from .text import did_you_mean, nearest

MOST_TARGETS: Final = 200
"""Names of handlers and commands in the record of a worker: it is written with every heartbeat."""
_NAMES_SHOWN: Final = 8


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker. It leaves the list when it stops, or one lease after its last heartbeat."""

    id: str
    """The name that results and `explain` give. Two processes may have the same one."""
    host: str = ""
    pid: int = 0
    version: str = ""
    queues: dict[str, int] = {}
    """Weights of the queues it serves, by name; with `strict`, their order alone counts."""
    strict: bool = False
    targets: tuple[str, ...] = ()
    """What it runs of these queues: `queue:<queue>/<handler>` and `command:<name>`."""
    targets_left_out: int = 0
    """So many more that are not in the list."""
    concurrency: int = 0
    running: int = 0
    """Jobs it has taken that are not over."""
    stopping: bool = False
    """It takes nothing more and ends when its jobs have."""
    started_ms: int = 0
    seen_ms: int = 0
    """Its last heartbeat."""
    lease_ms: int = 0
    """Without a heartbeat for so long it counts as dead."""

    def serves(self, queue: str) -> bool:
        return queue in self.queues and not self.stopping


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that has tasks, had some in the last day, or is served by a live worker."""

    name: str
    ready: int
    """Tasks that wait for a worker."""
    running: int
    oldest_ms: int | None
    """When the one that waits longest was handed to the queue."""
    paused: bool
    """Workers take none of its tasks."""
    workers: list[str]
    """Ids of the live workers that serve it."""
    nearest: str | None = None
    """Of a queue that no worker serves: the served queue with the most similar name."""


def served_queues(workers: Iterable[WorkerInfo]) -> list[str]:
    return sorted({queue for one in workers if not one.stopping for queue in one.queues})


def nobody_runs(
    target: str, queue: str | None, workers: Sequence[WorkerInfo], may_name: Callable[[str], bool]
) -> str | None:
    """Say why no live worker can run a task, as part of a sentence; None if one can, or if it is not for workers.

    `queue` is the one it waits in, if it has got there: only then is the queue of a command known. `may_name` says
    whether a target, or a queue as `queue:<name>/*`, may be named to whoever asks.
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
    # Compared without what they all begin with, which would make any two names alike.
    near = nearest(target.removeprefix(prefix), [name.removeprefix(prefix) for name in sorted(listed)])
    meant = "" if near is None else f"; did you mean {prefix}{near}?"
    return f"no worker{'' if queue is None else f' of queue {queue}'} knows {target}{meant}"


def _unserved(queue: str, served: Sequence[str]) -> str:
    if not served:
        return f"no worker serves queue {queue}"
    rest = f" and {len(served) - _NAMES_SHOWN} more" if len(served) > _NAMES_SHOWN else ""
    shown = f"{', '.join(served[:_NAMES_SHOWN])}{rest}"
    return f"no worker serves queue {queue}, only {shown}{did_you_mean([queue], served)}"
