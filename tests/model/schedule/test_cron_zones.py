"""Cron where clocks jump: gaps, overlaps, lost days, half hours, and zones as such."""

import sys
import threading
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import pairwise

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.schedule.cron import Cron
from mainspring.model.schedule.recurrence import Recurrence
from mainspring.model.schedule.zone import Zone, tz_version, zone, zone_names
from tests.support.cron_cases import SPECIAL_ZONES, YEARS, changes_of


def runs(text: str, name: str, after: str, count: int = 3, **policy: str) -> list[str]:
    """The next runs as local times with offset; `after` is a local time, the first of two if it comes twice."""
    recurrence = Recurrence.parse(text, zone=name, **policy)  # type: ignore[arg-type]
    at_ms: int | None = round(datetime.fromisoformat(after).replace(tzinfo=zone(name).info).timestamp() * 1000)
    found = []
    for _ in range(count):
        assert at_ms is not None
        at_ms = recurrence.next_after(at_ms)
        assert at_ms is not None
        found.append(zone(name).datetime(at_ms).isoformat(timespec="minutes"))
    return found


# -- a fixed hour in a gap -------------------------------------------------------------------------------------


def test_a_fixed_hour_in_a_gap_runs_once_at_the_first_valid_instant() -> None:
    assert runs("30 2 * * *", "Europe/Paris", "2026-03-28T00:00") == [
        "2026-03-28T02:30+01:00",
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:30+02:00",
    ]


def test_several_times_in_a_gap_are_one_run() -> None:
    assert runs("*/15 2 * * *", "Europe/Paris", "2026-03-28T02:40") == [
        "2026-03-28T02:45+01:00",
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:00+02:00",
    ]


def test_a_shifted_run_and_a_planned_one_at_the_same_instant_are_one_run() -> None:
    assert runs("0 2,3 * * *", "Europe/Paris", "2026-03-28T12:00") == [
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:00+02:00",
        "2026-03-30T03:00+02:00",
    ]


def test_with_skip_a_fixed_hour_in_a_gap_does_not_run_that_day() -> None:
    assert runs("30 2 * * *", "Europe/Paris", "2026-03-28T00:00", 2, gap="skip") == [
        "2026-03-28T02:30+01:00",
        "2026-03-30T02:30+02:00",
    ]


# -- a fixed hour in an overlap --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("first", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("second", ["2026-10-25T02:30+01:00", "2026-10-26T02:30+01:00"]),
        ("both", ["2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-26T02:30+01:00"]),
    ],
)
def test_a_fixed_hour_that_comes_twice(overlap: str, expected: list[str]) -> None:
    assert runs("30 2 * * *", "Europe/Paris", "2026-10-24T12:00", len(expected), overlap=overlap) == expected


def test_several_times_that_come_twice_stay_in_order() -> None:
    assert runs("0,30 2 * * *", "Europe/Paris", "2026-10-24T12:00", 5, overlap="both") == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:30+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T02:30+01:00",
        "2026-10-26T02:00+01:00",
    ]


def test_a_time_asked_for_in_the_second_pass_is_not_in_the_first() -> None:
    """The next time is always later: it must not answer 02:30 of the first pass."""
    recurrence = Recurrence.parse("30 2 * * *", zone="Europe/Paris")
    second_pass = datetime.fromisoformat("2026-10-25T02:10:00+01:00")
    next_ms = recurrence.next_after(round(second_pass.timestamp() * 1000))
    assert next_ms is not None
    assert zone("Europe/Paris").datetime(next_ms).isoformat() == "2026-10-26T02:30:00+01:00"


# -- wildcard and step hours -----------------------------------------------------------------------------------


def test_wildcard_hours_run_on_absolute_time() -> None:
    assert runs("30 * * * *", "Europe/Paris", "2026-03-29T01:00") == [
        "2026-03-29T01:30+01:00",
        "2026-03-29T03:30+02:00",
        "2026-03-29T04:30+02:00",
    ]
    assert runs("30 * * * *", "Europe/Paris", "2026-10-25T02:00") == [
        "2026-10-25T02:30+02:00",
        "2026-10-25T02:30+01:00",
        "2026-10-25T03:30+01:00",
    ]


def test_step_hours_run_on_absolute_time() -> None:
    assert runs("0 */2 * * *", "Europe/Paris", "2026-03-28T23:00") == [
        "2026-03-29T00:00+01:00",
        "2026-03-29T04:00+02:00",
        "2026-03-29T06:00+02:00",
    ]
    assert runs("0 */2 * * *", "Europe/Paris", "2026-10-25T00:30") == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T04:00+01:00",
    ]


@pytest.mark.parametrize(
    ("absolute", "hours"),
    [
        (True, ["*", "*/2", "0-8/2", "H/6", "0-23", "1,*/4"]),
        (False, ["2", "1-5", "1,2,3", "H", "H(0-5)", "0-22"]),
    ],
)
def test_which_hours_are_fixed(absolute: bool, hours: list[str]) -> None:
    assert {Cron.parse(f"0 {hour} * * *").absolute for hour in hours} == {absolute}


@pytest.mark.parametrize("name", ["Europe/Paris", "Australia/Lord_Howe", "America/St_Johns", "Africa/Casablanca"])
def test_a_minute_wildcard_never_misses_a_quarter_of_an_hour(name: str) -> None:
    recurrence = Recurrence.parse("*/15 * * * *", zone=name)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    found = recurrence.between(
        round(start.timestamp() * 1000), round((start + timedelta(days=365)).timestamp() * 1000), 10**6
    )
    assert len(found) == 365 * 96
    assert {later - earlier for earlier, later in pairwise(found)} == {900_000}


# -- places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "after", "expected"),
    [
        # Samoa had no 30 December 2011.
        ("0 12 * * *", "Pacific/Apia", "2011-12-29T11:00", ["12-29T12:00-10:00", "12-31T00:00+14:00"]),
        ("0 12 30 12 *", "Pacific/Apia", "2011-12-29T11:00", ["12-31T00:00+14:00", "12-30T12:00+14:00"]),
        ("30 */12 * * *", "Pacific/Apia", "2011-12-29T11:00", ["12-29T12:30-10:00", "12-31T00:30+14:00"]),
        # Lord Howe goes forward and back by half an hour.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-04T02:30+11:00", "10-05T02:15+11:00"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["04-05T01:45+11:00", "04-06T01:45+10:30"]),
        ("15 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["04-05T01:15+11:00", "04-06T01:15+10:30"]),
        # Troll goes forward and back by two hours.
        ("30 2 * * *", "Antarctica/Troll", "2026-03-28T12:00", ["03-29T03:00+02:00", "03-30T02:30+02:00"]),
        ("30 2 * * *", "Antarctica/Troll", "2026-10-24T12:00", ["10-25T02:30+02:00", "10-26T02:30+00:00"]),
        # Midnight itself is missing.
        ("0 0 * * *", "Asia/Beirut", "2026-03-28T12:00", ["03-29T01:00+03:00", "03-30T00:00+03:00"]),
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00", ["04-24T01:00+03:00", "04-25T00:00+03:00"]),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00", ["11-04T01:00-02:00", "11-05T00:00-02:00"]),
        ("0 0 * * *", "Atlantic/Azores", "2026-03-28T12:00", ["03-29T01:00+00:00", "03-30T00:00+00:00"]),
        ("30 23 * * *", "America/Sao_Paulo", "2018-02-17T12:00", ["02-17T23:30-02:00", "02-18T23:30-03:00"]),
        # Ireland's winter is the exception to its standard time; Morocco goes back for Ramadan.
        ("30 1 * * *", "Europe/Dublin", "2026-03-28T12:00", ["03-29T02:00+01:00", "03-30T01:30+01:00"]),
        ("30 1 * * *", "Europe/Dublin", "2026-10-24T12:00", ["10-25T01:30+01:00", "10-26T01:30+00:00"]),
        ("30 2 * * *", "Africa/Casablanca", "2026-02-14T12:00", ["02-15T02:30+01:00", "02-16T02:30+00:00"]),
        ("30 2 * * *", "Africa/Casablanca", "2026-03-21T12:00", ["03-22T03:00+01:00", "03-23T02:30+01:00"]),
        # Greenland changed its rule without moving its clocks; zoneinfo alone takes this time for one that comes twice.
        ("37 23 28 * *", "America/Nuuk", "2023-10-28T12:00", ["10-28T23:37-02:00", "11-28T23:37-02:00"]),
        ("0 0 29 2 *", "Asia/Tokyo", "2026-01-01T00:00", ["02-29T00:00+09:00", "02-29T00:00+09:00"]),
    ],
)
def test_places_with_clocks_of_their_own(text: str, name: str, after: str, expected: list[str]) -> None:
    assert [run[5:] for run in runs(text, name, after, len(expected))] == expected


# -- zones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIAL_ZONES)
def test_segments_are_the_changes_that_a_walk_finds(name: str) -> None:
    first, last = (int(at.timestamp()) for at in YEARS)
    found = [(one.start_s, one.before_s, one.offset_s) for one in zone(name).changes(first, last)]
    assert found == list(changes_of(name, *YEARS))


def test_segments_join_without_a_hole() -> None:
    paris = zone("Europe/Paris")
    at_s = 0
    for _ in range(120):
        segment = paris.segment(at_s)
        assert segment.start_s <= at_s < segment.end_s
        assert paris.segment(segment.end_s - 1).offset_s == segment.offset_s
        assert segment.after_s == paris.segment(segment.end_s).offset_s
        at_s = segment.end_s


def test_no_zone_has_changed_twice_within_five_days_since_1970() -> None:
    """Zone looks for changes in steps of four days and relies on this, for every zone in the database."""
    seen: set[bytes] = set()
    for name in sorted(zone_names()):
        content = files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
        if content not in seen:
            seen.add(content)
            times = _transitions(content)
            assert all(later - earlier > 5 * 86_400 for earlier, later in pairwise(times)), name
    assert len(seen) > 300


def _transitions(content: bytes) -> list[int]:
    """The explicit transitions since 1970 of a TZif file (RFC 9636), from its second, 64-bit block."""

    def counts(at: int) -> list[int]:
        return [int.from_bytes(content[at + 20 + 4 * n : at + 24 + 4 * n], "big") for n in range(6)]

    utc, standard, leap, times, types, chars = counts(0)
    second = 44 + times * 5 + types * 6 + chars + leap * 8 + standard + utc
    start, count = second + 44, counts(second)[3]
    read = [int.from_bytes(content[start + 8 * n : start + 8 * n + 8], "big", signed=True) for n in range(count)]
    return [at_s for at_s in read if at_s >= 0]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("europe/paris", "did you mean Europe/Paris?"),
        ("Europe/Pariss", "did you mean Europe/Paris"),
        ("", "e.g. Europe/Paris"),
        ("../../etc/passwd", "not in the time zone database"),
        ("Europe", "not in the time zone database"),
    ],
)
def test_an_unknown_zone_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        zone(name)
    assert hint in str(caught.value)
    assert tz_version() in str(caught.value)


def test_the_release_of_the_database_has_a_name() -> None:
    assert 2026 <= int(tz_version()[:4]) < 2100
    assert tz_version()[4:].isalpha()


def test_threads_that_share_a_zone_agree() -> None:
    shared = Zone("Europe/Paris", zone("Europe/Paris").info)
    answers: list[list[int]] = []

    def ask() -> None:
        answers.append([shared.segment(at_s).offset_s for at_s in range(0, 2_000_000_000, 9_000_000)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert answers == [answers[0]] * 8
