"""Threads of a worker: what none of them has begun can be had back."""

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import pytest

from mainspring.model.delivery import Body
from mainspring.model.job import Job
from mainspring.worker.executor import JobRun, ThreadRunner
from mainspring.worker.handler import Handler


class Contested(SimpleQueue[JobRun | None]):
    """If anything is in it, a thread was quicker. Waiting for more would never end."""

    def empty(self) -> bool:
        return False

    def get(self, block: bool = True, timeout: float | None = None) -> JobRun | None:
        assert not block, "this stops the event loop until another job comes, if one does"
        return super().get(False)

    def get_nowait(self) -> JobRun | None:
        raise Empty


async def test_taking_jobs_back_does_not_wait_for_one_that_a_thread_took_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = ThreadRunner(1, lambda: 0, lambda _: None)
    monkeypatch.setattr(threads, "_jobs", Contested())
    assert threads.take_back() == []


def run_of(work: Callable[[], None]) -> JobRun:
    handler = Handler(work)
    body = Body(handler.target, b"null")
    return JobRun(
        Job(0, "default", b"1-0", bytes(16), body, 0, 0, 1, bytes(14) + b"1-0 default w/n/0"), handler, "main", 0.0
    )


async def test_a_job_that_is_stopped_at_the_moment_a_thread_begins_it_does_not_run() -> None:
    called, ended = threading.Event(), asyncio.Event()
    run = run_of(called.set)
    run.stopped = "cancelled"  # the thread may have asked before whether it is over
    threads = ThreadRunner(1, lambda: 0, lambda _: ended.set())
    threads.add(run)
    await asyncio.wait_for(ended.wait(), 60)
    assert not called.is_set()
    assert run.outcome == run.late()
    threads.stop()


async def test_jobs_that_no_thread_has_begun_are_given_back_in_order() -> None:
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(60)

    runs = [run_of(work) for _ in range(3)]
    threads = ThreadRunner(1, lambda: 0, lambda _: None)
    for run in runs:
        threads.add(run)
    assert began.wait(60)
    assert threads.take_back() == runs[1:]
    assert threads.take_back() == []
    go_on.set()
    threads.stop()
