"""Report ended jobs to the server in batches, with retries, and count them for `/metrics`."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from ..model.clock import Clock
from ..model.delivery import DONE, UNREADABLE, Dead, Done, Failure, Fate, Outcome, Retry
from ..model.errors import StoreError
from ..model.ids import idempotency_key
from ..model.job import End, Ending, Job, JobCancelled, Result
from ..model.lane import LanePolicies
from ..model.metrics import Histogram
from ..model.retry import Policies, RetryPolicy
from ..model.run import (
    DELIVERED,
    STOPPED,
    HistoryRules,
    Run,
    RunDetails,
    RunRecord,
    Verdict,
    buried,
    error_of,
    judge,
)
from ..model.text import describe, trace_of
from ..roles import Failures
from ..store import job_queue
from ..store.job_queue import pack_end
from ..store.runs import within
from ..store.store import Store
from .executor import JobRun

log = logging.getLogger("mainspring.worker")


RunFate = Literal["done", "failed", "dead", "expired", "cancelled", "lost"]

FATES: Final[Mapping[RunFate, str]] = {
    "done": "Runs that ended well.",
    "failed": "Runs that failed, and whose tasks are tried again.",
    "dead": "Tasks that this worker gave up: dead letters.",
    "expired": "Tasks that were not run, or not to their end, by the time they expire.",
    "cancelled": "Runs that were cancelled.",
    "lost": "Runs that do not count, because another worker has the task by now.",
}


class RunMeters:
    """Counts by kind of target: the word before the colon."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.counts: dict[RunFate, Counter[str]] = {fate: Counter() for fate in FATES}
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from due to the begin of the run, including the wait for a worker."""
        self.took: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from begin to done."""

    def expect(self, kinds: frozenset[str]) -> None:
        """Report 0 for rare events: a counter that first appears as 1 shows no increase and raises no alert."""
        for counts in self.counts.values():
            counts.update(dict.fromkeys(kinds, 0))

    def ended(self, run: JobRun, fate: RunFate) -> None:
        kind = _kind_of(run.job)
        self.counts[fate][kind] += 1
        if run.started:
            took_s = time.monotonic() - run.started
            since_due_s = (self._clock.now_ms() - run.job.due_ms) / 1000
            self.lateness[kind].observe(max(0.0, since_due_s - took_s))
            if fate == "done":
                self.took[kind].observe(took_s)

    def ended_unbegun(self, job: Job, fate: RunFate) -> None:
        self.counts[fate][_kind_of(job)] += 1


def fate_of(verdict: Verdict) -> RunFate:
    match verdict.end:
        case "done" | "expired" | "cancelled":
            return verdict.end
        case "retry" | "parked":
            return "failed"
        case _:
            return "dead"


def outcome_of(verdict: Verdict, traceback: str) -> Outcome | JobCancelled:
    """Return the verdict in the form that ends a job on the server. The owner of its partition parks a lane."""
    match verdict.end:
        case "done":
            return DONE
        case "cancelled":
            return JobCancelled()
        case "retry" | "parked":
            return Retry(verdict.reason, verdict.wait_ms, untried=not verdict.counted)
        case _:
            return Dead(verdict.reason, traceback=traceback)


def _kind_of(job: Job) -> str:
    """Return the kind of a job; an unreadable entry has no target, and came from a queue."""
    return job.body.target.partition(":")[0] or "queue"


IDLE_S: Final = 60.0
RESULT_BYTES: Final = 8_192
"""Most of a command's output that its result carries; the history has more of it."""


class Finisher:
    """Turns runs into ends by the retry policy; `step` writes them."""

    def __init__(
        self,
        store: Store,
        worker: str,
        policies: Policies,
        failures: Failures,
        wake: Callable[[], None],
        lanes: LanePolicies,
        history: HistoryRules | None = None,
    ) -> None:
        self._history = history or HistoryRules()
        self._store = store
        self._worker = worker
        self._policies = policies
        self._failures = failures
        self._wake = wake
        self._lanes = lanes
        self.meters = RunMeters(store.clock)
        self.unsent: list[End] = []
        self.given_back: list[Job] = []
        self.broken: BaseException | None = None
        """The last error of our own code while ending a run. It is never cleared, because it is a bug."""

    def add(self, run: JobRun) -> None:
        """Record that a run is over. An error in doing so fails the attempt, so that no run stays open."""
        try:
            self._add(run)
        except Exception as error:  # noqa: BLE001  # a bug: the task must not pay for it
            self._break_down(run.job, error)

    def _break_down(self, job: Job, error: BaseException) -> None:
        """Fail the attempt, by the usual policy, because its run could not be ended."""
        self.broken = error
        log.error("%s: its run could not be ended, which is a bug; the attempt failed: %s", job.id, describe(error),
                  exc_info=error, extra={"task": job.id})  # fmt: skip
        said = Retry(f"the run could not be ended: {describe(error)}")
        now_ms = self._store.clock.now_ms()
        verdict = judge(said, job.body, job.original_due_ms, now_ms, RetryPolicy(), None, now_ms)
        self.meters.ended_unbegun(job, fate_of(verdict))
        self._wake()
        self.unsent.append(End(job, outcome_of(verdict, trace_of(error))))

    def _add(self, run: JobRun) -> None:
        """Turn a run into an end. A run whose job another worker has by now is only counted as lost."""
        if run.stopped == "lost":
            self.meters.ended(run, "lost")
            return
        if run.stopped == "stale":
            log.warning("%s: not started, because its lease expired while it waited; giving it back", run.job.id,
                        extra={"task": run.job.id})  # fmt: skip
            self.put_back([run])
            return
        if run.stopped == "stopping" and run.outcome is not DONE:
            self.given_back.append(run.job)
        elif run.stopped == "cancelled":
            self._finish(run, STOPPED)
        else:
            self._finish(run, self._judge(run.job, run.outcome, run))

    def _finish(self, run: JobRun, verdict: Verdict) -> None:
        self.meters.ended(run, fate_of(verdict))
        error = None if isinstance(run.outcome, Done) else run.outcome.error
        end = End(run.job, outcome_of(verdict, trace_of(error)))
        if run.work.result_ttl_ms and verdict.is_over:
            end.result, end.result_ttl_ms = self._result(run, verdict).encode(), run.work.result_ttl_ms
        self._put(end, verdict, run.outcome, run)

    def refuse(self, job: Job, outcome: Outcome) -> None:
        """Record the outcome of a job that was never started."""
        try:
            verdict = self._judge(job, outcome, None)
            if verdict.counted:
                self.meters.ended_unbegun(job, fate_of(verdict))
            error = None if isinstance(outcome, Done) else outcome.error
            self._put(End(job, outcome_of(verdict, trace_of(error))), verdict, outcome, None)
        except Exception as error:  # noqa: BLE001  # as above
            self._break_down(job, error)

    def put_back(self, runs: Iterable[JobRun]) -> None:
        """Queue jobs to be given back, for other workers."""
        self.given_back += [run.job for run in runs]
        self._wake()

    def _put(self, end: End, verdict: Verdict, said: Outcome, run: JobRun | None) -> None:
        if verdict.counted:
            end.runs = self._runs(end.job, verdict, said, run)
        if end.job.body.occurrence is not None and verdict.is_over:
            end.run_end = pack_end(end.job, _ending(verdict), self._store.clock.now_ms())
        if not self.unsent:
            self._wake()
        self.unsent.append(end)

    def _judge(self, job: Job, said: Outcome, run: JobRun | None) -> Verdict:
        """Decide about a job by its retry policy, and report a failure. The owner parks a lane; it is reported here."""
        if isinstance(said, Done):
            return DELIVERED
        policy = self._policies.of(job.body, run.work.retry if run is not None else None, job.queue)
        lane = None if job.body.lane is None else self._lanes.of_queue(job.queue)
        if lane is not None and lane.on_failure == "block":
            lane = None  # only the owner knows for how long the lane has been blocked
        now_ms = self._store.clock.now_ms()
        verdict = judge(said, job.body, job.original_due_ms, now_ms, policy, lane, now_ms)
        if verdict.counted:
            self._report(job, said, verdict, now_ms)
        return verdict

    def died(self, job: Job, outcome: Dead) -> None:
        """Count and report a job that the store buried when it was taken."""
        verdict = buried(outcome.reason)
        self.meters.ended_unbegun(job, fate_of(verdict))
        self._report(job, outcome, verdict, self._store.clock.now_ms())

    def runs_of(self, job: Job, said: Dead | JobCancelled) -> tuple[Run, ...]:
        """Return what the history keeps of a job that ends when it is taken."""
        if isinstance(said, Dead):
            return self._runs(job, buried(said.reason), said, None)
        return self._runs(job, STOPPED, DONE, None)

    def _report(self, job: Job, said: Retry | Dead, verdict: Verdict, now_ms: int) -> None:
        fates: dict[str, Fate] = {"retry": "retry", "parked": "parked"}
        failure = Failure(
            id=job.id,
            target=job.body.target or UNREADABLE,
            attempt=job.body.attempt,
            error=verdict.reason,
            brief=said.brief or "",
            outcome=fates.get(verdict.end, "dead"),
            next_at_ms=now_ms + verdict.wait_ms if verdict.end == "retry" else None,
            lane=job.body.lane,
            original_due_ms=job.original_due_ms,
            idempotency_key=idempotency_key(self._store.keys.namespace, job.id, job.original_due_ms, job.body.key_lane),
            exception=said.error,
        )
        self._failures.report(failure)

    def _runs(self, job: Job, verdict: Verdict, said: Outcome, run: JobRun | None) -> tuple[Run, ...]:
        """Return what the history keeps of an attempt, and of those before it whose workers died."""
        now_ms = self._store.clock.now_ms()
        began_ms = now_ms - round((time.monotonic() - run.started) * 1000) if run is not None and run.started else 0
        output, log = (None, ()) if run is None else (run.output, run.context.lines)
        exit_code, answer_bytes = (None, 0) if output is None else (output.exit_code, output.size)
        record = RunRecord.of(
            job, verdict, said, began_ms, now_ms, self._worker,
            code=exit_code, queue=job.queue, answer_bytes=answer_bytes,
        )  # fmt: skip
        trace = trace_of(error_of(said))
        details = RunDetails(output=output, log=log, traceback=trace) if output is not None or log or trace else None
        kept: tuple[Run, ...] = (Run(record, details),) if self._history.keeps(record) else ()
        if job.deliveries > 1 and self._history.keeps(lost := record.as_lost()):
            kept = (Run(lost),) * (job.deliveries - 1) + kept
        return kept

    def _result(self, run: JobRun, verdict: Verdict) -> Result:
        ended_ms = self._store.clock.now_ms()
        return Result(
            _ending(verdict),
            run.value if verdict.end == "done" else None,
            verdict.reason,
            attempt=run.job.body.attempt,
            worker=self._worker,
            target=run.job.body.target,
            due_ms=run.job.original_due_ms,
            started_ms=ended_ms - (round((time.monotonic() - run.started) * 1000) if run.started else 0),
            ended_ms=ended_ms,
            log=run.context.lines,
            output=within(RunDetails(output=run.output), RESULT_BYTES).output,
        )

    # -- writing -----------------------------------------------------------------------------------------

    async def step(self) -> float:
        """Write ended jobs. Those that cannot be written are kept for the next step."""
        await self.give_back()
        if not self.unsent:
            return IDLE_S
        ends, self.unsent = self.unsent, []
        try:
            answers = await job_queue.finish(self._store, ends)
        except (StoreError, asyncio.CancelledError):
            self.unsent = ends + self.unsent
            raise
        except Exception as error:  # noqa: BLE001  # one of them cannot be written
            await self._finish_apart(ends, error)
            return 0.0
        failure: StoreError | None = None
        left: list[End] = []
        for end, answer in zip(ends, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
                left.append(end)
            elif answer == "lost":
                log.info("%s: its end does not count, another worker has it (or its reply was lost)", end.job.id,
                         extra={"task": end.job.id})  # fmt: skip
        self.unsent = left + self.unsent
        if failure is not None:
            raise failure
        return 0.0 if self.unsent else IDLE_S

    async def _finish_apart(self, ends: list[End], error: Exception) -> None:
        """Write ends one by one after one of them could not be written, so that it holds up no other."""
        if len(ends) == 1:
            self._break_down(ends[0].job, error)
            return
        while ends:
            end = ends.pop(0)
            try:
                [answer] = await job_queue.finish(self._store, [end])
            except (StoreError, asyncio.CancelledError):
                self.unsent = [end, *ends, *self.unsent]
                raise
            except Exception as own:  # noqa: BLE001  # this one
                self._break_down(end.job, own)
            else:
                if isinstance(answer, StoreError):
                    self.unsent.append(end)

    async def give_back(self) -> None:
        """Return unstarted jobs to their queues, so that other workers can have them at once."""
        jobs, self.given_back = self.given_back, []
        if jobs:
            await job_queue.give_back(self._store, jobs)


def _ending(verdict: Verdict) -> Ending:
    return "done" if verdict.end == "done" else "cancelled" if verdict.end == "cancelled" else "dead"
