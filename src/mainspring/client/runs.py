"""The calls of a client for the history: list and show runs, count them, follow the log of a running one."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, Literal, get_args

from ..model.errors import InvalidInput
from ..model.ids import check_name
from ..model.run import (
    FAILED_ENDS,
    KeptRun,
    RunDetails,
    RunEnd,
    RunFilter,
    RunLog,
    RunsPage,
    RunStats,
)
from ..model.targets.names import check_queue
from ..model.text import check_text
from ..model.times import When, instant_ms
from ..store import runs as history
from ..store.keys import HOUR_MS, MINUTE_MS
from ..store.store import Store
from ..store.tasks.dead_letters import find_live
from ..store.tasks.find import resolve

RunOutcome = Literal[RunEnd, "failed"]
"""How a run ended; `failed` is every end that counts as a failure."""

STEPS_MS: Final = {"minute": MINUTE_MS, "hour": HOUR_MS}
MOST_STEPS: Final = 24 * 31
"""Most minutes or hours of one answer."""

LIVE: Final = frozenset({"pending", "fired", "queued", "running"})


class RunOperations:
    """Calls of Client for the history of runs."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    async def runs(
        self,
        *,
        schedule: str | None = None,
        target: str | None = None,
        queue: str | None = None,
        id: str | None = None,
        lane: str | None = None,
        worker: str | None = None,
        outcome: RunOutcome | None = None,
        ended_after: When | None = None,
        ended_before: When | None = None,
        limit: int = 50,
        cursor: str | None = None,
        allowed: Sequence[str] | None = None,
    ) -> RunsPage:
        """Return runs that match every filter, newest first; pass `page.next` as `cursor` for the next page.

        - `schedule`, `target` (whole, or its beginning and `*`), `queue`, `worker` (or node).
        - `id`: the tasks with this id, in whatever lane; `lane`: only the one in this lane, "" for none.
        - `outcome`: how they ended, "failed" for all failures. `ended_after` (included), `ended_before` (not included):
          aware datetimes, ISO 8601 text or epoch milliseconds.
        - `limit`: 1 to 1000.

        - `allowed`: targets, or their beginnings and `*`, of which one must fit.

        A page looks through a bounded part of the history: with filters it may be short, and still name a next one.
        Raises InvalidInput.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
        for name, text in (("schedule", schedule), ("target", target), ("queue", queue), ("worker", worker)):
            if text is not None:
                check_text(text, name)
        if outcome is not None and outcome not in (ends := get_args(RunEnd)) and outcome != "failed":
            raise InvalidInput(f"outcome is {outcome!r}; use failed, or one of {', '.join(ends)}")
        where = RunFilter(
            schedule=schedule,
            target=target,
            queue=queue,
            by=worker,
            allowed=None if allowed is None else tuple(allowed),
            ends=None if outcome is None else FAILED_ENDS if outcome == "failed" else frozenset({outcome}),
            from_ms=0 if ended_after is None else instant_ms(ended_after, field="ended_after"),
            to_ms=RunFilter().to_ms if ended_before is None else instant_ms(ended_before, field="ended_before"),
        )
        if lane is not None and id is None:
            raise InvalidInput("lane: give the id of the task too; a lane alone chooses no runs")
        if not 0 <= where.from_ms < where.to_ms:
            raise InvalidInput("the range is empty: ended_before must be later than ended_after")
        if id is None:
            return await history.list_runs(self.store, where, cursor, limit)
        return await history.runs_of_task(self.store, await resolve(self.store, id, lane), where, cursor, limit)

    async def run(self, id: str) -> KeptRun | None:
        """Return a run by its own id, with its response, output, log and traceback while they are kept.

        None if the history does not have it (any more). Raises InvalidInput for what is not the id of a run.
        """
        return await history.read_run(self.store, check_name(id, "id"))

    async def run_stats(
        self,
        *,
        schedule: str | None = None,
        target: str | None = None,
        queue: str | None = None,
        start: When | None = None,
        end: When | None = None,
        step: Literal["minute", "hour"] = "hour",
    ) -> RunStats:
        """Return the counts of all runs, or of those of a schedule, a target or a queue, by minute or hour.

        Without `start` they begin a day before the end, or with minutes an hour; `end` is now by default. Minutes are
        kept for two hours, hours for two weeks. A webhook's target counts by its host. Raises InvalidInput.
        """
        if step not in STEPS_MS:
            raise InvalidInput(f"step is {step!r}; use minute or hour")
        width_ms = STEPS_MS[step]
        end_ms = await self.store.sample_clock() + 1 if end is None else instant_ms(end, field="end")
        start_ms = (
            end_ms - (24 if step == "hour" else 60) * width_ms if start is None else instant_ms(start, field="start")
        )
        if not 0 <= end_ms - start_ms <= MOST_STEPS * width_ms:
            advice = ", or step='hour'" if step == "minute" else ""
            raise InvalidInput(
                f"start is out of range: the counts must begin before they end, and be at most {MOST_STEPS} {step}s;"
                f" give a later start{advice}"
            )
        if sum(one is not None for one in (schedule, target, queue)) > 1:
            raise InvalidInput("give one of schedule, target and queue")
        kind, name = subject_of(schedule, target, queue)
        counts = await history.run_counts(self.store, kind, name, start_ms, end_ms, width_ms)
        return RunStats(counts, await history.history_state(self.store))

    async def run_log(self, id: str, *, lane: str | None = None, cursor: str | None = None) -> RunLog:
        """Return what a run has written: log lines of a handler, or output of a command.

        `id` is a task's, also while it runs, or a run's; `lane` is the task's. Pass `log.next` as `cursor` for what
        follows, until `log.over`. Empty if nothing was written or is kept. Raises InvalidInput and Ambiguous.
        """
        if lane is None and history.is_run_id(id, len(self.store.keys)):
            run = await self.run(id)
            if run is not None:  # else it may be the id of a task, such as 1.2.3.4
                return RunLog("" if cursor is not None else _rest(run.details), cursor or "0", True)
        reference = await resolve(self.store, id, lane)
        text, after = await history.read_log(self.store, reference, cursor or "0")
        if text or (await find_live(self.store, id, lane)).state in LIVE:
            return RunLog(text, after, False)
        # Read again: its end may have been published after the first read, before the task was over.
        text, after = await history.read_log(self.store, reference, after)
        if text:
            return RunLog(text, after, False)
        page = await self.runs(id=id, lane=lane, limit=1)
        run = await self.run(page.runs[0].id) if page.runs else None
        shown = "" if cursor is None else await history.end_of_log(self.store, reference)
        return RunLog("" if run is None else _rest(run.details, shown), after, True)


def _rest(details: RunDetails | None, shown: str = "") -> str:
    """Return the rest of a run's kept output after `shown`, the part that was published while it ran."""
    if details is None or (details.output is not None and shown):
        return ""  # a command publishes everything
    lines = [f"{line}\n" for line in details.log]
    known = next(n for n in range(len(lines), -1, -1) if shown.endswith("".join(lines[:n])))
    output = b"" if details.output is None else details.output.stdout + details.output.stderr
    return "".join(lines[known:]) + output.decode(errors="replace")


def subject_of(schedule: str | None, target: str | None, queue: str | None) -> tuple[history.Subject, str | None]:
    """Return the kind and the name under which runs are counted; all runs are counted by their targets."""
    if schedule is not None:
        return "s", check_text(schedule, "schedule")
    if queue is not None:
        return "q", check_queue(queue)
    return "t", None if target is None else history.counted_as(check_text(target, "target"))
