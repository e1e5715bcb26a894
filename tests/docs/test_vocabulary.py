"""One word for one thing: every name that Python, HTTP and the command line offer is in the table of words."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import typer.main

from mainspring import Client, DeadLetters, Scheduler, Schedules
from mainspring.api.app import ROUTES
from mainspring.api.openapi import document
from mainspring.cli import _COMMANDS, app
from mainspring.config.settings import SETTINGS
from mainspring.model.schedule.input import ScheduleFields
from tests.support.pages import text_of
from tests.support.paths import ROOT

TABLE = text_of(ROOT / "docs" / "reference" / "vocabulary.md")
NOT_OFFERED = ("bench", "demo")
"""Commands that measure: what they take is about the measurement."""


def rows(heading: str) -> Iterator[list[set[str]]]:
    """Yield the words in each cell of the tables below a heading."""
    section = TABLE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith(("| for |", "| field |", "| ---")):
            yield [set(re.findall(r"`([^`]+)`", cell)) for cell in line.strip().strip("|").split("|")]


def column(number: int) -> set[str]:
    return {word for row in rows("What callers say") if len(row) > number for word in row[number]}


def in_python() -> set[str]:
    words = set(get_type_hints(ScheduleFields))
    for one in (Client, DeadLetters, Schedules, Scheduler):
        for name, call in inspect.getmembers(one, callable):
            if not name.startswith("_") or name == "__init__":
                given = inspect.signature(call).parameters.values()
                words |= {it.name for it in given if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
    return words - {"self"}


def referred(part: Any, schemas: dict[str, Any], found: set[str]) -> set[str]:
    """Return the names of all schemas that a part of the document leads to."""
    if isinstance(part, dict):
        name = str(part.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            referred(schemas[name], schemas, found)
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        referred(below, schemas, found)
    return found


def over_http() -> tuple[set[str], set[str]]:
    """Return the words of requests, and those of answers only."""
    api = document(ROUTES)
    schemas = api["components"]["schemas"]
    said: set[str] = set()
    bodies: set[str] = set()
    answers: set[str] = set()
    for operation in (one for path in api["paths"].values() for one in path.values()):
        said |= {one["name"] for one in operation.get("parameters", ()) if one["in"] != "header"}
        referred(operation.get("requestBody"), schemas, bodies)
        referred(operation["responses"], schemas, answers)
    said |= {word for name in bodies for word in schemas[name].get("properties", ())}
    return said, {word for name in answers for word in schemas[name].get("properties", ())} - said


def options_of(command: Any) -> Iterator[str]:
    for one in command.params:
        if not getattr(one, "hidden", False):
            yield from (word for word in (*one.opts, *one.secondary_opts) if word.startswith("--"))
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def on_the_command_line() -> set[str]:
    """All options that are shown, but for those that have the name of a setting."""
    root = typer.main.get_command(app)
    context = root.make_context("mainspring", ["--help"], resilient_parsing=True)
    commands = [root.resolve_command(context, [name])[1] for name in _COMMANDS if name not in NOT_OFFERED]  # type: ignore[attr-defined]
    words = {word for command in commands for word in options_of(command)}
    return {word for word in words if word.removeprefix("--").removeprefix("no-").replace("-", "_") not in SETTINGS}


def test_every_word_of_python_is_in_the_table() -> None:
    assert in_python() ^ column(1) == set()


def test_every_word_of_http_requests_is_in_the_table() -> None:
    assert over_http()[0] ^ column(2) == set()


def test_every_option_is_in_the_table_or_named_as_its_setting() -> None:
    assert on_the_command_line() ^ column(3) == set()


def test_every_word_of_http_answers_is_in_the_table() -> None:
    named = {word for row in rows("What answers say") for word in row[0]}
    assert over_http()[1] ^ named == set()


def test_no_word_means_two_things_on_one_face() -> None:
    for number in (1, 2, 3):
        words = [word for row in rows("What callers say") if len(row) > number for word in row[number]]
        assert sorted({word for word in words if words.count(word) > 1}) == []


def test_an_option_is_spelt_like_its_argument() -> None:
    """A row of which the faces differ says why."""
    for row in rows("What callers say"):
        python, http, options = row[1], row[2], {word.removeprefix("--").replace("-", "_") for word in row[3]}
        faces = [face for face in (python, http, options) if face]
        assert set.intersection(*faces) or len(row) > 4, row
