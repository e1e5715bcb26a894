"""Random cron expressions, zones and instants, the same for the same seed."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from mainspring.model.schedule.zone import zone, zone_names
from tests.support.cron_oracle import MONTHS, WEEKDAYS

SPECIAL_ZONES = (
    "Africa/Cairo", "Africa/Casablanca", "America/Havana", "America/New_York", "America/Nuuk", "America/Santiago",
    "America/Sao_Paulo", "America/St_Johns", "Antarctica/Troll", "Asia/Beirut", "Asia/Gaza", "Asia/Kolkata",
    "Asia/Tehran", "Asia/Tokyo", "Atlantic/Azores", "Australia/Lord_Howe", "Europe/Dublin", "Europe/Paris",
    "Pacific/Apia", "Pacific/Chatham", "Pacific/Easter", "UTC",
)  # fmt: skip
YEARS = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC))


class Case(NamedTuple):
    text: str
    zone: str
    after: datetime
    gap: str
    overlap: str


def changes_of(name: str, first: datetime, last: datetime) -> tuple[tuple[int, int, int], ...]:
    """(instant, offset before, offset after) of each change, by zoneinfo alone: by day, by hour, to the minute."""
    info, found = zone(name).info, []
    low, high = int(first.timestamp()), int(last.timestamp())

    def offset(at_s: int) -> timedelta | None:
        return datetime.fromtimestamp(at_s, info).utcoffset()

    before = offset(low)
    for day in range(low, high, 86_400):
        after = offset(day + 86_400)
        if after != before:
            hour = next(hour for hour in range(day, day + 86_401, 3_600) if offset(hour) == after)
            at_s = next(minute for minute in range(hour - 3_600, hour + 1, 60) if offset(minute) == after)
            found.append((at_s, seconds(before), seconds(after)))
            before = after
    return tuple(found)


def seconds(offset: timedelta | None) -> int:
    assert offset is not None
    return int(offset.total_seconds())


@cache
def families() -> dict[tuple[tuple[int, int, int], ...], str]:
    """One zone for each different row of clock changes from 2020 to 2030."""
    found: dict[tuple[tuple[int, int, int], ...], str] = {}
    rules: set[bytes] = set()
    for name in (*SPECIAL_ZONES, *sorted(zone_names())):
        content = files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
        if content not in rules:  # many names are links
            rules.add(content)
            found.setdefault(changes_of(name, *YEARS), name)
    found.pop((), None)
    return found


@cache
def changes_within(name: str) -> tuple[tuple[int, int, int], ...]:
    return changes_of(name, *YEARS)


def _item(rng: random.Random, low: int, high: int, names: dict[str, int] | None = None) -> str:
    def word(number: int) -> str:
        spelled = [name for name, value in (names or {}).items() if value == number]
        return rng.choice([spelled[0], spelled[0].lower()]) if spelled and rng.random() < 0.5 else str(number)

    kind = rng.random()
    first = rng.randint(low, high)
    last = rng.randint(first, high)
    if kind < 0.55:
        return word(first)
    if kind < 0.75:
        return f"{word(first)}-{word(last)}"
    if kind < 0.85:
        return f"{first}-{last}/{rng.randint(1, 7)}"
    return f"*/{rng.randint(1, high)}" if kind < 0.95 else f"{first}/{rng.randint(1, high)}"


def field(rng: random.Random, low: int, high: int, star: float, names: dict[str, int] | None = None) -> str:
    if rng.random() < star:
        return "*"
    return ",".join(_item(rng, low, high, names) for _ in range(rng.choice([1, 1, 1, 2, 3])))


def _dom(rng: random.Random) -> str:
    if rng.random() < 0.2:
        n = rng.randint(1, 31)
        return rng.choice(["L", "LW", "WL", f"L-{rng.randint(1, 27)}", f"{n}W", f"{n}W,L", "1W,15W", "?", "29", "l"])
    return field(rng, 1, 31, 0.55)


def _dow(rng: random.Random) -> str:
    if rng.random() < 0.2:
        day = rng.choice([*WEEKDAYS, "0", "3", "7"])
        return rng.choice(
            [f"{day}#{rng.randint(1, 5)}", f"{day}L", "?", "SAT-SUN", "5-7", f"{day}#1,{day}L", "MON-FRI"]
        )
    return field(rng, 0, 7, 0.6, WEEKDAYS)


def expression(rng: random.Random, *, plain: bool = False) -> str:
    """Five or six fields; `plain` leaves out what other libraries do not know."""
    hour = field(rng, 0, 23, 0.25)
    if rng.random() < 0.4:
        hour = str(rng.choice([0, 0, 1, 1, 2, 2, 3, 23]))  # where clocks change
    dom, dow = (field(rng, 1, 28, 0.6), field(rng, 0, 6, 0.6, WEEKDAYS)) if plain else (_dom(rng), _dow(rng))
    fields = [field(rng, 0, 59, 0.2), hour, dom, field(rng, 1, 12, 0.7, MONTHS), dow]
    if not plain and rng.random() < 0.2:
        fields.insert(0, field(rng, 0, 59, 0.2))
    return " ".join(fields)


def cases(seed: int, count: int, *, plain: bool = False) -> Iterator[Case]:
    """Half of the instants are within two days of a change of the clocks."""
    rng = random.Random(seed)
    span_s = int((YEARS[1] - YEARS[0]).total_seconds())
    for _ in range(count):
        name = rng.choice(SPECIAL_ZONES if rng.random() < 0.7 else sorted(families().values()))
        changes = changes_within(name)
        if changes and rng.random() < 0.5:
            at_s = rng.choice(changes)[0] + rng.randint(-172_800, 7_200)
        else:
            at_s = int(YEARS[0].timestamp()) + rng.randrange(span_s)
        if rng.random() < 0.5:
            at_s -= at_s % 60
        after = datetime.fromtimestamp(at_s, UTC)
        gap, overlap = rng.choice(["shift", "shift", "skip"]), rng.choice(["first", "first", "second", "both"])
        yield Case(expression(rng, plain=plain), name, after, gap, overlap)
