"""One field of a cron expression: the text of a field read into a set of numbers, kept as the bits of an integer."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from .errors import InvalidCron

_NUMBER: Final = re.compile(r"[0-9]{1,4}")
_SPREAD_ITEM: Final = re.compile(r"(?:^|[\s,])H", re.IGNORECASE)
_SPREAD: Final = re.compile(r"H(?:\((?P<range>[^()]*)\))?")


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What a field may hold. `spread_high` bounds H: day 31 would leave out most months."""

    name: str
    low: int
    high: int
    names: Mapping[str, int]
    spread_high: int
    also: str = ""

    @property
    def allowed(self) -> str:
        named = f" or {_first_name(self)}-{_last_name(self)}" if self.names else ""
        return f"{self.low}-{self.high}{named}, *, ranges a-b, steps */n or a-b/n, lists a,b{self.also}, H"


def _numbered(words: str, first: int) -> Mapping[str, int]:
    return MappingProxyType({word: number for number, word in enumerate(words.split(), first)})


_MONTHS: Final = _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1)
_WEEKDAYS: Final = _numbered("SUN MON TUE WED THU FRI SAT", 0)
_NONE: Final = _numbered("", 0)

SECOND: Final = FieldKind("second", 0, 59, _NONE, 59)
MINUTE: Final = FieldKind("minute", 0, 59, _NONE, 59)
HOUR: Final = FieldKind("hour", 0, 23, _NONE, 23)
DAY: Final = FieldKind("day of month", 1, 31, _NONE, 28, ", ?, L, L-n, LW, nW")
MONTH: Final = FieldKind("month", 1, 12, _MONTHS, 12)
WEEKDAY: Final = FieldKind("day of week", 0, 7, _WEEKDAYS, 6, ", ?, d#n, dL")


class Span(NamedTuple):
    """One item of a list, read: from, to, every how many."""

    low: int
    high: int
    step: int

    @property
    def bits(self) -> int:
        if self.step == 1:
            return (2 << self.high) - (1 << self.low)
        return sum(1 << number for number in range(self.low, self.high + 1, self.step))


@dataclass(frozen=True, slots=True)
class FieldText:
    """The text of one field and where it stands, so that an error can point at it."""

    expression: str
    number: int
    kind: FieldKind
    text: str
    position: int
    seed: str = ""

    def items(self) -> "list[FieldText]":
        """The members of a list, each with its own position."""
        if "," not in self.text:
            return [self]
        found, at = [], self.position
        for part in self.text.split(","):
            found.append(FieldText(self.expression, self.number, self.kind, part, at, self.seed))
            at += len(part) + 1
        return found

    def refuse(self, reason: str) -> InvalidCron:
        return self.point_at(f"{reason}; allowed: {self.kind.allowed}")

    def point_at(self, reason: str) -> InvalidCron:
        return InvalidCron(
            self.expression, reason, field=self.number, name=self.kind.name, text=self.text, position=self.position
        )

    @property
    def is_open(self) -> bool:
        """It begins with `*` or `?`: between the two day fields that decides over "and" and "or", as in Vixie cron."""
        return self.text[:1] in ("*", "?")

    @property
    def is_stepped(self) -> bool:
        """It holds a wildcard or a step: for hours, that means "on absolute time"."""
        return "*" in self.text or "/" in self.text

    def bits(self) -> int:
        """The numbers of a field that has no day rules (L, W, #)."""
        found = 0
        for item in self.items():
            found |= item.span().bits
        return found

    def span(self) -> Span:
        base, slash, step_text = self.text.partition("/")
        if not base:
            raise self.refuse("a value is missing" if self.text else "an empty item: there is a comma too many")
        step = self._step(step_text) if slash else 1
        if base[0] in "Hh":
            return self._spread(base, step if slash else None)
        low, high = self._range(base)
        return Span(low, self.kind.high if slash and base[0] not in "*?" and "-" not in base else high, step)

    def _step(self, text: str) -> int:
        if not _NUMBER.fullmatch(text) or int(text) == 0:
            raise self.refuse(f"the step {text!r} is not a number from 1 up")
        return int(text)

    def _range(self, base: str) -> tuple[int, int]:
        kind = self.kind
        if base == "*" or (base == "?" and "?" in kind.also):
            return kind.low, kind.high
        left, dash, right = base.partition("-")
        low = self.value(left)
        high = self.value(right) if dash else low
        if kind is WEEKDAY and high == 0 < low:
            high = 7  # Sunday closes the week: SAT-SUN is 6-7
        if high < low:
            straight = f"{left}-{_last_name(kind)},{_first_name(kind)}-{right}"
            if kind is WEEKDAY and low == kind.high:
                straight = f"0-{right}"  # 7 is Sunday as well, and nothing of the week is left behind it
            raise self.refuse(f"the range {base} runs backwards; write {straight}")
        return low, high

    def value(self, text: str) -> int:
        named = self.kind.names.get(text.upper())
        if named is not None:
            return named
        if not _NUMBER.fullmatch(text):
            raise self.refuse(f"{text!r} is not a value of this field" if text else "a value is missing")
        number = int(text)
        if not self.kind.low <= number <= self.kind.high:
            raise self.refuse(f"{number} is out of range")
        return number

    def _spread(self, base: str, step: int | None) -> Span:
        """H: a place that depends on the schedule's name alone, so that many schedules do not come all at once."""
        match = _SPREAD.fullmatch(base.upper())
        if match is None:
            raise self.refuse(f"{base!r} is not a spread; write H, H(0-29), H/15 or H(0-29)/10")
        low, high = self.kind.low, self.kind.spread_high
        if match["range"] is not None:
            low, high = self._range(match["range"]) if "-" in match["range"] else (1, 0)
            if low > high:
                raise self.refuse(f"H({match['range']}) needs a range such as H(0-29)")
        digest = hashlib.blake2b(f"{self.seed}\0{self.kind.name}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big")
        if step is None:
            chosen = low + place % (high - low + 1)
            return Span(chosen, chosen, 1)
        return Span(low + place % min(step, high - low + 1), high, step)


def is_spread(expression: str) -> bool:
    """Whether H occurs, and the schedule's name therefore counts."""
    return _SPREAD_ITEM.search(expression) is not None


def _first_name(kind: FieldKind) -> str:
    return next(iter(kind.names), str(kind.low))


def _last_name(kind: FieldKind) -> str:
    return list(kind.names)[-1] if kind.names else str(kind.high)
