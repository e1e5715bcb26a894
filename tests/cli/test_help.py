"""The help of every command has examples that work, and a bar is drawn for people only."""

import io
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from mainspring.cli import _COMMANDS, EXAMPLES, app
from mainspring.cli.output import ProgressBar

ROOT = typer.main.get_command(app)
PROMISED = (
    "serve", "worker", "worker list", "queue list", "verify", "doctor", "config show", "acl", "audit", "demo ticks",
    *(f"task {name}" for name in ("put", "get", "list", "cancel", "reschedule", "explain")),
    *(f"schedule {name}" for name in ("add", "list", "show", "edit", "pause", "resume", "trigger", "backfill")),
    *(f"schedule {name}" for name in ("preview", "remove", "import", "apply")),
    *(f"lane {name}" for name in ("list", "show", "retry-head", "skip-head", "resume")),
    *(f"dead {name}" for name in ("list", "show", "replay", "drop")),
    *(f"key {name}" for name in ("add", "list", "revoke")),
    *(f"run {name}" for name in ("list", "show", "log", "stats")),
    "cluster status",
)  # fmt: skip
"""The commands whose names are promised to people."""


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line runs, and the words after its name."""
    context = ROOT.make_context("mainspring", ["--help-is-not-asked"], resilient_parsing=True)
    _, command, rest = ROOT.resolve_command(context, words)  # type: ignore[attr-defined]
    while hasattr(command, "commands") and rest:
        rest = command.spelled_out(rest) if hasattr(command, "spelled_out") else rest
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
    for below, one in getattr(command, "commands", {}).items():
        yield from leaves(one, f"{name} {below}")


def every(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, one in getattr(command, "commands", {}).items():
        yield from every(one, f"{name} {below}".strip())


def lines() -> list[tuple[str, str]]:
    return [(name, line) for name, some in EXAMPLES.items() for line in some]


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_command_has_examples(name: str) -> None:
    command, rest = find(name.split())
    assert not rest
    assert "Examples:" in help_of(command, name)


def help_of(command: Any, name: str) -> str:
    text: str = command.get_help(command.make_context(name, [], resilient_parsing=True, terminal_width=80))
    return text


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_says_what_it_does_with_an_example(name: str) -> None:
    for full, command in leaves(find([name])[0], name):
        assert command.help, full
        assert "Examples:" in help_of(command, full), full


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_help_looks_alike_and_neither_cuts_nor_leaves_80_columns(name: str) -> None:
    for full, command in every(find([name])[0] if name else ROOT, name):
        # An example may be wider: people copy it whole.
        shown = help_of(command, full).partition("Examples:")[0].splitlines()
        assert shown[0].startswith("Usage: "), full
        assert [line for line in shown if len(line) > 80] == [], full
        assert [line for line in shown[1:] if line.endswith("...")] == [], full


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_every_parameter_is_explained_and_the_namespace_has_a_short_form(name: str) -> None:
    for full, command in every(find([name])[0] if name else ROOT, name):
        for one in command.params:
            assert one.help or getattr(one, "hidden", False), f"{full}: {one.name}"
            if one.name == "namespace":
                assert "-n" in one.opts, full


def test_a_group_of_one_command_says_what_it_is_for() -> None:
    assert "Queues: how long they are" in help_of(find(["queue"])[0], "queue")


@pytest.mark.parametrize(("name", "line"), lines(), ids=[line for _, line in lines()])
def test_an_example_is_a_line_that_can_be_typed(name: str, line: str) -> None:
    typed = next(part for part in line.split("|") if "mainspring" in part).partition(">")[0]
    words = shlex.split(typed)
    assert words[0] == "mainspring"
    command, rest = find(words[1:])
    assert words[1 : len(words) - len(rest)] == name.split()
    given = command.make_context(name, list(rest)).params  # raises for an unknown option or a missing argument
    assert given or not rest


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_fit_a_terminal_of_80_columns(name: str) -> None:
    command, _ = find(name.split())
    shown = command.get_help(command.make_context(name, [], resilient_parsing=True)).partition("Examples:")[2]
    assert max(map(len, shown.splitlines())) <= 80
    assert re.sub(r" \\\n +", " ", shown).split("\n")[2:] == [f"    {line}" for line in EXAMPLES[name]]


OLD = [
    ("task list", "--due-after", "--after"),
    ("task count", "--due-before", "--before"),
    ("pause", "--by", "--who"),
    ("schedule preview", "--dst-gap", "--gap"),
    ("schedule preview", "--dst-overlap", "--overlap"),
]
"""Options that have another name now."""


@pytest.mark.parametrize(("name", "option", "old"), OLD)
def test_an_old_name_of_an_option_works_and_is_not_shown(name: str, option: str, old: str) -> None:
    command, _ = find(name.split())
    value = {"--gap": "skip", "--overlap": "both"}.get(old, "2030-01-01T00:00:00Z")
    rest = ["@daily"] if "preview" in name else []
    by_either = [command.make_context(name, [*rest, word, value]).params for word in (option, old)]
    assert by_either[0] == by_either[1]
    shown = command.get_help(command.make_context(name, [], resilient_parsing=True)).split()
    assert option in shown
    assert old not in shown


def test_parts_of_a_retry_policy_are_not_offered_as_options() -> None:
    command, _ = find(["schedule", "add"])
    shown = command.get_help(command.make_context("add", [], resilient_parsing=True))
    assert "--retries" in shown
    assert "--retry-base" not in shown
    assert "--retry-jitter" not in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ProgressBar("partitions", stream) as bar:
            for done in range(33):
                bar(done, 32)
    assert "32 of 32 partitions" in terminal.getvalue()
    assert "[" + "#" * 30 + "]" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""


def test_without_a_total_a_bar_counts_and_one_that_was_too_small_grows() -> None:
    for total, shown in ((None, "7 dead letters"), (3, "7 of 7 dead letters")):
        terminal = Terminal()
        with ProgressBar("dead letters", terminal) as bar:
            bar(7, total)
        assert shown in terminal.getvalue()


def test_a_bar_that_is_not_wanted_is_not_drawn() -> None:
    terminal = Terminal()
    with ProgressBar("dead letters", terminal, shown=False) as bar:
        bar(1, 1)
    assert terminal.getvalue() == ""
