"""One producer of the Kafka library, from its making to its end."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer

log = logging.getLogger("mainspring.kafka")
library_log = logging.getLogger("mainspring.kafka.library")

FIRST_POLL_S: Final = 0.001
SLOWEST_POLL_S: Final = 0.02
"""Reports are fetched so often while some are missing: the library cannot wake an event loop."""

IDLE_POLL_S: Final = 2.0
"""And so often while none are, for what the library has to say besides."""

REPORTS: Final = {"delivery.report.only.error": True}
"""Callbacks are for failures: to make a message and call with it costs three times what it takes to let go of one."""


class Carrier:
    """Owns the producer and fetches its reports.

    The library works in threads of its own. Fetching reports does not block, so it is done on the event loop: a thread
    would have to win the interpreter back from the loop for every single report.
    """

    def __init__(self, properties: Mapping[str, str], away: Callable[[], None]) -> None:
        self.broken: KafkaError | None = None
        """Why it will never send again: its identity at the broker is lost."""
        self._away = away
        self._wake = asyncio.Event()
        self._retired = False
        self.producer = Producer({**properties, **REPORTS, "error_cb": self._on_error, "logger": library_log})
        self._serving = asyncio.create_task(self._serve(), name="mainspring-kafka")

    @property
    def queued(self) -> int:
        """Messages that are with the library and not yet reported."""
        return len(self.producer)

    def wake(self) -> None:
        """Something was handed over."""
        self._wake.set()

    def retire(self) -> None:
        """Take no more. What is in it is reported as failed, and then it ends."""
        if not self._retired:
            self._retired = True
            self.producer.purge(blocking=False)
            self._wake.set()

    async def ended(self) -> None:
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        wait_s = FIRST_POLL_S
        while self.queued or not self._retired:
            served = self._fetch()
            if self.broken is not None:
                self.retire()
            if self.queued:
                wait_s = FIRST_POLL_S if served else min(wait_s * 2, SLOWEST_POLL_S)
                await asyncio.sleep(wait_s)
            elif not self._retired:
                wait_s = FIRST_POLL_S
                await self._rest()
        # Joins the library's threads: not on the loop.
        await asyncio.get_running_loop().run_in_executor(None, self.producer.close)

    def _fetch(self) -> int:
        """How many reports there were: one may be of thousands of messages."""
        try:
            return self.producer.poll(0)
        except KafkaException as caught:  # how the library tells of a fatal error
            self._on_error(caught.args[0])
            return 1

    async def _rest(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(IDLE_POLL_S):
                await self._wake.wait()
        except TimeoutError:
            return

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.broken = self.broken or error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._away()
        else:
            log.info("Kafka: %s", error.str())
