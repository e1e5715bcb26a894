"""Real servers for every test of the data path: a namespace of its own, and nothing left behind."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import cache
from typing import Any, Final

import pytest
import uvloop

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.store.store import Store
from mainspring.store.tasks import encode
from mainspring.testing.balance import balance
from mainspring.testing.kafka import Broker, broker
from mainspring.testing.servers import (
    Kind,
    Server,
    all_keys,
    belongs_to,
    cluster,
    delete_namespace,
    standalone,
)
from mainspring.testing.ticker import Ticker
from tests.support import narrow_rights
from tests.support.fleets import KINDS, PARTITIONS, Fleet, masters_of
from tests.support.kafka_topics import need_kafka
from tests.support.missing_parts import need_server

pytest_plugins = ["tests.support.suite"]

STRETCH = 32
"""Tasks of one call that share a partition: less than usual, so that some hundred of them reach all partitions."""

UVLOOP_ON: Final = ("redis", "cluster")
"""Whether a test runs on uvloop, as nodes do; otherwise on asyncio's own loop, as programs may."""


class Loops:
    """Makes the event loop of the test that is about to run."""

    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop

    @classmethod
    def new(cls) -> asyncio.AbstractEventLoop:
        return cls.factory()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    kind = item.callspec.params.get("fleet") if hasattr(item, "callspec") else None
    Loops.factory = uvloop.new_event_loop if kind in UVLOOP_ON else asyncio.new_event_loop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"by server": Loops.new}


@pytest.fixture(scope="session")
def fleets() -> Iterator[Callable[[str], Fleet]]:
    """Starts each kind when it is asked for first. All run to the end: pytest would end one where the next begins."""
    with ExitStack() as stack:

        @cache
        def of_kind(name: str) -> Fleet:
            made: Fleet = cluster(3, 0) if name == "cluster" else standalone("redis" if name == "redis" else "valkey")
            stack.enter_context(made)
            if name in narrow_rights.ON:
                more = [f"+{command}" for command in narrow_rights.TESTS_OWN]
                narrow_rights.sign_in(made, masters_of(made), more=more)
            return made

        yield of_kind


@pytest.fixture(autouse=True)
def _small_loads_reach_all_partitions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a server is used: tests of the arithmetic itself see the real figure."""
    if {"fleet", "server", "kind"} & set(request.fixturenames):
        monkeypatch.setattr(encode, "STRETCH", STRETCH)


@pytest.fixture(scope="session", params=KINDS)
def fleet(request: pytest.FixtureRequest, fleets: Callable[[str], Fleet]) -> Fleet:
    """Valkey as embedded, Debian's Redis 7.0, and a cluster of three masters: started once."""
    need_server("redis" if request.param == "redis" else "valkey")
    return fleets(request.param)


@pytest.fixture(scope="module", params=["valkey", "redis"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """For tests that start servers of their own."""
    kind: Kind = request.param
    need_server(kind)
    return kind


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A Valkey for the tests of one module, where the kind of server does not matter."""
    with standalone() as started:
        yield started


@pytest.fixture(scope="session")
def kafka() -> Iterator[Broker]:
    """One broker for all tests; each makes topics of its own. A test that stops or kills it starts it again."""
    need_kafka()
    with broker(extra={"auto.create.topics.enable": "true"}) as started:
        yield started


@pytest.fixture
def namespace(fleet: Fleet) -> Iterator[str]:
    """A fresh namespace. A test that writes outside of it fails, and so does one whose keys cannot be found again."""
    name = f"t{uuid.uuid4().hex[:10]}"
    yield name
    strangers: list[bytes] = []
    left = 0
    for server in masters_of(fleet):
        strangers += [key for key in all_keys(server) if not belongs_to(key, name)]
        delete_namespace(server, name)
        count, _ = server.calls([("DBSIZE",), ("FLUSHALL",)])  # the next test starts clean in any case
        left += count
    assert not strangers, f"keys outside the test's namespace: {strangers[:5]}"
    assert left == 0, f"{left} keys are left after the namespace was cleared"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(fleet: Fleet, namespace: str, clock: ManualClock) -> AsyncIterator[Store]:
    """A store under a clock held by hand. Whatever a test did, the books must balance at its end."""
    opened = await Store.open(fleet.url, namespace=namespace, partitions=PARTITIONS, clock=clock)
    try:
        yield opened
        await balance(opened)
    finally:
        await opened.aclose()


@pytest.fixture
def client(store: Store) -> Client:
    return Client.over(store)


@pytest.fixture
async def tickers(fleet: Fleet, namespace: str, clock: ManualClock) -> AsyncIterator[Callable[..., Awaitable[Ticker]]]:
    """Makes tickers on the test's namespace and clock; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Ticker:
            made = Ticker(fleet.url, namespace=namespace, partitions=PARTITIONS, clock=clock, **options)
            return await stack.enter_async_context(made)

        yield make


@pytest.fixture
async def ticker(tickers: Callable[..., Awaitable[Ticker]], store: Store) -> Ticker:
    return await tickers()
