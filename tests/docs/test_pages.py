"""The documentation is true: code runs, commands and links exist, requirements name tests that are there."""

import ast
import asyncio
import base64
import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from mainspring import Client, ManualClock
from mainspring.api import app as app_module
from mainspring.api.asgi import PROBLEMS
from mainspring.config.config import Config
from mainspring.config.settings import SETTINGS
from mainspring.model.errors import MainspringError
from mainspring.node.schedule_file import read_file
from mainspring.store.keys import PartitionKeys
from mainspring.testing.servers import standalone
from tests.support.pages import AWAIT, FENCE, blocks, run_as_typed, text_of
from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])
REQUIREMENTS = {"A": 8, "B": 10, "C": 7, "D": 11, "E": 19}
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def page(name: str) -> str:
    return text_of(ROOT / name)


def named(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


# -- code ------------------------------------------------------------------------------------------------------


@named([page for page in PAGES if blocks(page, "python")])
def test_python_in_a_page_compiles(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec", AWAIT)


async def test_the_tutorial_can_be_typed_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_DATA_DIR", str(tmp_path))
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "tutorial.md", "python"):
        if not code.startswith("# test_"):
            await run_as_typed(code, names)


NOT_TYPED = {
    ("docs/commands.md", "handle = await client.put("): "it needs a worker; tests/worker/test_commands.py has one",
    (
        "docs/kafka.md",
        "from mainspring.testing import kafka",
    ): "it starts four brokers; tests/sinks/test_kafka_brokers.py has three",
    ("docs/webhooks.md", "result = await client.run_result("): "it needs a node; tests/sinks/test_webhooks.py has one",
    ("docs/workers.md", "handle = await expire_order"): "it needs a worker; tests/worker/test_worker.py has one",
}
"""Code that cannot be run here, by page and beginning, each with the reason."""
REFERENCE = [
    page
    for page in PAGES
    if page.parent == ROOT / "docs" and page.stem not in ("testing", "tutorial") and blocks(page, "python")
]


@named(REFERENCE)
async def test_python_in_the_reference_answers_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    left_out = tuple(start for name, start in NOT_TYPED if name == str(page.relative_to(ROOT)))
    with standalone() as server:
        names: dict[str, Any] = {"__name__": "page", "url": server.url, "hook": "https://example.com/hook"}
        async with Client(server.url, clock=ManualClock()) as client:
            for code in blocks(page, "python"):
                code = re.sub(r"redis://localhost(:6379)?", server.url, code)
                if code.startswith("# shop.py"):
                    (tmp_path / "shop.py").write_text(code)
                if code.startswith(("# test_", *left_out)):
                    continue
                names["client"] = client
                if "# -> " in code or "await " in code or "async with" in code:
                    await run_as_typed(code, names)
                else:  # as in a program without an event loop
                    await asyncio.to_thread(exec, compile(code, str(page), "exec"), names)
                if "main" in names:
                    await names.pop("main")()
    sys.modules.pop("shop", None)


@pytest.mark.parametrize(("page", "start"), NOT_TYPED)
def test_code_that_is_not_run_is_still_on_its_page(page: str, start: str) -> None:
    assert any(code.startswith(start) for code in blocks(ROOT / page, "python"))


def test_test_files_in_the_docs_pass(tmp_path: Path) -> None:
    """In a folder of their own, as a user's: only the installed plugin gives them their fixtures."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    count = 0
    for each in PAGES:
        for code in blocks(each, "python"):
            if match := re.match(r"# (test_\w+\.py)\n", code):
                (tmp_path / match[1]).write_text(code)
                count += len(re.findall(r"^(?:async )?def test_", code, re.MULTILINE))
    assert count >= 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) >= count, ended.stdout  # more: a class may inherit its tests


@named([page for page in PAGES if blocks(page, "toml") and page.is_relative_to(ROOT / "docs")])
def test_settings_and_schedules_in_a_page_are_read(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for toml in blocks(page, "toml"):
        for secret in re.findall(r'_file = "/?([^"]+)"', toml):
            (tmp_path / secret).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / secret).write_text("whsec_" + base64.b64encode(bytes(32)).decode())
        text = toml.replace('_file = "/', '_file = "')
        file = tmp_path / "mainspring.toml"
        file.write_text(text)
        if "[schedules." in text:
            assert read_file(file).schedules
        else:
            assert Config.load({"config": str(file)}, {}) != Config()  # a name that is no setting is refused


def test_the_settings_file_of_the_operations_page_says_what_is_read(tmp_path: Path) -> None:
    [toml] = blocks(ROOT / "docs" / "operations.md", "toml")
    file = tmp_path / "mainspring.toml"
    file.write_text(toml)
    config = Config.load({"config": str(file)}, {})
    assert (config.namespace, config.lease_s, config.retry.base_ms) == ("shop", 10.0, 500)
    assert tomllib.loads(toml)["redis_url"] == config.redis_url


@named([page for page in PAGES if blocks(page, "json") + blocks(page, "ini")])
def test_json_and_units_in_a_page_can_be_parsed(page: Path) -> None:
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "ini"):
        configparser.ConfigParser(interpolation=None).read_string(text)


@named(PAGES)
def test_code_fits_a_terminal_of_80_columns(page: Path) -> None:
    wide = [line for _, code in FENCE.findall(text_of(page)) for line in code.splitlines() if len(line) > 80]
    assert not wide


def narrowest(table: str) -> int:
    """Return the columns that a table needs at least: its longest words beside each other."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", table).replace("**", "").replace("`", "")
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in text.splitlines() if not line.startswith("|--")]
    columns = zip_longest(*rows, fillvalue="")
    words = [max(len(word) for cell in column for word in re.split(r"\s+|(?<=[/-])", cell)) for column in columns]
    return sum(words) + 3 * (len(words) - 1)


@named(PAGES)
def test_a_table_fits_80_columns_without_breaking_a_word(page: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text_of(page)) + "\n", re.MULTILINE)
    assert not [table.partition("\n")[0] for table in tables if narrowest(table) > 80]


def test_every_kind_of_block_has_a_test() -> None:
    assert not [page.name for page in PAGES if text_of(page).count("```") != 2 * len(FENCE.findall(text_of(page)))]
    kinds = {kind for page in PAGES for kind, _ in FENCE.findall(text_of(page)) if "decisions" not in page.parts}
    assert kinds <= {"", "console", "crontab", "ini", "json", "python", "text", "toml"}


# -- names -----------------------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))


@named(PAGES)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", text_of(page)) + [code for _, code in FENCE.findall(text_of(page))]
    named = {word for span in spans for word in re.findall(r"(?:^|\$ )make ([a-z][a-z-]*)", span, re.MULTILINE)}
    assert named <= make_targets()


def test_every_command_of_the_bench_that_is_named_exists() -> None:
    from mainspring.cli.bench import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for name in ("README.md", "docs/benchmarks.md", "docs/operations.md"):
        named = set(re.findall(r'ARGS="?([a-z0-9]+)', page(name))) | set(re.findall(r"`bench (\w+)", page(name)))
        assert named
        assert named <= commands


@named(PAGES)
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    folders = [ROOT, ROOT / "deploy", ROOT / "src" / "mainspring"]
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))
    files = {span for span in spans if re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|lua)", span)}
    assert {file for file in files if not any((folder / file).exists() for folder in folders)} == set()


def test_every_setting_is_on_the_operations_page() -> None:
    text = page("docs/operations.md")
    for name in SETTINGS:
        if name.startswith("retry_"):
            assert f"_{name.removeprefix('retry_').upper()}`" in text.replace("MAINSPRING_RETRY", "")
        else:
            assert f"MAINSPRING_{name.upper()}" in text, name


def test_every_problem_is_on_the_page_of_the_http_api() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", page("docs/http-api.md"), re.MULTILINE)
    assert dict(rows) == {slug: str(status) for slug, (status, _) in PROBLEMS.items()}


def test_every_route_is_on_the_page_of_the_http_api() -> None:
    """Or its beginning: `…` stands for the part that the line has named already."""
    text = page("docs/http-api.md")
    for route in app_module.ROUTES:
        verb = route.path.rpartition("/")[2]
        assert route.path in text or f"…/{verb}" in text or route.path.startswith("/docs/"), route.path


def test_every_key_is_in_the_wire_format() -> None:
    keys = PartitionKeys.make("main", 0, "t")
    text = page("docs/wire-format.md")
    for field in fields(keys):
        value = getattr(keys, field.name)
        if isinstance(value, str) and value.startswith("{t}:"):
            assert f"`{value}`" in text, value


def test_every_module_on_the_architecture_page_exists() -> None:
    text = page("ARCHITECTURE.md")
    package = ROOT / "src" / "mainspring"
    for name in set(re.findall(r"`((?:[a-z]+/)*[a-z_]+\.(?:py|lua))`", text)):
        folders = (package, package / "engine", package / "store", ROOT)
        assert any((folder / name).exists() for folder in folders), name


def test_the_tree_of_errors_in_the_reference_is_the_real_one() -> None:
    [tree] = [code for _, code in FENCE.findall(page("docs/client.md")) if code.startswith("MainspringError")]
    drawn = set(re.findall(r"^[│├└─ ]*([A-Z]\w+)", tree, re.MULTILINE))

    def real(root: type[Exception]) -> Iterator[str]:
        yield root.__name__
        for child in root.__subclasses__():
            if child.__module__ == root.__module__:
                yield from real(child)

    assert drawn == set(real(MainspringError))


# -- links -----------------------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """Headings as they are linked to: lower case, spaces to hyphens, other punctuation gone."""
    prose = FENCE.sub("", text_of(page))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@named(PAGES)
def test_every_internal_link_resolves(page: Path) -> None:
    for link in _LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_index_of_the_docs_leads_to_every_page() -> None:
    linked = {name.partition("#")[0] for name in _LINK.findall(page("docs/README.md"))}
    pages = {str(each.relative_to(ROOT / "docs")) for each in PAGES if each.is_relative_to(ROOT / "docs")}
    assert {each for each in pages if not each.startswith("decisions/")} - {"README.md"} <= linked


# -- requirements and figures ----------------------------------------------------------------------------------


def requirements() -> dict[str, str]:
    """Return the text of each requirement by its number."""
    parts = re.split(r"^\*\*([A-E]\d+)\. ", page("docs/requirements.md"), flags=re.MULTILINE)
    numbers, texts = parts[1::2], parts[2::2]
    assert len(set(numbers)) == len(numbers)
    return dict(zip(numbers, texts, strict=True))


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(text_of(file))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_requirement_is_on_its_page() -> None:
    numbers = {f"{letter}{number}" for letter, count in REQUIREMENTS.items() for number in range(1, count + 1)}
    assert set(requirements()) == numbers


@pytest.mark.parametrize("name", sorted(requirements()))
def test_a_requirement_names_tests_that_exist(name: str) -> None:
    text = requirements()[name]
    tests = _TEST.findall(text)
    assert text.count("::") == len(tests)
    for file, test in tests:
        assert (ROOT / file).exists(), file
        assert test in functions_of(ROOT / file), f"{file}::{test}"
    assert bool(tests) != (".** Not yet (" in text)


@pytest.mark.parametrize("name", ["docs/internals/protocol.md", "src/mainspring/engine/README.md"])
def test_every_rule_of_the_protocol_and_of_the_owner_names_a_test_that_exists(name: str) -> None:
    text = page(name)
    rules = [rule for rule in re.split(r"\n\n(?:## .*\n\n)?", text) if re.match(r"\*\*[A-Z]\d+\.", rule)]
    assert len(rules) == len(re.findall(r"^\*\*[A-Z]\d", text, re.MULTILINE))
    assert rules
    for rule in rules:
        assert "*Without it*" in rule, rule
        [(file, test)] = _TEST.findall(rule)
        assert test in functions_of(ROOT / file), f"{file}::{test}"


def test_every_figure_is_filled_in() -> None:
    left = [name for each in PAGES for name in re.findall(r"<!-- figure:([\w.,]+) -->\?", text_of(each))]
    if left and os.environ.get("CI") != "true":
        pytest.skip(f"{len(left)} figures are still to be measured: {', '.join(left[:3])} …")
    assert not left


def section(text: str, heading: str) -> str:
    _, _, rest = text.partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def test_the_sizing_section_separates_measured_from_extrapolated() -> None:
    sizing = section(page("docs/operations.md"), "Sizing")
    assert "Measured (" in sizing
    assert "Extrapolated, not measured" in sizing
    assert len(re.findall(r"`bench \w+", sizing)) >= 8


SIZING = {
    "memory while pending, due within the hour": "memory per pending task",
    "the same without an id, spread thinly over a year": "bytes per pending task, 10 M",
    "a task still pending where 95 %": "bytes per task still pending",
    "server CPU, put and fire, in bulk": "server CPU per task, put and fire",
    "server CPU, put and fire, at a steady 10 k/s": "server CPU per task at a steady 10 k/s",
    "server CPU, put and fire, at a steady 100 k/s": "server CPU per task at a steady 100 k/s",
}


@pytest.mark.parametrize(("cost", "line"), SIZING.items())
def test_the_sizing_section_has_the_figures_of_the_benchmarks(cost: str, line: str) -> None:
    [sized] = re.findall(rf"^\| {re.escape(cost)}[^|]*\| ([\d.]+)", page("docs/operations.md"), re.MULTILINE)
    [measured] = re.findall(rf"^\| {re.escape(line)}[^|]*\| ([\d.]+)", page("docs/benchmarks.md"), re.MULTILINE)
    assert sized == measured


def figures(text: str) -> dict[str, list[str]]:
    """The rows of tables by their first cell, without heads and lines."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {cells[0]: cells[1:] for cells in rows if cells[0] not in ("what", "peer")}


def test_the_readme_has_the_figures_of_the_benchmarks() -> None:
    shown, measured = figures(section(page("README.md"), "Figures")), figures(page("docs/benchmarks.md"))
    assert len(shown) == 5 + 6
    for what, cells in shown.items():
        assert (cells[0], cells[-1]) == (measured[what][0].removesuffix(" ¹"), measured[what][-1]), what


def test_the_readme_is_short() -> None:
    assert len(page("README.md").splitlines()) <= 130
    [program] = blocks(ROOT / "README.md", "python")
    assert sum(map(bool, program.splitlines())) <= 16


def test_there_is_a_section_on_when_not_to_use_it() -> None:
    advice = section(page("docs/operations.md"), "When not to use it")
    assert advice.count("\n- **") >= 5
    assert "Servers cost money" in advice


def test_the_security_page_says_what_is_open_and_how_to_isolate_it() -> None:
    text = page("SECURITY.md")
    assert "private advisory form" in section(text, "Reporting")
    assert "whoever reaches the Redis server" in section(text, "What is not there yet")
    assert "Whoever reaches Redis directly" in section(page("docs/access.md"), "What these rules do not cover")
    assert "network of their own" in section(text, "Network")


_BOUNDS = re.compile(
    r"max_|_(bytes|max|lines|errors|rate|depth|entries|window|timeout|tasks|connections|keep|ttl|allow|hosts)$"
)
_OF_THE_PROCESS = {"look_ahead_bytes", "shutdown_timeout", "catch_up_rate"}
"""Settings that bound what a process does; no client runs into them."""


def test_the_list_of_limits_has_every_setting_that_a_client_can_run_into() -> None:
    lines = section(page("docs/security.md"), "Limits that a client can run into").splitlines()
    settings = [line.split("|")[2] for line in lines if line.count("|") == 5]
    named = {name for one in settings for name in re.findall(r"`(\w+)`(?! of a)", one)}
    assert named <= SETTINGS.keys()
    assert {name for name in SETTINGS if _BOUNDS.search(name)} - _OF_THE_PROCESS <= named


@named(PAGES)
def test_no_page_names_a_path_of_an_authors_machine(page: Path) -> None:
    assert not re.search(r"/(?:root|tmp|work|Users)/", text_of(page))
