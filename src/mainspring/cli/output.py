"""What commands print: columns, progress bars, and the result of a run."""

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Final, Self, TextIO

import msgspec

from mainspring.model.delivery import Response
from mainspring.model.explain import moment, with_times
from mainspring.model.job import Output, Result


def printable(text: str) -> str:
    """Replace control characters: ids, lanes and reasons come from outside and must not control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)


def wrapped(text: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Wrap each line to the terminal, and indent what follows it; elsewhere lines stay whole."""
    if not (stream or sys.stdout).isatty():
        return text
    width, rest = shutil.get_terminal_size().columns, " " * indent
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False)
        for line in text.split("\n")
    )


def print_json(value: Any) -> None:
    """Print a view, or a list of them, as the HTTP API answers it: instants are RFC 3339 too."""
    shown = [with_times(one) for one in value] if isinstance(value, list) else with_times(value)
    print(msgspec.json.encode(shown).decode(), flush=True)


def print_message(text: str) -> None:
    """Print to standard error, wrapped to a terminal."""
    print(wrapped(text, stream=sys.stderr), file=sys.stderr)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Print one line per row, each cell as wide as the widest of its column; rows may differ in length."""
    clean = [[printable(cell) for cell in row] for row in rows]
    widths: list[int] = []
    for row in clean:
        widths += [0] * (len(row) - len(widths))
        for at, cell in enumerate(row):
            widths[at] = max(widths[at], len(cell))
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in clean]


_UNITS: Final = ((47.5 * 3_600_000, 86_400_000, "d"), (59.5 * 60_000, 3_600_000, "h"), (59_500, 60_000, "min"))
"""From how many milliseconds a unit is used, and how long it is."""


def relative(ms: int, now_ms: int) -> str:
    """Return a time as people say it: "in 29 min", "3 s ago"."""
    apart_ms = abs(ms - now_ms)
    size, name = next(((size, name) for at_least, size, name in _UNITS if apart_ms >= at_least), (1000, "s"))
    text = f"{round(apart_ms / size)} {name}"
    return f"in {text}" if ms > now_ms else f"{text} ago"


WIDTH: Final = 30
_REDRAW_S: Final = 0.1


class ProgressBar:
    """A progress bar on standard error, drawn in place and removed when the work is done."""

    def __init__(self, what: str, stream: TextIO | None = None, *, shown: bool = True) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown and self._stream.isatty()
        self._drawn_s = 0.0

    def __call__(self, done: int, total: int | None) -> None:
        """Draw the progress; without a total, if the amount of work is unknown, only the count."""
        now_s = time.monotonic()
        if not self._shown or (done != total and now_s - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = now_s
        self._write(f"{done} {self._what}" if total is None else self._line(done, max(done, total)))

    def _line(self, done: int, total: int) -> str:
        full = WIDTH * done // max(1, total)
        return f"[{'#' * full}{'.' * (WIDTH - full)}] {done} of {total} {self._what}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)


def lines_of(result: Result) -> list[str]:
    """Describe a result for people; its value, response or output comes last, unchanged."""
    lines = [f"ending      {result.ending}"]
    if result.reason:
        lines.append(f"reason      {result.reason}")
    lines.append(f"attempt     {result.attempt}")
    if result.worker:
        lines.append(f"run by      {result.worker}")
    if result.ended_ms:
        took_ms = result.ended_ms - result.started_ms
        lines.append(f"ended       {result.ended_ms} ({moment(result.ended_ms)}), after {took_ms} ms")
    lines += [f"log         {line}" for line in result.log]
    if result.response is not None:
        lines += answer_lines(result.response)
    elif result.output is not None:
        lines += output_lines(result.output)
    elif result.value is not None:
        lines.append(f"value       {msgspec.json.encode(result.json_value).decode()}")
    return lines


def answer_lines(response: Response) -> list[str]:
    """Describe the target's response to the last attempt."""
    lines = [f"answer      HTTP {response.status} after {response.duration_ms} ms"]
    lines += [f"  {printable(name)}: {printable(value)}" for name, value in response.headers]
    return [*lines, *_indented(response.body)]


def output_lines(output: Output) -> list[str]:
    """Describe the output of a command."""
    lines = [f"exit code   {'none: it never ran' if output.exit_code is None else output.exit_code}"]
    for name, kept, size in (
        ("stdout", output.stdout, output.stdout_bytes),
        ("stderr", output.stderr, output.stderr_bytes),
    ):
        cut = ", of which the beginning and the end are kept:" if len(kept) < size else ""
        lines += [f"{name}      {size} bytes{cut}", *_indented(kept)]
    return lines


def _indented(text: bytes) -> list[str]:
    return [f"  {printable(line)}" for line in text.decode(errors="replace").splitlines()]
