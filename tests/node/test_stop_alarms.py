"""Alarms of a stop: time in which the whole process stood still is no time that a stop had."""

import asyncio
import time

from mainspring.node.process import Alarm


async def rung(after_s: float, again_s: float, *, held_up_s: float) -> float:
    """Seconds from when the process continues to the call."""
    calls: asyncio.Queue[float] = asyncio.Queue()
    Alarm(after_s, again_s, lambda: calls.put_nowait(time.monotonic()))
    time.sleep(held_up_s)  # noqa: ASYNC251  # the whole process stands still
    began = time.monotonic()
    return await calls.get() - began


async def test_an_alarm_that_a_pause_has_swallowed_gives_the_stop_its_time() -> None:
    assert await rung(0.01, 0.3, held_up_s=0.2) >= 0.3


async def test_an_alarm_comes_again_once_only() -> None:
    calls: list[int] = []
    over = asyncio.Event()

    def call() -> None:
        calls.append(1)
        over.set()

    Alarm(0.01, 0.01, call)
    for _ in range(2):
        time.sleep(0.2)  # noqa: ASYNC251  # it stands still again and again
        await asyncio.sleep(0)
    await over.wait()
    assert calls == [1]


async def test_an_alarm_that_was_called_off_is_silent() -> None:
    calls: list[int] = []
    alarm, later = Alarm(0.01, 0.01, lambda: calls.append(1)), asyncio.Event()
    alarm.cancel()
    asyncio.get_running_loop().call_later(0.05, later.set)
    await later.wait()
    assert calls == []
