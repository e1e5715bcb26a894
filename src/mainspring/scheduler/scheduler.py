"""`Scheduler`: what a program declares, and everything that runs it, started and stopped as one."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from .. import __version__
from ..config.config import Config
from ..model.errors import MainspringError, NotFound, SchedulerRunning
from ..model.retry import RetryPolicy
from ..model.schedule.chain import PastRun
from ..model.schedule.definition import Definition, is_over
from ..model.schedule.view import ScheduleView
from ..model.schedule.zone import Zone, zone
from ..model.text import clean
from ..node.process import Background
from ..worker.command import CommandWork
from .declarations import Declarations

if TYPE_CHECKING:
    from ..model.run import KeptRun
    from ..store.embedded import EmbeddedServer
    from .running import Running

log = logging.getLogger("mainspring.scheduler")


@dataclass(frozen=True, slots=True)
class EntryRun:
    """A run that has ended."""

    planned: datetime
    began: datetime
    duration: timedelta | None
    """None if its end was not recorded."""
    outcome: str
    """`done`, `dead`, `cancelled`, …"""


@dataclass(frozen=True, slots=True)
class Entry:
    """State of a schedule at one moment. Times are aware, in the schedule's own zone."""

    name: str
    specs: tuple[str, ...]
    """Cron lines and intervals; it runs when any of them is due."""
    zone: str
    target: str
    next_runs: tuple[datetime, ...]
    """The next three planned times; fewer if it ends before."""
    last_runs: tuple[EntryRun, ...]
    """The newest last."""
    retries: int
    """Further attempts after a failed one."""
    generation: int
    """Grows with each edit; 0 while it is only declared in code."""
    paused: bool
    running_since: datetime | None = None
    ran: int = 0
    """How many runs have begun."""
    not_run: tuple[tuple[str, int], ...] = ()
    """Planned times that did not run, by reason: missed, overlap, paused, excluded, cancelled, lost."""
    history: "Callable[[int], list[KeptRun]]" = field(default=lambda _: [], repr=False, compare=False)

    def runs(self, limit: int = 50) -> "list[KeptRun]":
        """Return its last runs from the history, newest first: every attempt, and what did not run. Waits for the
        answer; in an event loop await `client.runs(schedule=name)`. Empty if the schedule is only declared."""
        return self.history(limit)

    @property
    def spec(self) -> str:
        """All of its times in one line."""
        return " or ".join(self.specs)


def entry_of(view: ScheduleView, policy: RetryPolicy, history: "Callable[[int], list[KeptRun]]") -> Entry:
    """Return the entry of a stored schedule; `policy` is the retry policy of its runs."""
    definition, home = view.definition, zone(view.definition.zone)
    return Entry(
        name=view.name,
        specs=definition.times,
        zone=definition.zone,
        target=definition.target,
        next_runs=_times(home, view.next_ms),
        last_runs=tuple(_run(home, run) for run in view.last_runs),
        retries=policy.max_attempts - 1,
        generation=view.generation,
        paused=view.state == "paused",
        running_since=None if view.running_since_ms is None else home.datetime(view.running_since_ms),
        ran=view.runs,
        not_run=tuple(sorted(view.not_run.items())),
        history=history,
    )


def declared_entry(definition: Definition, policy: RetryPolicy, now_ms: int) -> Entry:
    """Return the entry of a schedule that is only declared: not yet started, or already over at the start."""
    home = zone(definition.zone)
    return Entry(
        name=definition.name,
        specs=definition.times,
        zone=definition.zone,
        target=definition.target,
        next_runs=_times(home, definition.next_runs(now_ms)),
        last_runs=(),
        retries=policy.max_attempts - 1,
        generation=0,
        paused=False,
    )


def _times(home: Zone, instants: "tuple[int, ...] | list[int]") -> tuple[datetime, ...]:
    return tuple(home.datetime(ms) for ms in instants)


def _run(home: Zone, run: PastRun) -> EntryRun:
    span = None if run.ended_ms is None else timedelta(milliseconds=run.ended_ms - run.began_ms)
    return EntryRun(home.datetime(run.planned_ms), home.datetime(run.began_ms), span, run.outcome)


_SHOWN: Final = 20


def overview(where: str, namespace: str, entries: Sequence[Entry], queues: Sequence[str]) -> str:
    """Return what a scheduler runs, in lines for people."""
    lines = [f"mainspring {__version__} on {where}, namespace {namespace}"]
    shown = sorted(entries, key=lambda one: (one.paused, [run.timestamp() for run in one.next_runs[:1]] or [inf]))
    width = max((len(one.name) for one in shown[:_SHOWN]), default=0)
    lines += [f"  schedule {one.name:{width}}  {_next(one)}  ({one.spec})" for one in shown[:_SHOWN]]
    if len(shown) > _SHOWN:
        lines.append(f"  and {len(shown) - _SHOWN:,} more schedules")
    lines += [f"  queue {name}" for name in queues]
    return "\n".join([*lines, "Ctrl-C stops it.", ""])


def _next(entry: Entry) -> str:
    if entry.paused:
        return "paused"
    if not entry.next_runs:
        return "is over"
    return f"next {entry.next_runs[0]:%Y-%m-%d %H:%M:%S %Z}"


SchedulerState = Literal["stopped", "starting", "running", "stopping"]


class Scheduler(Declarations):
    """Handlers and schedules are declared; `start` runs them in the background until `stop`.

    Making one opens nothing, so a module that declares handlers can be imported anywhere. Every call may be made
    from any thread. Within an event loop use `async with scheduler`: then coroutine handlers run in that loop.
    """

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config.load({}, os.environ))
        self._changed = threading.Condition(self._lock)
        self._state: SchedulerState = "stopped"
        self._pid = os.getpid()
        self._running: Running | None = None
        self._home: Background | None = None
        self._failure: BaseException | None = None

    def _renew_locks(self) -> None:
        """Make new locks in the child of a fork."""
        super()._renew_locks()
        self._changed = threading.Condition(self._lock)

    def configure(self, settings: Config) -> None:
        """Apply the settings of this process; those that are not defaults override those in code."""
        default = Config()
        given = {one.name: getattr(settings, one.name) for one in fields(Config)}
        changed = {name: value for name, value in given.items() if value != getattr(default, name)}
        with self._lock:
            self._check_stopped()
            self.config = replace(self.config, **changed)
            for name, command in settings.commands.items():
                if self.registry.find(f"command:{name}") is None:
                    self.registry.add(CommandWork(name, command))

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> SchedulerState:
        """`stopped`, `starting`, `running` or `stopping`."""
        with self._lock:
            if self._pid != os.getpid():
                return "stopped"  # a child of a fork has none of its parent's threads
            return "stopping" if self._abandoned() is not None else self._state

    @property
    def healthy(self) -> bool:
        """True if it is running and the last step of each part succeeded."""
        running = self._running
        return self.state == "running" and running is not None and running.healthy

    @property
    def _is_guest(self) -> bool:
        """True if it runs in an event loop of the caller's."""
        return self._running is not None and self._home is None

    def declared(self) -> list[Definition]:
        """Return the definitions of the declared schedules."""
        with self._lock:
            return list(self.timetable)

    def entries(self) -> list[Entry]:
        """Return the declared schedules by name: as stored while it runs, otherwise as declared in code."""
        definitions, asked = self._ask()
        return self._entries(definitions, None if asked is None else self._answer(asked.result))

    async def aentries(self) -> list[Entry]:
        """The same, awaited."""
        definitions, asked = self._ask()
        if asked is None:
            return self._entries(definitions, None)
        views: dict[str, ScheduleView] | None = None
        try:
            views = await asyncio.wrap_future(asked)
        except MainspringError:
            if self.state == "running":
                raise
        return self._entries(definitions, views)

    def entry(self, name: str) -> Entry:
        """Return one declared schedule. Raises NotFound if there is none of that name."""
        found = next((one for one in self.entries() if one.name == name), None)
        if found is None:
            raise NotFound(f"there is no schedule {name!r} declared here")
        return found

    def _ask(self) -> "tuple[list[Definition], Future[dict[str, ScheduleView]] | None]":
        with self._lock:
            definitions = sorted(self.timetable, key=lambda one: one.name)
            if self.state != "running" or self._running is None:
                return definitions, None
            return definitions, self._running.views([one.name for one in definitions])

    def _answer(self, result: "Callable[[], dict[str, ScheduleView]]") -> "dict[str, ScheduleView] | None":
        try:
            return result()
        except (MainspringError, CancelledError):
            if self.state == "running":
                raise
            return None  # it was stopped meanwhile

    def _entries(self, definitions: list[Definition], views: "Mapping[str, ScheduleView] | None") -> list[Entry]:
        now_ms = time.time_ns() // 1_000_000
        found: list[Entry] = []
        for one in definitions:
            view = None if views is None else views.get(one.name)
            if view is not None:
                found.append(entry_of(view, self.policy_of(view.definition), partial(self._history, view.name)))
            elif views is None or is_over(one, now_ms):  # the store has none of one that was over at the start
                found.append(declared_entry(one, self.policy_of(one), now_ms))
        return found

    def _history(self, name: str, limit: int) -> "list[KeptRun]":
        return self.sync_client().runs(schedule=name, limit=limit).runs

    # -- start and stop --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything in background threads; return when it runs.

        Raises SchedulerRunning if it runs already, and what keeps it from running: ConfigError, Unavailable, Refused,
        WrongFormat, InvalidInput. Nothing is left behind then.
        """
        self._stop_abandoned()
        running = self._begin()
        home = Background("mainspring-handlers")
        try:
            home.wait(running.start())
        except BaseException:
            home.end()
            self._is("stopped")
            raise
        self._is("running", running, home)

    def stop(self) -> None:
        """Finish what runs within `shutdown_timeout`, cancel the rest, close. It can be started again.

        Called again, or by several threads, it waits until all has stopped.
        """
        self._check_outside("stop()")
        self._stop_abandoned()
        with self._changed:
            self._changed.wait_for(lambda: self.state != "starting")
            running, home = self._running, self._home
            if self.state != "running" or running is None:
                self._changed.wait_for(lambda: self.state == "stopped")
                return
            if home is None:
                raise MainspringError("this scheduler was started in an event loop; stop it there, with astop()")
            self._state = "stopping"
        try:
            home.wait(running.stop())
        finally:
            home.end()
            self._is("stopped")

    async def astart(self) -> None:
        """Start within this event loop: coroutine handlers run in it, everything else in background threads."""
        await asyncio.to_thread(self._stop_abandoned)
        running = self._begin()
        try:
            await running.start()
        except BaseException:
            self._is("stopped")
            raise
        self._is("running", running)

    async def astop(self) -> None:
        """Stop what `astart` began. Repeated calls do nothing. Cancelling the wait does not interrupt the stop."""
        self._check_outside("astop()")
        if self._abandoned() is not None:
            await asyncio.to_thread(self._stop_abandoned)
        with self._lock:
            running = self._running
            if self.state != "running" or running is None or self._home is not None:
                return
            if not running.at_home:
                raise MainspringError("this scheduler was started in another event loop; await astop() in that one")
            self._state = "stopping"
        await asyncio.shield(asyncio.create_task(self._stopped(running), name="mainspring-stop"))

    async def _stopped(self, running: "Running") -> None:
        try:
            await running.stop()
        finally:
            self._is("stopped")

    def run(self, *, quiet: bool = False) -> None:
        """Start, and block until SIGTERM, SIGINT or SIGHUP, or until another thread stops it; then stop.

        Prints to standard error what runs, unless `quiet`. A program that has set up logging gets one log line instead.
        Raises what `start` raises, and MainspringError if a part of the scheduler breaks down.
        """
        from ..node.process import run_until_asked

        def begin() -> None:
            self.start()
            if not quiet:
                self._announce()

        run_until_asked(begin, self._over, self.stop, self.config.shutdown_timeout_s)
        if self._failure is not None:
            raise MainspringError(f"a part of the scheduler broke down: {self._failure!r}") from self._failure

    def _announce(self) -> None:
        running = self._running
        if running is None:
            return  # another thread has stopped it already
        where, namespace = running.where, self.config.namespace
        if log.hasHandlers():
            log.info("running on %s, namespace %s", where, namespace)
            return
        try:
            entries = self.entries()
        except MainspringError:  # the server is unavailable: what follows reports it
            entries = []
        sys.stderr.write(clean(overview(where, namespace, entries, self.registry.queues)))
        sys.stderr.flush()

    def _over(self) -> bool:
        return self.state == "stopped" or self._failure is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    # -- inside ----------------------------------------------------------------------------------------------

    def _abandoned(self) -> "Running | None":
        """Return what still runs although its event loop is closed, so that astop() cannot be awaited there."""
        running = self._running
        return running if self._state == "running" and running is not None and running.abandoned else None

    def _stop_abandoned(self) -> None:
        with self._changed:
            running = self._abandoned()
            if running is None or self._pid != os.getpid():
                return
            self._state = "stopping"
        log.warning(
            "the event loop in which the scheduler was started is closed: stopping it now; await astop() before"
        )
        try:
            running.stop_abandoned()
        finally:
            self._is("stopped")

    def _check_stopped(self) -> None:
        if self.state != "stopped":
            raise SchedulerRunning(
                f"the scheduler is {self.state}: declare handlers and schedules before it starts, or after stop();"
                " schedules in the store can be edited at any time with client.schedules"
            )

    def _check_outside(self, call: str) -> None:
        home, running = self._home, self._running
        if (home is not None and home.inside) or (running is not None and running.inside):
            raise MainspringError(f"{call} was called by a handler, for which it would have to wait; end the program")

    def _begin(self) -> "Running":
        from .running import Running  # here: a module that only declares handlers needs no engine

        with self._changed:
            self._check_stopped()
            self._pid = os.getpid()
            self._state, self._failure = "starting", None
            return Running(self, self.config)

    def _is(self, state: SchedulerState, running: "Running | None" = None, home: Background | None = None) -> None:
        with self._changed:
            self._state, self._running, self._home = state, running, home
            if state == "stopped":
                self._url_of_node = None
            self._changed.notify_all()

    def _node_started(self, url: str) -> "EmbeddedServer | None":
        """Put tasks on the node's server from now on; hand over a server that was started for an earlier put."""
        with self._opening:
            self._url_of_node = url
            embedded, self._embedded = self._embedded, None
        return embedded

    def _broke_down(self, error: BaseException) -> None:
        """Record the failure of a part, which ends `run()`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()
