"""The synchronous face of a client's schedules: the same calls, waited for."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .client import Client
from .model.schedule_view import ScheduleView
from .schedules import Schedules

P = ParamSpec("P")
T = TypeVar("T")


class Wait(Protocol):
    """Does some work with the client in its own thread, and waits for it."""

    def __call__(self, work: Callable[[Client], Coroutine[Any, Any, T]], /) -> T: ...


def _waiting(
    method: Callable[Concatenate[Schedules, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncSchedules", P], T]:
    """The blocking form of one of the calls: same arguments, same answer, same documentation."""

    @functools.wraps(method)
    def call(self: "SyncSchedules", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(lambda client: method(client.schedules, *args, **kwargs))

    return call


async def _all(schedules: Schedules) -> list[ScheduleView]:
    return [view async for view in schedules.all()]


class SyncSchedules:
    """`client.schedules` of a SyncClient."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    add = _waiting(Schedules.add)
    add_many = _waiting(Schedules.add_many)
    edit = _waiting(Schedules.edit)
    get = _waiting(Schedules.get)
    get_many = _waiting(Schedules.get_many)
    pause = _waiting(Schedules.pause)
    resume = _waiting(Schedules.resume)
    trigger = _waiting(Schedules.trigger)
    backfill = _waiting(Schedules.backfill)
    remove = _waiting(Schedules.remove)
    history = _waiting(Schedules.history)
    rollback = _waiting(Schedules.rollback)
    diff = _waiting(Schedules.diff)
    all = _waiting(_all)
    list = _waiting(Schedules.list)
