"""`target:<name>`: hands deliveries on to the sink of what the name stands for on this node."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from ..model.delivery import Delivery
from ..model.named import Plain, Spec, Targets
from ..model.outcome import Outcome, Retry
from .base import Sink, most_in_batch

log = logging.getLogger("mainspring.targets")

_MOST_MISSED: Final = 1000


@runtime_checkable
class SpecSink(Protocol):
    """A sink whose targets have more to them than an address."""

    async def deliver_to(self, spec: Spec, batch: Sequence[Delivery]) -> Sequence[Outcome]: ...


class NamedSink:
    """Knows the names; the sinks do the work."""

    keeps_answers = True

    def __init__(self, targets: Targets, sinks: Mapping[str, Sink]) -> None:
        self._targets = targets
        self._sinks = sinks
        self._missed: set[str] = set()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        name = batch[0].target.partition(":")[2]
        spec = self._targets.get(name)
        if spec is None:
            return self._not_now(
                name, f"this node knows no target {name!r}; add [targets.{name}] to its settings", batch
            )
        scheme = spec.address.partition(":")[0]
        sink = self._sinks.get(scheme)
        if sink is None:
            return self._not_now(name, f"target {name!r} is {spec.address}, and this node has no sink for it", batch)
        if isinstance(spec, Plain):
            return await sink.deliver([_aimed(one, spec.address) for one in batch])
        if not isinstance(sink, SpecSink):
            return self._not_now(name, f"target {name!r}: the sink for {scheme}: takes plain addresses only", batch)
        return await sink.deliver_to(spec, batch)

    def batch_tasks_of(self, target: str) -> int | None:
        """As the sink says that gets them."""
        spec = self._targets.get(target.partition(":")[2])
        sink = None if spec is None else self._sinks.get(spec.address.partition(":")[0])
        return None if spec is None or sink is None else most_in_batch(sink, spec.address)

    async def aclose(self) -> None:
        """The sinks are closed by who made them."""

    def _not_now(self, name: str, reason: str, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        # Not dead: another node may know better, or this one after its next start.
        if name not in self._missed and len(self._missed) < _MOST_MISSED:
            self._missed.add(name)
            log.warning("%s", reason)
        return [Retry(reason)] * len(batch)


def _aimed(delivery: Delivery, address: str) -> Delivery:
    return msgspec.structs.replace(delivery, body=msgspec.structs.replace(delivery.body, target=address))
