"""One line for each event, for people and for programs."""

import json
import logging
import sys
from typing import Any

import pytest

from mainspring.cli.serve import HumanLines, JsonLines


def _record(message: str, *args: object, level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    record = logging.LogRecord("mainspring.failures", level, "file.py", 1, message, args, None)
    record.__dict__.update(extra)
    return record


def test_a_line_about_a_task_has_its_id_in_a_field() -> None:
    record = _record("task %s is dead", "order-42", level=logging.ERROR, task="order-42", target="log:")
    fields = json.loads(JsonLines().format(record))
    assert fields.pop("at").endswith("Z")
    assert fields == {
        "level": "error", "logger": "mainspring.failures", "message": "task order-42 is dead", "task": "order-42",
        "target": "log:",
    }  # fmt: skip


@pytest.mark.parametrize("lines", [HumanLines(), JsonLines()])
def test_text_of_a_receiver_cannot_forge_a_log_line(lines: logging.Formatter) -> None:
    text = lines.format(_record("it said: %s", "no\r\n12:00:00 error all tasks are lost"))
    assert "\n" not in text
    assert "\r" not in text


@pytest.mark.parametrize("lines", [HumanLines(), JsonLines()])
def test_an_id_does_not_take_hold_of_the_terminal(lines: logging.Formatter) -> None:
    text = lines.format(_record("task %s is dead", "\x1b[2Jwild"))
    assert "wild is dead" in text
    assert "\x1b" not in text


def test_an_exception_is_a_field_of_the_same_line() -> None:
    record = _record("broken", level=logging.ERROR)
    try:
        raise ValueError("here\nand there")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ValueError: here" in json.loads(text)["exception"]


def test_people_see_the_level_where_it_matters() -> None:
    assert HumanLines().format(_record("started"))[9:] == "started"
    assert HumanLines().format(_record("late", level=logging.WARNING))[9:] == "warning late"
