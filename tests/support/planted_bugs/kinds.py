"""What a planted bug is made of: exact changes of the text of a script or function, and other functions."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mainspring.store.scripts import rewrite, source_of


class Change(Protocol):
    """One small change of the code. It is made and taken back in this process only."""

    def make(self) -> None: ...

    def take_back(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Another text in a Lua file. The old one must stand there exactly once: a bug in a place that is gone is none."""

    file: str
    old: str
    new: str

    def make(self) -> None:
        text = source_of(self.file)
        found = text.count(self.old)
        if found != 1:
            raise LookupError(
                f"{self.file}.lua holds this text {found} times, not once: {self.old!r};"
                " the script has changed: write the planted bug anew for what it is now"
            )
        rewrite(self.file, text.replace(self.old, self.new))

    def take_back(self) -> None:
        rewrite(self.file, None)


class Patch:
    """Another function (or constant) in the place of one in a class or module, made from the one that was there."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._original: Any = None

    def make(self) -> None:
        if self._name not in vars(self._owner):
            raise LookupError(
                f"{self._owner.__name__} has no {self._name} any more: write the planted bug anew for what it has now"
            )
        self._original = vars(self._owner)[self._name]
        setattr(self._owner, self._name, self._make(self._original))

    def take_back(self) -> None:
        setattr(self._owner, self._name, self._original)


def with_text(old: str, new: str) -> Callable[[Any], Any]:
    """For a `Patch`: the function that was there, with another text in one place of it."""

    def make(function: Any) -> Any:
        text = textwrap.dedent(inspect.getsource(function))
        found = text.count(old)
        if found != 1:
            raise LookupError(
                f"{function.__qualname__} holds this text {found} times, not once: {old!r};"
                " the function has changed: write the planted bug anew for what it is now"
            )
        made: dict[str, Any] = {}
        code = compile(text.replace(old, new), inspect.getfile(function), "exec")
        exec(code, function.__globals__, made)  # noqa: S102
        return made[function.__name__]

    return make


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug that somebody could write: its name, what was forgotten, and the changes that make it."""

    name: str
    bug: str
    changes: tuple[Change, ...]
