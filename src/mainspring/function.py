"""A handler as its module sees it: a function to call, and a task to put."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from .model.retry import RetryPolicy
from .model.task import Handle, OnConflict
from .model.times import Delay, When
from .worker.handler import Handler

if TYPE_CHECKING:
    from .client import Client
    from .sync import SyncClient

P = ParamSpec("P")
R = TypeVar("R")


class Clients(Protocol):
    """Where the tasks of a handler are put."""

    def sync_client(self) -> "SyncClient": ...

    async def client(self) -> "Client": ...


@dataclass(frozen=True, slots=True)
class Order:
    """When and how a task is put; `put` and `aput` take the handler's arguments."""

    handler: Handler
    clients: Clients
    at: When | None
    after: Delay | None
    id: str | None = None
    lane: str | None = None
    expires: When | Delay | None = None
    retry: RetryPolicy | str | None = None
    timeout: Delay | None = None
    on_conflict: OnConflict = "keep"
    durability: str = "server"

    def put(self, *args: Any, **kwargs: Any) -> Handle:
        """Check the arguments, put the task, return its handle. For programs without an event loop."""
        return self.clients.sync_client().put(self.handler.target, self._payload(args, kwargs), **self._rest())

    async def aput(self, *args: Any, **kwargs: Any) -> Handle:
        """The same within an event loop; the result of its handle is awaited."""
        payload = self._payload(args, kwargs)
        client = await self.clients.client()
        return await client.put(self.handler.target, payload, **self._rest())

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.handler.arguments.write(args, kwargs, self.handler.codec)

    def _rest(self) -> dict[str, Any]:
        names = ("at", "after", "id", "lane", "expires", "retry", "timeout", "on_conflict", "durability")
        return {name: getattr(self, name) for name in names}


class Function(Generic[P, R]):
    """Called, it is the function itself. `now`, `after` and `at` put a task that runs it on a worker."""

    def __init__(self, function: Callable[P, R], handler: Handler, clients: Clients) -> None:
        self.handler = handler
        self._function = function
        self._clients = clients
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<handler {self.handler.target}>"

    def now(self, **how: Any) -> Order:
        """As soon as a worker is free."""
        return Order(self.handler, self._clients, None, None, **how)

    def after(self, delay: Delay, **how: Any) -> Order:
        """So long from now: `after("30m", id="order-42").put(order_id=42)`."""
        return Order(self.handler, self._clients, None, delay, **how)

    def at(self, when: When, **how: Any) -> Order:
        """At a time: an aware datetime, ISO 8601 text, or epoch milliseconds."""
        return Order(self.handler, self._clients, when, None, **how)
