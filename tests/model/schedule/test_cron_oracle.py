"""Random expressions in random zones, checked against a walk over every minute and against two other libraries.

`make test-cron-long` runs 200,000 cases; MAINSPRING_CRON_CASES sets the number."""

import os
import random
import re
from datetime import UTC, date, datetime, timedelta

import pytest
from croniter import croniter
from cronsim import CronSim

from mainspring.model.errors import InvalidCron
from mainspring.model.schedule.recurrence import Recurrence
from mainspring.model.schedule.zone import zone
from tests.support.cron_cases import Case, cases, changes_within, families
from tests.support.cron_oracle import MONTHS, WEEKDAYS, Oracle, values

CASES = int(os.environ.get("MAINSPRING_CRON_CASES", "2000"))
CHUNK = 500
HORIZON = timedelta(days=400)
POLICIES = [(gap, overlap) for gap in ("shift", "skip") for overlap in ("first", "second", "both")]


def next_of(case: Case) -> datetime | None:
    recurrence = Recurrence.parse(case.text, zone=case.zone, gap=case.gap, overlap=case.overlap)  # type: ignore[arg-type]
    next_ms = recurrence.next_after(round(case.after.timestamp() * 1000))
    return None if next_ms is None else datetime.fromtimestamp(next_ms / 1000, UTC)


def check(case: Case, horizon: timedelta = HORIZON) -> None:
    oracle = Oracle(case.text, zone(case.zone).info, case.gap, case.overlap)
    expected = oracle.next(case.after, horizon)
    try:
        got = next_of(case)
    except InvalidCron:
        # Refused because it can never run: then no day of 28 years, with every kind of month, may be meant.
        assert not any(oracle.is_meant(date(2000, 1, 1) + timedelta(days)) for days in range(28 * 366)), case
        return
    if expected is None:
        assert got is None or got > case.after + horizon, case
    else:
        assert got == expected, case


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_the_next_run_is_the_one_that_a_walk_finds(chunk: int) -> None:
    for case in cases(seed=chunk, count=min(CHUNK, CASES - chunk * CHUNK)):
        check(case)


def around_a_change(rng: random.Random, at_s: int, before_s: int, after_s: int, name: str) -> list[Case]:
    """A fixed time that is jumped over or comes twice, its neighbours, and hours on absolute time."""
    inside_s = at_s + min(before_s, after_s) + rng.randrange(0, abs(after_s - before_s), 60)
    inside = datetime.fromtimestamp(inside_s, UTC)
    texts = [
        f"{inside.minute} {inside.hour} * * *",
        f"*/15 {inside.hour} * * *",
        f"{rng.randrange(60)} {(inside.hour - 1) % 24},{(inside.hour + 1) % 24} {inside.day} * *",
        "0 0 * * *",
        rng.choice(["0 */2 * * *", "*/20 * * * *", f"{inside.minute} * * * *", f"30 {inside.minute} * * * *"]),
    ]
    after = datetime.fromtimestamp(at_s - rng.choice([1, 60, 1800, 3600, 7200, 50_000]) + rng.choice([0, 0, 1800]), UTC)
    return [Case(text, name, after, *rng.choice(POLICIES)) for text in texts]


@pytest.mark.parametrize("part", range(8))
def test_every_change_of_the_clocks_from_2020_to_2030(part: int) -> None:
    """In one zone of each family: zones that change their clocks at the same instants by the same amounts."""
    names = sorted(families().values())
    assert len(names) > 40
    rng = random.Random(part)
    for name in names[part::8]:
        for change in changes_within(name):
            for case in around_a_change(rng, *change, name):
                check(case, timedelta(days=3))


# -- other libraries -------------------------------------------------------------------------------------------


def cronsim_agrees_on_the_rule(text: str) -> bool:
    """Debian's rule, which cronsim follows, is ours except that

    - it takes a minute that begins with `*` for absolute time too: `*/15 2 * * *` is a fixed hour for us;
    - an hour such as `0-8/2`, `1,*` or `0-23` is a fixed hour for it; a step, a wildcard or every hour for us;
    - it reads `3-3/2`, a range of one with a step, as `3/2`: from 3 to the end."""
    if re.search(r"\b(\d+)-\1/", text):
        return False
    minute, hour = text.split()[:2]
    ours = "*" in hour or "/" in hour or len(values(hour, 0, 23)) == 24
    return ours == (minute.startswith("*") or hour.startswith("*"))


def is_second_time(case: Case) -> bool:
    """In the second pass of an overlap cronsim forgets which one it is in, and can answer with a time in the past."""
    return case.after.astimezone(zone(case.zone).info).fold == 1


def test_cronsim_gives_the_same_answer_wherever_its_rule_is_ours() -> None:
    compared = 0
    for case in cases(seed=42, count=2_000, plain=True):
        default = case._replace(gap="shift", overlap="first")
        if not cronsim_agrees_on_the_rule(case.text) or is_second_time(case):
            continue
        compared += 1
        local = case.after.astimezone(zone(case.zone).info)
        assert next_of(default) == next(CronSim(case.text, local)).astimezone(UTC), default
    assert compared > 1_000


@pytest.mark.parametrize(
    "text", ["0 0 L * *", "0 0 LW * *", "0 0 * * 5L", "0 0 * * 1#1", "0 0 * * 0#5", "15 8 1,L * *", "5 10 0 29 2 *"]
)
def test_cronsim_gives_the_same_answer_on_special_days(text: str) -> None:
    other = CronSim(text, datetime(2026, 1, 1, tzinfo=UTC))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(30):
        found = next_of(Case(text, "UTC", at, "shift", "first"))
        assert found == next(other)
        assert found is not None
        at = found


def croniter_reads_the_same(text: str) -> bool:
    """Known differences:

    - a day field `*/n` beside another day field: it says "or", Vixie cron and we say "and";
    - `a/n` for weekdays: its week ends with 6, ours with 7, which is Sunday again;
    - `WED-WED`, or `23/2` for hours, a range of one: the whole field for it, Wednesday and 23 for us."""
    dom, dow = text.split()[-3], text.split()[-1]
    numbers = {name: str(number) for name, number in (MONTHS | WEEKDAYS).items()}
    ranges = re.findall(r"(\w+)-(\w+)", text.upper())
    one_only = any(numbers.get(left, left) == numbers.get(right, right) for left, right in ranges)
    lasts = zip(text.split(), (59, 23, 31, 12, 6), strict=True)
    one_left = any(item.startswith(f"{last}/") for field, last in lasts for item in field.split(","))
    return not (dom.startswith("*/") or "/" in dow or one_only or one_left)


def test_croniter_gives_the_same_answer_in_utc() -> None:
    """Only in UTC: in a zone it fires fixed hours twice when clocks go back."""
    compared = 0
    for case in cases(seed=43, count=2_000, plain=True):
        if not croniter_reads_the_same(case.text):
            continue
        compared += 1
        expected = croniter(case.text, case.after).get_next(datetime)
        assert next_of(case._replace(zone="UTC")) == expected, case
    assert compared > 1_000


def test_croniter_gives_the_same_answer_with_seconds() -> None:
    rng = random.Random(44)
    for case in cases(seed=44, count=500, plain=True):
        if not croniter_reads_the_same(case.text):
            continue
        text = f"{rng.randrange(60)},{rng.randrange(60)} {case.text}"
        expected = croniter(text, case.after, second_at_beginning=True).get_next(datetime)
        assert next_of(case._replace(text=text, zone="UTC")) == expected, text
