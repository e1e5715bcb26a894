"""pytest fixtures: an isolated real server, a separate namespace for every test, a scheduler to tick by hand.

    async def test_an_unpaid_order_expires(mainspring_ticker):
        async with mainspring_ticker as ticker:
            await place_order(ticker.client)
            [delivery] = await ticker.advance(minutes=30)

No other module of Mainspring is imported before a test asks for one of these.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.model.clock import ManualClock
    from mainspring.testing.servers import Server
    from mainspring.testing.ticker import Ticker


@pytest.fixture(scope="session")
def mainspring_server() -> Iterator[Server]:
    """A server for this test run only: on a free port, nothing kept on disk, removed at the end."""
    from mainspring.testing.servers import standalone

    with standalone() as server:
        yield server


@pytest.fixture(scope="session")
def mainspring_url(mainspring_server: Server) -> str:
    return mainspring_server.url


@pytest.fixture
def mainspring_namespace(mainspring_server: Server) -> Iterator[str]:
    """A namespace for this test only; its keys are deleted afterwards."""
    from mainspring.testing.servers import delete_namespace

    namespace = f"test-{uuid.uuid4().hex[:12]}"
    yield namespace
    delete_namespace(mainspring_server, namespace)


@pytest.fixture
def mainspring_clock() -> ManualClock:
    """A clock that is stopped until the test moves it."""
    from mainspring.model.clock import ManualClock

    return ManualClock()


@pytest.fixture
def mainspring_ticker(mainspring_url: str, mainspring_namespace: str, mainspring_clock: ManualClock) -> Ticker:
    """A scheduler to tick by hand: `async with mainspring_ticker as ticker`."""
    from mainspring.testing.ticker import Ticker

    return Ticker(mainspring_url, namespace=mainspring_namespace, clock=mainspring_clock)
