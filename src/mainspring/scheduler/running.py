"""A running scheduler: a node in its own thread, and a worker in the event loop where handlers run.

They are separate so that a handler that blocks its loop cannot cost the node its leases.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..client.client import Client
from ..config.config import Config
from ..model.errors import MainspringError
from ..model.schedule.view import ScheduleView
from ..model.targets.command import Commands
from ..node.node import Node
from ..node.process import Background
from ..node.supervisor import Embedding
from .publishing import publish
from .worker_process import Workplace

if TYPE_CHECKING:
    from ..store.embedded import EmbeddedServer
    from ..worker.executor import Executor
    from .scheduler import Scheduler

log = logging.getLogger("mainspring.scheduler")

WATCH_S: Final = 0.25


class Running:
    """The node and worker of one process, from start to stop. Used once, from the event loop of the handlers."""

    def __init__(self, scheduler: "Scheduler", config: Config) -> None:
        self._scheduler = scheduler
        # The node must know the queues of commands declared in code, too.
        # And what is declared must be fired here, whatever role `mainspring serve` has by the same settings.
        self._config = replace(config, commands=Commands(scheduler.commands), roles=("scheduler",))
        self._workplace: Workplace | None = None
        self._executor: Executor | None = None
        self._node: Node | None = None
        self._thread: Background | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._embedding: Embedding | None = None
        self._server: EmbeddedServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        return "" if self._node is None else self._node.where

    @property
    def healthy(self) -> bool:
        node, workplace = self._node, self._workplace
        node_healthy = self.failure is None and node is not None and node.healthy
        return node_healthy and (workplace is None or (workplace.worker is not None and workplace.worker.healthy))

    @property
    def inside(self) -> bool:
        """True if the caller is one of its handlers: a stop would have to wait for itself."""
        return self._executor is not None and self._executor.inside

    @property
    def at_home(self) -> bool:
        """Whether the caller is in the event loop in which it was started."""
        return self._loop is asyncio.get_running_loop()

    @property
    def abandoned(self) -> bool:
        """Whether that event loop is closed, so that nothing can be awaited there."""
        return self._loop is not None and self._loop.is_closed()

    def views(self, names: Sequence[str]) -> "Future[dict[str, ScheduleView]]":
        """Return the stored state of these schedules; callable from any thread."""
        assert self._thread is not None
        return self._thread.submit(self._views(names))

    async def _views(self, names: Sequence[str]) -> dict[str, ScheduleView]:
        return await self._client().schedules.get_many(names)

    def _client(self) -> Client:
        client = self._node.client if self._node is not None else None
        if client is None:
            raise MainspringError("the scheduler is stopping")
        return client

    # -- start and stop ------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._thread = thread = Background("mainspring-node")
        url = await thread.do(self._start_node())
        # If it was started for an earlier put, it now ends with the node, which needs it.
        self._server = self._scheduler._node_started(url)
        if len(self._scheduler.registry):
            credentials = self._config.credentials if self._config.redis_url is not None else None
            config = replace(self._config, redis_url=url, credentials=credentials)
            self._workplace = workplace = Workplace(self._scheduler, config)
            await workplace.start()
            assert workplace.worker is not None
            self._executor = workplace.worker.executor
        else:
            await thread.do(self._publish())
        self._watcher = asyncio.create_task(self._watch(), name="mainspring-watch")

    async def _start_node(self) -> str:
        self._node = node = Node(self._config)
        node.roles = ("scheduler", "worker") if len(self._scheduler.registry) else ("scheduler",)
        await node.start()
        server = node.embedding.server if node.embedding is not None else None
        url = server.url if server is not None else self._config.redis_url
        assert url is not None
        return url

    async def _publish(self) -> None:
        client = self._client()
        await publish(client.schedules, self._scheduler.declared(), client.store.clock.now_ms())

    async def stop(self) -> None:
        """Finish running jobs within `shutdown_timeout`, break off the others, hand over, close."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait([watcher])
        # Stop both at once: they share the time. The embedded server ends last, whatever went wrong before.
        try:
            ends = await asyncio.gather(self._stop_workplace(), self._stop_node(), return_exceptions=True)
        finally:
            await self._end()  # even if the caller was cancelled: Ctrl-C
        for error in ends:
            if error is not None:
                raise error

    def stop_abandoned(self) -> None:
        """Stop after the event loop of the start was closed. Other workers get the interrupted jobs after a lease."""
        helper = Background("mainspring-stop")
        try:
            helper.wait(self._stop_abandoned())
        finally:
            helper.end()

    async def _stop_abandoned(self) -> None:
        try:
            await self._stop_node()
        finally:
            await self._end()

    async def _stop_workplace(self) -> None:
        if self._workplace is not None:
            await self._workplace.stop()
        else:
            await self._scheduler.aclose()

    async def _stop_node(self) -> None:
        thread, node = self._thread, self._node
        if thread is not None and node is not None:
            self._embedding, node.embedding = node.embedding, None
            await thread.do(node.stop())

    async def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            if self._embedding is not None:
                await thread.do(self._embedding.stop())
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)
        finally:
            await asyncio.to_thread(thread.end)

    async def _watch(self) -> None:
        """Report a failed component. The others keep running; the caller decides whether to stop."""
        try:
            while self.failure is None:
                await asyncio.sleep(WATCH_S)
                parts = (self._node, self._workplace)
                self.failure = next((one.failure for one in parts if one is not None and one.failure is not None), None)
        except asyncio.CancelledError:
            # Do not use `stop`: everything in the caller's event loop is cancelled, as at the end of asyncio.run.
            if self._watcher is not None and self._scheduler._is_guest:
                self._watcher = None
                log.warning("event loop is closing without `await astop()`; stopping the scheduler now")
                await self._scheduler.astop()
            raise
        log.error("a part of the scheduler broke down, which is a bug: %r", self.failure, exc_info=self.failure)
        self._scheduler._broke_down(self.failure)
