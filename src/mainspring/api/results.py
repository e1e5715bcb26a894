"""How the end of a task is told."""

from typing import Any

import msgspec

from ..model.result import Ending


class Answered(msgspec.Struct):
    """An answer, cut to what its target keeps; the body in base64 where it is no text."""

    status: int
    headers: list[tuple[str, str]]
    duration_ms: int
    body: str | None = None
    body_base64: str | None = None


class Printed(msgspec.Struct):
    """What a command left: the end of its output, in base64 where it is no text, and how many bytes there were."""

    exit_code: int | None
    stdout_bytes: int
    stderr_bytes: int
    stdout: str | None = None
    stdout_base64: str | None = None
    stderr: str | None = None
    stderr_base64: str | None = None


class Ended(msgspec.Struct):
    """How a task ended: `value` of a handler, `output` of a command, `response` of a webhook."""

    ending: Ending
    value: Any
    reason: str
    attempt: int
    worker: str
    target: str
    due_ms: int
    started_ms: int
    ended_ms: int
    log: list[str]
    output: Printed | None
    response: Answered | None


class NotOver(msgspec.Struct):
    """The task waits or runs; there is no result yet."""

    id: str
    state: str
