"""`SyncClient`: the calls of `Client` for programs without an event loop."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, cast

from ..model.errors import MainspringError
from ..model.schedule.view import ScheduleView
from ..model.task import Handle
from .client import Client
from .dead_letters import DeadLetters
from .schedules import Schedules

P = ParamSpec("P")
T = TypeVar("T")
Waiting = TypeVar("Waiting", bound="SyncClient | _Part")
Calls = TypeVar("Calls")
"""Calls on one kind of thing, such as schedules."""


class BlockingCall(Protocol):
    """Runs a coroutine with the client in its own thread, and waits for it."""

    def __call__(self, work: Callable[[Client], Coroutine[Any, Any, T]], /) -> T: ...


class _Part:
    """Part of a SyncClient."""

    def __init__(self, wait: BlockingCall) -> None:
        self._wait = wait


def _waiting_for(
    part: Callable[[Client], Calls], method: Callable[Concatenate[Calls, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[_Part, P], T]:
    """Return the blocking form of one of the calls: same arguments, result and documentation."""

    @functools.wraps(method)
    def call(self: _Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(lambda client: method(part(client), *args, **kwargs))

    return call


def _answering(
    method: Callable[Concatenate[Waiting, P], Handle[Coroutine[Any, Any, Any]]],
) -> Callable[Concatenate[Waiting, P], Handle]:
    """Return a blocking call whose handle asks in a blocking way, too."""

    @functools.wraps(method)
    def call(self: Waiting, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        handle = method(self, *args, **kwargs)
        ask, cancel = handle.__dict__["ask"], handle.__dict__["cancel"]
        return handle._asking(
            lambda timeout: self._wait(lambda _: ask(timeout)), lambda: self._wait(lambda _: cancel())
        )

    return call


def _schedules(client: Client) -> Schedules:
    return client.schedules


def _dead(client: Client) -> DeadLetters:
    return client.dead


async def _all(schedules: Schedules) -> list[ScheduleView]:
    """Return every schedule, in no order."""
    return [view async for view in schedules.all()]


class SyncSchedules(_Part):
    """`client.schedules` of a SyncClient."""

    add = _waiting_for(_schedules, Schedules.add)
    add_many = _waiting_for(_schedules, Schedules.add_many)
    edit = _waiting_for(_schedules, Schedules.edit)
    get = _waiting_for(_schedules, Schedules.get)
    get_many = _waiting_for(_schedules, Schedules.get_many)
    pause = _waiting_for(_schedules, Schedules.pause)
    resume = _waiting_for(_schedules, Schedules.resume)
    trigger = _answering(_waiting_for(_schedules, Schedules.trigger))
    backfill = _waiting_for(_schedules, Schedules.backfill)
    remove = _waiting_for(_schedules, Schedules.remove)
    history = _waiting_for(_schedules, Schedules.history)
    rollback = _waiting_for(_schedules, Schedules.rollback)
    diff = _waiting_for(_schedules, Schedules.diff)
    all = _waiting_for(_schedules, _all)
    list = _waiting_for(_schedules, Schedules.list)


class SyncDeadLetters(_Part):
    """`client.dead` of a SyncClient."""

    get = _waiting_for(_dead, DeadLetters.get)
    replay = _waiting_for(_dead, DeadLetters.replay)
    replay_many = _waiting_for(_dead, DeadLetters.replay_many)
    drop = _waiting_for(_dead, DeadLetters.drop)
    drop_many = _waiting_for(_dead, DeadLetters.drop_many)
    export = _waiting_for(_dead, DeadLetters.export)
    count = _waiting_for(_dead, DeadLetters.count)
    list = _waiting_for(_dead, DeadLetters.list)


CLOSE_S: Final = 2.0
"""Seconds for calls of other threads that are in progress when the client is closed."""


def _same_arguments(
    as_of: Callable[P, Client],
) -> Callable[[Callable[..., None]], Callable[Concatenate["SyncClient", P], None]]:
    del as_of  # only its type matters
    return lambda init: init


def _waiting(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncClient", P], T]:
    """Return the blocking form of one of Client's methods: same arguments, result and documentation."""

    @functools.wraps(method)
    def call(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(lambda client: method(client, *args, **kwargs))

    return call


_Answer = tuple[T | None, BaseException | None]


async def _contained(work: Coroutine[Any, Any, T]) -> _Answer[T]:
    """Run a call; an iterable of the caller's may raise SystemExit, which would end the loop that all calls need."""
    try:
        return await work, None
    except (SystemExit, KeyboardInterrupt) as ended:
        return None, ended


def _answer_of(call: "Future[_Answer[T]]") -> T:
    try:
        answer, ended = call.result()
    except BaseException:
        call.cancel()  # Ctrl-C: the caller no longer waits for the result
        raise
    if ended is not None:
        raise ended
    return cast("T", answer)


class SyncClient:
    """`with SyncClient(url) as client: client.put(…)`; takes what Client takes and connects at once.

    Any number of threads may share one. The work is done in one background thread: there too run the
    iterable given to put_many and its progress callback, which must not call the client themselves.
    """

    @_same_arguments(Client)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = Client(*args, **kwargs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mainspring-client", daemon=True)
        self._pid = os.getpid()
        self.schedules = SyncSchedules(self._wait)
        """Recurring work: add, edit, pause, trigger, backfill, …"""
        self.dead = SyncDeadLetters(self._wait)
        """Dead letters: list, get, replay, drop, export, count."""
        self._closing = threading.Lock()
        self._under_way: set[Future[Any]] = set()
        self._quiet = threading.Condition()
        """Held to begin or end a call; notified when one has ended."""
        self._closed = False
        self._thread.start()
        try:
            self._wait(Client.open)
        except BaseException:
            self.close()
            raise

    put = _answering(_waiting(Client.put))
    put_many = _waiting(Client.put_many)
    beat = _waiting(Client.beat)
    beats = _waiting(Client.beats)
    remove_beat = _waiting(Client.remove_beat)
    get = _waiting(Client.get)
    explain = _waiting(Client.explain)
    cancel = _waiting(Client.cancel)
    cancel_many = _waiting(Client.cancel_many)
    reschedule = _answering(_waiting(Client.reschedule))
    list = _waiting(Client.list)
    count = _waiting(Client.count)
    result = _waiting(Client.result)
    run_result = _waiting(Client.run_result)
    find_result = _waiting(Client.find_result)
    # Old names of the calls of `dead`, to be removed.
    dead_list = _waiting(Client.dead_list)
    dead_count = _waiting(Client.dead_count)
    dead_get = _waiting(Client.dead_get)
    dead_replay = _waiting(Client.dead_replay)
    dead_replay_many = _waiting(Client.dead_replay_many)
    dead_drop = _waiting(Client.dead_drop)
    dead_drop_many = _waiting(Client.dead_drop_many)
    dead_export = _waiting(Client.dead_export)

    pause = _waiting(Client.pause)
    resume = _waiting(Client.resume)
    pauses = _waiting(Client.pauses)
    queues = _waiting(Client.queues)
    queue = _waiting(Client.queue)
    queue_page = _waiting(Client.queue_page)
    workers = _waiting(Client.workers)
    runs = _waiting(Client.runs)
    run = _waiting(Client.run)
    run_stats = _waiting(Client.run_stats)
    run_log = _waiting(Client.run_log)
    lanes = _waiting(Client.lanes)
    lane = _waiting(Client.lane)
    lane_retry_head = _waiting(Client.lane_retry_head)
    lane_skip_head = _waiting(Client.lane_skip_head)
    lane_resume = _waiting(Client.lane_resume)

    def close(self) -> None:
        """Close the connections and end the thread; calls of other threads have a moment to end. May be repeated."""
        self._check_thread()
        if os.getpid() != self._pid:  # before the lock: the parent may have held it at the fork
            return
        with self._closing:
            if self._closed:
                return
            with self._quiet:
                self._closed = True
                self._quiet.wait_for(lambda: not self._under_way, CLOSE_S)
                late = list(self._under_way)
            for call in late:
                call.cancel()  # before the connections are closed: otherwise it would be reported as their failure
            try:
                _answer_of(self._begin(Client.aclose))
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        if os.getpid() != self._pid:
            raise MainspringError("this client was made before a fork; make one in the child process")
        with self._quiet:
            self._check()
            call = self._begin(work)
            self._under_way.add(call)
        try:
            return _answer_of(call)
        except CancelledError:
            raise MainspringError("the client was closed during this call, which may have taken effect") from None
        finally:
            with self._quiet:
                self._under_way.discard(call)
                self._quiet.notify_all()

    def _begin(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> "Future[_Answer[T]]":
        return asyncio.run_coroutine_threadsafe(_contained(work(self._client)), self._loop)

    def _check(self) -> None:
        if self._closed:
            raise MainspringError("the client is closed")
        self._check_thread()

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise MainspringError("a callback of put_many may not call the client: it would wait for itself")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
