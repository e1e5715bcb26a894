"""Schedules in time: unions, exclusions, bounds, intervals, and the small shifts."""

import dataclasses
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.model.errors import InvalidCron, InvalidInput
from mainspring.model.schedule.cron import Cron
from mainspring.model.schedule.definition import jitter_ms, spread_ms
from mainspring.model.schedule.recurrence import AfterEnd, Every, Recurrence, exclusion, spec
from mainspring.model.schedule.zone import zone

DAY_MS = 86_400_000


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


START = ms("2026-01-01")


def runs(recurrence: Recurrence, after: str = "2026-01-01", count: int = 4) -> list[str]:
    """The next runs on the wall clock of the zone."""
    found: list[str] = []
    at_ms = recurrence.next_after(ms(after))
    while at_ms is not None and len(found) < count:
        found.append(f"{zone(recurrence.zone).datetime(at_ms):%Y-%m-%d %H:%M:%S}".removesuffix(":00"))
        at_ms = recurrence.next_after(at_ms)
    return found


# -- next and between ------------------------------------------------------------------------------------------

TEXTS = ["*/7 * * * * *", "30 2 * * *", "0 */3 * * *", "0 0 L * *", "@every 40m", "15,45 1-3 * * SUN", "0 0 29 2 *"]
ZONES = ["UTC", "Europe/Paris", "Australia/Lord_Howe", "Asia/Beirut", "Pacific/Apia"]
INSTANTS = st.integers(ms("2010-01-01"), ms("2035-01-01"))


@settings(deadline=None)  # the first look at a zone reads its rules
@given(st.sampled_from(TEXTS), st.sampled_from(ZONES), INSTANTS, st.sampled_from(["first", "second", "both"]))
def test_the_next_time_is_always_later_than_the_last(text: str, name: str, after_ms: int, overlap: Any) -> None:
    recurrence = Recurrence.parse(text, zone=name, overlap=overlap)
    for _ in range(5):
        next_ms = recurrence.next_after(after_ms)
        assert next_ms is not None
        assert next_ms > after_ms
        # Nothing lies in between: asked just before, it answers the same.
        assert recurrence.next_after(next_ms - 1) == next_ms
        after_ms = next_ms


@settings(deadline=None)
@given(st.lists(st.sampled_from(TEXTS[1:]), min_size=1, max_size=3), st.sampled_from(ZONES), INSTANTS)
def test_several_specs_run_whenever_one_of_them_does(texts: list[str], name: str, from_ms: int) -> None:
    until_ms = from_ms + 3 * DAY_MS
    alone = [Recurrence.parse(text, zone=name).between(from_ms, until_ms) for text in texts]
    union = Recurrence.parse(texts, zone=name).between(from_ms, until_ms)
    assert union == sorted({run for one in alone for run in one})


@settings(deadline=None)
@given(st.sampled_from(ZONES), INSTANTS, st.sampled_from(["* 2-3 * * *", "*/2 * * * MON", "0 0 * * *", "* * 5-12 * *"]))
def test_an_exclusion_takes_out_what_its_line_matches_and_nothing_else(name: str, from_ms: int, line: str) -> None:
    whole = Recurrence.parse("*/10 * * * *", zone=name)
    kept = Recurrence.parse("*/10 * * * *", zone=name, exclude=[line])
    until_ms = from_ms + 3 * DAY_MS
    matches = Cron.parse(line).matches
    expected = [run for run in whole.between(from_ms, until_ms) if not matches(zone(name).local_s(run // 1000))]
    assert kept.between(from_ms, until_ms) == expected


def test_between_has_its_first_bound_and_not_its_last() -> None:
    hourly = Recurrence.parse("@hourly")
    assert hourly.between(START, START + 3 * 3_600_000) == [START + hour * 3_600_000 for hour in range(3)]
    assert hourly.between(START + 1, START + 3_600_000) == []
    assert len(hourly.between(START, START + DAY_MS, limit=5)) == 5
    assert hourly.between(START + 1, START) == []


def test_a_millisecond_before_and_at_a_run() -> None:
    hourly = Recurrence.parse("@hourly")
    assert hourly.next_after(START - 1) == START
    assert hourly.next_after(START) == START + 3_600_000


def test_instants_far_away_have_an_answer() -> None:
    hourly = Recurrence.parse("@hourly", zone="Europe/Paris")
    assert hourly.next_after(-(10**18)) == 0
    assert hourly.next_after(10**18) is None


# -- exclusions ------------------------------------------------------------------------------------------------


def test_a_date_and_a_range_of_dates_are_left_out() -> None:
    recurrence = Recurrence.parse(
        "0 9 * * *", exclude=["2026-01-02", "2026-01-04..2026-01-06", "2026-01-08/2026-01-09"]
    )
    assert [run[:10] for run in runs(recurrence)] == ["2026-01-01", "2026-01-03", "2026-01-07", "2026-01-10"]


def test_an_excluded_date_is_a_day_of_the_zone() -> None:
    recurrence = Recurrence.parse("0 */12 * * *", zone="Asia/Tokyo", exclude=["2026-01-02"])
    assert runs(recurrence, "2025-12-31T20:00") == [
        "2026-01-01 12:00",
        "2026-01-03 00:00",
        "2026-01-03 12:00",
        "2026-01-04 00:00",
    ]


def test_a_cron_line_leaves_out_the_hours_it_matches() -> None:
    recurrence = Recurrence.parse("0 * * * *", exclude=["* 1-22 * * *"])
    assert runs(recurrence, count=3) == ["2026-01-01 23:00", "2026-01-02 00:00", "2026-01-02 23:00"]


def test_a_long_exclusion_of_a_frequent_schedule_is_left_in_one_step() -> None:
    recurrence = Recurrence.parse("@every 1ms", exclude=["2026-01-01..2035-12-31"])
    assert recurrence.next_after(START) == ms("2036-01-01")
    every_second = Recurrence.parse("* * * * * *", exclude=["* * * 1-11 *"])
    assert every_second.next_after(START) == ms("2026-12-01")


@pytest.mark.parametrize(
    ("specs", "left_out", "first"),
    [
        (["30 2 * * *"], "30 2 * * SUN", "2026-03-30 02:30"),
        (["30 2 * * *"], "0 3 * * *", "2026-03-29 03:00"),
        (["30 2 * * *"], "2026-03-29", "2026-03-30 02:30"),
        (["*/15 2 * * *"], "0-30 2 * * *", "2026-03-29 03:00"),
        (["30 2 * * *", "0 3 * * *"], "30 2 * * *", "2026-03-29 03:00"),
        (["30 2 * * *", "0 3 * * *"], "0 3 * * *", "2026-03-29 03:00"),
        (["30 2 * * *", "0 3 * * *"], "* 2-3 * * SUN", "2026-03-30 02:30"),
        (["30 2 * * *", "@every 1h"], "30 2 * * SUN", "2026-03-29 03:00"),
    ],
)
def test_an_exclusion_applies_to_the_planned_time_that_the_clock_skips(
    specs: list[str], left_out: str, first: str
) -> None:
    recurrence = Recurrence.parse(specs, zone="Europe/Paris", exclude=[left_out, "0 1 * * *", "0 2 * * *"])
    assert runs(recurrence, "2026-03-29", 1) == [first]


def test_the_day_that_a_zone_lost_can_be_excluded() -> None:
    recurrence = Recurrence.parse("0 12 * * *", zone="Pacific/Apia", exclude=["2011-12-30"])
    assert runs(recurrence, "2011-12-30", 1) == ["2011-12-31 12:00"]


@pytest.mark.parametrize(
    ("line", "left_out"), [("*/5 * * * *", "*/5 * * 2-11 *"), ("*/2 * * * * *", "*/2 * * * 2-11 *")]
)
def test_an_exclusion_that_is_written_like_the_schedule_does_not_end_it(line: str, left_out: str) -> None:
    recurrence = Recurrence.parse(line, exclude=[left_out])
    assert recurrence.next_after(ms("2026-01-31T23:59:59")) == ms("2026-12-01")


@pytest.mark.parametrize(
    ("specs", "left_out"),
    [
        (["* * * * *"], ["0-29 * * 2-11 *", "30-59 * * 2-11 *"]),
        (["* * * * *"], ["* 0-11 * 2-11 *", "* 12-23 * 2-11 *"]),
        (["* * * * * *"], ["*/2 * * * 2-11 *", "1-59/2 * * * 2-11 *"]),
        (["* * * * * *"], ["*/2 * 0-11 * 2-11 *", "1-59/2 * 0-11 * 2-11 *", "* 12-23 * 2-6 *", "* 12-23 * 7-11 *"]),
        (["@every 1s"], ["0-29 * * 2-11 *", "30-59 * * 2-11 *"]),
        (["0-29 0-11 * * *", "30-59 12-23 * * *"], ["0-29 0-11 * 2-11 *", "30-59 12-23 * 2-11 *"]),
        (["* * 1 1,12 *", "*/2 0-11 * * *"], ["*/2 * * 2-11 *"]),
    ],
)  # fmt: skip
def test_exclusions_that_cover_a_schedule_only_together_do_not_end_it(specs: list[str], left_out: list[str]) -> None:
    recurrence = Recurrence.parse(specs, exclude=left_out)
    assert recurrence.next_after(ms("2026-01-31T23:59:59")) == ms("2026-12-01")


@pytest.mark.parametrize(
    ("every", "name", "left_out"),
    [
        (Every(60_000), "UTC", ["0 * * * 2-11 *"]),
        (Every(3_600_000), "UTC", ["0 * * 2-11 *"]),
        (Every(60_000, 17_000), "UTC", ["17 * * * 2-11 *"]),
        (Every(3_600_000), "Asia/Kolkata", ["30 * * 2-11 *"]),
        (Every(90_000), "UTC", ["0 */3 * * 2-11 *", "30 1-59/3 * * 2-11 *"]),
        (Every(1_500), "UTC", ["*/3 * * * 2-11 *", "1-59/3 * * * 2-11 *"]),
        (Every(36 * 3_600_000), "UTC", ["0 0,12 * 2-11 *"]),
    ],
)  # fmt: skip
def test_an_interval_whose_single_times_are_excluded_continues_after_them(
    every: Every, name: str, left_out: list[str]
) -> None:
    recurrence = Recurrence.parse([every], zone=name, exclude=left_out)
    first_ms = zone(name).segment(ms("2026-12-01") // 1000).offset_s * -1000 + ms("2026-12-01")
    assert recurrence.next_after(ms("2026-02-01")) == every.next_after(first_ms - 1)


@settings(deadline=None)
@given(
    st.sampled_from([7_000, 20_000, 60_000, 90_000, 100_500, 600_000, 3_000_000, 3_600_000, 90_000_000]),
    st.integers(0, 86_400_000),
    st.lists(st.sampled_from(["0 * * * *", "*/7 * * * *", "20,40 * * * * *", "0 */10 * * * *", "* 3-20 * * *",
                              "30 1-59/3 * * * *", "* * * * MON"]), min_size=1, max_size=4),
    st.sampled_from(ZONES), INSTANTS,
)  # fmt: skip
def test_an_interval_runs_whenever_nothing_excludes_it(
    every_ms: int, anchor_ms: int, left_out: list[str], name: str, from_ms: int
) -> None:
    every, place, lines = Every(every_ms, anchor_ms), zone(name), [Cron.parse(line) for line in left_out]
    until_ms = from_ms + max(DAY_MS // 4, 20 * every_ms)

    def is_left(at_ms: int) -> bool:
        local_s = at_ms // 1000 + place.segment(at_ms // 1000).offset_s
        return not any(line.matches(local_s) for line in lines)

    planned = Recurrence.parse([every], zone=name).between(from_ms, until_ms, 100_000)
    kept = Recurrence.parse([every], zone=name, exclude=left_out, end_ms=until_ms - 1)
    assert kept.between(from_ms, until_ms, 100_000) == [at_ms for at_ms in planned if is_left(at_ms)]


LEFT_OUT = [
    "0-29 * * * *", "30-59 * * * *", "*/2 * * * *", "1-59/2 1-22 * * *", "* 0-11 * * MON", "* 12-23 * * MON",
    "0 * * * *", "*/30 * 5-12 * *", "0-29 */10 * * * *", "30-59 */10 * * * *", "2027-03-27..2027-03-29",
]  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["*/10 * * * *", "15 */3 * * *", "0 0 * * MON", "*/20 5 */20 * * *", "@every 50m"]),
             min_size=1, max_size=3),
    st.lists(st.sampled_from(LEFT_OUT), min_size=1, max_size=4), st.sampled_from(ZONES), INSTANTS,
)  # fmt: skip
def test_several_exclusions_take_out_what_one_of_them_matches_and_nothing_else(
    specs: list[str], left_out: list[str], name: str, from_ms: int
) -> None:
    until_ms = from_ms + 2 * DAY_MS

    def without(*some: str) -> list[int]:
        found = Recurrence.parse(specs, zone=name, gap="skip", exclude=some, end_ms=until_ms)
        return found.between(from_ms, until_ms, 100_000)

    expected = {*without()}.intersection(*(without(one) for one in left_out))
    assert without(*left_out) == sorted(expected)


def test_when_everything_is_excluded_there_is_no_next_run() -> None:
    assert Recurrence.parse("0 12 * * *", exclude=["* 12 * * *"]).next_after(START) is None


@pytest.mark.parametrize("text", ["2026-02-30", "2026-13-01", "2026-01-05..2026-01-01"])
def test_wrong_dates_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="exclude"):
        exclusion(text)


def test_a_wrong_line_to_exclude_is_refused_as_cron() -> None:
    with pytest.raises(InvalidCron, match="hour"):
        exclusion("0 25 * * *")


# -- bounds ----------------------------------------------------------------------------------------------------


def test_both_bounds_belong_to_it() -> None:
    recurrence = Recurrence.parse("@daily", start_ms=ms("2026-02-01"), end_ms=ms("2026-02-03"))
    assert runs(recurrence) == ["2026-02-01 00:00", "2026-02-02 00:00", "2026-02-03 00:00"]


def test_the_runs_that_were_made_count_against_the_most_there_may_be() -> None:
    recurrence = Recurrence.parse("@daily", max_runs=3)
    assert recurrence.next_after(START, runs=2) == START + DAY_MS
    assert recurrence.next_after(START, runs=3) is None
    assert len(recurrence.between(START, START + 30 * DAY_MS)) == 3
    assert len(recurrence.between(START, START + 30 * DAY_MS, runs=2)) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"specs": []}, "at least one spec"),
        ({"zone": "Mars/Base"}, "not in the time zone database"),
        ({"gap": "jump"}, "gap is 'jump'; use shift, skip"),
        ({"overlap": "none"}, "use first, second, both"),
        ({"max_runs": 0}, "max_runs is 0"),
        ({"start_ms": 2, "end_ms": 1}, "before the start"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Recurrence.parse(**({"specs": "@daily"} | wrong))


def test_a_recurrence_is_frozen_and_equal_to_its_like() -> None:
    one = Recurrence.parse(["@daily", "@every 1h"], exclude=["2026-01-01"])
    assert one == Recurrence.parse(["@daily", "@every 1h"], exclude=["2026-01-01"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.zone = "UTC"  # type: ignore[misc]


# -- intervals -------------------------------------------------------------------------------------------------


def test_a_fixed_rate_counts_from_its_anchor() -> None:
    recurrence = Recurrence.parse([Every(7 * 60_000, anchor_ms=START + 60_000)])
    assert runs(recurrence, count=3) == ["2026-01-01 00:01", "2026-01-01 00:08", "2026-01-01 00:15"]
    assert runs(recurrence, "2026-01-01T00:09", count=1) == ["2026-01-01 00:15"]


def test_without_an_anchor_the_start_is_it_or_else_1970() -> None:
    assert runs(Recurrence.parse("@every 7m", start_ms=START), count=2) == ["2026-01-01 00:07", "2026-01-01 00:14"]
    first = Recurrence.parse("@every 7m").next_after(START)
    assert first is not None
    assert first % (7 * 60_000) == 0


def test_a_fixed_rate_does_not_care_for_clocks_that_change() -> None:
    recurrence = Recurrence.parse("@every 1h", zone="Europe/Paris")
    found = recurrence.between(ms("2026-03-28"), ms("2026-03-31"))
    assert len(found) == 72
    assert {later - earlier for earlier, later in pairwise(found)} == {3_600_000}


def test_a_fixed_delay_counts_from_the_end_of_the_last_run() -> None:
    recurrence = Recurrence.parse([AfterEnd(10_000)])
    assert recurrence.waits_for_end
    assert recurrence.next_after(START, ended_ms=START + 3_000) == START + 13_000
    assert recurrence.next_after(START) == START + 10_000
    # The end is known late: still after what was asked.
    assert recurrence.next_after(START, ended_ms=START - DAY_MS) == START + 1


def test_a_fixed_delay_waits_for_the_end_of_an_exclusion() -> None:
    recurrence = Recurrence.parse([AfterEnd(10_000)], exclude=["2026-01-02"])
    assert recurrence.next_after(ms("2026-01-01T23:59:55"), ended_ms=ms("2026-01-01T23:59:56")) == ms("2026-01-03")


@pytest.mark.parametrize(
    ("text", "interval_ms"),
    [("@every 30s", 30_000), ("@EVERY 1h30m", 5_400_000), (" @every  250ms ", 250), ("@every PT10M", 600_000)],
)
def test_every_is_read_as_an_interval(text: str, interval_ms: int) -> None:
    assert spec(text) == Every(interval_ms)


@pytest.mark.parametrize("text", ["@every", "@every soon", "@every 0s", "@every 30", "@every 20000d"])
def test_a_value_that_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        spec(text)


# -- jitter and spread -----------------------------------------------------------------------------------------


def test_jitter_is_the_same_for_the_same_run_and_within_its_width() -> None:
    found = [jitter_ms("backup", START + day * DAY_MS, 60_000) for day in range(200)]
    assert found == [jitter_ms("backup", START + day * DAY_MS, 60_000) for day in range(200)]
    assert all(0 <= shift < 60_000 for shift in found)
    assert len(set(found)) > 190
    assert min(found) < 6_000
    assert max(found) > 54_000


def test_a_spread_is_the_same_for_every_run_of_a_schedule() -> None:
    found = {spread_ms(f"job-{number}", 60_000) for number in range(200)}
    assert len(found) > 190
    assert spread_ms("job-7", 60_000) == spread_ms("job-7", 60_000)


def test_jitter_and_spread_do_not_change_with_an_upgrade() -> None:
    assert (jitter_ms("backup", START, 60_000), spread_ms("backup", 60_000)) == (18_060, 16_890)


def test_no_width_is_no_shift() -> None:
    assert (jitter_ms("x", 1, 0), spread_ms("x", 0)) == (0, 0)
    with pytest.raises(InvalidInput, match="negative"):
        spread_ms("x", -1)
