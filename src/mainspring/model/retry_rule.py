"""What a certain failure means for retries: by the status of an answer, or by the type of an error."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .errors import InvalidInput
from .outcome import Dead, Retry
from .times import delay_ms, delay_text

_CODES: Final = re.compile(r"([1-9])xx|([1-9]\d\d)(?:-([1-9]\d\d))?", re.IGNORECASE)
_TYPE: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_WORST_RANK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """`when` is a status (`429`), a range of them (`500-599`, `5xx`), or the name of an exception type."""

    when: str
    dead: bool = False
    """No further attempt; otherwise try again, also where the sink would not."""
    wait_ms: int | None = None
    """Instead of the policy's wait."""

    def __post_init__(self) -> None:
        _codes(self.when)
        if self.dead and self.wait_ms is not None:
            raise InvalidInput(f"on {self.when}: dead has no wait")
        if self.wait_ms is not None and self.wait_ms < 1:
            raise InvalidInput(f"on {self.when}: the wait is {self.wait_ms} ms; it must be at least 1")

    @classmethod
    def read(cls, when: str, action: object) -> "Rule":
        """From a setting: `dead`, `retry`, or `retry 30s`."""
        match re.split(r"[\s:]+", action.strip(), maxsplit=1) if isinstance(action, str) else ():
            case ["dead"]:
                return cls(when, dead=True)
            case ["retry"]:
                return cls(when)
            case ["retry", wait]:
                return cls(when, wait_ms=delay_ms(wait, field=f"on {when}"))
        raise InvalidInput(f"on {when}: {action!r} says nothing; write 'dead', 'retry' or 'retry 30s'")

    @property
    def action(self) -> str:
        """The text from which `read` makes this rule again."""
        if self.dead:
            return "dead"
        return "retry" if self.wait_ms is None else f"retry:{delay_text(self.wait_ms)}"

    def rank(self, status: int | None, types: list[str]) -> int:
        """How narrowly the rule fits, less is narrower; `_WORST_RANK` when it does not fit."""
        codes = _codes(self.when)
        if codes is None:
            return types.index(self.when) if self.when in types else _WORST_RANK
        return len(codes) if status is not None and status in codes else _WORST_RANK


def rule_for(rules: Iterable[Rule], outcome: Retry | Dead) -> Rule | None:
    """The narrowest rule for what happened: a status before a range, a type before the types it is made of."""
    if not rules:
        return None
    status = None if outcome.response is None else outcome.response.status
    types = _names(outcome.error)
    rank, rule = min(((rule.rank(status, types), rule) for rule in rules), key=lambda pair: pair[0])
    return rule if rank < _WORST_RANK else None


def _names(error: BaseException | None) -> list[str]:
    """Plain and full names of an error's types, the nearest first."""
    if error is None:
        return []
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return [name for kind in kinds for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]


def _codes(when: str) -> range | None:
    """The statuses meant; None for the name of a type."""
    found = _CODES.fullmatch(when)
    if found is None:
        if not _TYPE.fullmatch(when):
            raise InvalidInput(
                f"on {when!r}: give a status such as '429', some such as '5xx' or '400-499', or the name of an error"
            )
        return None
    hundred, first, last = found.groups()
    if hundred:
        return range(int(hundred) * 100, int(hundred) * 100 + 100)
    codes = range(int(first), int(last or first) + 1)
    if not codes:
        raise InvalidInput(f"on {when!r}: the range is empty")
    return codes
