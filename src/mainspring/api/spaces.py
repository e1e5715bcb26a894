"""The namespaces one API serves: its node's own, and those on the same servers that a key may reach too."""

from collections.abc import Sequence
from typing import Final

from ..client import Client
from ..model.errors import Conflict, NotConfirmed
from ..model.task import Handle, OnConflict, Task
from ..node import Node
from ..store.neighbour import neighbour
from .collector import Collector, Write
from .problems import Problem, not_ready

MOST: Final = 1_000
"""Neighbours kept open: they share the node's connections, so each is only a table of key names."""


class Space:
    """One namespace: a client, and the collectors in which concurrent puts travel together."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._collectors: dict[tuple[OnConflict, str, bool], Collector] = {}

    def collector(self, on_conflict: OnConflict, durability: str = "server", *, named: bool = True) -> Collector:
        """Tasks without ids travel apart: a group that is tried again one by one would put them twice."""
        found = self._collectors.get((on_conflict, durability, named))
        if found is None:
            made = Collector(_writer(self.client, on_conflict, durability))
            found = self._collectors[on_conflict, durability, named] = made
        return found

    async def put(self, task: Task, on_conflict: OnConflict, durability: str) -> Handle:
        if task.id is None:
            return await self.collector("keep", durability, named=False).put(task)
        if on_conflict != "reject":
            return await self.collector(on_conflict, durability).put(task)
        # In a group one refusal must not undo or repeat the others: what is known is kept, and told as refused.
        try:
            handle = await self.collector("keep", durability).put(task)
        except NotConfirmed as error:
            if (kept := kept_in(error)) is not None:
                raise _exists(kept) from None
            raise
        if handle.outcome == "kept":
            raise _exists(handle)
        return handle


def kept_in(error: NotConfirmed) -> Handle | None:
    """The task that was there before, where that is all that could not be confirmed."""
    return next((one for one in error.handles or () if one is not None and one.outcome == "kept"), None)


def _exists(kept: Handle) -> Conflict:
    return Conflict(f"a task with id {kept.id!r} exists, due {kept.due_ms} ms")


def _writer(client: Client, on_conflict: OnConflict, durability: str) -> Write:
    async def write(tasks: Sequence[Task]) -> Sequence[Handle]:
        summary = await client.put_many(tasks, on_conflict=on_conflict, durability=durability, handles=True)
        return summary.handles or ()

    return write


class Spaces:
    """Opens namespaces when they are asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._home: Space | None = None
        self._others: dict[str, Space] = {}

    @property
    def home(self) -> Space:
        client = self._node.client
        if client is None:
            raise not_ready("the node is starting or stopping")
        if self._home is None or self._home.client is not client:
            self._home = Space(client)
            self._others.clear()
        return self._home

    async def find(self, namespace: str) -> Space:
        """A namespace that exists; one that does not is not made by asking for it."""
        home = self.home
        if namespace == self._node.config.namespace:
            return home
        if namespace not in self._others:
            store = await neighbour(home.client.store, namespace)
            if store is None:
                raise no_such_namespace(namespace)
            if len(self._others) >= MOST:
                self._others.clear()
            config = self._node.config
            client = Client.over(store, dedupe_window=f"{config.dedupe_window_s}s", timezone=config.timezone)
            self._others[namespace] = Space(client)
        return self._others[namespace]


def no_such_namespace(namespace: str) -> Problem:
    """The same for one that is not there and one that the key may not see."""
    problem = Problem("not-found", f"there is no namespace {namespace[:80]!r} for this key")
    # Who asks for a task must not take the answer for one about the task.
    problem.members = {"missing": "namespace"}
    return problem
