"""Benchmark figures for people: tables on standard output, a progress bar on standard error."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_REDRAW_S: Final = 0.2

Cells = Mapping[str, Any]


class MeasuringBar:
    """A progress bar that draws only when it is called, at most five times a second: a thread that redraws by itself
    would take the interpreter from the code being measured."""

    def __init__(self, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not shown,
        )
        self._task = self._progress.add_task("starting", total=1)
        self._what = ""
        self._drawn_at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._what and now - self._drawn_at < _REDRAW_S:
            return
        self._what, self._drawn_at = what, now
        self._progress.update(self._task, description=what, completed=done, total=total)
        self._progress.refresh()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def side_by_side(title: str, columns: Mapping[str, Cells], more: Cells | None = None) -> Table:
    """Make a table with one row per figure and one column per design; `more` (ratios) below, in the last column."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for name in columns:
        table.add_column(name, justify="right")
    first = next(iter(columns.values()))
    for figure in first:
        table.add_row(figure, *(_text(cells.get(figure)) for cells in columns.values()))
    if more:
        table.add_section()
        blanks = [""] * (len(columns) - 1)
        for figure, value in more.items():
            table.add_row(figure, *blanks, _text(value))
    return table


def in_rows(title: str, rows: Sequence[Cells]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(_text, row.values()))
    return table


def table_of(title: str, result: Any) -> Table:
    """Return the table that suits a result: rows for a list, columns for a comparison, otherwise one column."""
    if isinstance(result, list):
        return in_rows(title, [msgspec.structs.asdict(row) for row in result])
    cells = msgspec.structs.asdict(result)
    nested = {name: msgspec.structs.asdict(value) for name, value in cells.items() if isinstance(value, msgspec.Struct)}
    if nested:
        # The baseline first: the ratios appear below Mainspring's own column.
        nested = dict(sorted(nested.items(), key=lambda item: item[0] != "baseline"))
        return side_by_side(title, nested, {name: cells[name] for name in cells if name not in nested})
    return side_by_side(title, {"value": cells})


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
