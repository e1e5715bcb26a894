"""The receiving end on which the contract suite tries a sink."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..model.delivery import Body, Delivery, GivenDelivery
from ..model.ids import idh_of
from ..sinks.base import Sink

NAMESPACE: Final = "contract"
DUE_MS: Final = 1_700_000_000_123
TOLD: Final = frozenset({"id", "key", "due_ms", "attempt"})


class Arrived(NamedTuple):
    """One task as the receiver got it, put back into the words of the task: nothing quoted, no text for numbers."""

    payload: bytes
    id: str = ""
    key: str = ""
    """The idempotency key."""
    due_ms: int = 0
    """The due time of the first attempt."""
    attempt: int = 0


class Receiver(ABC):
    """What a sink delivers to: one target, which can be broken, mended, and asked what it got."""

    target: str
    """The target of all deliveries, with its scheme."""
    told: frozenset[str] = TOLD
    """Which fields of `Arrived` the sink sends along with the payload; the fewer, the less is checked."""
    big_bytes: int = 512 * 1024
    """The size of a payload that it must take."""

    @abstractmethod
    def sink(self) -> Sink:
        """A new sink. The suite closes it."""

    @abstractmethod
    async def arrived(self) -> Sequence[Arrived]:
        """Everything that this receiver has got until now, in any order."""

    @abstractmethod
    async def fail(self) -> None:
        """From here on it takes nothing: it is away, or says that it is out of order."""

    @abstractmethod
    async def mend(self) -> None:
        """It works again."""

    async def hold(self) -> bool:
        """It takes what comes and does not say so before `release`. False: this receiver cannot do that."""
        return False

    async def release(self) -> None:
        """The end of `hold`."""
        raise NotImplementedError("a receiver that can hold must be able to release")

    def poison(self) -> bytes | None:
        """A payload that it refuses, and only that; None: it takes everything."""
        return None

    def delivery(
        self,
        number: int,
        payload: bytes = b'{"order": 42}',
        *,
        id: str | None = None,
        lane: str | None = None,
        attempt: int = 1,
        raw: bool = False,
    ) -> Delivery:
        """One attempt at a task; two with the same number or id are attempts at the same one."""
        first = attempt == 1
        body = Body(
            self.target, payload, id, lane, original_due_ms=None if first else DUE_MS + number, attempt=attempt, raw=raw
        )
        idh = idh_of(id) if id is not None else number.to_bytes(16, "big")
        # A retry has a due time of its own, which is none of the receiver's business.
        due_ms = DUE_MS + number if first else DUE_MS + number + 60_000 * attempt
        return Traced(body, NAMESPACE, idh, due_ms)


class Traced(GivenDelivery, weakref=True, gc=True):
    """A delivery of which can be told whether somebody still holds it."""
