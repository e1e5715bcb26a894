"""A recurring HTTP call: name, times, URL, retry policy, timeout."""

import threading
from collections.abc import Awaitable, Callable

from mainspring.client.client import Client
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.testing.ticker import Ticker
from tests.support.web_receiver import Answer, Request, receiving

Tickers = Callable[..., Awaitable[Ticker]]


async def test_a_call_that_is_not_answered_in_time_is_tried_again_and_the_next_comes_on_time(
    tickers: Tickers, client: Client
) -> None:
    sink = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    ticker = await tickers(sinks={"http": sink})
    release = threading.Event()
    seen: list[tuple[str, str]] = []

    def answer(request: Request) -> Answer:
        seen.append((request.headers["mainspring-id"], request.headers["mainspring-attempt"]))
        if len(seen) == 1:
            release.wait(60)
        return Answer()

    with receiving(answer) as receiver:
        await client.schedules.add(
            "hook", every="10s", target=receiver.url, payload={"a": 1}, retry="3 base=1s jitter=none", timeout="2s"
        )
        await ticker.advance(seconds=21)
        release.set()
        assert [request.body for request in receiver.requests] == [b'{"a":1}'] * 3
    await sink.aclose()
    assert seen == [
        ("hook%402027-01-15T08%3A00%3A10Z", "1"), ("hook%402027-01-15T08%3A00%3A10Z", "2"),
        ("hook%402027-01-15T08%3A00%3A20Z", "1"),
    ]  # fmt: skip
    view = await client.schedules.get("hook")
    assert view is not None
    assert [run.outcome for run in view.last_runs] == ["done", "done"]
