"""Schedules in text: how a command line shows them."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mainspring.cli.task import print_json
from mainspring.model.chain import Run
from mainspring.model.lint import Finding
from mainspring.model.schedule import Definition
from mainspring.model.schedule_view import ScheduleView, span_text, told_changes, written
from mainspring.model.zone import zone

if TYPE_CHECKING:
    from mainspring.config import Config


def at(definition: Definition, ms: int) -> str:
    when = zone(definition.zone).datetime(ms)
    return f"{when.isoformat(sep=' ')} {when.tzname()}"


def row(view: ScheduleView) -> tuple[str, str, str, str]:
    """One schedule in one line of a list."""
    following = ", ".join(at(view.definition, ms) for ms in view.next_ms) or view.state
    return view.name, " | ".join(view.definition.times), view.definition.target, following


def lines(view: ScheduleView) -> list[str]:
    """All there is to say of one."""
    definition = view.definition
    shown = [f"{view.name}  ({view.state}, generation {view.generation})"]
    shown += [f"  {field:<12}{_plain(value)}" for field, value in written(definition).items()]
    if view.worst_case is not None:
        shown.append(f"  {'worst case':<12}{view.worst_case.text}")
    pause = definition.paused
    if view.state == "paused" and pause is not None:
        until = "" if pause.until_ms is None else f" until {at(definition, pause.until_ms)}"
        shown.append(
            f"  {'paused':<12}since {at(definition, pause.at_ms)}{until} ({pause.mode}) {pause.reason}".rstrip()
        )
    if definition.tz_version:
        shown.append(f"  {'tz data':<12}{definition.tz_version}")
    shown += [f"  {'next':<12}{at(definition, ms)}" for ms in view.next_ms]
    shown += [f"  {'ran':<12}{_run(definition, run)}" for run in view.last_runs]
    if view.running_since_ms is not None:
        shown.append(f"  {'running':<12}since {at(definition, view.running_since_ms)}")
    shown.append(f"  {'runs':<12}{view.runs}")
    if view.not_run:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(view.not_run.items()))
        shown.append(f"  {'not run':<12}{counts}")
    for slot in view.recent_not_run:
        shown.append(f"  {'':<12}{slot.count} {slot.reason} from {at(definition, slot.from_ms)}")
    return shown


def next_lines(definition: Definition, now_ms: int, runs: int = 0) -> list[str]:
    """The next three runs of a definition that is not stored, or was just now."""
    if definition.anchor_ms is None:
        definition = msgspec.structs.replace(definition, anchor_ms=now_ms - now_ms % 1000)
    return [f"  {'next':<12}{at(definition, ms)}" for ms in definition.next_runs(now_ms, runs=runs)]


def _run(definition: Definition, run: Run) -> str:
    took = "" if run.ended_ms is None else f" in {span_text(run.ended_ms - run.began_ms)}"
    return f"{at(definition, run.planned_ms)}  {run.outcome}{took}"


def _plain(value: Any) -> str:
    """Cron lines side by side, payloads as the JSON they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        return " | ".join(value)
    return msgspec.json.encode(value).decode()


def revision(definition: Definition, former: Definition | None) -> list[str]:
    """A revision, and what it changed."""
    by = f" by {definition.by}" if definition.by else ""
    note = f": {definition.note}" if definition.note else ""
    head = f"{definition.generation:>4}  {at(definition, definition.at_ms)}{by}{note}"
    if former is None:
        return [head, f"      {' | '.join(definition.specs)} in {definition.zone}, {definition.target}"]
    return [head, *(f"    {line}" for line in _changed(told_changes(former, definition)))]


def _changed(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"  {field}: {_plain(old)} -> {_plain(new)}" for field, (old, new) in changes.items()]


def with_outlook(view: ScheduleView, config: "Config") -> ScheduleView:
    """How it will fare: as a node's API has told, else by the settings of this command."""
    from mainspring.schedule_outlook import with_outlook as by_settings

    return by_settings(view, time.time_ns() // 1_000_000, config)


def warn(name: str, findings: Iterable[Finding]) -> None:
    """What is probably not meant, on standard error."""
    for finding in findings:
        print(f"warning: {name}: {finding.message} [{finding.code}]", file=sys.stderr)


def show_changes(changes: Mapping[str, tuple[Any, Any]], json: bool) -> None:
    """What an edit would change."""
    if json:
        print_json({"changes": changes})
        return
    print("\n".join(_changed(changes)) or "nothing would change")
