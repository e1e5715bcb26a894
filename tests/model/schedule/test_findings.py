"""Findings about schedules: what is probably not meant."""

from datetime import datetime
from typing import Any

import pytest

from mainspring.model.retry import WorstCase
from mainspring.model.schedule.recurrence import AfterEnd, Recurrence
from mainspring.model.schedule.view import lint

NOW_MS = round(datetime.fromisoformat("2026-11-16T00:00:00Z").timestamp() * 1000)


def codes(specs: Any, *, worst_case_ms: int | None = None, max_per_second: int = 10, **options: Any) -> list[str]:
    recurrence = Recurrence.parse(specs, **options)
    worst = None if worst_case_ms is None else WorstCase(worst_case_ms, f"{worst_case_ms:,} ms")
    found = lint(recurrence, NOW_MS, worst=worst, max_per_second=max_per_second)
    return [finding.code for finding in found]


def message(specs: str, **options: Any) -> str:
    return " | ".join(finding.message for finding in lint(Recurrence.parse(specs, **options), NOW_MS))


@pytest.mark.parametrize(
    ("text", "zone"),
    [
        ("0 9 * * MON-FRI", "Europe/Paris"),
        ("*/15 * * * *", "Europe/Paris"),
        ("30 2 * * *", "UTC"),
        ("30 2 * * *", "Asia/Tokyo"),
        ("H H(3-5) * * *", "Europe/Paris"),
        ("0 */6 * * *", "Europe/Paris"),
        ("@every 30s", "Europe/Paris"),
    ],
)
def test_a_good_schedule_has_no_findings(text: str, zone: str) -> None:
    assert codes(text, zone=zone, worst_case_ms=1_000) == []


def test_a_fixed_hour_in_a_gap_says_when_and_what_happens() -> None:
    assert codes("30 2 * * *", zone="Europe/Paris") == ["dst-gap", "dst-overlap"]
    told = message("30 2 * * *", zone="Europe/Paris")
    assert "2027-03-28 02:30 does not exist in Europe/Paris, and 4 more within five years" in told
    assert "it runs at 03:00 on 2027-03-28 instead (dst_gap=shift)" in told
    assert "2027-10-31 02:30 comes twice in Europe/Paris" in told
    assert "the first time (dst_overlap=first)" in told


def test_the_finding_follows_the_policy() -> None:
    told = message("30 2 * * *", zone="Europe/Paris", gap="skip", overlap="both")
    assert "it does not run then (dst_gap=skip)" in told
    assert "both times (dst_overlap=both)" in told


def test_a_day_on_which_it_does_not_run_anyway_is_no_trap() -> None:
    assert codes("30 2 * * MON-FRI", zone="Europe/Paris") == []


def test_a_zone_that_lost_midnight() -> None:
    assert codes("5 0 * * *", zone="Asia/Beirut") == ["dst-gap"]


@pytest.mark.parametrize("text", ["0 0 * * *", "@daily", "@monthly", "0 0 0 * * MON"])
def test_everyone_at_midnight(text: str) -> None:
    assert codes(text) == ["midnight"]
    assert "H H(0-5)" in message(text)


def test_the_way_out_of_midnight_is_itself_clean() -> None:
    assert "'H H(0-5) 1 * *'" in message("@monthly")
    assert codes("H H(0-5) 1 * *", name="x") == []


def test_both_day_fields() -> None:
    assert codes("0 9 13 * FRI") == ["day-or"]
    assert "day of month 13 and also on every day of week FRI" in message("0 9 13 * FRI")
    assert codes("0 9 ? * FRI") == []


@pytest.mark.parametrize("text", ["*/90 * * * *", "*/60 * * * *", "0 */24 * * *"])
def test_a_step_wider_than_its_field(text: str) -> None:
    assert "wide-step" in codes(text)
    assert "@every" in message(text)


def test_the_widest_step_that_fits() -> None:
    assert codes("*/59 * * * *") == []


def test_a_run_that_may_take_longer_than_the_interval() -> None:
    assert codes("*/5 * * * *", worst_case_ms=300_000) == []
    assert codes("*/5 * * * *", worst_case_ms=300_001) == ["too-long"]
    # The shortest distance counts, not the usual one.
    assert codes(["0 9 * * *", "10 9 * * *"], worst_case_ms=601_000) == ["too-long"]


def test_a_fixed_delay_is_never_too_short() -> None:
    assert codes([AfterEnd(1)], worst_case_ms=10_000) == []


def test_too_many_runs_a_second() -> None:
    assert codes("@every 100ms") == []
    assert codes("@every 99ms") == ["too-often"]
    assert codes("* * * * * *", max_per_second=1) == []
    assert codes("@every 500ms", max_per_second=1) == ["too-often"]
