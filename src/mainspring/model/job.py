"""Work that a worker has taken from a queue, how it ended, and the result that is kept."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from .delivery import Body, Dead, Done, Response, Retry, bytes_from_fields, bytes_to_fields
from .errors import InvalidInput
from .limits import MAX_PAYLOAD_BYTES
from .text import describe


class Job(msgspec.Struct, gc=False):
    """One entry of a queue's stream, taken by one worker."""

    partition: int
    queue: str
    entry: bytes
    """Its place in the stream."""
    idh: bytes
    body: Body
    due_ms: int
    original_due_ms: int
    """Of the first attempt; part of the idempotency key."""
    deliveries: int = 1
    """How often it was taken: more than once when a worker died over it."""
    claim: bytes = b""
    """What makes it this worker's: the address it came from, then its place in the stream, queue, worker and nonce."""

    @property
    def id(self) -> str:
        return self.body.id or self.idh.hex()

    @property
    def key(self) -> tuple[int, bytes]:
        """Tells it from all others in hand: a claim is one of its partition, and two of them may say the same."""
        return self.partition, self.claim


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """It was cancelled while it ran, and has stopped."""


@dataclass(slots=True)
class End:
    """How a job ended, after the retry policy was asked: a `Retry` comes with its `after_ms`."""

    job: Job
    outcome: Done | Retry | Dead | JobCancelled
    result: bytes | None = None
    """To be kept for who waits for it, for so long."""
    result_ttl_ms: int = 0
    run_end: bytes | None = None
    """Of a run of a schedule: to be kept under the name of the schedule."""


Ending = Literal["done", "dead", "cancelled"]


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command left behind. Of long output the end is kept."""

    exit_code: int | None = None
    """None: it never ran. Negative: the number of the signal that ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    """All that was written, also what was not kept."""
    stderr_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = {"exit_code": self.exit_code}
        for name in ("stdout", "stderr"):
            fields |= bytes_to_fields(name, getattr(self, name)) | {f"{name}_bytes": getattr(self, f"{name}_bytes")}
        return fields

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Output":
        """Read the output of a command as the HTTP API sends it."""
        out, err = bytes_from_fields("stdout", told), bytes_from_fields("stderr", told)
        return cls(told["exit_code"], out, err, told["stdout_bytes"], told["stderr_bytes"])


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a task: what its last run came to."""

    ending: Ending
    value: Any = None
    reason: str = ""
    """Why it is dead, or why the value could not be kept."""
    attempt: int = 1
    worker: str = ""
    """Or the node that delivered it."""
    started_ms: int = 0
    ended_ms: int = 0
    target: str = ""
    due_ms: int = 0
    """When the task was due at first: another of the same id has another."""
    log: tuple[str, ...] = ()
    output: Output | None = None
    response: Response | None = None
    """What a webhook was answered."""

    def encode(self) -> bytes:
        """Never fails: a value that cannot be kept is left out, with the reason in its place."""
        try:
            data = _encode(self)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return self._without(f"the handler's answer cannot be kept: {describe(error)}")
        if len(data) > MAX_RESULT_BYTES and self.value is not None:
            return self._without(f"the handler's answer is too large to be kept: {len(data)} bytes")
        return data

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what a run of this kind does not have is null."""
        fields = msgspec.structs.asdict(self)
        fields["value"] = self.json_value
        fields["output"] = None if self.output is None else self.output.as_dict()
        fields["response"] = None if self.response is None else self.response.as_dict()
        return fields

    @property
    def json_value(self) -> Any:
        """The value for JSON, where only texts and numbers can be keys."""
        return _with_plain_keys(self.value)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Result":
        """Read a result as the HTTP API sends it."""
        output, response = told["output"], told["response"]
        return cls(
            **{name: told[name] for name in cls.__struct_fields__ if name in told}
            | {
                "log": tuple(told["log"]),
                "output": None if output is None else Output.from_dict(output),
                "response": None if response is None else Response.from_dict(response),
            }
        )

    def _without(self, reason: str) -> bytes:
        rest = msgspec.structs.replace(self, value=None, reason=reason)
        try:
            return _encode(rest)
        except ValueError:  # a text in it is none
            return _encode(msgspec.structs.replace(rest, log=(), output=None, response=None))


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, dict):
        odd = (bool, tuple, type(None))
        return {str(key) if isinstance(key, odd) else key: _with_plain_keys(one) for key, one in value.items()}
    return [_with_plain_keys(one) for one in value] if isinstance(value, list) else value


MAX_RESULT_BYTES: Final = 4 * MAX_PAYLOAD_BYTES
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Result).decode


def decode_result(data: bytes) -> Result:
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the stored result cannot be read: {error}") from None
