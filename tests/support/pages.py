"""The code in a page of the documentation, and running it as a reader would type it."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(text_of(page)) if kind == language]


async def run_as_typed(code: str, names: dict[str, Any]) -> None:
    """Run a block statement by statement, as at the prompt of `python -m asyncio`.

    `# -> x` at the end of a statement, or in the line below, is its answer.
    """
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        end = statement.end_lineno or 0
        below = "".join(line for line in lines[end : end + 1] if line.startswith("# -> "))
        expected = (lines[end - 1] + below).partition("# -> ")[2]
        if isinstance(statement, ast.Expr):
            answer = eval(compile(ast.Expression(statement.value), "page", "eval", AWAIT), names)  # noqa: S307
        else:
            answer = eval(compile(ast.Module([statement], []), "page", "exec", AWAIT), names)  # noqa: S307
        if inspect.isawaitable(answer):
            answer = await answer
        assert not expected or repr(answer) == expected, lines[statement.lineno - 1]
