"""The one loop: a role says what to do and when to come back; waiting, errors and stopping are done here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..model.errors import StoreError

log = logging.getLogger("mainspring.engine")


class Loop:
    """Runs `step` again and again. A step returns the seconds until the next; `wake` cuts the wait short."""

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[float]],
        *,
        min_backoff_s: float = 0.05,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._name = name
        self._step = step
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self._last = False
        self.failures = 0
        """Failed steps in a row; 0 when the last one went well."""

    def wake(self) -> None:
        self._wake.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"mainspring-{self._name}")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def finish(self, within_s: float) -> None:
        """Stop after the step that runs now: what it brings is not thrown away. One that takes longer is cut short."""
        self._last = True
        self.wake()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)
        await self.stop()

    @property
    def crashed(self) -> BaseException | None:
        """The error that ended the loop; such an error is a bug, and the node must not pretend to be well."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    async def _run(self) -> None:
        while not self._last:
            self._wake.clear()
            try:
                wait_s = await self._step()
                if self.failures:
                    log.info("%s: going on after %d failed attempts", self._name, self.failures)
                self.failures = 0
            except StoreError as error:
                self.failures += 1
                wait_s = min(self._max_backoff_s, self._min_backoff_s * 2 ** min(self.failures, 6))
                if self.failures in (1, 10, 100):
                    log.warning("%s: %s; trying again", self._name, error)
            if wait_s > 0 and not self._last:
                await self._pause(wait_s)
            else:
                await asyncio.sleep(0)

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
