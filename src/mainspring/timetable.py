"""The schedules that a program declares."""

from collections.abc import Iterator
from typing import Final

from .model.errors import InvalidInput, NotFound
from .model.schedule import Definition

SOURCE: Final = "code"
"""Who looks after a schedule that is declared in code."""


class Timetable:
    """Declared schedules by name. Whoever shares one among threads locks it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}

    def add(self, definition: Definition) -> None:
        if definition.name in self._by_name:
            raise InvalidInput(f"a schedule {definition.name!r} is declared twice; give one of them another name")
        self._by_name[definition.name] = definition

    def remove(self, name: str) -> Definition:
        if name not in self._by_name:
            raise NotFound(f"there is no schedule {name!r} declared here")
        return self._by_name.pop(name)

    def find(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)
