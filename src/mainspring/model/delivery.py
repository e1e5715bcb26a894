"""A task on its way to its target, as sinks see it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec

from .ids import idempotency_key


class Body(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What an entry says of its task. Readers accept two fields or more and ignore fields they do not know."""

    target: str
    payload: bytes
    id: str | None = None
    lane: str | None = None
    due_ms: int | None = None
    """Only where it is not the slice's start plus the offset: a due time that had passed at put."""
    original_due_ms: int | None = None
    """Only where it differs from the due time: in retries. Part of the idempotency key."""
    attempt: int = 1
    expires_ms: int | None = None
    raw: bool = False
    """The payload is the caller's bytes; otherwise it is JSON."""
    errors: tuple[str, ...] = ()
    retry: str | None = None
    """The task's own retry policy, in one line; None leaves it to the target and the node."""
    occurrence: tuple[int, int] | None = None
    """Of a run of a schedule: the schedule's generation and the planned time in ms. The id starts with its name."""
    timeout_ms: int | None = None
    """How long one attempt may take; None leaves it to the target and the node."""

    @property
    def is_retry(self) -> bool:
        """It was under way before, whether that counted as an attempt or not."""
        return self.original_due_ms is not None


class Columns(NamedTuple):
    """Of many deliveries at once, in their order. To ask each of them costs several times as much."""

    idhs: bytes
    """One behind the other."""
    dues_ms: list[int]


class Delivery(msgspec.Struct, gc=False):
    """One attempt at one task, as a sink gets it. The idempotency key is the same for every attempt."""

    body: Body

    @property
    def namespace(self) -> str:
        raise NotImplementedError

    @property
    def idh(self) -> bytes:
        """The 16 bytes that stand for the id."""
        raise NotImplementedError

    @property
    def due_ms(self) -> int:
        raise NotImplementedError

    @property
    def id(self) -> str:
        return self.body.id or self.idh.hex()

    @property
    def target(self) -> str:
        return self.body.target

    @property
    def payload(self) -> bytes:
        """The bytes to send: JSON, or the caller's own."""
        return self.body.payload

    @property
    def attempt(self) -> int:
        return self.body.attempt

    @property
    def lane(self) -> str | None:
        return self.body.lane

    @property
    def original_due_ms(self) -> int:
        return self.body.original_due_ms if self.body.original_due_ms is not None else self.due_ms

    @property
    def idempotency_key(self) -> str:
        return idempotency_key(self.namespace, self.id, self.original_due_ms)

    @classmethod
    def columns(cls, batch: Sequence[Self]) -> Columns | None:  # noqa: ARG003  # for those that know more
        """Of tasks of which nothing is said but target and payload: their ids are made of their idhs, they have no
        lanes, and this is their first attempt. None where one is otherwise, or where that takes a look at each."""
        return None

    def value(self) -> Any:
        """The payload as the caller gave it."""
        return self.body.payload if self.body.raw else msgspec.json.decode(self.body.payload)


class GivenDelivery(Delivery, gc=False):
    """A delivery made by hand, to try a sink with."""

    namespace: str
    idh: bytes
    due_ms: int
