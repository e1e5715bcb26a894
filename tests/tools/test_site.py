"""`make docs`: the reference names everything public, and the site has every page. The builder itself is not
installed."""

import html
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import mainspring
from mainspring.api.app import ROUTES
from mainspring.api.asgi import PROBLEMS
from mainspring.cli import _COMMANDS, EXAMPLES, app
from tests.support.pages import FENCE, text_of
from tests.support.paths import ROOT

LINK = re.compile(r"\]\(([^)\s:#]+)[)#]")


def run(tool: str, folder: Path) -> Path:
    command = [sys.executable, str(ROOT / "tools" / tool), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("reference", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("site", tmp_path_factory.mktemp("site"))


def commands() -> Iterator[tuple[str, Any]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for last, one in getattr(command, "commands", {}).items():
            yield from below(f"{name} {last}", one)

    root: Any = typer.main.get_command(app)
    context = root.make_context("mainspring", [], resilient_parsing=True)
    for name in _COMMANDS:
        yield from below(name, root.resolve_command(context, [name])[1])


# -- the reference ---------------------------------------------------------------------------------------------


def test_the_python_reference_has_every_public_name_once(reference: Path) -> None:
    named = re.findall(r"^::: mainspring\.(\w+)$", text_of(reference / "python.md"), re.MULTILINE)
    assert sorted(named) == sorted(mainspring.__all__)


def test_the_http_reference_has_every_route_and_every_problem(reference: Path) -> None:
    text = text_of(reference / "http.md")
    headings = re.findall(r"^### `([A-Z]+ /\S*)` ", text, re.MULTILINE)
    assert sorted(headings) == sorted(f"{route.method} {route.path}" for route in ROUTES)
    for slug in PROBLEMS:
        assert f"\n| `{slug}` |" in text, slug


def test_every_link_in_the_http_reference_has_its_anchor(reference: Path) -> None:
    text = text_of(reference / "http.md")
    anchors = re.findall(r"\{#([\w-]+)\}$", text, re.MULTILINE)
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= {*anchors, "problems"}


def test_the_command_reference_has_every_command_with_its_options_and_examples(reference: Path) -> None:
    _, *parts = re.split(r"^##+ mainspring (.+)$", text_of(reference / "commands.md"), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    shown = {name: command for name, command in commands() if not command.hidden}
    assert set(sections) == set(shown)
    for name, command in shown.items():
        section = html.unescape(sections[name])
        for option in command.params:
            assert getattr(option, "hidden", False) or option.opts[-1].lower() in section.lower(), (name, option.opts)
        for line in EXAMPLES.get(name, ()):
            assert f"\n$ {line}\n" in re.sub(r" \\\n +", " ", section), name


# -- the pages -------------------------------------------------------------------------------------------------


def pages_of(nav: Any) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case dict():
            yield from pages_of(list(nav.values()))
        case _:
            for one in nav:
                yield from pages_of(one)


def test_long_names_in_tables_break_between_their_parts(site: Path) -> None:
    text = text_of(site / "pages" / "docs" / "operations.md")
    assert "| <code>MAINSPRING&#95;<wbr>TIMEZONE</code>, `--timezone` |" in text, "a short name is left as it is"


def test_the_nav_has_every_page_once_in_the_order_of_the_index(site: Path) -> None:
    nav = list(pages_of(json.loads(text_of(site / "mkdocs.yml"))["nav"]))
    assert len(set(nav)) == len(nav)
    documents = {str(page.relative_to(ROOT)) for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]}
    reference = {"reference/python.md", "reference/http.md", "reference/commands.md"}
    assert {page for page in nav if page.startswith("docs/")} | {"README.md"} == documents
    assert reference <= set(nav)
    index = [f"docs/{name}" for name in LINK.findall(text_of(ROOT / "docs" / "README.md"))]
    linked = [page for page in dict.fromkeys(index) if page in nav]
    assert [page for page in nav if page in linked] == linked


def test_every_link_between_pages_leads_to_a_page(site: Path) -> None:
    pages = site / "pages"
    for page in pages.rglob("*.md"):
        if not text_of(page).startswith("---\n"):  # a source file, shown as it is
            for link in LINK.findall(re.sub(r"`[^`\n]+`", "", FENCE.sub("", text_of(page)))):
                assert (page.parent / link).is_file(), f"{page.relative_to(pages)}: {link}"


def test_a_link_to_a_source_file_leads_to_a_page_that_shows_it(site: Path) -> None:
    assert "](../examples/order_expiry.py.md)" in text_of(site / "pages" / "docs" / "tutorial.md")
    shown = text_of(site / "pages" / "examples" / "order_expiry.py.md")
    assert text_of(ROOT / "examples" / "order_expiry.py") in shown


@pytest.mark.parametrize(
    ("written", "built"),
    [
        ("Why:\n- one\n- two\n", "Why:\n\n- one\n- two\n"),
        ("- one\n  goes on\n- two\n", "- one\n    goes on\n- two\n"),
        ("- one\n\n  | a |\n  |---|\n- two\n", "- one\n\n    | a |\n    |---|\n\n- two\n"),
        ("- one\n\n  ```python\n  x = 1\n  ```\n", "- one\n\n    ```python\n    x = 1\n    ```\n"),
        ("Text\n```text\nWhy:\n- one\n  two\n```\n", "Text\n```text\nWhy:\n- one\n  two\n```\n"),
        ("| `a \\| b` | c |\n", "| `a | b` | c |\n"),
    ],
)
def test_lists_and_tables_are_built_as_they_read_elsewhere(written: str, built: str) -> None:
    assert runpy.run_path(str(ROOT / "tools" / "site"))["for_the_builder"](written) == built
