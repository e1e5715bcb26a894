"""Every example in docs/cron.md is what really happens."""

import re
from datetime import datetime

import pytest

from mainspring.model.errors import InvalidCron
from mainspring.model.retry import WorstCase
from mainspring.model.schedule.recurrence import Every, Recurrence, spec
from mainspring.model.schedule.view import lint
from mainspring.model.schedule.zone import zone
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "cron.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that has this column heading."""
    lines = PAGE.splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith("|") and f"| {heading} |" in line]
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len(found) > 3
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def check(text: str, after: datetime, expected: list[str], form: str, *, name: str = "", **options: str) -> None:
    info = after.tzinfo
    after_ms = round(after.timestamp() * 1000)
    read = spec(text, name)
    given = Every(read.interval_ms, after_ms) if isinstance(read, Every) else text
    recurrence = Recurrence.parse([given], name=name, **options)  # type: ignore[arg-type]
    at_ms: int | None = after_ms
    for want in expected:
        assert at_ms is not None
        at_ms = recurrence.next_after(at_ms)
        assert at_ms is not None
        got = datetime.fromtimestamp(at_ms / 1000, info)
        assert got.isoformat(sep=" ", timespec=form).removesuffix("+00:00") == want


@pytest.mark.parametrize("row", rows("means | next runs"), ids=lambda row: row[0])
def test_fields(row: list[str]) -> None:
    expected = code(row[2])
    form = "seconds" if len(expected[0]) > 16 else "minutes"
    check(code(row[0])[0], datetime.fromisoformat("2026-01-01T00:00:00Z"), expected, form)


@pytest.mark.parametrize("row", rows("next runs of `backup`"), ids=lambda row: row[0])
def test_spread(row: list[str]) -> None:
    check(code(row[0])[0], datetime.fromisoformat("2026-01-01T00:00:00Z"), code(row[2]), "minutes", name="backup")


@pytest.mark.parametrize("row", rows("what it says"), ids=lambda row: row[0])
def test_refusals(row: list[str]) -> None:
    with pytest.raises(InvalidCron) as caught:
        spec(code(row[0])[0])
    assert row[1] in str(caught.value)


@pytest.mark.parametrize("row", rows("after (local)"), ids=lambda row: " ".join(row[:4]))
def test_clock_changes(row: list[str]) -> None:
    text, name, after, policy, expected = row
    options = dict([policy.split("=")]) if policy else {}
    local = datetime.fromisoformat(after).replace(tzinfo=zone(name).info)
    check(code(text)[0], local, code(expected), "minutes", zone=name, **options)


@pytest.mark.parametrize("row", rows("finding"), ids=lambda row: row[0])
def test_warnings(row: list[str]) -> None:
    text, _, name = row[1].partition(" in ")
    now_ms = round(datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp() * 1000)
    recurrence, worst = Recurrence.parse(code(text)[0], zone=name or "UTC"), WorstCase(300_001, "300,001 ms")
    usual_attempt_ms = 1_000 if "default-retries" in row[0] else None
    found = lint(recurrence, now_ms, worst=worst, usual_attempt_ms=usual_attempt_ms)
    assert set(code(row[0])) <= {finding.code for finding in found}
