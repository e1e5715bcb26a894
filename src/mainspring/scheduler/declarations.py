"""What a program declares before it starts: handlers, commands, schedules, and the clients their tasks go through."""

import asyncio
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from ..config.config import Config
from ..model.errors import InvalidInput
from ..model.retry import RetryPolicy, check_against
from ..model.schedule.definition import Definition, check_definition, shortest_interval_ms
from ..model.schedule.input import SOURCE, ScheduleOptions, TimedOptions, Timetable, define
from ..model.shared_settings import DEDUPE_WINDOW
from ..model.targets.command import Command, read_command
from ..model.targets.names import NEEDS_KAFKA, shown_target
from ..model.targets.webhook import NEEDS, is_web
from ..model.task import Handle, OnConflict
from ..model.times import Delay, When, instant_ms
from ..node.schedule_lint import Performer, Terms, terms_of
from ..worker.command import CommandWork
from ..worker.context import Context
from ..worker.handler import Codec, Handler, Registry

if TYPE_CHECKING:
    from ..client.client import Client
    from ..client.sync import SyncClient
    from ..store.embedded import EmbeddedServer
    from ..store.redis.servers import LinkOptions

log = logging.getLogger("mainspring.scheduler")


class _Options(TypedDict):
    namespace: str
    partitions: int | None
    dedupe_window: str | None
    max_payload_bytes: int | None
    options: "LinkOptions"
    timezone: str


def _options(config: Config) -> _Options:
    """Return the client options in the settings."""
    return {
        "namespace": config.namespace,
        "partitions": config.partitions,
        "dedupe_window": config.shared.get(DEDUPE_WINDOW),
        "max_payload_bytes": config.max_payload_bytes,
        "options": config.links,
        "timezone": config.timezone,
    }


_ALL: "weakref.WeakSet[Connections]" = weakref.WeakSet()


class Connections:
    """One client for all threads, and one for each event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        _ALL.add(self)
        self._opening = threading.Lock()
        self._sync: tuple[int, SyncClient] | None = None
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()
        self._lent: weakref.WeakSet[Client] = weakref.WeakSet()
        self._embedded: EmbeddedServer | None = None
        self._url_of_node: str | None = None

    def _renew_locks(self) -> None:
        """Make new locks in the child of a fork: the thread of the parent that held one does not exist here."""
        self._opening = threading.Lock()

    def sync_client(self) -> "SyncClient":
        """One for all threads of this process."""
        from ..client.sync import SyncClient

        with self._opening:
            if self._sync is None or self._sync[0] != os.getpid():
                self._sync = (os.getpid(), SyncClient(self._url(), **_options(self.config)))
            return self._sync[1]

    async def client(self) -> "Client":
        """Return the client of this event loop; within a worker, the worker's own."""
        from ..client.client import Client

        loop = asyncio.get_running_loop()
        with self._opening:
            known = self._async.get(loop)
        if known is None:
            url = await asyncio.to_thread(self._locked_url)
            made = Client(url, **_options(self.config))
            with self._opening:
                known = self._async.setdefault(loop, made)
        await known.open()
        return known

    def _lend(self, client: "Client") -> None:
        """Use this client in the running event loop; its owner closes it."""
        with self._opening:
            self._async[asyncio.get_running_loop()] = client
            self._lent.add(client)

    def _locked_url(self) -> str:
        with self._opening:
            return self._url()

    def _url(self) -> str:
        url = self.config.redis_url or self._url_of_node
        if url is not None:
            return url
        from ..store import embedded

        if self._embedded is None:
            self._embedded = embedded.start(self.config.data_dir, memory_bytes=self.config.embedded_memory_bytes)
        return self._embedded.url

    def close(self) -> None:
        """Close the clients that `put` has opened."""
        with self._opening:
            known, self._sync = self._sync, None
            embedded, self._embedded = self._embedded, None
        if known is not None and known[0] == os.getpid():
            known[1].close()
        if embedded is not None:
            embedded.stop()

    async def aclose(self) -> None:
        """Close what `aput` has opened in this event loop, and everything else."""
        with self._opening:
            client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None and client not in self._lent:
            await client.aclose()
        await asyncio.to_thread(self.close)


def _renew_locks_in_a_forked_child() -> None:
    for one in list(_ALL):
        one._renew_locks()


os.register_at_fork(after_in_child=_renew_locks_in_a_forked_child)


C = ParamSpec("C")
"""Arguments of a direct call, with the Context."""
P = ParamSpec("P")
"""Arguments of a task, without a leading Context."""
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Clients(Protocol):
    """Provides the clients through which a handler's tasks are put."""

    def sync_client(self) -> "SyncClient": ...

    async def client(self) -> "Client": ...


class TaskOptions(TypedDict, total=False):
    """Options of `now`, `after` and `at` besides the time. `Client.put` explains each."""

    id: str | None
    lane: str | None
    expires: When | Delay | None
    retry: RetryPolicy | str | None
    retries: int | None
    timeout: Delay | None
    on_conflict: OnConflict
    durability: str


@dataclass(frozen=True, slots=True)
class Order(Generic[P, R_co]):
    """When and how a task is put; `put` and `aput` take the handler's arguments."""

    handler: Handler
    clients: Clients
    options: Mapping[str, Any]

    @overload
    def put(self: "Order[P, Coroutine[Any, Any, T]]", *args: P.args, **kwargs: P.kwargs) -> Handle[T]: ...

    @overload
    def put(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]: ...

    def put(self, *args: P.args, **kwargs: P.kwargs) -> Handle[Any]:
        """Put the task with these arguments of the handler; for programs without an event loop.

        Returns a handle: its `id`, its due time, and `result()`, which waits for what the handler returns.
        Raises InvalidInput for arguments that the handler does not take, and everything that `Client.put` raises.
        """
        return self.clients.sync_client().put(self.handler.target, self._payload(args, kwargs), **self.options)

    @overload
    async def aput(
        self: "Order[P, Coroutine[Any, Any, T]]", *args: P.args, **kwargs: P.kwargs
    ) -> Handle[Coroutine[Any, Any, T]]: ...

    @overload
    async def aput(self, *args: P.args, **kwargs: P.kwargs) -> Handle[Coroutine[Any, Any, R_co]]: ...

    async def aput(self, *args: P.args, **kwargs: P.kwargs) -> Handle[Coroutine[Any, Any, Any]]:
        """Put the task within an event loop: as `put`, and `result()` of the handle is awaited."""
        payload = self._payload(args, kwargs)
        client = await self.clients.client()
        return await client.put(self.handler.target, payload, **self.options)

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.handler.arguments.write(args, kwargs, self.handler.codec)


class Function(Generic[C, P, R]):
    """A handler. Called, it is the function itself. `now`, `after` and `at` put a task that runs it on a worker."""

    def __init__(self, function: Callable[C, R], handler: Handler, clients: Clients) -> None:
        self.handler = handler
        self._function = function
        self._clients = clients
        functools.update_wrapper(self, function)

    def __call__(self, *args: C.args, **kwargs: C.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<handler {self.handler.target}>"

    def now(self, **options: Unpack[TaskOptions]) -> Order[P, R]:
        """Run it as soon as a worker is free: `send.now().put(order_id=42)`."""
        return self._order({}, options)

    def after(self, delay: Delay, **options: Unpack[TaskOptions]) -> Order[P, R]:
        """Run it after a delay, a text or a timedelta: `send.after("30m", id="order-42").put(order_id=42)`.

        The options are those of `Client.put`: id, lane, expires, retries, retry, timeout, on_conflict, durability.
        """
        return self._order({"after": delay}, options)

    def at(self, when: When, **options: Unpack[TaskOptions]) -> Order[P, R]:
        """Run it at a time: an aware datetime, ISO 8601 text with an offset, or epoch milliseconds."""
        return self._order({"at": when}, options)

    def _order(self, when: dict[str, Any], options: TaskOptions) -> Order[P, R]:
        for name in options:
            if name not in TaskOptions.__annotations__:
                known = ", ".join(TaskOptions.__annotations__)
                raise TypeError(f"handler {self.handler.name}: unexpected keyword argument {name!r}; give {known}")
        return Order(self.handler, self._clients, {**options, **when})


class Decorator(Protocol):
    """Turns a function into a handler."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> Function[Concatenate[Context, P], P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Function[P, P, R]: ...


class HandlerScheduleOptions(ScheduleOptions, total=False):
    """Options of `cron`, `every` and `once` besides their times."""

    args: Sequence[Any]
    """Arguments of the handler, by position."""
    kwargs: Mapping[str, Any] | None
    """Arguments of the handler, by name."""


ScheduledTarget = Callable[..., Any] | str
"""A handler, a function that becomes one, or a target such as `https://…`."""


def _warn_of_long_runs(definition: Definition, terms: Terms, now_ms: int) -> None:
    """Warn if retries may make a run outlast the interval: the next run would then be left out.

    Nobody asked for the default retries, so `schedule lint` alone reports those.
    """
    interval_ms = shortest_interval_ms(definition, now_ms)
    if interval_ms is None or definition.slots.recurrence.waits_for_end:
        return
    if terms.policy == RetryPolicy() and terms.timeout_ms <= interval_ms:
        return
    try:
        check_against(terms.policy, interval_ms, terms.timeout_ms)
    except InvalidInput as error:
        log.warning("schedule %r of %s: %s", definition.name, shown_target(definition.target), error)


class Declarations(Connections):
    """Handlers and schedules by name. Safe for use by any number of threads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lock = threading.RLock()
        self.registry = Registry(CommandWork(name, one) for name, one in config.commands.items())
        self.timetable = Timetable()

    def _renew_locks(self) -> None:
        super()._renew_locks()
        self._lock = threading.RLock()

    def _check_stopped(self) -> None:
        """Raise SchedulerRunning if it is too late to declare something."""
        raise NotImplementedError

    # -- handlers and commands ---------------------------------------------------------------------------

    @overload
    def handler(self, function: Callable[Concatenate[Context, P], R], /) -> Function[Concatenate[Context, P], P, R]: ...

    @overload
    def handler(self, function: Callable[P, R], /) -> Function[P, P, R]: ...

    @overload
    def handler(
        self,
        *,
        queue: str = "default",
        name: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | str | None = None,
        timeout: Delay | None = None,
        result_ttl: Delay = "0s",
        codec: Codec = "json",
    ) -> Decorator: ...

    def handler(
        self,
        function: Callable[..., Any] | None = None,
        *,
        queue: str = "default",
        name: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | str | None = None,
        timeout: Delay | None = None,
        result_ttl: Delay = "0s",
        codec: Codec = "json",
    ) -> Any:
        """Make a function a handler: `@scheduler.handler`, or `@scheduler.handler(queue="mail", retries=5)`.

        - `queue`: the queue whose workers run it; `name`: what tasks call it, else the function's name.
        - `retries`: further attempts after a failed first one; `retry`: a whole policy, such as "5 base=1s cap=1m".
        - `timeout`: how long one attempt may take, such as "30s".
        - `result_ttl`: how long what it returns is kept for `handle.result()`; "0s" keeps nothing.
        - `codec`: how arguments travel, "json" or "msgpack".

        A parameter annotated `Context` is given by the worker; all others are arguments of the task.
        Raises InvalidInput for wrong settings, and SchedulerRunning while the scheduler runs.
        """
        if function is not None and not callable(function):
            raise InvalidInput(f"handler({function!r}): settings go by name, such as handler(queue={function!r})")

        def declare(function: Callable[..., Any]) -> Function[..., ..., Any]:
            handler = Handler(
                function,
                queue=queue,
                name=name,
                retries=retries,
                retry=retry,
                timeout=timeout,
                result_ttl=result_ttl,
                codec=codec,
            )
            with self._lock:
                self._check_stopped()
                self.registry.add(handler)
            return Function(function, handler, self)

        return declare if function is None else declare(function)

    def command(self, name: str, argv: Sequence[str], **settings: Any) -> Command:
        """Name a program that workers may start, with the settings of a `[commands.<name>]` table: queue, timeout, env,
        …

        `argv` is the program and its arguments, no shell. Tasks run it by the target `command:<name>`. Raises
        InvalidInput.
        """
        command = read_command({"argv": argv if isinstance(argv, str) else list(argv), **settings})
        with self._lock:
            self._check_stopped()
            self.registry.add(CommandWork(name, command))
        return command

    @property
    def commands(self) -> Mapping[str, Command]:
        """The commands that were declared, by name."""
        with self._lock:
            return {work.name: work.command for work in self.registry if isinstance(work, CommandWork)}

    # -- schedules -------------------------------------------------------------------------------------------

    def register(
        self,
        name: str | None,
        target: ScheduledTarget,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[TimedOptions],
    ) -> Definition:
        """Declare a schedule with the fields of `client.schedules.add`: cron, every, timezone, overlap, misfire, …

        `target` is a handler, a function, which becomes one, or a target such as "https://…". A handler is called with
        `args` and `kwargs`, other targets get the `payload`. Without a `name` the schedule has the handler's.
        Raises InvalidInput for a wrong field and a name that is taken, SchedulerRunning while the scheduler runs.
        """
        with self._lock:
            self._check_stopped()
            if isinstance(target, str):
                if args or kwargs or name is None:
                    raise InvalidInput(f"a schedule for {target!r} needs a name, and has a payload, no arguments")
                return self._declare(define(name, **self._with_zone({**fields, "target": target})))
            return self._register_handler(name, target, args, kwargs or {}, fields)

    def _register_handler(
        self,
        name: str | None,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fields: Mapping[str, Any],
    ) -> Definition:
        known = self._handler_of(target)
        is_new = self.registry.find(known.target) is not known
        if "payload" in fields or "target" in fields:
            raise InvalidInput(f"schedule {name or known.name!r}: a handler gets args and kwargs, not a payload")
        payload = known.arguments.write(tuple(args), kwargs, known.codec)
        target_fields = {**fields, "target": known.target, "payload": payload}
        definition = define(name or known.name, **self._with_zone(target_fields))
        if is_new and not isinstance(target, Function):
            self.registry.add(known)  # a plain function becomes a handler here
        try:
            return self._declare(definition)
        except InvalidInput:
            if is_new and not isinstance(target, Function):
                self.registry.remove(known)
            raise

    def _handler_of(self, target: object) -> Handler:
        """Return the handler; for a plain function, the one it became or would become."""
        if isinstance(target, Function):
            return target.handler
        if not callable(target):
            raise InvalidInput(f"the target {target!r} is neither a handler nor a function nor a text such as 'log:'")
        made = Handler(target)
        there = self.registry.find(made.target)
        return there if isinstance(there, Handler) and there.function == target else made

    def _with_zone(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"timezone": self.config.timezone, **fields}

    def _declare(self, definition: Definition) -> Definition:
        if definition.pinned:
            raise InvalidInput(
                f"schedule {definition.name!r}: pinned is for edits in the store, which programs then leave"
            )
        definition = msgspec.structs.replace(definition, source=definition.source or SOURCE)
        now_ms = time.time_ns() // 1_000_000
        # Report a mistake here, not at the start. An ended schedule is no mistake: a program may outlive its schedules.
        if definition.end_ms is None or definition.end_ms > now_ms:
            check_definition(definition, now_ms)
        self.timetable.add(definition)
        self._warn_of_missing_parts(definition)
        if definition.overlap == "skip":
            _warn_of_long_runs(definition, self._terms_of(definition), now_ms)
        return definition

    def _warn_of_missing_parts(self, definition: Definition) -> None:
        """Warn only: the nodes that fire it may run elsewhere, with more packages installed."""
        scheme, _, name = definition.target.partition(":")
        spec = self.config.targets.get(name) if scheme == "target" else None
        address = definition.target if spec is None else spec.address
        package, needs = ("aiohttp", NEEDS) if is_web(address) else ("confluent_kafka", NEEDS_KAFKA)
        if address.startswith(("http:", "https:", "kafka:")) and find_spec(package) is None:
            log.warning("schedule %r of %s: %s", definition.name, shown_target(definition.target), needs)

    def policy_of(self, definition: Definition) -> RetryPolicy:
        """Return the retry policy of its runs: its own, or that of its handler, queue, target, or the settings."""
        return self._terms_of(definition).policy

    def _terms_of(self, definition: Definition) -> Terms:
        with self._lock:
            work = self.registry.find(definition.target)
        if work is None:
            return terms_of(definition, self.config)
        timeout_ms = None if work.timeout_s is None else round(work.timeout_s * 1000)
        return terms_of(definition, self.config, Performer(work.queue, work.retry, timeout_ms))

    def unregister(self, name: str | Callable[..., Any]) -> None:
        """Remove a declared schedule, or a handler with all of its schedules.

        The store is not changed: `client.schedules.remove(name)` ends a schedule for everybody.
        """
        with self._lock:
            self._check_stopped()
            if isinstance(name, str):
                self.timetable.remove(name)
                return
            handler = self._handler_of(name)
            self.registry.remove(handler)
            for definition in list(self.timetable):
                if definition.target == handler.target:
                    self.timetable.remove(definition.name)

    # -- shortcuts ---------------------------------------------------------------------------------------------

    @overload
    def cron(
        self,
        spec: str | Sequence[str],
        target: Callable[Concatenate[Context, P], R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[Concatenate[Context, P], P, R]: ...

    @overload
    def cron(
        self,
        spec: str | Sequence[str],
        target: Callable[P, R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[P, P, R]: ...

    @overload
    def cron(
        self,
        spec: str | Sequence[str],
        target: str,
        *,
        name: str,
        payload: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> str: ...

    @overload
    def cron(
        self, spec: str | Sequence[str], *, name: str | None = None, **options: Unpack[HandlerScheduleOptions]
    ) -> Decorator: ...

    def cron(
        self,
        spec: str | Sequence[str],
        target: ScheduledTarget | None = None,
        *,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Run at the times of a cron line: `cron("0 9 * * MON-FRI", expire_order, name="morning")`, or as a decorator.

        `spec` is a line of five or six fields, an alias such as "@daily", or several of them. `target` is a handler, a
        function, which becomes one, or a target such as "https://…", which needs a `name`. Without a name the schedule
        has the handler's. Options are the fields of a schedule (timezone, overlap, misfire, retries, jitter, …) and
        `args` and `kwargs` for the handler. Returns the handler. Raises InvalidInput and SchedulerRunning.
        """
        return self._timed(target, name, {**options, "cron": spec})

    @overload
    def every(
        self,
        span: Delay,
        target: Callable[Concatenate[Context, P], R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[Concatenate[Context, P], P, R]: ...

    @overload
    def every(
        self,
        span: Delay,
        target: Callable[P, R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[P, P, R]: ...

    @overload
    def every(
        self, span: Delay, target: str, *, name: str, payload: Any = None, **options: Unpack[ScheduleOptions]
    ) -> str: ...

    @overload
    def every(
        self, span: Delay, *, name: str | None = None, **options: Unpack[HandlerScheduleOptions]
    ) -> Decorator: ...

    def every(
        self, span: Delay, target: ScheduledTarget | None = None, *, name: str | None = None, **options: Any
    ) -> Any:
        """Run at a fixed rate: `every("30s", poll)`, or as a decorator.

        `span` is a text such as "30s" or a timedelta; `start` says what it counts from. All else is as for `cron`.
        """
        return self._timed(target, name, {**options, "every": span})

    @overload
    def once(
        self,
        at: When,
        target: Callable[Concatenate[Context, P], R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[Concatenate[Context, P], P, R]: ...

    @overload
    def once(
        self,
        at: When,
        target: Callable[P, R],
        *,
        name: str | None = None,
        **options: Unpack[HandlerScheduleOptions],
    ) -> Function[P, P, R]: ...

    @overload
    def once(
        self, at: When, target: str, *, name: str, payload: Any = None, **options: Unpack[ScheduleOptions]
    ) -> str: ...

    @overload
    def once(self, at: When, *, name: str | None = None, **options: Unpack[HandlerScheduleOptions]) -> Decorator: ...

    def once(self, at: When, target: ScheduledTarget | None = None, *, name: str | None = None, **options: Any) -> Any:
        """Run at one time and never again, however many programs declare it and however often they start.

        `at` is an aware datetime, ISO 8601 text with an offset, or epoch milliseconds. All else is as for `cron`.
        """
        instant_ms(at, field="at")  # report a wrong time here, under the name that the caller used
        # No max_runs: its count outlives a new declaration, so a declaration for another time would never run.
        return self._timed(target, name, {**options, "every": "1d", "start": at, "end": at})

    def _timed(self, target: ScheduledTarget | None, name: str | None, details: dict[str, Any]) -> Any:
        def declare(function: ScheduledTarget) -> Any:
            with self._lock:
                definition = self.register(name, function, **details)
                if isinstance(function, (Function, str)):
                    return function
                handler = self.registry.find(definition.target)
                assert isinstance(handler, Handler)
                return Function(function, handler, self)

        return declare if target is None else declare(target)
