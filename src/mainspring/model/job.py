"""A job that a worker has taken from a queue, how it ended, and its stored result."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from .delivery import Body, Dead, Done, Response, Retry, bytes_from_fields, bytes_to_fields
from .errors import InvalidInput
from .limits import MAX_PAYLOAD_BYTES
from .text import describe

if TYPE_CHECKING:
    from .run import Run


class Job(msgspec.Struct, gc=False):
    """One entry of a queue's stream, taken by one worker."""

    partition: int
    queue: str
    entry: bytes
    """Entry id in the queue's stream."""
    idh: bytes
    body: Body
    due_ms: int
    original_due_ms: int
    """Due time of the first attempt; part of the idempotency key."""
    deliveries: int = 1
    """Number of times it was taken: more than one if a worker died while running it."""
    claim: bytes = b""
    """The worker's claim: the task's address, then the stream entry, queue, worker and nonce."""

    @property
    def id(self) -> str:
        return self.body.id or self.idh.hex()

    @property
    def key(self) -> tuple[int, bytes]:
        """Key among all jobs in hand: claims are unique only within a partition."""
        return self.partition, self.claim


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """The job was cancelled while it ran, and has stopped."""


@dataclass(slots=True)
class End:
    """How a job ended, after the retry policy was applied: a `Retry` carries its `after_ms`."""

    job: Job
    outcome: Done | Retry | Dead | JobCancelled
    result: bytes | None = None
    """The encoded result to store for waiting callers, for `keep_ms`."""
    result_ttl_ms: int = 0
    run_end: bytes | None = None
    """Record of a schedule's run, stored under the schedule's name."""
    runs: "tuple[Run, ...]" = ()
    """What the history keeps of the attempt, written in the same step."""


Ending = Literal["done", "dead", "cancelled"]


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output of a command; of long output the beginning and the end are stored."""

    exit_code: int | None = None
    """None if the command never ran; negative if a signal ended it: minus the signal's number."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    """Bytes written in all, including those that were not stored."""
    stderr_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes written in all."""
        return self.stdout_bytes + self.stderr_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = {"exit_code": self.exit_code}
        for name in ("stdout", "stderr"):
            fields |= bytes_to_fields(name, getattr(self, name)) | {f"{name}_bytes": getattr(self, f"{name}_bytes")}
        return fields

    @classmethod
    def from_dict(cls, answer: dict[str, Any]) -> "Output":
        """Read the output of a command as the HTTP API sends it."""
        out, err = bytes_from_fields("stdout", answer), bytes_from_fields("stderr", answer)
        return cls(answer["exit_code"], out, err, answer["stdout_bytes"], answer["stderr_bytes"])


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a task: the outcome of its last run."""

    ending: Ending
    value: Any = None
    reason: str = ""
    """Why the task is dead, or why its value could not be stored."""
    attempt: int = 1
    worker: str = ""
    """The worker that ran it, or the node that delivered it."""
    started_ms: int = 0
    ended_ms: int = 0
    target: str = ""
    due_ms: int = 0
    """When the first attempt was due: tells tasks of the same id apart."""
    log: tuple[str, ...] = ()
    output: Output | None = None
    response: Response | None = None
    """The webhook's response."""

    def encode(self) -> bytes:
        """Return the bytes to store. Never fails: a value that cannot be stored is replaced by the reason."""
        try:
            data = _encode(self)
        except BaseException as error:  # noqa: BLE001  # attributes of the value run the application's code
            return self._without(f"the handler's return value cannot be stored: {describe(error)}")
        if len(data) > MAX_RESULT_BYTES and self.value is not None:
            return self._without(f"the handler's return value is too large to store: {len(data)} bytes")
        return data

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; fields that this kind of run does not have are null."""
        fields = msgspec.structs.asdict(self)
        fields["value"] = self.json_value
        fields["output"] = None if self.output is None else self.output.as_dict()
        fields["response"] = None if self.response is None else self.response.as_dict()
        return fields

    @property
    def json_value(self) -> Any:
        """The value for JSON, where keys can only be texts and numbers."""
        return _with_plain_keys(self.value)

    @classmethod
    def from_dict(cls, answer: dict[str, Any]) -> "Result":
        """Read a result as the HTTP API sends it."""
        output, response = answer["output"], answer["response"]
        return cls(
            **{name: answer[name] for name in cls.__struct_fields__ if name in answer}
            | {
                "log": tuple(answer["log"]),
                "output": None if output is None else Output.from_dict(output),
                "response": None if response is None else Response.from_dict(response),
            }
        )

    def _without(self, reason: str) -> bytes:
        rest = msgspec.structs.replace(self, value=None, reason=reason)
        try:
            return _encode(rest)
        except ValueError:  # it contains a text that is not valid Unicode
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
