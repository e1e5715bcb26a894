"""What a worker can run: handlers, their arguments as types, and the registry by target."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, Literal, get_type_hints

import msgspec

from ..model.errors import InvalidInput, NotFound
from ..model.job import Output
from ..model.retry import RetryPolicy, policy_of
from ..model.targets.names import check_queue
from ..model.times import Delay, delay_ms, timeout_ms
from .context import Context


class Work:
    """A kind of task: its function, the source of its tasks, and the rules for its runs."""

    is_async = False
    obeys = False
    """True if it ends by itself soon after its context is `cancelled`: its end is then awaited."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        queue: str,
        target: str,
        retry: RetryPolicy | None,
        timeout_ms: int | None,
        result_ttl_ms: int,
    ) -> None:
        self.function = function
        self.name = name
        self.queue = check_queue(queue)
        self.target = target
        self.retry = retry
        """Retry policy; None means the worker's own."""
        self.timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self.result_ttl_ms = result_ttl_ms

    def read(self, context: Context) -> dict[str, Any]:
        """Return the arguments of a call; raise WrongArguments if the payload does not fit."""
        raise NotImplementedError


class Outputs(Exception):
    """The output of a failed command, and why it failed."""

    def __init__(self, reason: str, output: Output, brief: str | None = None) -> None:
        super().__init__(reason)
        self.output = output
        self.brief = brief
        """The reason without the command's output, for logs."""


Codec = Literal["json", "msgpack"]
CODECS: Final = ("json", "msgpack")
_EMPTY: Final = frozenset({b"null", b"{}", b""})
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")


class WrongArguments(ValueError):
    """A payload that does not fit the signature; the message names the argument."""


class Arguments:
    """Reads and writes payloads for one function's signature."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        signature, hints = inspect.signature(function), _hints(function, name)
        parameters = [_checked(one, name) for one in signature.parameters.values()]
        contexts = [one.name for one in parameters if hints.get(one.name) is Context]
        if len(contexts) > 1:
            raise InvalidInput(f"handler {name!r} asks for its Context twice: {', '.join(contexts)}")
        self.context_name = contexts[0] if contexts else None
        asked = [one for one in parameters if one.name != self.context_name]
        self._signature = signature.replace(parameters=asked)
        self._names = tuple(one.name for one in asked)
        self._optional = all(one.default is not one.empty for one in asked)
        self._type = msgspec.defstruct(
            "Arguments", [_field(one, hints, name) for one in asked], kw_only=True, forbid_unknown_fields=True
        )
        self._values = attrgetter(*self._names) if self._names else None
        self._from_json = msgspec.json.Decoder(self._type)
        self._from_msgpack = msgspec.msgpack.Decoder(self._type)

    def read(self, payload: bytes, *, raw: bool) -> dict[str, Any]:
        """Return the arguments of a call. The payload is JSON, or msgpack if it is the caller's own bytes."""
        if payload in _EMPTY and self._optional:
            return {}
        try:
            found = (self._from_msgpack if raw else self._from_json).decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WrongArguments(self._spoken(error)) from None
        if self._values is None:
            return {}
        values = self._values(found)
        return dict(zip(self._names, values, strict=True)) if len(self._names) > 1 else {self._names[0]: values}

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec) -> Any:
        """Return the payload of a call. Check arguments here too, so that the caller sees the error."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidInput(f"handler {self._name!r}: {error}") from None
        try:
            data = msgspec.msgpack.encode(given) if codec == "msgpack" else msgspec.json.encode(given)
            self.read(data, raw=codec == "msgpack")
        except WrongArguments as error:
            raise InvalidInput(str(error)) from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"handler {self._name!r}: an argument cannot be written as {codec}: {error}") from None
        return data if codec == "msgpack" else msgspec.Raw(data)

    def _spoken(self, error: Exception) -> str:
        """Return msgspec's message with its path replaced by the argument's name."""
        text = str(error)
        where = _PLACE.search(text)
        if where is None or not where[1]:
            return f"arguments of handler {self._name!r}: {_PLACE.sub('', text)}"
        return f"argument {where[1]} of handler {self._name!r}: {_PLACE.sub('', text)}"


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as error:
        raise InvalidInput(f"handler {name!r}: {error}; annotations must be known where the handler is made") from None


def _checked(parameter: inspect.Parameter, name: str) -> inspect.Parameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise InvalidInput(
            f"handler {name!r}: parameter {parameter} has no name that a payload could use; "
            "a handler takes named arguments only"
        )
    return parameter


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> tuple[str, Any, Any]:
    kind = hints.get(parameter.name, Any)
    try:
        readable = not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
    except TypeError:
        readable = False
    if not readable:
        raise InvalidInput(
            f"handler {name!r}: argument {parameter.name} is a {kind!r}, which no payload can hold; "
            "use plain types, dataclasses or msgspec Structs"
        )
    if parameter.default is parameter.empty:
        return parameter.name, kind, msgspec.field()
    # Use the default itself, even a mutable one: a function shares it between calls, too.
    default = parameter.default
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)


_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Handler(Work):
    """A function with its queue and rules. Coroutine functions run on the loop, others in threads."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        queue: str = "default",
        name: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | str | None = None,
        timeout: Delay | None = None,
        result_ttl: Delay = "0s",
        codec: Codec = "json",
    ) -> None:
        called: str = name if name is not None else getattr(function, "__name__", "")
        if not _NAME.fullmatch(called):
            raise InvalidInput(f"the name of a handler is {called!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(f"handler {called!r} is a generator, which is never iterated; return, do not yield")
        super().__init__(
            function,
            name=called,
            queue=queue,
            target=f"queue:{queue}/{called}",
            retry=policy_of(retries, retry),
            timeout_ms=None if timeout is None else timeout_ms(timeout),
            result_ttl_ms=delay_ms(result_ttl, field="result_ttl"),
        )
        if codec not in CODECS:
            raise InvalidInput(f"codec is {codec!r}; use one of {', '.join(CODECS)}")
        self.codec: Codec = codec
        self.is_async = inspect.iscoroutinefunction(function)
        self.arguments = Arguments(function, f"{queue}/{called}")

    def read(self, context: Context) -> dict[str, Any]:
        body = context.job.body
        found = self.arguments.read(body.payload, raw=body.raw)
        if self.arguments.context_name is not None:
            found[self.arguments.context_name] = context
        return found


class Registry:
    """Handlers and commands by the target that their tasks carry."""

    def __init__(self, works: Iterable[Work] = ()) -> None:
        self._by_target: dict[str, Work] = {}
        for work in works:
            self.add(work)

    def add(self, work: Work) -> None:
        if work.target in self._by_target:
            raise InvalidInput(f"{work.target} is registered twice; give one of them another name")
        self._by_target[work.target] = work

    def remove(self, work: Work) -> None:
        if self._by_target.get(work.target) is not work:
            raise NotFound(f"{work.target} is not registered here")
        del self._by_target[work.target]

    def find(self, target: str) -> Work | None:
        return self._by_target.get(target)

    @property
    def queues(self) -> list[str]:
        return sorted({work.queue for work in self._by_target.values()})

    def __iter__(self) -> Iterator[Work]:
        return iter(self._by_target.values())

    def __len__(self) -> int:
        return len(self._by_target)
