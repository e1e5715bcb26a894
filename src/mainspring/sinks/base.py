"""What a sink is, sinks by name, and sinks from other packages.

    [project.entry-points."mainspring.sinks"]
    file = "mainspring_file:make"

The name is the scheme of its targets; `make(config)` returns the sink.
"""

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Final, Protocol, runtime_checkable

import msgspec

from ..model.delivery import Delivery, DeliveryBatch, Outcome, Retry
from ..model.errors import ConfigError
from ..model.targets.named import Plain, Targets, TargetSpec
from ..model.targets.names import HANDED_OFF, SCHEMES, SINK_GROUP, is_scheme, sink_entry_points

log = logging.getLogger("mainspring.targets")


class Sink(Protocol):
    """Delivers to one kind of target.

    A sink whose deliveries end one by one has a number `batch_tasks`, the most tasks in one batch: delivered tasks
    are then soon marked done, and do not wait for the slowest of thousands. Tasks of lanes and runs of schedules come
    to it one at a time, because others wait for their ends. A sink with `keeps_answers` has responses stored with runs:
    those of its `Done(response, keep_ms)`. A sink that is slow to connect has `prepare()`: a starting node calls it in
    its event loop and continues at once, so that the first task does not wait. A sink in which deliveries wait calls
    `batch.unwanted(index)` before each send: the task may have expired meanwhile, or belong to another node. One that
    needs a package has `missing(target)`, which names it while it is not installed: tasks are held meanwhile.
    """

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        """Deliver; return one outcome per delivery, in order, once the target has it. A batch has a single target."""
        ...

    async def aclose(self) -> None:
        """Close what `deliver` needs; called once, when no delivery is under way."""
        ...


def prepare(sink: Sink) -> None:
    """Let a sink begin to connect, if it supports that."""
    begin = getattr(sink, "prepare", None)
    if begin is not None:
        begin()


def most_in_batch(sink: Sink, target: str) -> int | None:
    """Return the most tasks the sink wants in one batch; None if its tasks end together and any number may come."""
    by_target = getattr(sink, "batch_tasks_of", None)
    most: int | None = getattr(sink, "batch_tasks", None) if by_target is None else by_target(target)
    return most


def missing(sinks: Mapping[str, Sink], target: str) -> str | None:
    """Say what this node lacks to deliver to a target; None if it can.

    A sink that cannot work here has a method `missing(target)` that names the package it needs.
    """
    scheme = target.partition(":")[0]
    sink = sinks.get(scheme)
    if sink is None:
        return None if scheme in HANDED_OFF else f"no sink for {scheme}: on this node; install the package that has it"
    lacks = getattr(sink, "missing", None)
    reason: str | None = None if lacks is None else lacks(target)
    return reason


_MOST_MISSED: Final = 1000


@runtime_checkable
class SpecSink(Protocol):
    """A sink whose targets have settings besides an address."""

    async def deliver_to(self, spec: TargetSpec, batch: Sequence[Delivery]) -> Sequence[Outcome]: ...


class NamedSink:
    """Delivers to named targets through the sink of each one's address."""

    keeps_answers = True

    def __init__(self, targets: Targets, sinks: Mapping[str, Sink]) -> None:
        self._targets = targets
        self._sinks = sinks
        self._missed: set[str] = set()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        name = batch[0].target.partition(":")[2]
        spec = self._targets.get(name)
        if spec is None:
            return self._not_now(name, f"this node has no target {name!r}; add [targets.{name}] to its settings", batch)
        scheme = spec.address.partition(":")[0]
        sink = self._sinks.get(scheme)
        if sink is None:
            return self._not_now(name, f"target {name!r} is {spec.address}, and this node has no sink for it", batch)
        if isinstance(spec, Plain):
            aimed = [_aimed(one, spec.address) for one in batch]
            return await sink.deliver(
                DeliveryBatch(aimed, batch.unwanted) if isinstance(batch, DeliveryBatch) else aimed
            )
        if not isinstance(sink, SpecSink):
            return self._not_now(name, f"target {name!r}: the sink for {scheme}: takes plain addresses only", batch)
        return await sink.deliver_to(spec, batch)

    def batch_tasks_of(self, target: str) -> int | None:
        """Return the batch limit of the sink behind the name."""
        spec = self._targets.get(target.partition(":")[2])
        sink = None if spec is None else self._sinks.get(spec.address.partition(":")[0])
        return None if spec is None or sink is None else most_in_batch(sink, spec.address)

    def missing(self, target: str) -> str | None:
        """Return what the sink behind the name lacks; without a name, what any of them lacks."""
        name = target.partition(":")[2]
        specs = [spec for spec in (self._targets.get(name),) if spec is not None] if name else self._targets.values()
        return next((reason for spec in specs if (reason := missing(self._sinks, spec.address)) is not None), None)

    async def aclose(self) -> None:
        """Do nothing: the owner of the sinks closes them."""

    def _not_now(self, name: str, reason: str, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        # Not dead: another node may know the name, or this one after its next start.
        if name not in self._missed and len(self._missed) < _MOST_MISSED:
            self._missed.add(name)
            log.warning("%s", reason)
        return [Retry(reason)] * len(batch)


def _aimed(delivery: Delivery, address: str) -> Delivery:
    return msgspec.structs.replace(delivery, body=msgspec.structs.replace(delivery.body, target=address))


def plugin_sinks(config: object) -> Mapping[str, Sink]:
    """Return the sinks of all installed plug-ins by scheme; refuse to start with an unusable one, and name it."""
    sinks: dict[str, Sink] = {}
    makers: dict[str, EntryPoint] = {}
    for point in sink_entry_points():
        _check_scheme(point, makers)
        makers[point.name] = point
        sinks[point.name] = _made(point, config)
    return sinks


def _check_scheme(point: EntryPoint, makers: Mapping[str, EntryPoint]) -> None:
    if point.name in SCHEMES:
        raise ConfigError(
            f"{_describe(point)} wants the scheme {point.name}:, which is built in;"
            " uninstall it, or ask for another name"
        )
    if not is_scheme(point.name):
        raise ConfigError(
            f"{_describe(point)} has the name {point.name!r}, which can be no scheme: a-z first, then a-z 0-9 + . -"
        )
    if point.name in makers:
        raise ConfigError(
            f"{_describe(makers[point.name])} and {_describe(point)} are both for {point.name}:; uninstall one"
        )


def _made(point: EntryPoint, config: object) -> Sink:
    try:
        sink: Sink = point.load()(config)
    except ConfigError as error:  # the plug-in has checked its settings: keep its message
        raise ConfigError(f"{_describe(point)}: {error}") from error
    except Exception as error:  # imported code may raise anything: name the plug-in
        text = f"{_describe(point)} cannot be used: {type(error).__name__}: {error}; reinstall or uninstall it"
        raise ConfigError(text) from error
    lacking = [name for name in ("deliver", "aclose") if not callable(getattr(sink, name, None))]
    if lacking:
        raise ConfigError(f"{_describe(point)} made a {type(sink).__name__}, which has no {' and no '.join(lacking)}")
    return sink


def _describe(point: EntryPoint) -> str:
    """Describe a plug-in by its package and entry point."""
    whose = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"the sink plug-in of {whose} ({SINK_GROUP}: {point.name} = {point.value})"
