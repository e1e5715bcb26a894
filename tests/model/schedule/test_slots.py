"""Planned times counted, and found from their end: the same as walking, without the walk."""

import random

import pytest

from mainspring.model.errors import InvalidCron
from mainspring.model.schedule.recurrence import PlannedTimes, Recurrence
from tests.support.cron_cases import Case, cases

DAY_MS = 86_400_000
WALKED = 3_000


def slots_of(case: Case) -> PlannedTimes | None:
    try:
        return PlannedTimes(Recurrence.parse(case.text, zone=case.zone, gap=case.gap, overlap=case.overlap))  # type: ignore[arg-type]
    except InvalidCron:
        return None  # it would never run


@pytest.mark.parametrize("seed", range(4))
def test_counting_and_looking_back_find_what_a_walk_finds(seed: int) -> None:
    dice = random.Random(seed)
    for case in cases(seed=1_000 + seed, count=80):
        slots, from_ms = slots_of(case), round(case.after.timestamp() * 1000) + dice.choice([0, 0, 1, 999])
        if slots is None:
            continue
        span_ms = dice.choice([1, 2, 40, 400]) * DAY_MS
        walked = slots.recurrence.between(from_ms, from_ms + span_ms, WALKED)
        until_ms = walked[-1] if len(walked) == WALKED else from_ms + span_ms - 1
        assert slots.count(from_ms, until_ms) == len(walked), case
        assert slots.newest(from_ms, until_ms) == (walked[-1] if walked else None), case
        kept = dice.choice([1, 2, 100])
        assert slots.last(kept, from_ms, until_ms) == (walked[-kept:][0] if walked else None), case


def test_bounds_belong_to_what_is_counted() -> None:
    minutes = [n * 60_000 for n in range(10)]
    slots = PlannedTimes(Recurrence.parse("* * * * *", start_ms=minutes[2], end_ms=minutes[7]))
    assert slots.count(0, minutes[9]) == 6
    assert slots.count(minutes[3], minutes[3]) == 1
    assert slots.count(minutes[3] + 1, minutes[4] - 1) == 0
    assert slots.count(minutes[8], minutes[9]) == 0


def test_a_year_of_seconds_is_counted_at_once() -> None:
    slots = PlannedTimes(Recurrence.parse("* * * * * *", zone="Europe/Paris"))
    begin_ms = 1_767_225_600_000
    assert slots.count(begin_ms, begin_ms + 365 * DAY_MS - 1) == 365 * 86_400
    assert slots.last(100, begin_ms, begin_ms + 365 * DAY_MS) == begin_ms + 365 * DAY_MS - 99_000


def test_several_specs_and_exclusions_are_counted_one_by_one() -> None:
    slots = PlannedTimes(Recurrence.parse(["0 * * * *", "30 * * * *"], exclude=["* 0-11 * * *"]))
    assert slots.count(0, 10 * DAY_MS - 1) == 10 * 24
