"""`mainspring.testing` as users get it: fixtures, a clock, a scheduler to tick; it costs nothing when unused."""

import subprocess
import sys

import pytest

import mainspring.testing
from mainspring.model.delivery import Retry
from mainspring.testing import ManualClock, Ticker
from mainspring.testing.servers import Server, all_keys, belongs_to


async def test_a_scheduler_is_ticked_by_hand(mainspring_ticker: Ticker, mainspring_clock: ManualClock) -> None:
    async with mainspring_ticker as ticker:
        assert ticker.clock is mainspring_clock
        await ticker.client.put("log:", {"order": 42}, after="30m", id="order-42")
        assert await ticker.advance(minutes=29) == []
        [delivery] = await ticker.advance(minutes=1)
        assert (delivery.id, delivery.value()) == ("order-42", {"order": 42})


async def test_retries_run_at_their_own_times(mainspring_ticker: Ticker) -> None:
    mainspring_ticker.answer("http", lambda one: Retry("503", after_ms=60_000) if one.attempt < 3 else None)
    async with mainspring_ticker as ticker:
        handle = await ticker.client.put("http://example.org/", after="1s")
        fired = await ticker.advance(hours=1)
        assert [one.due_ms - handle.due_ms for one in fired] == [0, 60_000, 120_000]


async def test_a_namespace_is_fresh_and_its_keys_go(
    mainspring_server: Server, mainspring_namespace: str, mainspring_url: str
) -> None:
    async with Ticker(mainspring_url, namespace=mainspring_namespace) as ticker:
        await ticker.client.put("log:", after="1h")
    keys = list(all_keys(mainspring_server))
    assert keys
    assert all(belongs_to(key, mainspring_namespace) for key in keys), "earlier tests left nothing"


def test_the_plugin_costs_nothing_when_unused() -> None:
    code = "import sys, mainspring.testing.plugin; print([n for n in sys.modules if n.startswith('mainspring.engine')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_exported_names_can_be_imported() -> None:
    assert {"ManualClock", "SinkContract", "Ticker", "servers"} <= set(mainspring.testing.__all__)
    for name in mainspring.testing.__all__:
        assert getattr(mainspring.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mainspring.testing.nothing
