"""Sinks of other packages: found by entry point, loaded when a node starts, named when they are broken."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from mainspring.config.config import Config
from mainspring.model.errors import ConfigError
from mainspring.node.node import Node
from mainspring.testing.servers import wait_until
from tests.support.paths import ROOT
from tests.support.serving import ENVIRON, MAIN, Serve

EXAMPLE = ROOT / "examples" / "spool_sink"
WAIT_S = 60


def install(folder: Path, name: str, points: Mapping[str, str]) -> Path:
    """A distribution as an installer leaves it, without its modules."""
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = ["[mainspring.sinks]", *(f"{scheme} = {maker}" for scheme, maker in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """The example package, installed in a folder of its own."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = install(tmp_path / "site", project["name"], project["entry-points"]["mainspring.sinks"])
    shutil.copy(EXAMPLE / "mainspring_spool.py", folder)
    return folder


def run(code: str, *folders: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    env = ENVIRON | {"PYTHONPATH": ":".join(map(str, folders))} | environ
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT_S)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*"))


def test_a_node_delivers_to_an_installed_sink_by_address_and_by_name(spool: Path, tmp_path: Path) -> None:
    orders = tmp_path / "root" / "orders"
    orders.mkdir(parents=True)
    settings = tmp_path / "mainspring.toml"
    settings.write_text('[targets.inbox]\naddress = "spool:orders"\n')
    environ = {"PYTHONPATH": str(spool), "SPOOL_ROOT": str(orders.parent)}
    serve = Serve(tmp_path, "--data-dir", "data", "--config", str(settings), environ=environ)
    try:
        serve.wait_started()
        for number, target in enumerate(("spool:orders", "target:inbox")):
            task = {"target": target, "payload": {"order": number}, "after": "100ms", "id": f"order-{number}"}
            assert serve.status("/v1/tasks", task) == 201, serve.log
        wait_until(lambda: len(files_in(orders)) == 2, "both are delivered", timeout_s=WAIT_S)
    finally:
        serve.process.terminate()
        assert serve.process.wait(WAIT_S) == 0, serve.log
    got = [file.read_bytes().partition(b"\n") for file in files_in(orders)]
    assert {json.loads(about)["id"]: json.loads(payload)["order"] for about, _, payload in got} == {
        "order-0": 0,
        "order-1": 1,
    }


def test_the_contract_suite_runs_in_a_project_of_its_own(tmp_path: Path) -> None:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:valkey", "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S * 2)
    assert ended.returncode == 0, ended.stdout
    assert "13 passed, 2 skipped" in ended.stdout


CHECK = "from mainspring.model.targets.names import check_target; print(check_target('spool:orders'))"


def test_a_client_accepts_the_schemes_that_are_installed_beside_it_and_imports_nothing_of_them(spool: Path) -> None:
    code = f"{CHECK}; import sys; assert 'mainspring_spool' not in sys.modules"
    assert run(code, spool).stdout == "spool\n"


def test_a_client_without_the_package_says_what_to_do() -> None:
    said = run(CHECK).stderr
    assert "must start with one of command:, http:" in said
    assert "install it here too (entry point 'mainspring.sinks')" in said
    assert "or use a named target of the nodes, target:<name>" in said


def test_built_in_schemes_never_cause_a_search_for_plugins() -> None:
    code = (
        "import sys, mainspring; from mainspring import Client;"
        "from mainspring.model.targets.names import check_target;"
        "check_target('log:'); check_target('kafka:ticks'); print('importlib.metadata' in sys.modules)"
    )
    assert run(code).stdout == "False\n"


def test_serve_ends_at_once_with_the_words_of_a_plugin_that_lacks_a_setting(spool: Path, tmp_path: Path) -> None:
    environ = ENVIRON | {"PYTHONPATH": str(spool)}
    command = [*MAIN, "serve", "--port", "0", "--data-dir", "data"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 2
    assert "the sink plug-in of mainspring-spool 1.0 (mainspring.sinks: spool = mainspring_spool:make)" in ended.stderr
    assert "SPOOL_ROOT is not set" in ended.stderr
    assert "Traceback" not in ended.stderr


MODULE = """
class NoSink:
    async def deliver(self, batch):
        return []

def make(config):
    return NoSink()

def fails(config):
    raise RuntimeError("no disk")
"""


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({"http": "{module}:make"}, r"wants the scheme http:, which is built in"),
        ({"Shelf": "{module}:make"}, r"has the name 'Shelf', which can be no scheme"),
        ({"shelf": "{module}:make"}, r"made a NoSink, which has no aclose"),
        ({"shelf": "{module}:fails"}, r"cannot be used: RuntimeError: no disk"),
        ({"shelf": "{module}:absent"}, r"cannot be used: AttributeError"),
        ({"shelf": "no_such_module:make"}, r"cannot be used: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_plugin_that_cannot_be_used_ends_the_start_and_is_named(
    points: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"shelf_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    install(tmp_path, "their-shelf", {scheme: maker.format(module=module) for scheme, maker in points.items()})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"their-shelf 1\.0 \(mainspring\.sinks: .*{said}"):
        Node(Config())


def test_two_packages_for_one_scheme_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"shelf_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(MODULE + "\nasync def aclose(self):\n    pass\n\nNoSink.aclose = aclose\n")
    for name in ("one-shelf", "two-shelf"):
        install(tmp_path, name, {"shelf": f"{module}:make"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"one-shelf 1\.0 .* and .* two-shelf 1\.0 .* are both for shelf:"):
        Node(Config())
