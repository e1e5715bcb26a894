"""A command as a worker runs it."""

import os
import signal
from typing import Any, Final

import msgspec

from ..model.command import INHERITED, Command
from ..model.result import Output
from .arguments import WrongArguments
from .context import Context
from .process import Process
from .work import Outputs, Work

MOST_ARGUMENTS: Final = 100
_REASON_CHARS: Final = 200


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    args: list[str] = []


_read_payload: Final = msgspec.json.Decoder(_Payload | None).decode


class CommandWork(Work):
    """Starts the program in a thread, and waits for it there."""

    obeys = True

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(
            self.execute,
            name=name,
            queue=command.queue,
            target=f"command:{name}",
            retry=command.retry,
            timeout_ms=command.timeout_ms,
            result_ttl_ms=command.result_ttl_ms,
        )
        self.command = command

    def read(self, context: Context) -> dict[str, Any]:
        return {"context": context, "args": self._arguments(context)}

    def _arguments(self, context: Context) -> list[str]:
        body = context.job.body
        if body.raw:
            raise WrongArguments(f"command {self.name!r}: its payload is bytes; give JSON or nothing")
        try:
            found = _read_payload(body.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WrongArguments(f"command {self.name!r}: its payload is not {{'args': [...]}}: {error}") from None
        args = found.args if found is not None else []
        if args and not self.command.arguments:
            raise WrongArguments(
                f"command {self.name!r} takes no arguments from tasks; arguments = true in its definition allows them"
            )
        if len(args) > MOST_ARGUMENTS or any("\0" in one for one in args):
            raise WrongArguments(f"command {self.name!r}: at most {MOST_ARGUMENTS} arguments, none with a zero byte")
        return args

    def execute(self, context: Context, args: list[str]) -> Output:
        command = self.command
        try:
            process = Process([*command.argv, *args], self._environ(context), command.cwd, command.output_bytes)
        except (OSError, ValueError) as error:
            raise Outputs(self._why_not(error), Output()) from None
        output = process.run(lambda: context.cancelled, command.kill_after_ms / 1000)
        if output.exit_code != 0:
            how = _ended(output.exit_code or 0)
            raise Outputs(how + _last_words(output), output, how)
        return output

    def _environ(self, context: Context) -> dict[str, str]:
        found = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return found | dict(self.command.env) | environ_of(context)

    def _why_not(self, error: Exception) -> str:
        folder = self.command.cwd
        if folder is not None and not os.access(folder, os.X_OK):
            return f"command {self.name!r} cannot be started: its folder {folder!r} is missing or forbidden"
        return f"command {self.name!r} cannot be started: {self.command.argv[0]!r}: {error}"


def environ_of(context: Context) -> dict[str, str]:
    """What a command is told of its task."""
    return {
        "MAINSPRING_TASK_ID": context.id,
        "MAINSPRING_TASK_KEY": context.idempotency_key,
        "MAINSPRING_TASK_ATTEMPT": str(context.attempt),
        "MAINSPRING_TASK_DUE": context.due.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


def _ended(code: int) -> str:
    if code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"exit code {code}"


def _last_words(output: Output) -> str:
    lines = output.stderr.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][-_REASON_CHARS:]}" if lines else ""
