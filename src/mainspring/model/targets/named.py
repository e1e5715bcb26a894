"""Named targets: `target:<name>` names an address with its credentials and rules, kept by the nodes.

A task that names its target carries no secrets, and the address can change while the task waits.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ..errors import InvalidInput
from ..flow import BreakerPolicy, Limit, Rate
from ..lane import LanePolicy, read_lane_policy
from ..retry import RetryPolicy, policy_table, read_retry
from ..text import Tables, check_known
from .names import HANDED_OFF, check_target
from .webhook import WEBHOOK_SETTINGS, Webhook, read_webhook, webhook_table

SCHEME: Final = "target"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Plain:
    """Another name for an address, for kinds of targets that need nothing more."""

    address: str
    retry: RetryPolicy | None = None
    rate: Rate | None = None
    concurrency: int | None = None
    breaker: BreakerPolicy | None = None
    lane_policy: LanePolicy | None = None

    @property
    def limit(self) -> Limit:
        """The limit over all nodes together."""
        return Limit(self.rate, self.concurrency)

    def __post_init__(self) -> None:
        Limit(self.rate, self.concurrency)
        scheme = check_target(self.address)
        if scheme == SCHEME:
            raise InvalidInput(f"address {self.address!r} is another named target; give the address behind it")
        if scheme in HANDED_OFF:
            # A worker chooses its handler by the target in the task itself, so it could not use the name.
            raise InvalidInput(
                f"address {self.address!r} is run by workers, and names are known to nodes only; put tasks to that"
                " target itself, and its rules under [queue.<name>] or [commands.<name>]"
            )


TargetSpec = Webhook | Plain


class Targets(Tables[TargetSpec]):
    """Named targets by name. Immutable."""

    def __init__(self, specs: Mapping[str, TargetSpec] | None = None) -> None:
        super().__init__(specs)
        for name in self:
            if not _NAME.fullmatch(name):
                raise InvalidInput(f"the name of a target is {name!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")

    @classmethod
    def read(cls, tables: object) -> "Targets":
        """Read one table per target, as in `[targets.<name>]`."""
        return cls.read_each("targets", tables, _read_spec)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the tables from which `read` makes these targets again, secrets included."""
        return {name: _kind_of(spec).write(spec) | _shared_table(spec) for name, spec in self.items()}

    def retries(self) -> dict[str, RetryPolicy]:
        """Return the retry policies, by target as named in tasks."""
        return {f"{SCHEME}:{name}": spec.retry for name, spec in self.items() if spec.retry is not None}

    def limits(self) -> dict[str, Limit]:
        """Return the limits over all nodes together, by target."""
        limits = {f"{SCHEME}:{name}": spec.limit for name, spec in self.items()}
        return {target: limit for target, limit in limits.items() if limit}

    def lane_policies(self) -> dict[str, LanePolicy]:
        policies = {f"{SCHEME}:{name}": spec.lane_policy for name, spec in self.items()}
        return {target: policy for target, policy in policies.items() if policy is not None}

    def breakers(self) -> dict[str, BreakerPolicy]:
        return {f"{SCHEME}:{name}": spec.breaker for name, spec in self.items() if spec.breaker is not None}


class _Kind(NamedTuple):
    what: str
    settings: tuple[str, ...]
    spec: type
    read: Callable[[Mapping[str, object]], TargetSpec]
    write: Callable[[Any], dict[str, Any]]


def _read_plain(table: Mapping[str, object]) -> Plain:
    address, concurrency = table["address"], table.get("concurrency")
    if not isinstance(address, str):
        raise InvalidInput(f"address: expected a string, not {type(address).__name__}")
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise InvalidInput(f"concurrency: expected a whole number, not {concurrency!r}")
    return Plain(address, rate=Rate.read(table["rate"]) if "rate" in table else None, concurrency=concurrency)


def _plain_table(spec: Plain) -> dict[str, Any]:
    table: dict[str, Any] = {"address": spec.address}
    if spec.rate is not None:
        table["rate"] = str(spec.rate)
    return table | ({} if spec.concurrency is None else {"concurrency": spec.concurrency})


_KINDS: Final = {
    "url": _Kind("a webhook", WEBHOOK_SETTINGS, Webhook, read_webhook, webhook_table),
    "address": _Kind("a target with an address", ("address", "rate", "concurrency"), Plain, _read_plain, _plain_table),
}
"""Kinds of targets by the setting that identifies them."""

_SHARED: Final = ("retry", "breaker", "lane_policy")
"""Settings that every kind of target may have."""


def _read_spec(_: str, table: Mapping[str, Any]) -> TargetSpec:
    found = [kind for name, kind in _KINDS.items() if name in table]
    if not found:
        every = dict.fromkeys(name for kind in _KINDS.values() for name in kind.settings)
        check_known(table, (*every, *_SHARED), "a target")  # the identifying setting may be misspelt
    if len(found) != 1:
        raise InvalidInput(f"give exactly one of {', '.join(_KINDS)} to choose the kind of target")
    check_known(table, (*found[0].settings, *_SHARED), found[0].what)
    spec = found[0].read({name: value for name, value in table.items() if name not in _SHARED})
    try:
        if "retry" in table:
            spec = replace(spec, retry=read_retry(table["retry"]))
        if "breaker" in table:
            spec = replace(spec, breaker=BreakerPolicy.read(table["breaker"]))
    except InvalidInput as error:
        raise InvalidInput(f"{'retry' if spec.retry is None and 'retry' in table else 'breaker'}: {error}") from None
    return replace(spec, lane_policy=read_lane_policy(table))


def _shared_table(spec: TargetSpec) -> dict[str, Any]:
    shared: dict[str, Any] = {} if spec.retry is None else {"retry": policy_table(spec.retry)}
    shared |= {} if spec.lane_policy is None else {"lane_policy": str(spec.lane_policy)}
    return shared | ({} if spec.breaker is None else {"breaker": str(spec.breaker)})


def _kind_of(spec: TargetSpec) -> _Kind:
    return next(kind for kind in _KINDS.values() if isinstance(spec, kind.spec))
