"""`mainspring schedule preview`: as a program, without a server."""

import json
import os
import subprocess
import sys

import pytest

PARIS = ["30 2 * * *", "--tz", "Europe/Paris", "--count", "3"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the machine's own zones: the package brings all it needs."""
    command = [sys.executable, "-c", "from mainspring.cli import main; main()", "schedule", "preview", *arguments]
    env = os.environ | {"PYTHONTZPATH": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def runs(*arguments: str) -> list[str]:
    ended = call(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert list(document) == ["runs"]
    return list(document["runs"])


def test_runs_are_iso_times_with_the_offset_of_the_zone() -> None:
    assert runs(*PARIS, "--from", "2026-03-28T00:00:00Z") == [
        "2026-03-28T02:30:00+01:00",
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]


def test_the_policies_are_options() -> None:
    assert runs(*PARIS, "--from", "2026-03-28T12:00:00Z", "--gap", "skip")[0] == "2026-03-30T02:30:00+02:00"
    assert runs(*PARIS, "--from", "2026-10-24T12:00:00Z", "--overlap", "both")[:2] == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:30:00+01:00",
    ]


def test_a_time_without_offset_is_one_of_the_zone() -> None:
    assert runs("@daily", "--tz", "Asia/Tokyo", "--from", "2026-01-01", "--count", "1") == ["2026-01-02T00:00:00+09:00"]


def test_an_interval_counts_from_the_beginning_of_the_preview() -> None:
    assert runs("@every 7m", "--from", "2026-01-01T00:00:10Z", "--count", "2") == [
        "2026-01-01T00:07:10+00:00",
        "2026-01-01T00:14:10+00:00",
    ]
    assert runs("@after-end 7m", "--from", "2026-01-01T00:00:10Z", "--count", "1") == ["2026-01-01T00:07:10+00:00"]


def test_several_specs_and_exclusions() -> None:
    found = runs(
        "0 9 * * *", "0 18 * * *", "--from", "2026-01-01T00:00Z", "--count", "3", "--exclude", "2026-01-02"
    )  # fmt: skip
    assert [run[:13] for run in found] == ["2026-01-01T09", "2026-01-01T18", "2026-01-03T09"]


def test_without_json_a_table_with_weekdays_and_warnings_apart() -> None:
    ended = call(*PARIS, "--from", "2026-03-28T00:00:00Z")
    first, second, _ = ended.stdout.splitlines()
    assert first.split() == ["1", "Sat", "2026-03-28", "02:30:00+01:00", "CET"]
    assert second.split() == ["2", "Sun", "2026-03-29", "03:00:00+02:00", "CEST"]
    assert "warning: '30 2 * * *': 2026-03-29 02:30 does not exist in Europe/Paris" in ended.stderr
    assert "[dst-gap]" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0 25 * * *"], "field 2 (hour) '25' at position 3"),
        (["0 0 31 2 *"], "it would never run"),
        (["@daily", "--tz", "Europe/Pari"], "did you mean Europe/Paris"),
        (["@daily", "--from", "tomorrow"], "--from: 'tomorrow' is not an ISO 8601 time"),
        (["@daily", "--count", "0"], "--count is 0"),
        (["@daily", "--gap", "jump"], "'jump' is not one of shift, skip"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_why(arguments: list[str], message: str) -> None:
    ended = call(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "start",
    ["9999-12-30T00:00:00Z", "0001-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "99999999999999", "1960-01-01"],
)
def test_a_beginning_outside_of_the_calendar_is_refused(start: str) -> None:
    for spec in ("0 0 * * *", "@every 1s"):
        ended = call(spec, "--from", start, "--tz", "Asia/Tokyo")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "give a time from 1970 to 3084" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_digits_of_other_scripts_are_no_milliseconds() -> None:
    ended = call("@daily", "--from", "\u00b2")
    assert ended.returncode == 2
    assert "not an ISO 8601 time" in ended.stderr


def test_runs_are_shown_as_far_as_calendars_go() -> None:
    assert runs("@every 3650d", "--count", "1000", "--from", "2026-01-01T00:00:00Z")[-1].startswith("64")
