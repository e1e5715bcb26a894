"""What this worker can run, by target."""

from collections.abc import Iterable, Iterator

from ..model.errors import InvalidInput, NotFound
from .work import Work


class Registry:
    """Handlers and commands, each under the target that its tasks carry."""

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
