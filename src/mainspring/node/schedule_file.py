"""Schedules kept in a file: plan what applying it would change, and do it. Applied twice, it changes nothing.

[schedules.nightly]
cron = "0 2 * * *"
timezone = "Europe/Paris"
target = "command:backup"
"""

import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from ..model.errors import InvalidInput
from ..model.schedule.definition import Definition, check_definition, is_over
from ..model.schedule.input import SOURCE, define
from ..model.schedule.view import describe_changes

if TYPE_CHECKING:
    from ..client.schedules import Schedules

Action = Literal["create", "change", "remove", "same", "over"]
"""`over`: the schedule has ended and is skipped, so that a file that was valid stays valid."""
_MAY_BE_SECRET: Final = ("target", "payload")
"""Fields that may contain secrets: an address may hold a password, and a payload anything."""


class Step(NamedTuple):
    """What happens to one schedule."""

    name: str
    action: Action
    changes: Mapping[str, tuple[Any, Any]]
    definition: Definition | None = None

    def lines(self, *, public: bool = False) -> list[str]:
        """Return a summary; if `public`, as in a log, without values that may be secret."""
        if self.action == "over":
            return [f"! {self.name}: its end has passed, or max_runs is reached; nothing of it is written"]
        sign = {"create": "+", "change": "~", "remove": "-", "same": "="}[self.action]
        hidden = _MAY_BE_SECRET if public else ()
        summary = (
            f"    {field}: " + ("changed" if field in hidden else f"{old!r} -> {new!r}")
            for field, (old, new) in self.changes.items()
        )
        return [f"{sign} {self.name}", *summary]


class ScheduleFile(NamedTuple):
    """Contents of a file: its schedules, and their source."""

    source: str
    schedules: list[Definition]


def read_file(path: Path, source: str | None = None, *, timezone: str = "UTC") -> ScheduleFile:
    """Read the schedules of a TOML file and check them without a server; `timezone` is the default zone.

    The source is the given one, or else the file's own, or else the file's name.
    """
    try:
        text = path.read_bytes().decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}") from None
    own = table.get("source", path.stem)
    if not isinstance(own, str) or not own:
        raise InvalidInput(f"{path}: source is {own!r}; give a name")
    whose = source or own
    if whose == SOURCE:  # to prune by it would remove what programs have declared
        raise InvalidInput(
            f"{path}: the source {SOURCE!r} belongs to schedules that programs declare; give the file another, with"
            " --source or a line such as source = 'team-a' at its top"
        )
    return ScheduleFile(whose, read_table(table, str(path), whose, timezone=timezone))


def read_table(table: Mapping[str, Any], where: str, source: str, *, timezone: str = "UTC") -> list[Definition]:
    unknown = set(table) - {"schedules", "defaults", "source"}
    if unknown:
        raise InvalidInput(f"{where}: unknown {', '.join(sorted(unknown))}; write [schedules.<name>] or [defaults]")
    if "schedules" not in table:
        # The file may be cut off or half written: taken literally, it would remove every schedule of its source.
        raise InvalidInput(f"{where}: has no schedules; if there should be none, write an empty [schedules]")
    defaults, tables = table.get("defaults", {}), table["schedules"]
    if not isinstance(tables, Mapping) or not isinstance(defaults, Mapping):
        raise InvalidInput(f"{where}: write [schedules.<name>], each with its fields")
    found = []
    for name, fields in tables.items():
        if not isinstance(fields, Mapping):
            raise InvalidInput(f"{where}: schedules.{name} is of type {type(fields).__name__}; write a table of fields")
        try:
            found.append(define(name, **{"source": source, "timezone": timezone, **defaults, **fields}))
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {_naming(name, error)}") from None
    return found


def _naming(name: str, error: InvalidInput) -> str:
    """Name the schedule in an error: a file has many."""
    return str(error) if repr(name) in str(error) else f"schedule {name!r}: {error}"


async def plan(schedules: "Schedules", wanted: Iterable[Definition], source: str, *, prune: bool) -> list[Step]:
    """Return the steps that give the server these schedules; with `prune`, and no others of the same source."""
    steps: list[Step] = []
    wanted = list(wanted)
    names = {definition.name for definition in wanted}
    known = await schedules.get_many(sorted(names))
    now_ms = time.time_ns() // 1_000_000
    for definition in wanted:
        there = known.get(definition.name)
        over = is_over(definition, now_ms, 0 if there is None else there.runs)
        if there is None:
            steps.append(Step(definition.name, "over" if over else "create", {}, definition))
            continue
        # A pause or pin set by hand is not changed by the file.
        pinned = definition.pinned or there.definition.pinned
        kept = msgspec.structs.replace(definition, paused=there.definition.paused, pinned=pinned)
        if kept.specs == there.definition.specs:
            kept = msgspec.structs.replace(kept, anchor_ms=there.definition.anchor_ms)
        different = describe_changes(there.definition, kept)
        if "lane" in different:
            raise InvalidInput(f"schedule {definition.name!r}: its lane cannot be changed; remove it, and add it again")
        if there.definition.source != kept.source:  # if two files have it, the one applied last wins
            different["source"] = (there.definition.source, kept.source)
        action: Action = "same"
        if different:
            action = "over" if over else "change"
        steps.append(Step(definition.name, action, different, kept))
    _check(steps, now_ms)
    if prune:
        gone = [view.name async for view in schedules.all() if view.definition.source == source]
        steps += [Step(name, "remove", {}) for name in gone if name not in names]
    return steps


def _check(steps: Iterable[Step], now_ms: int) -> None:
    """Check the steps before anything is written, and in a dry run as well."""
    for step in steps:
        if step.action in ("create", "change") and step.definition is not None:
            try:
                check_definition(step.definition, now_ms)
            except InvalidInput as error:
                raise InvalidInput(_naming(step.name, error)) from None


async def carry_out(schedules: "Schedules", steps: Iterable[Step]) -> int:
    """Carry out the steps; return how many schedules were written or removed."""
    wanted = [step.definition for step in steps if step.action in ("create", "change") and step.definition is not None]
    done = len(await schedules.add_many(wanted, on_conflict="replace"))
    for step in steps:
        if step.action == "remove":
            done += await schedules.remove(step.name)
    return done
