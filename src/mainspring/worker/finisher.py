"""Report ended jobs to the server in batches, with retries, and count them for `/metrics`."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from ..model.delivery import DONE, Dead, Done, Outcome, Retry
from ..model.errors import StoreError
from ..model.ids import idempotency_key
from ..model.job import End, Ending, Job, JobCancelled, Result
from ..model.lane import LanePolicies
from ..model.metrics import Histogram
from ..model.retry import Policies, RetryPolicy
from ..model.run import (
    DELIVERED,
    STOPPED,
    Run,
    RunDetails,
    RunRecord,
    Verdict,
    buried,
    error_of,
    judge,
)
from ..model.text import describe, trace_of
from ..store import job_queue
from ..store.job_queue import pack_end
from ..store.runs import within
from .executor import JobRun

if TYPE_CHECKING:
    from .worker import Worker

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

    def __init__(self) -> None:
        self.counts: dict[RunFate, Counter[str]] = {fate: Counter() for fate in FATES}
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from due to the begin of the run, including the wait for a worker."""
        self.took: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from begin to done."""

    def expect(self, kinds: frozenset[str]) -> None:
        """Report 0 for rare events: a counter that first appears as 1 shows no increase and raises no alert."""
        for counts in self.counts.values():
            counts.update(dict.fromkeys(kinds, 0))

    def ended(self, job: Job, fate: RunFate, now_ms: int = 0, run: JobRun | None = None) -> None:
        # An unreadable entry has no target, and came from a queue.
        kind = job.body.target.partition(":")[0] or "queue"
        self.counts[fate][kind] += 1
        if run is not None and run.started:
            took_s = time.monotonic() - run.started
            since_due_s = (now_ms - job.due_ms) / 1000
            self.lateness[kind].observe(max(0.0, since_due_s - took_s))
            if fate == "done":
                self.took[kind].observe(took_s)


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


IDLE_S: Final = 60.0
RESULT_BYTES: Final = 8_192
"""Most of a command's output that its result carries; the history has more of it."""


class Finisher:
    """Turns runs into ends by the retry policy; `step` writes them."""

    def __init__(self, worker: "Worker") -> None:
        options = worker.options
        self._worker, self._store, self._name = worker, worker.store, options.name
        self._policies = Policies(options.retry, by_queue=options.queue_retries)
        self._lanes = LanePolicies(options.lane_policy, by_queue=options.queue_lanes)
        self.meters = RunMeters()
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
        self.meters.ended(job, fate_of(verdict))
        self._worker.wake_finisher()
        self.unsent.append(End(job, outcome_of(verdict, trace_of(error))))

    def _add(self, run: JobRun) -> None:
        """Turn a run into an end. A run whose job another worker has by now is only counted as lost."""
        if run.stopped == "lost":
            self.meters.ended(run.job, "lost", self._store.clock.now_ms(), run)
            return
        if run.stopped == "stale":
            log.warning("%s: not started, because its lease expired while it waited; giving it back", run.job.id,
                        extra={"task": run.job.id})  # fmt: skip
            self.put_back([run])
            return
        if run.stopped == "stopping" and run.outcome is not DONE:
            self.given_back.append(run.job)
        elif run.stopped == "cancelled":
            self._end(run.job, run.outcome, STOPPED, run)
        else:
            self._end(run.job, run.outcome, self._judge(run.job, run.outcome, run), run)

    def refuse(self, job: Job, outcome: Outcome) -> None:
        """Record the outcome of a job that was never started."""
        try:
            self._end(job, outcome, self._judge(job, outcome, None), None)
        except Exception as error:  # noqa: BLE001  # as above
            self._break_down(job, error)

    def put_back(self, runs: Iterable[JobRun]) -> None:
        """Queue jobs to be given back, for other workers."""
        self.given_back += [run.job for run in runs]
        self._worker.wake_finisher()

    def _end(self, job: Job, said: Outcome, verdict: Verdict, run: JobRun | None) -> None:
        """Queue the end of a job to be written; `run` is None if it was never started."""
        now_ms = self._store.clock.now_ms()
        if run is not None or verdict.counted:
            self.meters.ended(job, fate_of(verdict), now_ms, run)
        end = End(job, outcome_of(verdict, trace_of(None if isinstance(said, Done) else said.error)))
        if run is not None and run.work.result_ttl_ms and verdict.is_over:
            end.result, end.result_ttl_ms = self._result(run, verdict, now_ms).encode(), run.work.result_ttl_ms
        if verdict.counted:
            end.runs = self._runs(job, verdict, said, now_ms, run)
        if job.body.occurrence is not None and verdict.is_over:
            end.run_end = pack_end(job, _ending(verdict), now_ms)
        if not self.unsent:
            self._worker.wake_finisher()
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
            self._report(job, said, self._record(job, verdict, said, now_ms, run))
        return verdict

    def died(self, job: Job, outcome: Dead) -> None:
        """Count and report a job that the store buried when it was taken."""
        verdict = buried(outcome.reason)
        self.meters.ended(job, fate_of(verdict))
        self._report(job, outcome, self._record(job, verdict, outcome, self._store.clock.now_ms()))

    def _report(self, job: Job, said: Retry | Dead, record: RunRecord) -> None:
        key = idempotency_key(self._store.keys.namespace, job.id, job.original_due_ms, job.body.key_lane)
        self._worker.failures.report(record.failure(said, key))

    def runs_of(self, job: Job, said: Dead | JobCancelled) -> tuple[Run, ...]:
        """Return what the history keeps of a job that ends when it is taken."""
        verdict, outcome = (buried(said.reason), said) if isinstance(said, Dead) else (STOPPED, DONE)
        return self._runs(job, verdict, outcome, self._store.clock.now_ms())

    def _record(self, job: Job, verdict: Verdict, said: Outcome, now_ms: int, run: JobRun | None = None) -> RunRecord:
        began_ms = now_ms - round((time.monotonic() - run.started) * 1000) if run is not None and run.started else 0
        output = None if run is None else run.output
        exit_code, answer_bytes = (None, 0) if output is None else (output.exit_code, output.size)
        return RunRecord.of(
            job, verdict, said, began_ms, now_ms, self._name,
            code=exit_code, queue=job.queue, answer_bytes=answer_bytes,
        )  # fmt: skip

    def _runs(
        self, job: Job, verdict: Verdict, said: Outcome, now_ms: int, run: JobRun | None = None
    ) -> tuple[Run, ...]:
        """Return what the history keeps of an attempt, and of those before it whose workers died."""
        rules = self._worker.options.history
        keeps_all = rules.keeps_all(job.body, job.queue)
        if verdict is DELIVERED and job.deliveries <= 1 and not keeps_all:
            return ()
        record = self._record(job, verdict, said, now_ms, run)
        output, log = (None, ()) if run is None else (run.output, run.context.lines)
        trace = "" if verdict is DELIVERED else trace_of(error_of(said))
        details = RunDetails(output=output, log=log, traceback=trace) if output is not None or log or trace else None
        kept: tuple[Run, ...] = (Run(record, details),) if keeps_all or rules.keeps(record) else ()
        if job.deliveries > 1 and rules.keeps(lost := record.as_lost()):
            kept = (Run(lost),) * (job.deliveries - 1) + kept
        return kept

    def _result(self, run: JobRun, verdict: Verdict, ended_ms: int) -> Result:
        return Result(
            _ending(verdict),
            run.value if verdict.end == "done" else None,
            verdict.reason,
            attempt=run.job.body.attempt,
            worker=self._name,
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
        ends, self.unsent = self.unsent, []
        failure = await self._write(ends) if ends else None
        if failure is not None:
            raise failure
        return 0.0 if self.unsent else IDLE_S

    async def _write(self, ends: list[End]) -> StoreError | None:
        """Write these ends; those that the server did not take wait again. Return why it did not take them."""
        try:
            answers = await job_queue.finish(self._store, ends)
        except (StoreError, asyncio.CancelledError):
            self.unsent = ends + self.unsent
            raise
        except Exception as error:  # noqa: BLE001  # one of them cannot be written
            if len(ends) == 1:
                self._break_down(ends[0].job, error)
                return None
            return await self._write_apart(ends)
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
        return failure

    async def _write_apart(self, ends: list[End]) -> StoreError | None:
        """Write ends one by one after one of them could not be written, so that it holds up no other."""
        failure: StoreError | None = None
        while ends:
            end = ends.pop(0)
            try:
                failure = await self._write([end]) or failure
            except (StoreError, asyncio.CancelledError):
                self.unsent += ends
                raise
        return failure

    async def give_back(self) -> None:
        """Return unstarted jobs to their queues, so that other workers can have them at once."""
        jobs, self.given_back = self.given_back, []
        if jobs:
            await job_queue.give_back(self._store, jobs)


def _ending(verdict: Verdict) -> Ending:
    return "done" if verdict.end == "done" else "cancelled" if verdict.end == "cancelled" else "dead"
