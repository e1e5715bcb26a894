"""The command `mainspring`. Commands are loaded when they are called: `--version` must not wait for servers."""

import sys
from importlib import import_module
from typing import Any, Final

import typer
import typer.core
import typer.main

_COMMANDS: Final = {
    "serve": ("mainspring.cli.serve:app", "Run a scheduler with its HTTP API."),
    "task": ("mainspring.cli.task:app", "Put, look at, cancel and move tasks."),
    "bench": ("mainspring.cli.bench:app", "Measure, and print the figures of the README."),
}


class _LazyGroup(typer.core.TyperGroup):
    """Knows the names of the commands, and loads one when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        place, summary = _COMMANDS[cmd_name]
        if ctx.resilient_parsing or not ctx.args_of_group:
            return None
        module, _, name = place.partition(":")
        command = typer.main.get_command(getattr(import_module(module), name))
        command.name = cmd_name
        command.short_help = command.help = command.help or summary
        return command
