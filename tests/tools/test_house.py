"""`tools/house`: what it counts, and that it refuses a layout over its bounds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Tree:
    """A small repository, changed by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("__init__")

    def write(self, module: str, text: str = "") -> None:
        file = self.root / "src" / "mainspring" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def fill(self, folder: str, count: int) -> None:
        for number in range(count):
            self.write(f"{folder}/module_{number}")

    def house(self, *options: str) -> subprocess.CompletedProcess[str]:
        return run("--root", str(self.root), *options)

    def sign(self, name: str) -> int:
        """The figure that is printed for a sign."""
        [line] = [line for line in self.house().stdout.splitlines() if line.strip().startswith(name)]
        return int(line.strip().removeprefix(name).split()[0].replace(",", ""))

    def complaints(self) -> list[str]:
        """Return the messages of the check, which fails exactly if there are any."""
        ended = self.house("--check")
        assert ended.returncode == (1 if ended.stderr else 0)
        return ended.stderr.splitlines()


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "house"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_repository_passes() -> None:
    ended = run("--check")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_tree_within_all_bounds_passes(tree: Tree) -> None:
    tree.write("model/task", "class Task: ...\n")
    assert tree.complaints() == []


def test_too_many_modules_are_refused(tree: Tree) -> None:
    for folder in range(10):
        tree.fill(f"part_{folder}", 23)
    assert tree.sign("modules") == 231  # the package's own `__init__` is one of them
    assert tree.complaints() == [
        (
            "house: 231 modules, at most 230: add to the module that already holds the idea, "
            "or merge two that change together"
        )
    ]


def test_scripts_are_not_counted_as_modules(tree: Tree) -> None:
    (tree.root / "src" / "mainspring" / "drop.lua").write_text("return 1\n")
    assert tree.sign("modules") == 1


def test_too_many_modules_with_one_importer_are_refused(tree: Tree) -> None:
    for folder in ("left", "right"):
        tree.fill(folder, 20)
    tree.write("store/last")
    names = [f"mainspring.{folder}.module_{number}" for folder in ("left", "right") for number in range(20)]
    tree.write("store/user", "\n".join(f"import {name}" for name in names))
    assert tree.complaints() == []
    tree.write("store/other", "from mainspring.store import last\n")
    assert tree.complaints() == [
        "house: 41 modules with one importer, at most 40: merge one into its importer (tools/house --list names them)"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "import mainspring.store.keys",
        "from mainspring.store import keys",
        "from mainspring.store.keys import Slice",
        "from . import keys",
        "from .keys import Slice",
        "from ..store.keys import Slice",
        "def late():\n    from .keys import Slice",
    ],
)
def test_every_form_of_import_is_seen(tree: Tree, line: str) -> None:
    tree.write("store/keys", "class Slice: ...\n")
    tree.write("store/user", line)
    assert "  mainspring.store.keys <- mainspring.store.user" in tree.house("--list").stdout.splitlines()


def test_an_import_in_the_init_of_a_package_starts_at_that_package(tree: Tree) -> None:
    tree.write("store/keys")
    tree.write("store/__init__", "from . import keys\n")
    assert "  mainspring.store.keys <- mainspring.store" in tree.house("--list").stdout.splitlines()


def test_a_module_with_two_importers_is_not_listed(tree: Tree) -> None:
    tree.write("store/keys")
    for user in ("one", "two"):
        tree.write(f"store/{user}", "from mainspring.store import keys\n")
    assert tree.sign("with one importer") == 0


def test_a_class_name_defined_twice_is_refused(tree: Tree) -> None:
    tree.write("engine/flow", "class Limit: ...\n")
    tree.write("model/flow", "class Limit: ...\n")
    assert tree.complaints() == [
        (
            "house: class Limit is defined in mainspring.engine.flow, mainspring.model.flow: "
            "use one of them, or rename one for what it holds"
        )
    ]


def test_a_type_alias_counts_as_a_class(tree: Tree) -> None:
    tree.write("engine/flow", "Outcome = int | str\n")
    tree.write("model/flow", "class Outcome: ...\n")
    assert tree.sign("class names twice") == 1


@pytest.mark.parametrize("folder", ["bench", "demo", "testing"])
def test_outside_the_product_a_class_name_may_be_used_again(tree: Tree, folder: str) -> None:
    tree.write(f"{folder}/flow", "class Limit: ...\n")
    tree.write("model/flow", "class Limit: ...\n")
    assert tree.complaints() == []


def test_constants_of_the_same_name_are_no_classes(tree: Tree) -> None:
    for module in ("engine/flow", "model/flow"):
        tree.write(module, "MOST = 5\nT = TypeVar('T')\nKeyType = TypeVar('KeyType')\n")
    assert tree.complaints() == []


def test_a_folder_that_is_too_full_is_refused(tree: Tree) -> None:
    tree.fill("model", 25)
    assert tree.complaints() == []
    tree.write("model/one_more")
    assert tree.complaints() == [
        "house: mainspring/model has 26 modules, at most 25: move some into a package by capability"
    ]


def test_too_many_modules_at_the_top_level_are_refused(tree: Tree) -> None:
    tree.fill(".", 4)
    assert tree.complaints() == []
    tree.write("one_more")
    assert tree.complaints() == [
        "house: 6 modules at the top level, at most 5: move a new module into the package of its layer"
    ]


def test_too_many_callbacks_in_the_engine_are_refused(tree: Tree) -> None:
    line = "def wake(first: Callable[[], None], second: Callable[[], None]) -> None: ...\n"
    for number in range(3):
        tree.write(f"engine/role_{number}", line)
    tree.write("store/tick", line)
    assert tree.sign("engine callbacks") == 6
    assert tree.complaints() == []
    tree.write("engine/last", line)
    [complaint] = tree.complaints()
    assert complaint.startswith("house: 8 callbacks in engine/, at most 7: give a role the part it needs")


@pytest.mark.parametrize(
    "text",
    [
        "def wake(partition):\n    partition.lanes.wake()\n",
        "def wake(one: Partition):\n    return one.lanes.behind\n",
        "def wake(self):\n    for one in self._owned.values():\n        one.lanes.wake()\n",
        "def wake(owned):\n    return sum(one.lanes.behind for one in owned.values())\n",
    ],
)
def test_no_code_reaches_through_a_partition_into_its_parts(tree: Tree, text: str) -> None:
    tree.write("engine/partition", text)
    tree.write("engine/role", "def wake(partition, task):\n    return partition.behind, task.body.lane\n")
    assert tree.complaints() == []
    tree.write("engine/other", text)
    assert tree.sign("into partitions") == 1
    [complaint] = tree.complaints()
    assert complaint.startswith("house: mainspring/engine/other.py:")
    assert complaint.endswith("reaches into the parts of a partition: ask the partition (engine/partition.py)")


def test_every_bound_that_is_broken_is_named(tree: Tree) -> None:
    tree.fill(".", 5)
    tree.fill("model", 26)
    assert len(tree.complaints()) == 2


def test_without_check_the_signs_are_printed_and_nothing_is_refused(tree: Tree) -> None:
    tree.fill("model", 26)
    ended = tree.house()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tree.sign("largest folder") == 26


def test_lines_are_counted_for_each_package_of_the_product(tree: Tree) -> None:
    tree.write("model/task", "\n" * 30)
    tree.write("store/keys", "\n" * 10)
    tree.write("bench/cycle", "\n" * 200)
    assert [tree.sign(name) for name in ("product lines", "model", "store", "mean lines")] == [40, 30, 10, 60]


def test_a_folder_without_the_package_is_an_error_that_says_so(tmp_path: Path) -> None:
    ended = run("--root", str(tmp_path), "--check")
    assert ended.returncode == 1
    assert "no modules in" in ended.stderr
    assert "--root" in ended.stderr
