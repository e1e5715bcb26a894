"""The command `mainspring`. Commands are loaded when they are called: `--version` must not wait for servers."""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from mainspring.cli.examples import with_examples
from mainspring.cli.quick import quick, quicken

_COMMANDS: Final = {
    "serve": ("mainspring.cli.serve", "Run a scheduler with its HTTP API."),
    "worker": ("mainspring.cli.worker", "Run handlers and commands from queues."),
    "task": ("mainspring.cli.task", "Put, look at, explain, cancel and move tasks."),
    "dead": ("mainspring.cli.dead", "Tasks that were given up: look, replay, drop, export."),
    "lane": ("mainspring.cli.lane", "Lanes that stand still: look, retry or skip the head, resume."),
    "pause": ("mainspring.cli.pause", "Let everything, a target, a queue or a lane stand still."),
    "resume": ("mainspring.cli.resume", "End a pause."),
    "pauses": ("mainspring.cli.pauses", "List what is paused, by whom and why."),
    "schedule": ("mainspring.cli.schedule", "Recurring work: cron and intervals."),
    "cluster": ("mainspring.cli.cluster", "Show the nodes, who leads, who owns what."),
    "verify": ("mainspring.cli.verify", "Prove that every task is somewhere; find orphans, repair them."),
    "doctor": ("mainspring.cli.doctor", "Check the whole set-up: what is fine, and what to change."),
    "acl": ("mainspring.cli.acl", "Print the smallest rights that Mainspring needs on a server."),
    "config": ("mainspring.cli.config", "Settings: what holds, and where it comes from."),
    "demo": ("mainspring.cli.demo", "Generator, schedulers and consumer at full speed, rates every second."),
    "key": ("mainspring.cli.key", "API keys: add, list, revoke."),
    "audit": ("mainspring.cli.audit", "Who changed what, the newest first."),
    "bench": ("mainspring.cli.bench", "Measure, and print the figures of the README."),
}

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write meets that has no room, or a medium that fails: no fault of ours that needs a trace."""


class _LazyGroup(typer.core.TyperGroup):
    """Lists the commands by name and summary only, and loads the one that is called."""

    def get_params(self, ctx: Any) -> Any:
        return quick(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(0) from None  # whoever read our output (head, less) has seen enough

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _COMMANDS:
            module, summary = _COMMANDS[name]
            command = with_examples(quicken(typer.main.get_command(import_module(module).app)), name)
            command.help = command.help or summary
        return name, command, rest


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A distributed scheduler and delay queue on Redis or Valkey, exact to the millisecond.",
)


def _placeholder() -> None:
    """Never called: stands in the list of commands for one that is not loaded yet."""


for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, help=_summary)(_placeholder)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mainspring import __version__

        print(f"mainspring {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command."""


def main() -> None:
    """Exit codes: 0 well, 1 failed, 2 called wrongly, 130 on Ctrl-C."""
    from mainspring.model.errors import ConfigError, InvalidInput, MainspringError

    code: Any = 0
    try:
        app(prog_name="mainspring")
    except SystemExit as ended:
        code = ended.code
    except (ConfigError, InvalidInput) as error:
        code = _failed(str(error), 2)
    except MainspringError as error:
        code = _failed(str(error), 1)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        code = _unwritten(error, 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(_flushed(code))


def _failed(message: str, code: Any) -> Any:
    print(f"mainspring: {message}", file=sys.stderr)
    return code


def _flushed(code: Any) -> Any:
    """What was printed goes out here: when the interpreter ends, a failure is neither quiet nor explained."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _shut_output()
    except OSError as error:
        return _unwritten(error, code or 1)
    return code


def _unwritten(error: OSError, code: Any) -> Any:
    _shut_output()
    return _failed(f"{error.filename or 'the output'} cannot be written: {error.strerror}", code)


def _shut_output() -> None:
    """What is left of the output goes nowhere: it would be tried once more, and told once more."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
