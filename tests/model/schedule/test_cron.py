"""The language of cron expressions: what each field may say, what is refused, and how the refusal reads."""

import dataclasses
from collections import Counter
from datetime import UTC, datetime

import pytest

from mainspring.model.errors import InvalidCron, InvalidInput
from mainspring.model.schedule.cron import ALIASES, Cron, month_length

START = datetime(2026, 1, 1, tzinfo=UTC)


def runs(text: str, count: int = 4, after: datetime = START, name: str = "") -> list[str]:
    """The next runs on a plain calendar, as texts."""
    cron, found, at_s = Cron.parse(text, name), [], int(after.timestamp()) + 1
    for _ in range(count):
        local_s = cron.next_local(at_s, at_s + 50 * 366 * 86_400)
        assert local_s is not None
        found.append(f"{datetime.fromtimestamp(local_s, UTC):%Y-%m-%d %H:%M:%S}".removesuffix(":00"))
        at_s = local_s + 1
    return found


def days(text: str, count: int = 4) -> list[str]:
    return [run[:10] for run in runs(text, count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30 9 * * *", ["2026-01-01 09:30", "2026-01-02 09:30"]),
        ("*/20 * * * *", ["2026-01-01 00:20", "2026-01-01 00:40", "2026-01-01 01:00"]),
        ("5/25 * * * *", ["2026-01-01 00:05", "2026-01-01 00:30", "2026-01-01 00:55", "2026-01-01 01:05"]),
        ("10-30/10 4 * * *", ["2026-01-01 04:10", "2026-01-01 04:20", "2026-01-01 04:30", "2026-01-02 04:10"]),
        ("0 8,20 * * *", ["2026-01-01 08:00", "2026-01-01 20:00", "2026-01-02 08:00"]),
        ("15,45 0 1-2 * * *", ["2026-01-01 01:00:15", "2026-01-01 01:00:45", "2026-01-01 02:00:15"]),
        ("*/30 * * * * *", ["2026-01-01 00:00:30", "2026-01-01 00:01", "2026-01-01 00:01:30"]),
        ("0 0 1 JAN,jul *", ["2026-07-01 00:00", "2027-01-01 00:00"]),
        ("  0   12  *\t* * ", ["2026-01-01 12:00", "2026-01-02 12:00"]),
    ],
)
def test_fields_lists_ranges_and_steps(text: str, expected: list[str]) -> None:
    assert runs(text, len(expected)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 0 L * *", ["2026-01-31", "2026-02-28", "2026-03-31", "2026-04-30"]),
        ("0 0 L-2 * *", ["2026-01-29", "2026-02-26", "2026-03-29", "2026-04-28"]),
        ("0 0 LW * *", ["2026-01-30", "2026-02-27", "2026-03-31", "2026-04-30"]),
        ("0 0 WL * *", ["2026-01-30", "2026-02-27", "2026-03-31", "2026-04-30"]),
        ("0 0 15W * *", ["2026-01-15", "2026-02-16", "2026-03-16", "2026-04-15"]),
        ("0 0 1W 8 *", ["2026-08-03", "2027-08-02", "2028-08-01"]),  # Saturday 1: not back into July
        ("0 0 31W 5 *", ["2026-05-29", "2027-05-31"]),  # Sunday 31: not on into June
        ("0 0 30W * *", ["2026-01-30", "2026-03-30", "2026-04-30"]),  # February has no 30
        ("0 0 1,L * *", ["2026-01-31", "2026-02-01", "2026-02-28", "2026-03-01"]),
        ("0 0 * * FRI#2", ["2026-01-09", "2026-02-13", "2026-03-13"]),
        ("0 0 * * 5#5", ["2026-01-30", "2026-05-29", "2026-07-31"]),
        ("0 0 * * FRIL", ["2026-01-30", "2026-02-27", "2026-03-27"]),
        ("0 0 * * 7L", ["2026-01-25", "2026-02-22", "2026-03-29"]),
        ("0 0 * * MON#1,fril", ["2026-01-05", "2026-01-30", "2026-02-02"]),
        ("0 0 * * SAT-SUN", ["2026-01-03", "2026-01-04", "2026-01-10"]),
        ("0 0 * * 5-7", ["2026-01-02", "2026-01-03", "2026-01-04", "2026-01-09"]),
        ("0 0 * * 0", ["2026-01-04", "2026-01-11"]),
        ("0 0 * * 7", ["2026-01-04", "2026-01-11"]),
        ("0 0 29 2 *", ["2028-02-29", "2032-02-29"]),
        ("0 0 29 2 ?", ["2028-02-29", "2032-02-29"]),
        ("0 0 ? * MON", ["2026-01-05", "2026-01-12"]),
    ],
)
def test_special_days(text: str, expected: list[str]) -> None:
    assert days(text, len(expected)) == expected


def test_no_leap_day_in_2100() -> None:
    assert runs("0 0 29 2 *", 1, datetime(2097, 1, 1, tzinfo=UTC)) == ["2104-02-29 00:00"]
    assert [month_length(year, 2) for year in (2000, 2024, 2025, 2100)] == [29, 29, 28, 28]


def test_with_both_day_fields_either_one_suffices() -> None:
    assert days("0 0 13 * FRI") == ["2026-01-02", "2026-01-09", "2026-01-13", "2026-01-16"]


@pytest.mark.parametrize("text", ["0 0 */2 * MON", "0 0 1-31/2 * ?", "0 0 ? * MON"])
def test_a_day_field_that_begins_with_a_star_or_a_question_mark_must_agree_with_the_other(text: str) -> None:
    assert Cron.parse(text).days.both


def test_an_odd_day_that_is_a_monday() -> None:
    assert days("0 0 */2 * MON") == ["2026-01-05", "2026-01-19", "2026-02-09", "2026-02-23"]


@pytest.mark.parametrize(("alias", "line"), ALIASES.items())
def test_an_alias_is_its_line(alias: str, line: str) -> None:
    assert runs(alias) == runs(line)
    assert runs(alias.upper()) == runs(line)


# -- H ---------------------------------------------------------------------------------------------------------


def places(text: str, field: str, names: int = 600) -> Counter[int]:
    """Return the place of H for many names."""
    found: Counter[int] = Counter()
    for number in range(names):
        bits = getattr(Cron.parse(text, f"job-{number}"), field)
        found.update([(bits & -bits).bit_length() - 1])
    return found


def test_h_depends_on_the_name_alone() -> None:
    assert runs("H H * * *", name="backup") == runs("H H * * *", name="backup")
    assert Cron.parse("H H * * *", "backup").minutes != Cron.parse("H H * * *", "report").minutes


def test_h_is_the_same_in_every_release() -> None:
    """Were it to move, every schedule that uses it would move with an upgrade."""
    assert runs("H H(0-5) * * *", 1, name="backup") == ["2026-01-01 03:02"]


def test_h_spreads_many_schedules_over_the_whole_field() -> None:
    assert set(places("H * * * *", "minutes", 1_500)) == set(range(60))
    assert max(places("H * * * *", "minutes").values()) < 40
    assert set(places("0 H * * *", "hours")) == set(range(24))


def test_h_with_a_range_stays_within_it() -> None:
    assert set(places("H(10-19) * * * *", "minutes")) == set(range(10, 20))


def test_h_with_a_step_moves_the_first_and_keeps_the_distance() -> None:
    assert set(places("H/15 * * * *", "minutes")) == set(range(15))
    first, second, third, _ = (int(run[14:16]) for run in runs("H/15 * * * *", name="x"))
    assert {(second - first) % 60, (third - second) % 60} == {15}
    assert Cron.parse("H(0-29)/10 * * * *", "x").minutes.bit_count() == 3


def test_h_for_the_day_of_month_is_a_day_that_every_month_has() -> None:
    for number in range(200):
        assert len({run[5:7] for run in runs("0 0 H * *", 12, name=f"job-{number}")}) == 12


def test_thursday_is_not_a_spread() -> None:
    assert Cron.parse("0 0 * * THU", "a") is Cron.parse("0 0 * * THU", "b")


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "name", "piece", "position", "reason"),
    [
        ("60 * * * *", 1, "minute", "60", 1, "60 is out of range; allowed: 0-59"),
        ("0 24 * * *", 2, "hour", "24", 3, "24 is out of range; allowed: 0-23"),
        ("0 0 0 * *", 3, "day of month", "0", 5, "allowed: 1-31"),
        ("0 0 1 13 *", 4, "month", "13", 7, "allowed: 1-12 or JAN-DEC"),
        ("0 0 * * 8", 5, "day of week", "8", 9, "allowed: 0-7 or SUN-SAT"),
        ("99 0 0 * * *", 1, "second", "99", 1, "0-59"),
        ("0 0 25 * * *", 3, "hour", "25", 5, "0-23"),
        ("0  1,2,x * * *", 2, "hour", "x", 8, "'x' is not a value"),
        ("0 0 1,,2 * *", 3, "day of month", "", 7, "comma too many"),
        ("*/0 * * * *", 1, "minute", "*/0", 1, "step '0' is not a number from 1 up"),
        ("*/x * * * *", 1, "minute", "*/x", 1, "step 'x'"),
        ("*/ * * * *", 1, "minute", "*/", 1, "step ''"),
        ("/5 * * * *", 1, "minute", "/5", 1, "a value is missing"),
        ("5- * * * *", 1, "minute", "5-", 1, "a value is missing"),
        ("-5 * * * *", 1, "minute", "-5", 1, "a value is missing"),
        ("0 22-2 * * *", 2, "hour", "22-2", 3, "runs backwards; write 22-23,0-2"),
        ("0 0 * * 7-1", 5, "day of week", "7-1", 9, "runs backwards; write 0-1;"),
        ("0 0 * * 7-MON", 5, "day of week", "7-MON", 9, "runs backwards; write 0-MON;"),
        ("0 0 * * FRI-MON", 5, "day of week", "FRI-MON", 9, "write FRI-SAT,SUN-MON"),
        ("0 0 * NOV-FEB *", 4, "month", "NOV-FEB", 7, "write NOV-DEC,JAN-FEB"),
        ("0 0 * * L", 5, "day of week", "L", 9, "Write 5L or FRIL"),
        ("0 0 * * MON#6", 5, "day of week", "MON#6", 9, "no weekday number 6"),
        ("0 0 * * MON#0", 5, "day of week", "MON#0", 9, "no weekday number 0"),
        ("0 0 32W * *", 3, "day of month", "32W", 5, "32 is out of range"),
        ("0 0 L-31 * *", 3, "day of month", "L-31", 5, "31 days before"),
        ("0 0 L * L", 5, "day of week", "L", 9, "which last weekday"),
        ("L * * * *", 1, "minute", "L", 1, "'L' is not a value"),
        ("? * * * *", 1, "minute", "?", 1, "'?' is not a value"),
        ("H(5) * * * *", 1, "minute", "H(5)", 1, "needs a range such as H(0-29)"),
        ("H( * * * *", 1, "minute", "H(", 1, "not a spread"),
        ("H(0-60) * * * *", 1, "minute", "H(0-60)", 1, "60 is out of range"),
        ("1.5 * * * *", 1, "minute", "1.5", 1, "not a value"),
        ("0 0 ١ * *", 3, "day of month", "١", 5, "not a value"),
    ],
)
def test_an_error_points_at_the_field(text: str, field: int, name: str, piece: str, position: int, reason: str) -> None:
    with pytest.raises(InvalidCron) as caught:
        Cron.parse(text)
    error = caught.value
    assert (error.field, error.name, error.text, error.position) == (field, name, piece, position)
    assert reason in error.reason
    assert f"field {field} ({name}) {piece!r} at position {position}" in str(error)
    assert isinstance(error, InvalidInput)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0 0 31 2 *", "no day 31 in month 2 (at most 29 days)"),
        ("0 0 30 FEB *", "no day 30 in month FEB (at most 29 days)"),
        ("0 0 31 4,6,9,11 ?", "at most 30 days"),
        ("0 0 L-29 2 *", "no day L-29 in month 2"),
        ("0 0 31W 6 *", "no day 31W"),
        ("0 0 */31 * MON#2", "no day of any month is both day of month */31 and day of week MON#2"),
    ],
)
def test_an_expression_that_can_never_run_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidCron, match="never run") as caught:
        Cron.parse(text)
    assert reason in caught.value.reason
    assert caught.value.name == "day of month"


@pytest.mark.parametrize("text", ["0 0 31 2 MON", "0 0 29 2 *", "0 0 * 2 MON#5", "0 0 L-28 2 *", "0 0 29 2 */6"])
def test_a_day_that_exists_only_in_some_years_is_accepted(text: str) -> None:
    assert runs(text, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 fields"),
        ("* * * *", "4 fields"),
        ("0 0 1 1 * 2027 x", "7 fields; give 5 (minute, hour, day of month, month, day of week) or 6 (second first)"),
        ("@reboot", "unknown alias; use @yearly"),
        ("@", "unknown alias"),
        ("1," * 600 + "1 * * * *", "at most 1000"),
    ],
)
def test_a_value_that_is_no_expression_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidCron) as caught:
        Cron.parse(text)
    assert reason in str(caught.value)
    assert caught.value.field == 0


def test_an_expression_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cron.parse("@daily").hours = 1  # type: ignore[misc]


# -- the calendar ----------------------------------------------------------------------------------------------


def test_a_line_of_five_fields_matches_whole_minutes_and_one_of_six_its_seconds() -> None:
    noon = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp())
    assert [Cron.parse("0 12 * * *").matches(noon + s) for s in (-1, 0, 59, 60)] == [False, True, True, False]
    assert [Cron.parse("0 0 12 * * *").matches(noon + s) for s in (-1, 0, 1)] == [False, True, False]


def test_nothing_is_found_outside_of_the_given_span() -> None:
    cron = Cron.parse("0 12 * * *")
    noon = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp())
    assert cron.next_local(noon, noon) is None
    assert cron.next_local(noon, noon + 1) == noon
    assert cron.next_local(noon + 1, noon + 86_400) is None
    assert cron.next_local(noon + 1, noon + 86_401) == noon + 86_400
