"""A bar for work that takes its time: on a terminal only, and never among what a command prints."""

import sys
import time
from typing import Final, Self, TextIO

WIDTH: Final = 30
_REDRAW_S: Final = 0.1


class Bar:
    """Drawn in place on standard error, and taken away when the work is over."""

    def __init__(self, what: str, stream: TextIO | None = None, *, shown: bool = True) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown and self._stream.isatty()
        self._drawn_s = 0.0

    def __call__(self, done: int, total: int | None) -> None:
        """Without a total, for work of which nobody knows how much there is, it only counts."""
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
