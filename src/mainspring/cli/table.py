"""Lists for people: columns that stand under each other, and no text that takes hold of the terminal."""

from collections.abc import Sequence


def printable(text: str) -> str:
    """Ids, lanes and reasons are written by others: what a terminal would obey is shown as a mark instead."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row, each cell as wide as the widest of its column; rows may be of different lengths."""
    clean = [[printable(cell) for cell in row] for row in rows]
    widths: list[int] = []
    for row in clean:
        widths += [0] * (len(row) - len(widths))
        for at, cell in enumerate(row):
            widths[at] = max(widths[at], len(cell))
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in clean]
