"""The error handler: it sees every failure, and nothing it does comes back to the deliveries."""

import asyncio
import logging
import threading

import msgspec
import pytest

from mainspring import roles
from mainspring.model.delivery import EXPIRED, Failure
from mainspring.roles import Failures


def failure(number: int = 0, *, dead: bool = False, target: str = "http://shop.example/hook?key=secret") -> Failure:
    return Failure(
        id=f"task-{number}",
        target=target,
        attempt=1,
        error="HTTP 503",
        outcome="dead" if dead else "retry",
        next_at_ms=None if dead else 1_000,
        original_due_ms=0,
        idempotency_key=f"main/task-{number}/0",
    )


async def test_a_coroutine_function_sees_every_failure_in_order() -> None:
    seen: list[str] = []

    async def handler(one: Failure) -> None:
        await asyncio.sleep(0)
        seen.append(one.id)

    failures = Failures(handler)
    for number in range(1_200):
        failures.report(failure(number, dead=number % 2 == 0))
    await failures.seen()
    assert seen == [f"task-{number}" for number in range(1_200)]
    assert (failures.retries, failures.deaths, failures.dropped) == (600, 600, 0)


async def test_a_plain_function_runs_beside_the_loop() -> None:
    release, seen = threading.Event(), []

    def handler(one: Failure) -> None:
        assert release.wait(30), "the loop was held up: nobody could let this go on"
        seen.append(threading.current_thread() is threading.main_thread())

    failures = Failures(handler)
    failures.report(failure())
    await asyncio.sleep(0)
    release.set()
    await failures.seen()
    assert seen == [False]


@pytest.mark.parametrize("ending", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_an_error_handler_that_raises_is_named_and_called_again(
    caplog: pytest.LogCaptureFixture, ending: type[BaseException]
) -> None:
    seen: list[str] = []

    def handler(one: Failure) -> None:
        seen.append(one.id)
        raise ending("a bug of the handler")

    async def async_handler(one: Failure) -> None:
        handler(one)

    for each in (handler, async_handler):
        failures = Failures(each)
        failures.report(failure(1))
        failures.report(failure(2))
        await failures.seen()
    assert seen == ["task-1", "task-2"] * 2
    assert caplog.text.count("the error handler failed") == 4
    assert "a bug of the handler" in caplog.text


async def test_a_plain_function_may_return_something_to_await() -> None:
    seen: list[str] = []

    async def later(one: Failure) -> None:
        seen.append(one.id)

    failures = Failures(lambda one: later(one))
    failures.report(failure(7))
    await failures.seen()
    assert seen == ["task-7"]


async def test_failures_that_a_slow_handler_cannot_take_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    going, seen = asyncio.Event(), []

    async def handler(one: Failure) -> None:
        await going.wait()
        seen.append(one.id)

    failures = Failures(handler, room=3)
    for number in range(5):
        failures.report(failure(number))
    assert failures.dropped == 2
    assert "the error handler is too slow: 3 failures wait, 1 were not shown to it" in caplog.text
    going.set()
    await failures.seen()
    assert len(seen) == 3


async def test_a_handler_that_hangs_does_not_hold_up_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(one: Failure) -> None:
        await asyncio.Event().wait()

    failures = Failures(handler)
    failures.report(failure(1))
    await failures.aclose(timeout_s=0.01)
    assert "the error handler has not seen" in caplog.text


# -- without a handler ------------------------------------------------------------------------------------------------


async def test_a_dead_target_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "QUIET_S", 0.01)
    summed_up = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "more" in record.getMessage():
                summed_up.set()

    logger = logging.getLogger("mainspring.failures")
    monkeypatch.setattr(logger, "handlers", [Watch()])
    failures = Failures()
    for number in range(1_000):
        failures.report(failure(number, target=f"http://shop.example/orders/{number}"))
    failures.report(failure(target="kafka:ticks"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2, "one line for each receiver"
    async with asyncio.timeout(60):
        await summed_up.wait()
    assert caplog.records[2].getMessage() == (
        "http://shop.example: 999 more failed attempts; the last: task task-999, HTTP 503"
    )
    await failures.aclose()


async def test_dead_tasks_are_errors_logged_one_by_one_and_then_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    for number in range(roles.FIRST_DEAD + 3):
        failures.report(failure(number, dead=True))
    assert len(caplog.records) == roles.FIRST_DEAD
    await failures.aclose()
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "3 more tasks died" in caplog.records[-1].getMessage()


async def test_a_parked_lane_is_an_error_and_no_death(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    for number in range(roles.FIRST_DEAD + 3):
        failures.report(
            msgspec.structs.replace(failure(number), outcome="parked", lane=f"user {number}", next_at_ms=None)
        )
    await failures.aclose()
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert caplog.records[0].getMessage() == (
        "task task-0 to http://shop.example/hook?… failed, and its lane user 0 is parked until someone acts: HTTP 503"
    )
    assert "3 more lanes were parked" in caplog.records[-1].getMessage()


async def test_the_query_of_an_address_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    failures.report(failure())
    failures.report(failure(dead=True))
    await failures.aclose()
    assert "shop.example" in caplog.text
    assert "secret" not in caplog.text


def raised(number: int) -> Exception:
    try:
        raise ValueError(f"no stock for order {number}")
    except ValueError as error:
        return error


def run_failure(number: int, target: str = "queue:mail/send", **changes: object) -> Failure:
    error = f"ValueError: no stock for order {number}"
    made = msgspec.structs.replace(
        failure(number, target=target), error=error, brief="hidden", exception=raised(number)
    )
    return msgspec.structs.replace(made, **changes)


async def test_every_failed_run_is_logged_with_its_message_and_the_first_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = Failures()
    for number in range(20):
        failures.report(run_failure(number))
    failures.report(run_failure(20, "queue:mail/receive"))
    assert [record.getMessage().partition(";")[0] for record in caplog.records[:20]] == [
        f"task task-{number} to queue:mail/send: attempt 1 failed: ValueError: no stock for order {number}"
        for number in range(20)
    ]
    assert [record.exc_info is not None for record in caplog.records] == [True] + [False] * 19 + [True]
    assert "in raised" in caplog.text
    assert "ValueError: no stock for order 0" in caplog.text
    monkeypatch.setattr(roles, "TRACE_EVERY_S", 0.0)
    failures.report(run_failure(21))
    assert caplog.records[-1].exc_info is not None, "a minute later"
    await failures.aclose()


@pytest.mark.parametrize("target", ["queue:mail/send", "command:backup"])
async def test_a_handler_that_fails_without_end_has_a_line_for_every_attempt_and_one_traceback(
    caplog: pytest.LogCaptureFixture, target: str
) -> None:
    failures = Failures()
    for number in range(1_000):
        failures.report(run_failure(number, target, outcome="dead" if number % 2 else "retry"))
    await failures.aclose()
    assert [record.__dict__["task"] for record in caplog.records] == [f"task-{number}" for number in range(1_000)]
    assert all(f"no stock for order {number}" in caplog.records[number].getMessage() for number in range(1_000))
    assert [record.exc_info is not None for record in caplog.records] == [True] + [False] * 999


async def test_tasks_that_expire_in_a_queue_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    for number in range(1_000):
        failures.report(run_failure(number, error=EXPIRED, exception=None, outcome="dead"))
    await failures.aclose()
    assert len(caplog.records) == roles.FIRST_DEAD + 1
    assert "queue:mail: 995 more tasks died" in caplog.records[-1].getMessage()


async def test_a_redacted_log_has_no_messages(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(redacted=True)
    failures.report(run_failure(0))
    failures.report(run_failure(1))
    await failures.aclose()
    assert "order 0" not in caplog.text
    assert "attempt 1 failed: hidden" in caplog.text
    assert "in raised" in caplog.text
    assert "attempt 1 failed: hidden" in caplog.records[1].getMessage()
    assert [record.exc_info is not None for record in caplog.records] == [True, False], "once a minute, as ever"


@pytest.mark.parametrize(("attempt", "spoken"), [(1, "1 attempt"), (3, "3 attempts")])
async def test_a_death_is_logged_with_its_number_of_attempts(
    caplog: pytest.LogCaptureFixture, attempt: int, spoken: str
) -> None:
    failures = Failures()
    failures.report(run_failure(0, attempt=attempt, outcome="dead"))
    await failures.aclose()
    assert f"is dead after {spoken}: ValueError" in caplog.text


@pytest.mark.parametrize("outcome", ["retry", "dead"])
async def test_a_task_of_a_lane_is_named_with_it(caplog: pytest.LogCaptureFixture, outcome: str) -> None:
    failures = Failures()
    failures.report(run_failure(0, lane="user\n7", outcome=outcome))
    await failures.aclose()
    [record] = caplog.records
    assert record.getMessage().startswith("task task-0 of lane user\\n7 to queue:mail/send")
    assert record.__dict__["lane"] == "user\n7"


async def test_text_from_outside_stays_on_its_log_line(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    failures.report(run_failure(0, id="a\nb", error="said\r\n12:00 error \x1b[2J", exception=None))
    await failures.aclose()
    assert "task a\\nb to queue:mail/send: attempt 1 failed: said\\r\\n12:00 error \\x1b[2J" in caplog.text
