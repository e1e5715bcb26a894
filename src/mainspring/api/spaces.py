"""The namespaces that one API serves, and group commit: requests that arrive together are written together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from ..client.client import Client
from ..model.errors import Conflict, MainspringError, NotConfirmed, StoreError
from ..model.task import Handle, OnConflict, Task
from ..node.node import Node
from .asgi import Problem, not_ready

log = logging.getLogger("mainspring.api")


MAX_GROUP: Final = 4096
"""Most tasks of one write."""

AT_ONCE: Final = 3
CROWD: Final = 24
"""While a write is in progress, this many waiting tasks begin another: their requests are parsed while the server
works. Tasks in a single write would also be answered together and come back together: callers, this process and the
server would each wait for the other two."""

Write = Callable[[Sequence[Task]], Awaitable[Sequence[Handle]]]


class Waiter(Protocol):
    """A waiter for a handle; a future is one."""

    def done(self) -> bool:
        """Return True if the waiter is gone."""
        ...

    def set_result(self, handle: Handle, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


_Waiting = tuple[Task, Waiter]


class Collector:
    """Answers each put once its task is stored. Under load batches grow by themselves; a single put does not wait."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[_Waiting] = []
        self._writers: set[asyncio.Task[None]] = set()
        self._under_way = 0
        """Writers that wait for the server, and one that may have just begun."""

    def put(self, task: Task) -> "asyncio.Future[Handle]":
        """Return a future of the task's handle, or of the error of its write."""
        answer: asyncio.Future[Handle] = asyncio.get_running_loop().create_future()
        self.add(task, answer)
        return answer

    def add(self, task: Task, waiter: Waiter) -> None:
        """Like `put`, but notifies a waiter that is not a future."""
        self._waiting.append((task, waiter))
        if not self._writers or len(self._waiting) >= CROWD:
            self._begin_another()

    def _begin_another(self) -> None:
        if len(self._writers) < AT_ONCE:
            writer = asyncio.create_task(self._run(), name="mainspring-collector")
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def _run(self) -> None:
        try:
            while waiting := len(self._waiting):
                parts = max(1, min(AT_ONCE - self._under_way, waiting // CROWD))
                size = min(MAX_GROUP, -(-waiting // parts))
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                if parts > 1:
                    self._begin_another()
                self._under_way += 1
                try:
                    await self._commit(batch)
                finally:
                    self._under_way -= 1
        finally:
            # Leave in the same step that found no waiter, so that the next caller starts another group.
            self._writers -= {asyncio.current_task()}

    async def _commit(self, batch: list[_Waiting]) -> None:
        try:
            handles = await self._write([task for task, _ in batch])
        except MainspringError as error:
            # The server failed. Any other error is about one task, and only that one may fail.
            stored = [*(error.handles or ()), *[None] * len(batch)]
            error.stored = 0  # it counts other callers' tasks
            for one, handle in zip(batch, stored, strict=False):
                if isinstance(error, StoreError) or len(batch) == 1:
                    _resolve_failed(one, handle, error)
                elif handle is None:
                    await self._commit([one])
                else:
                    _resolve(one, handle)
        except Exception as error:
            _fail(batch, error)  # a bug: the waiting callers must get an error
            log.exception("a write failed in an unexpected way")
        else:
            for one, handle in zip(batch, handles, strict=True):
                _resolve(one, handle)


def _resolve(one: _Waiting, handle: Handle) -> None:
    if not one[1].done():  # done already if the caller hung up
        one[1].set_result(handle)


def _resolve_failed(one: _Waiting, handle: Handle | None, error: MainspringError) -> None:
    """The write failed, but the task may have been stored, possibly at the requested durability."""
    if handle is None:
        _fail([one], error)
    elif isinstance(error, NotConfirmed) and handle.durability == "server":
        _fail([one], error.of(handle))
    else:
        _resolve(one, handle)


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)


MAX_SPACES: Final = 1_000
"""Other namespaces kept open: they share the node's connections, so each is only a table of key names."""


class Space:
    """One namespace: a client, and the collectors that group concurrent puts."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._collectors: dict[tuple[OnConflict, str, bool], Collector] = {}

    def collector(self, on_conflict: OnConflict, durability: str = "server", *, named: bool = True) -> Collector:
        """Return a collector. Tasks without ids have their own: repeating a failed group would put them twice."""
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
        # One refusal in a group must not undo or repeat the others: keep known ids and report those as refused.
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
    """Return the existing task, if only its durability could not be confirmed."""
    return next((one for one in error.handles or () if one is not None and one.outcome == "kept"), None)


def _exists(kept: Handle) -> Conflict:
    return Conflict(f"a task with id {kept.id!r} exists, due {kept.due_ms} ms")


def _writer(client: Client, on_conflict: OnConflict, durability: str) -> Write:
    async def write(tasks: Sequence[Task]) -> Sequence[Handle]:
        summary = await client.put_many(tasks, on_conflict=on_conflict, durability=durability, handles=True)
        return summary.handles or ()

    return write


class Spaces:
    """Opens namespaces on demand."""

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
        """Return an existing namespace; asking for a missing one does not create it."""
        home = self.home
        if namespace == self._node.config.namespace:
            return home
        if namespace not in self._others:
            store = await home.client.store.open_namespace(namespace)
            if store is None:
                raise no_such_namespace(namespace)
            if len(self._others) >= MAX_SPACES:
                self._others.clear()
            self._others[namespace] = Space(Client.over(store, timezone=self._node.config.timezone))
        return self._others[namespace]


def no_such_namespace(namespace: str) -> Problem:
    """Return the same problem for a missing namespace and for one that the key may not see."""
    problem = Problem("not-found", f"there is no namespace {namespace[:80]!r} for this key")
    # A client that asks for a task must not mistake this for an answer about the task.
    problem.members = {"missing": "namespace"}
    return problem
