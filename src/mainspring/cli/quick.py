"""Plain values of options and arguments, read here: the library's own way loads more than most commands need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import typer

_CHECKED: Final = ("parser", "exists", "writable", "resolve_path", "path_type")
_READ: Final[dict[Any, Callable[[str], Any]]] = {str: str, int: int, float: float, Path: Path}


def quicken(command: Any) -> Any:
    """Let a command, and those below it, read plain texts, numbers and paths by themselves.

    Whatever is not plain (and whatever is wrong: its words are good) goes the library's way.
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
    """What its texts are read as; None where there is more to check than that."""
    descriptor: Any = getattr(parameter, "type_descriptor", None)
    about = getattr(descriptor, "parameter_info", None)
    if about is None or any(getattr(about, name, None) for name in _CHECKED) or (about.min, about.max) != (None, None):
        return None
    return descriptor.annotation


class _Reader:
    """In the place of one parameter's `process_value`."""

    def __init__(self, parameter: Any, kind: Any, library: Callable[[Any, Any], Any]) -> None:
        self._parameter = parameter
        self._many = parameter.multiple or parameter.nargs == -1
        inner = get_args(kind)[0] if get_origin(kind) is list else None
        self._read = _READ.get(inner if self._many else kind)
        self._library = library

    def __call__(self, context: Any, value: Any) -> Any:
        if value == "" and self._read is Path:  # mostly a variable that is not set; it would mean this folder
            raise typer.BadParameter("it is empty; name a path", context, self._parameter)
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
            return False, None
