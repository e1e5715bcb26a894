"""The public names of `mainspring`, and that importing it is cheap."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import resources
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

import pytest

import mainspring
from tests.support.paths import ROOT


def loaded_after(code: str) -> set[str]:
    listed = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout.split()
    )


def test_every_name_that_is_offered_can_be_had() -> None:
    for name in mainspring.__all__:
        assert getattr(mainspring, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mainspring.nothing


def test_documented_programs_import_from_the_package_alone() -> None:
    deeper = re.compile(r"^\s*(?:from|import) mainspring\.(?!testing import).*", re.MULTILINE)
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = {str(page): deeper.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: lines for page, lines in found.items() if lines} == {}


def undocumented(name: str) -> list[str]:
    """What an editor cannot explain of a public name: the thing itself, its public methods and properties."""
    one = getattr(mainspring, name)
    found = [] if (one.__doc__ or "").strip() else [name]
    for attribute, value in inspect.getmembers_static(one) if inspect.isclass(one) else ():
        bare = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
        ours = inspect.isfunction(bare) and bare.__module__.startswith("mainspring")
        if ours and not attribute.startswith("_") and not (bare.__doc__ or "").strip():
            found.append(f"{name}.{attribute}")
    return found


def test_every_public_call_has_a_docstring() -> None:
    assert [missing for name in mainspring.__all__ for missing in undocumented(name)] == []


ONLY_INSIDE = {
    "Expected",
    "Store",
    "Cron",
    "CronExclusion",
    "Days",
    "Every",
    "AfterEnd",
    "CountedRule",
    "PlannedTimes",
    "RetryRule",
    "Body",
}
"""Classes behind public attributes that are for tools and not for programs."""


def test_what_calls_return_has_a_name_in_the_package() -> None:
    """A program that passes a result on must be able to name its type."""
    ours = {
        name: one
        for module in [module for name, module in sys.modules.items() if name.startswith("mainspring")]
        for name, one in vars(module).items()
        if inspect.isclass(one) and one.__module__.startswith("mainspring")
    }
    found: set[str] = set()
    left = [mainspring.Client, mainspring.Schedules, mainspring.DeadLetters, mainspring.Scheduler]
    while left:
        one = left.pop()
        texts = [str(hint) for field, hint in getattr(one, "__annotations__", {}).items() if not field.startswith("_")]
        for name, call in inspect.getmembers_static(one):
            bare = getattr(call, "__func__", None) or getattr(call, "fget", None) or call
            if inspect.isfunction(bare) and not name.startswith("_"):
                texts.append(str(bare.__annotations__.get("return")))
        new = {name for text in texts for name in re.findall(r"[A-Z]\w+", text) if name in ours} - found - ONLY_INSIDE
        found |= new
        left += [ours[name] for name in new]
    assert {"RunsPage", "WorkerInfo", "ScheduleView", "TaskInfo", "Replayed"} <= found
    assert found - set(mainspring.__all__) == set()


def test_every_setting_is_explained_where_an_editor_looks() -> None:
    [config] = [
        node
        for node in ast.parse(inspect.getsource(sys.modules[mainspring.Config.__module__])).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    ]
    fields = [
        (one.target.id, following)
        for one, following in pairwise(config.body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    assert len(fields) > 60
    bare = [name for name, following in fields if not (isinstance(following, ast.Expr) and _is_text(following.value))]
    assert bare == []


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_package_itself_loads_nothing_of_ours() -> None:
    modules = loaded_after("import mainspring")
    assert {name for name in modules if name.startswith("mainspring")} == {"mainspring"}
    assert not modules & {"asyncio", "hiredis", "msgspec", "typer"}


def test_declaring_loads_neither_the_engine_nor_the_way_to_the_server() -> None:
    modules = loaded_after("from mainspring import Config, Entry, Scheduler\nScheduler(Config())")
    assert not {name for name in modules if name.startswith("mainspring.engine")}
    assert not modules & {
        "hiredis",
        "uvloop",
        "mainspring.node.node",
        "mainspring.client.client",
        "mainspring.store.redis.servers",
    }


def test_settings_are_read_without_an_event_loop() -> None:
    assert "asyncio" not in loaded_after("from mainspring import Config\nConfig()")


def test_the_package_says_that_it_is_typed() -> None:
    """Without this file a type checker takes everything of the package for `Any`."""
    assert (resources.files("mainspring") / "py.typed").is_file()


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    assert names == {file for file in files if "__pycache__" not in file}


def test_test_tools_that_ship_are_documented_or_used() -> None:
    """Code that only the tests of this repository use is in tests/support."""
    package = ROOT / "src" / "mainspring"
    shipped = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    docs = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for module in (package / "testing").glob("*.py"):
        used = re.compile(rf"(?:\btesting\.|from \.|import ){module.stem}\b")
        by_others = any(used.search(text) for file, text in shipped.items() if file != module)
        if module.stem not in ("__init__", "plugin"):  # the package itself, and an entry point
            documented = re.search(rf"mainspring\.testing(?:\.| import ){module.stem}\b", docs)
            assert by_others or documented, module.stem


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_the_package(tmp_path: Path) -> None:
    application = tmp_path / "application.py"
    application.write_text("from mainspring import Client\n\n\nreveal_type(Client('redis://localhost').count)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(application)]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout
    assert "mainspring.model.task.Count" in told.stdout
