"""Lists: the same look and the same options for every command that prints rows."""

import inspect
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec
import typer

from mainspring.cli.options import DataDir, Json, Namespace, RedisUrl, Settings, load, place_of, to_try
from mainspring.cli.output import aligned, print_json, print_message, printable, relative
from mainspring.model.explain import moment

if TYPE_CHECKING:
    from mainspring.config.config import Config

OutputForm = Annotated[
    Literal["table", "wide", "json", "name"],
    typer.Option("--output", "-o", help="How to print: wide cuts nothing and has exact times."),
]
Utc = Annotated[bool, typer.Option("--utc", help="Exact times in UTC instead of 'in 29 min'.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Print again every two seconds, until Ctrl-C.")]

EVERY_S: Final = 2.0
CLEAR: Final = "\x1b[H\x1b[2J"
_NARROWEST: Final = 8
"""Columns are cut to no less than this: the beginning of an id must stay readable."""
_PASTED: Final = 16
"""The first column, which other commands take, is cut to less than this only when nothing else can be."""

_SIGNS: Final = {
    **dict.fromkeys(("ok", "done", "active", "delivered"), ("✓", "green")),
    **dict.fromkeys(("pending", "queued", "waiting", "retrying"), ("○", "cyan")),
    **dict.fromkeys(("running", "fired", "busy"), ("●", "blue")),
    **dict.fromkeys(("paused", "held", "parked", "leaving", "stopping"), ("‖", "yellow")),
    **dict.fromkeys(("retry", "lost", "missed", "skipped", "dropped", "cancelled", "excluded"), ("!", "yellow")),
    **dict.fromkeys(("dead", "damaged", "expired", "revoked", "no worker"), ("✗", "red")),
}


class Instant(NamedTuple):
    """A time in a cell: relative on a terminal, exact elsewhere."""

    ms: int | None


class StateCell(str):
    """A state in a cell: on a terminal it has a sign and a colour."""

    __slots__ = ()


Cell = str | Instant


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a list command."""

    columns: tuple[str, ...]
    """Headers. The column `named` identifies a row: `-o name` prints it alone."""
    rows: Sequence[Sequence[Cell]]
    value: Any
    """The rows for programs."""
    empty: str
    """The message if there are no rows: "no tasks are pending"."""
    hint: str = ""
    """The next command to try if there are no rows."""
    more: str | None = None
    """Options that print the following rows, if there are any."""
    named: int = 0
    spare: tuple[str, ...] = ()
    """Columns to leave out where not all fit the terminal."""


def listing(work: Callable[..., Listing]) -> Callable[..., None]:
    """Turn a function that takes the settings and returns a `Listing` into a command with the options of all lists."""

    def command(
        *, redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None, config: Settings = None,
        json: Json = False, output: OutputForm = "table", utc: Utc = False, watch: Watch = False, **options: Any,
    ) -> None:  # fmt: skip
        loaded = load(redis_url, data_dir, namespace, config)
        while True:
            found = work(loaded, **options)
            if watch and sys.stdout.isatty():
                print(CLEAR, end="")
            _show(found, loaded, "json" if json else output, utc=utc)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(EVERY_S)

    return _with_options_of(work, command)


def connected(work: Callable[..., None]) -> Callable[..., None]:
    """Turn a function that takes the settings first into a command with the options that all share."""

    def command(
        *, redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None, config: Settings = None,
        **options: Any,
    ) -> None:  # fmt: skip
        work(load(redis_url, data_dir, namespace, config), **options)

    return _with_options_of(work, command)


def _with_options_of(work: Callable[..., Any], command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the parameters of `work` before its own, where typer looks for them; `--json` stays the last."""
    of_work, of_all = inspect.signature(work), inspect.signature(command)
    hints = {name: hint for name, hint in get_type_hints(command, include_extras=True).items() if name != "options"}
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in list(of_work.parameters.values())[1:]]
    shared = [one for one in of_all.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    parameters = sorted((*own, *shared), key=lambda one: one in own and one.name == "json")
    command.__signature__ = of_all.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in own} | hints
    command.__doc__, command.__name__ = work.__doc__, work.__name__
    return command


def _show(found: Listing, config: "Config", output: str, *, utc: bool) -> None:
    if output == "json":
        print_json(found.value)
        return
    if output == "name":
        for row in found.rows:
            print(printable(str(row[found.named])))
    elif not found.rows:
        hint = f"\n{to_try(config, found.hint)}" if found.hint else ""
        print_message(f"{found.empty} in {place_of(config)}{hint}")
    else:
        print_rows(found.columns, found.rows, whole=output == "wide", utc=utc, spare=found.spare)
    if found.more is not None:
        print(f"more: {found.more}", file=sys.stderr)


def _exact(cell: Cell) -> str:
    if not isinstance(cell, Instant):
        return cell
    return "-" if cell.ms is None else moment(cell.ms)


def print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, whole: bool = False, utc: bool = False,
    spare: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print a table as wide as the terminal. With `whole`, or to a file or a pipe, cut nothing, with exact times."""
    if whole or not sys.stdout.isatty():
        for line in aligned([columns, *([_exact(cell) for cell in row] for row in rows)]):
            print(line)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    now_ms = time.time_ns() // 1_000_000
    signs = console.encoding.startswith("utf")

    def shown(cell: Cell) -> Text:
        if isinstance(cell, Instant):
            return Text(_exact(cell) if utc or cell.ms is None else relative(cell.ms, now_ms))
        if isinstance(cell, StateCell):
            sign, colour = _SIGNS.get(cell, ("·", ""))
            return Text(f"{sign} {cell}" if signs else str(cell), style=colour)
        return Text(printable(cell))

    used = [at for at in range(len(columns)) if at == 0 or any(row[at] for row in rows)]
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(len(name), *(row[at].cell_len for row in cells), 0) for at, name in enumerate(columns)]
    if sum(widths[at] + 2 for at in used) - 2 > console.width:
        used = [at for at in used if columns[at] not in spare]
    kept = {at for at, number in enumerate(used) if isinstance(rows[0][number], Instant | StateCell)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, width in zip(used, fitted([widths[at] for at in used], console.width, kept), strict=True):
        table.add_column(columns[at], width=width, no_wrap=True, overflow="ellipsis")
    for row in cells:
        table.add_row(*(row[at] for at in used))
    console.print(table)


def fitted(widths: list[int], room: int, kept: Collection[int] = ()) -> list[int]:
    """Cut the widest column, again and again, until all fit; the first one later, those to be kept whole last."""
    fitted = list(widths)
    room -= 2 * (len(fitted) - 1)
    for first, last in ((_PASTED, kept), (_NARROWEST, kept), (_NARROWEST, ())):
        while sum(fitted) > room:
            least = [width if at in last else _NARROWEST if at else first for at, width in enumerate(fitted)]
            spare = [width - floor for width, floor in zip(fitted, least, strict=True)]
            if max(spare) <= 0:
                break
            fitted[max(range(len(fitted)), key=lambda at: (spare[at] > 0, fitted[at]))] -= 1
    return fitted
