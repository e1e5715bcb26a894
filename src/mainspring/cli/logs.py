"""Logs on standard error: lines for people on a terminal, JSON for programs."""

import logging
import sys
import time
from datetime import UTC, datetime
from typing import Final

import msgspec

from mainspring.cli.table import printable
from mainspring.config import LogFormat
from mainspring.model.texts import clean

ABOUT: Final = ("task", "target", "schedule")
"""Given as `extra` of a line, these are fields of the JSON object."""


def set_up(form: LogFormat, level: str) -> None:
    """Send every log of this process to standard error."""
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanLines() if human else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # asyncio says at debug level which selector it uses, and little else.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class HumanLines(logging.Formatter):
    """`12:00:00 warning message`; the level only where it says something."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()} "
        # What others said (an id, the answer of a receiver) must not look like lines of ours, nor move the cursor.
        text = printable(clean(f"{at} {level}{record.getMessage()}").replace("\n", "\\n").replace("\r", "\\r"))
        return f"{text}\n{clean(self.formatException(record.exc_info))}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """One object per line. What a line is about stands in fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: str(value) for name in ABOUT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode({name: clean(value) for name, value in fields.items()}).decode()
