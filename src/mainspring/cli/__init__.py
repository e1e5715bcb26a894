"""The command `mainspring`. Subcommands are imported when they are called, to keep `--version` fast."""

import errno
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import typer
import typer.core
import typer.main

_COMMANDS: Final = {
    "serve": ("mainspring.cli.serve:serve_app", "Run a scheduler with its HTTP API."),
    "worker": ("mainspring.cli.serve:worker_app", "Run handlers and commands from queues; list the workers."),
    "task": ("mainspring.cli.task", "Put, look at, explain, cancel and move tasks."),
    "dead": ("mainspring.cli.dead", "Dead letters, tasks that were given up: list, replay, drop, export."),
    "run": ("mainspring.cli.run", "The history: list and show runs, count them, follow a log."),
    "lane": ("mainspring.cli.lanes:lane_app", "Stalled lanes: list them, retry or skip the head, resume."),
    "queue": ("mainspring.cli.lanes:queue_app", "Queues: how long they are, and which workers serve them."),
    "pause": ("mainspring.cli.lanes:pause_app", "Pause everything, a target, a queue or a lane."),
    "resume": ("mainspring.cli.lanes:resume_app", "End a pause."),
    "pauses": ("mainspring.cli.lanes:pauses_app", "List what is paused, by whom and why."),
    "schedule": ("mainspring.cli.schedule", "Recurring work: cron and intervals."),
    "status": (
        "mainspring.cli.admin:status_app",
        "Nodes, tasks, what is due next and what failed last, on one screen.",
    ),
    "cluster": ("mainspring.cli.admin:cluster_app", "Show the nodes, the leader, and who owns which partitions."),
    "verify": ("mainspring.cli.checks:verify_app", "Prove that every task is somewhere; find orphans, repair them."),
    "doctor": ("mainspring.cli.checks:doctor_app", "Check the setup: servers, rights, clocks, nodes, Kafka."),
    "notify": ("mainspring.cli.checks:notify_app", "Channels of notices: list them, try one; beats of other jobs."),
    "acl": ("mainspring.cli.admin:acl_app", "Print the smallest rights that Mainspring needs on a server."),
    "config": ("mainspring.cli.config", "Settings: their values and where they come from."),
    "demo": ("mainspring.cli.demo", "Generator, schedulers and consumer at full speed, rates every second."),
    "key": ("mainspring.cli.admin:key_app", "API keys: add, list, revoke."),
    "audit": ("mainspring.cli.admin:audit_app", "The audit trail: who changed what, newest first."),
    "version": ("mainspring.cli.admin:version_app", "Print the versions of Mainspring and of Python."),
    "bench": ("mainspring.cli.bench", "Measure, and print the figures of the README."),
}

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""A full or failing disk: not our bug, so no traceback."""


class _LazyGroup(typer.core.TyperGroup):
    """Lists the commands by name and summary only, and loads the one that is called."""

    def get_params(self, ctx: Any) -> Any:
        return quick(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(0) from None  # the reader of our output (head, less) has seen enough

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _COMMANDS:
            place, summary = _COMMANDS[name]
            module, _, variable = place.partition(":")
            found = getattr(import_module(module), variable or "app")
            command = hiding_old_options(naming_options(with_examples(quicken(typer.main.get_command(found)), name)))
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
    """Placeholder in the list of commands for one that is not loaded yet; never called."""


for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, help=_summary, short_help=_summary)(_placeholder)


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
    from mainspring.model.errors import Ambiguous, ConfigError, InvalidInput, MainspringError, Unavailable

    code: Any = 0
    try:
        app(prog_name="mainspring")
    except SystemExit as ended:
        code = ended.code
    except (ConfigError, InvalidInput) as error:
        code = _failed(str(error), 2)
    except Ambiguous as error:
        code = _failed(f"{error} (--lane)", 1)
    except Unavailable as error:
        code = _failed(f"{error}\ntry: mainspring config show --changed", 1)  # says which place named the server
    except MainspringError as error:
        code = _failed("\n".join([str(error), *getattr(error, "__notes__", ())]), 1)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        code = _output_closed(error, 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(_flushed(code))


def _failed(message: str, code: Any) -> Any:
    from mainspring.cli.output import print_message

    print_message(f"mainspring: {message}")
    return code


def _flushed(code: Any) -> Any:
    """Flush here: at interpreter exit a failure would be neither quiet nor explained."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _shut_output()
    except OSError as error:
        return _output_closed(error, code or 1)
    return code


def _output_closed(error: OSError, code: Any) -> Any:
    _shut_output()
    return _failed(f"{error.filename or 'the output'} cannot be written: {error.strerror}", code)


def _shut_output() -> None:
    """Discard the rest of the output: otherwise the interpreter would retry it at exit, and report it again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "serve": (
        "mainspring serve",
        "mainspring serve --redis-url rediss://server:6379 --processes 4",
        "mainspring serve --host 0.0.0.0 --kafka-url kafka://broker:9092",
    ),
    "worker": (
        "mainspring worker myapp:scheduler",
        "mainspring worker myapp:scheduler --queues mail:3,reports:1 --concurrency 16",
    ),
    "worker run": ("mainspring worker run myapp:scheduler --queues mail:3,reports:1 --concurrency 16",),
    "worker list": ("mainspring worker list", "mainspring worker list --json --url https://scheduler.example.com"),
    "queue list": ("mainspring queue list", "mainspring queue list --json"),
    "task put": (
        "mainspring task put --after 30m --target https://example.com/hook --id order-42 '{\"order\": 42}'",
        "mainspring task put --at 2030-01-01T09:00:00Z --target kafka:orders --lane user-7 '\"hello\"'",
        "mainspring task put --target command:backup --timeout 2h --retry '3 base=1m'",
        "echo '[1, 2]' | mainspring task put --after 5s -",
    ),
    "task get": (
        "mainspring task get order-42",
        "mainspring task get order-42 --json --url https://scheduler.example.com",
    ),
    "task list": (
        "mainspring task list --target 'https://example.com/*' --limit 100",
        "mainspring task list --due-after 2030-01-01T00:00:00Z --due-before 2030-01-02T00:00:00Z --json",
    ),
    "task count": ("mainspring task count", "mainspring task count --due-before 2030-01-01T00:00:00Z"),
    "task cancel": ("mainspring task cancel order-42 order-43",),
    "task reschedule": ("mainspring task reschedule order-42 --after 1h",),
    "task explain": ("mainspring task explain order-42",),
    "task result": (
        "mainspring task result order-42",
        "mainspring task result order-42 --wait 10m --json",
    ),
    "run list": (
        "mainspring run list --outcome failed --ended-after 2030-01-01T00:00:00Z",
        "mainspring run list --schedule nightly -o name",
    ),
    "run show": ("mainspring run show 5.mwn1d9qx.0.0",),
    "run log": ("mainspring run log nightly-backup -f",),
    "run stats": ("mainspring run stats --queue mail --step minute",),
    "schedule add": (
        "mainspring schedule add nightly --cron '0 2 * * *' --tz Europe/Paris --target command:backup",
        "mainspring schedule add poll --every 30s --target https://example.com/poll --overlap skip",
    ),
    "schedule list": ("mainspring schedule list", "mainspring schedule list --limit 0 --json"),
    "schedule show": ("mainspring schedule show nightly",),
    "schedule edit": ("mainspring schedule edit nightly --cron '0 3 * * *' --note 'after the import'",),
    "schedule diff": ("mainspring schedule diff nightly --cron '0 3 * * *'",),
    "schedule pause": ("mainspring schedule pause nightly --reason 'disk is full' --until 2h",),
    "schedule resume": ("mainspring schedule resume nightly",),
    "schedule trigger": ("mainspring schedule trigger nightly",),
    "schedule backfill": (
        "mainspring schedule backfill nightly --start 2030-01-01T00:00:00Z --end 2030-01-08T00:00:00Z --dry-run",
    ),
    "schedule preview": (
        "mainspring schedule preview '0 9 * * MON-FRI' --tz Asia/Tokyo --count 5",
        "mainspring schedule preview '@every 36h' --from 2030-01-01T00:00:00",
    ),
    "schedule remove": ("mainspring schedule remove nightly",),
    "schedule rollback": ("mainspring schedule rollback nightly", "mainspring schedule rollback nightly 3"),
    "schedule history": ("mainspring schedule history nightly",),
    "schedule import": (
        "mainspring schedule import /etc/crontab --system --dry-run",
        "mainspring schedule import beat.json --format celery --out schedules.toml",
    ),
    "schedule apply": ("mainspring schedule apply -f schedules.toml --prune --dry-run",),
    "schedule lint": ("mainspring schedule lint", "mainspring schedule lint -f schedules.toml"),
    "lane list": ("mainspring lane list",),
    "lane show": ("mainspring lane show user-7",),
    "lane retry-head": ("mainspring lane retry-head user-7",),
    "lane skip-head": ("mainspring lane skip-head user-7 --reason 'account closed'",),
    "lane resume": ("mainspring lane resume user-7",),
    "dead list": ("mainspring dead list", "mainspring dead list --target 'https://example.com/*' --reason timeout"),
    "dead show": ("mainspring dead show order-42",),
    "dead replay": (
        "mainspring dead replay order-42",
        "mainspring dead replay --target 'kafka:*' --rate 100 --dry-run",
    ),
    "dead drop": ("mainspring dead drop --died-before 2030-01-01T00:00:00Z --yes",),
    "dead export": ("mainspring dead export -o dead-letters.ndjson",),
    "pause": ("mainspring pause --target 'kafka:*' --reason deploy --for 30m", "mainspring pause --all"),
    "resume": ("mainspring resume --target 'kafka:*'",),
    "pauses": ("mainspring pauses",),
    "status": ("mainspring status", "mainspring status --json -n shop"),
    "version": ("mainspring version",),
    "cluster status": ("mainspring cluster status", "mainspring cluster status --watch"),
    "verify": ("mainspring verify --redis-url redis://server:6379", "mainspring verify --repair"),
    "doctor": ("mainspring doctor --redis-url redis://server:6379", "mainspring doctor --strict --json"),
    "notify list": ("mainspring notify list",),
    "notify test": ("mainspring notify test ops",),
    "notify beats": ("mainspring notify beats",),
    "notify beat": ("mainspring notify beat backup --cron '0 2 * * *' --tz Europe/Paris --grace 30m",),
    "acl": (
        "mainspring acl --namespace shop --password-file secret | redis-cli -u redis://admin@server",
        "mainspring acl --file >> users.acl",
    ),
    "config show": ("mainspring config show --changed",),
    "config set": ("mainspring config set history_bytes 64MiB",),
    "config shared": ("mainspring config shared",),
    "key add": ("mainspring key add shop --role submit-only --target 'kafka:orders*' --expires 90d",),
    "key list": ("mainspring key list",),
    "key revoke": ("mainspring key revoke k89371c4ea6",),
    "key generate": ("mainspring key generate > api-keys",),
    "audit": ("mainspring audit --limit 20", "mainspring audit --json --url https://scheduler.example.com"),
    "demo ticks": (
        "mainspring demo ticks --seconds 30",
        "mainspring demo ticks --kafka broker:9092 --rate 20000 --json",
    ),
    "bench all": ("mainspring bench all",),
    "bench baseline": ("mainspring bench baseline --tasks 300000",),
    "bench cluster": ("mainspring bench cluster --kills 5",),
    "bench compare": ("mainspring bench compare --tasks 300000 --ids",),
    "bench cycle": ("mainspring bench cycle --tasks 500000",),
    "bench e2e": ("mainspring bench e2e --rate 60000 --json",),
    "bench growth": ("mainspring bench growth",),
    "bench history": ("mainspring bench history --runs 100000",),
    "bench http": ("mainspring bench http --json",),
    "bench idle": ("mainspring bench idle --seconds 10",),
    "bench lateness": ("mainspring bench lateness --rate 10000 --compare",),
    "bench peers": ("mainspring bench peers --only huey --only mainspring",),
    "bench schedules": ("mainspring bench schedules --schedules 10000",),
    "bench sinks": ("mainspring bench sinks --rounds 1",),
    "bench sparse": ("mainspring bench sparse --tasks 1000000",),
}


EXAMPLE_WIDTH: Final = 72
"""Columns of an example: help pages indent it, and a terminal may have 80."""


def folded(line: str) -> str:
    """Return a command as one types it: a long one continues on the next line, before an option or a bar."""
    lines: list[str] = []
    for part in re.split(r" (?=--|[|] )", line):
        if lines and len(lines[-1]) + len(part) < EXAMPLE_WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)


def with_examples(command: Any, name: str) -> Any:
    """Add the examples to the help of a command and its subcommands, and show their summaries whole, not cut."""
    command.short_help = (command.help or "").partition("\n\n")[0].replace("\n", " ")
    lines = EXAMPLES.get(name)
    if lines:
        note = f"{command.epilog}\n\n" if command.epilog else ""
        command.epilog = f"{note}Examples:\n\n\b\n" + indent("\n".join(map(folded, lines)), "  ")
    for below, one in getattr(command, "commands", {}).items():
        with_examples(one, f"{name} {below}")
    return command


_TYPED: Final = "mainspring.typed"
_LISTED: Final = frozenset({"task", "schedule", "run", "dead", "key"})
"""Groups whose `list` shows the names that their other commands take."""


def naming_options(command: Any) -> Any:
    """Let errors of a command and its subcommands name the option that was typed: `--in`, not `after`; and after a name
    that does not exist, the command that lists those that do."""
    invoke, parse = command.invoke, command.parse_args

    def parse_and_note(context: Any, args: list[str]) -> Any:
        context.meta[_TYPED] = {word.partition("=")[0] for word in args}
        return parse(context, args)

    def invoke_and_name(context: Any) -> Any:
        from mainspring.model.errors import InvalidInput, NotFound

        try:
            return invoke(context)
        except NotFound as error:
            if context.parent is not None and context.parent.info_name in _LISTED:
                namespace = context.params.get("namespace")
                error.add_note(f"try: {context.parent.command_path} list{f' -n {namespace}' if namespace else ''}")
            raise
        except InvalidInput as error:
            typed = {
                one.name: next((name for name in one.opts if name in context.meta[_TYPED]), one.opts[0])
                for one in command.params
                if one.opts[0].startswith("-")
            }
            name, mark, rest = re.match(r"(\w*)((?:: | is | lies )?)(.*)", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
            if mark and name in typed:
                error.args = (f"{typed[name]}{mark}{rest}", *error.args[1:])
            raise

    command.invoke, command.parse_args = invoke_and_name, parse_and_note
    for one in getattr(command, "commands", {}).values():
        naming_options(one)
    return command


_OLD: Final = frozenset({"--after", "--before", "--from", "--gap", "--overlap", "--to", "--who"})
"""Second names of options that go with the next release: `task list --after` is `--due-after` now."""


def hiding_old_options(command: Any) -> Any:
    """Let a command and its subcommands accept old names of options without showing them."""
    for one in command.params:
        old = [name for name in one.opts[1:] if name in _OLD]
        if old:
            one.opts = [name for name in one.opts if name not in old]
            one.add_to_parser = _Renamed(one, old)
    for one in getattr(command, "commands", {}).values():
        hiding_old_options(one)
    return command


class _Renamed:
    """Replaces `add_to_parser` of an option that has old names."""

    def __init__(self, option: Any, old: list[str]) -> None:
        self._option, self._old, self._add = option, old, option.add_to_parser

    def __call__(self, parser: Any, context: Any) -> None:
        shown = self._option.opts
        self._option.opts = [*shown, *self._old]
        try:
            self._add(parser, context)
        finally:
            self._option.opts = shown


_CHECKED: Final = ("parser", "exists", "writable", "resolve_path", "path_type")
_READ: Final[dict[Any, Callable[[str], Any]]] = {str: str, int: int, float: float, Path: Path}


def quicken(command: Any) -> Any:
    """Let a command and its subcommands read plain texts, numbers and paths themselves.

    Everything else, and everything that is wrong, is left to the library, whose messages are good.
    """
    parameters = command.get_params
    command.get_params = lambda context: quick(parameters(context))
    for one in getattr(command, "commands", {}).values():
        quicken(one)
    return command


def quick(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if not isinstance(one.process_value, _Reader):
            one.process_value = _Reader(one, _plain_kind(one), one.process_value)
    return parameters


def _plain_kind(parameter: Any) -> Any:
    """Return the type that its texts are read as, or None if there is more to check."""
    descriptor: Any = getattr(parameter, "type_descriptor", None)
    about = getattr(descriptor, "parameter_info", None)
    if about is None or any(getattr(about, name, None) for name in _CHECKED) or (about.min, about.max) != (None, None):
        return None
    return descriptor.annotation


class _Reader:
    """Replaces `process_value` of one parameter."""

    def __init__(self, parameter: Any, kind: Any, library: Callable[[Any, Any], Any]) -> None:
        self._parameter = parameter
        self._many = parameter.multiple or parameter.nargs == -1
        inner = get_args(kind)[0] if get_origin(kind) is list else None
        self._read = _READ.get(inner if self._many else kind)
        self._choices: tuple[str, ...] = get_args(kind) if get_origin(kind) is Literal else ()
        self._library = library

    def __call__(self, context: Any, value: Any) -> Any:
        if value == "" and self._read is Path:  # mostly a variable that is not set; it would mean this folder
            raise typer.BadParameter("it is empty; name a path", context, self._parameter)
        if self._choices and value is not None:
            if value not in self._choices:
                raise typer.BadParameter(
                    f"{value!r} is not one of {', '.join(self._choices)}", context, self._parameter
                )
            return value
        known, plain = self._plain(value)
        if not known or (self._parameter.required and plain in (None, ())):
            return self._library(context, value)
        callback = self._parameter.callback
        return plain if callback is None else callback(context, self._parameter, plain)

    def _plain(self, value: Any) -> tuple[bool, Any]:
        if value is None:
            return True, () if self._many else None
        if isinstance(value, bool):
            return True, value
        if self._read is None:
            return False, None
        try:
            if self._many:
                return isinstance(value, (list, tuple)), [self._read(one) for one in value]
            return True, value if type(value) is not str else self._read(value)
        except ValueError:
            if self._read is int:
                raise typer.BadParameter(f"{value!r} is not a whole number", None, self._parameter) from None
            return False, None
