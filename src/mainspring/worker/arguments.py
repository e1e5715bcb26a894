"""A handler's signature as a type: what a payload must hold, checked before the handler runs."""

import inspect
import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Literal, get_type_hints

import msgspec

from ..model.errors import InvalidInput
from .context import Context

Codec = Literal["json", "msgpack"]
CODECS: Final = ("json", "msgpack")
_EMPTY: Final = frozenset({b"null", b"{}", b""})
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")


class WrongArguments(ValueError):
    """A payload that does not fit the signature; the message names the argument."""


class Arguments:
    """Reads payloads for one function, and writes them for who puts its tasks."""

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
        """The arguments to call with. JSON, or msgpack where the payload is the caller's own bytes."""
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
        """The payload of a call: checked here too, so that the caller hears of a mistake and not a dead letter."""
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
        """msgspec's words with its path turned into the name of the argument."""
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
    # The default as it is, also a mutable one: a function shares it between calls, and so does this.
    default = parameter.default
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)
