"""What targets answered to tasks that are done, kept with their runs for a while."""

import logging
from collections.abc import Sequence

from ..model.errors import StoreError
from ..model.outcome import Done, Outcome
from ..model.result import Result
from ..sinks.base import Sink
from ..store.results import KeptResult, keep_results
from ..store.store import Store
from .flight import Flight

log = logging.getLogger("mainspring.engine")


class Answers:
    """Writes them before the tasks are marked done: who finds a task done finds its answer."""

    def __init__(self, store: Store, node: str) -> None:
        self._store = store
        self._node = node
        self._failing = False

    async def deliver(self, sink: Sink, group: Sequence[Flight]) -> Sequence[Outcome]:
        """What the sink says, once the answers among it are written."""
        outcomes = await sink.deliver(group)
        if len(outcomes) == len(group) and (kept := self._kept(group, outcomes)):
            await self._keep(kept)
        return outcomes

    def _kept(self, group: Sequence[Flight], outcomes: Sequence[Outcome]) -> list[KeptResult]:
        now_ms = self._store.clock.now_ms()
        kept = []
        for flight, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Done) and outcome.keep_ms and outcome.response is not None:
                result = Result(
                    "done",
                    attempt=flight.attempt,
                    worker=self._node,
                    target=flight.target,
                    due_ms=flight.original_due_ms,
                    started_ms=now_ms - outcome.response.duration_ms,
                    ended_ms=now_ms,
                    response=outcome.response,
                )
                kept.append(KeptResult(flight.live.partition, flight.idh, result.encode(), outcome.keep_ms))
        return kept

    async def _keep(self, kept: Sequence[KeptResult]) -> None:
        """A full or absent server costs the answers, never the outcome: the tasks are done."""
        try:
            await keep_results(self._store, kept)
        except StoreError as error:
            if not self._failing:
                log.warning("answers of webhooks are not kept: %s", error)
            self._failing = True
        else:
            self._failing = False
