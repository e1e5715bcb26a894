"""Work that a worker has taken from a queue, and how it ended."""

from dataclasses import dataclass

import msgspec

from .delivery import Body
from .outcome import Dead, Done, Retry


class Job(msgspec.Struct, gc=False):
    """One entry of a queue's stream, taken by one worker."""

    partition: int
    queue: str
    entry: bytes
    """Its place in the stream."""
    idh: bytes
    body: Body
    due_ms: int
    original_due_ms: int
    """Of the first attempt; part of the idempotency key."""
    deliveries: int = 1
    """How often it was taken: more than once when a worker died over it."""
    claim: bytes = b""
    """What makes it this worker's: the address it came from, then its place in the stream, queue, worker and nonce."""

    @property
    def id(self) -> str:
        return self.body.id or self.idh.hex()

    @property
    def key(self) -> tuple[int, bytes]:
        """Tells it from all others in hand: a claim is one of its partition, and two of them may say the same."""
        return self.partition, self.claim


@dataclass(frozen=True, slots=True)
class Cancelled:
    """It was cancelled while it ran, and has stopped."""


@dataclass(slots=True)
class End:
    """How a job ended, after the retry policy was asked: a `Retry` comes with its `after_ms`."""

    job: Job
    outcome: Done | Retry | Dead | Cancelled
    result: bytes | None = None
    """To be kept for who waits for it, for so long."""
    result_ttl_ms: int = 0
    run_end: bytes | None = None
    """Of a run of a schedule: to be kept under the name of the schedule."""
