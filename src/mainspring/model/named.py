"""Named targets: `target:<name>` stands for an address with its credentials and rules, kept by the nodes.

A task that names its target carries no secrets, and the address can change while the task waits.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

from .errors import InvalidInput
from .retry import RetryPolicy
from .retry_text import policy_table, read_policy
from .targets import check_target
from .webhook import Webhook
from .webhook_table import read_webhook, webhook_table

SCHEME: Final = "target"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Plain:
    """Another name for an address, for kinds of targets that need nothing more."""

    address: str
    retry: RetryPolicy | None = None

    def __post_init__(self) -> None:
        if check_target(self.address) == SCHEME:
            raise InvalidInput(f"address {self.address!r} is a named target again; give what it stands for")


Spec = Webhook | Plain


class Targets(Mapping[str, Spec]):
    """What each name stands for. Never changes once made."""

    def __init__(self, specs: Mapping[str, Spec] | None = None) -> None:
        self._specs = dict(specs or {})
        for name in self._specs:
            if not _NAME.fullmatch(name):
                raise InvalidInput(f"the name of a target is {name!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")

    @classmethod
    def read(cls, tables: Mapping[str, object]) -> "Targets":
        """From one table a target, as in `[targets.<name>]`."""
        specs = {}
        for name, table in tables.items():
            try:
                specs[name] = _read_spec(table)
            except InvalidInput as error:
                raise InvalidInput(f"{name}: {error}") from None
        return cls(specs)

    def tables(self) -> dict[str, dict[str, Any]]:
        """What `read` makes these targets of again; secrets included."""
        return {name: _kind_of(spec).write(spec) | _shared_table(spec) for name, spec in self._specs.items()}

    def retries(self) -> dict[str, RetryPolicy]:
        """The policies of those that have one, by the target that tasks name."""
        return {f"{SCHEME}:{name}": spec.retry for name, spec in self._specs.items() if spec.retry is not None}

    def __getitem__(self, name: str) -> Spec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __hash__(self) -> int:
        return hash(frozenset(self._specs.items()))

    def __repr__(self) -> str:
        return f"Targets({', '.join(self._specs)})"


class _Kind(NamedTuple):
    spec: type
    read: Callable[[Mapping[str, object]], Spec]
    write: Callable[[Any], dict[str, Any]]


def _read_plain(table: Mapping[str, object]) -> Plain:
    if set(table) != {"address"} or not isinstance(table["address"], str):
        raise InvalidInput("a target with an address has nothing besides but retry, and the address is a text")
    return Plain(table["address"])


_KINDS: Final = {
    "url": _Kind(Webhook, read_webhook, webhook_table),
    "address": _Kind(Plain, _read_plain, lambda spec: {"address": spec.address}),
}
"""By the setting that every target of the kind has."""

_SHARED: Final = ("retry",)
"""Settings that every kind of target may have."""


def _read_spec(table: object) -> Spec:
    if not isinstance(table, Mapping):
        raise InvalidInput("expected a table; write [targets.<name>] and its settings below")
    found = [kind for name, kind in _KINDS.items() if name in table]
    if len(found) != 1:
        raise InvalidInput(f"give one of {', '.join(_KINDS)}, to say what it is")
    spec = found[0].read({name: value for name, value in table.items() if name not in _SHARED})
    return replace(spec, retry=_read_retry(table["retry"])) if "retry" in table else spec


def _read_retry(value: object) -> RetryPolicy:
    try:
        return RetryPolicy.parse(value) if isinstance(value, str) else read_policy(cast("Mapping[str, Any]", value))
    except InvalidInput as error:
        raise InvalidInput(f"retry: {error}") from None


def _shared_table(spec: Spec) -> dict[str, Any]:
    return {} if spec.retry is None else {"retry": policy_table(spec.retry)}


def _kind_of(spec: Spec) -> _Kind:
    return next(kind for kind in _KINDS.values() if isinstance(spec, kind.spec))
