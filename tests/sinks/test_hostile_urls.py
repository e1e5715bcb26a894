"""No URL leads where it must not. A server listens where the hostile ones point, and gets no connection."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack

import pytest

from mainspring.model.delivery import DONE, Dead, Retry
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.sinks.http_network import SystemLookup
from tests.support.hostile_urls import hostile_urls
from tests.support.web_receiver import delivery, receiving

NAMES = {
    "127.0.0.1.nip.io": ["127.0.0.1"],
    "localtest.me": ["127.0.0.1", "::1"],
    "rebind.attacker.example": ["93.184.215.14", "127.0.0.1"],
    "localhost.localdomain": ["127.0.0.1"],
    "ip6-localhost": ["::1"],
    "metadata.google.internal": ["169.254.169.254"],
    "xn--9hbcp.xn--8hb.xn--8hb.xn--9hb": ["127.0.0.1"],
    "metadata": ["169.254.169.254"],
    "instance-data": ["169.254.169.254"],
}
"""Answers of name servers: the tests need no network."""


class Canary:
    """Listens on every loopback address there is; counts who comes."""

    def __init__(self, sockets: list[socket.socket], port: int) -> None:
        self._sockets = sockets
        self.port = port

    @property
    def visitors(self) -> int:
        count = 0
        for one in self._sockets:
            try:
                one.accept()[0].close()
                count += 1
            except BlockingIOError:
                continue
        return count


@pytest.fixture
def canary() -> Iterator[Canary]:
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = first.getsockname()[1]
        sockets = [first]
        if socket.has_ipv6:
            second = stack.enter_context(socket.socket(socket.AF_INET6))
            second.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                second.bind(("::", port))
                second.listen()
                sockets.append(second)
            except OSError:
                second.close()  # a machine without IPv6: nothing there can be reached either
        for one in sockets:
            one.setblocking(False)
        yield Canary(sockets, port)


async def lookup(host: str, port: int) -> Sequence[str]:
    return NAMES[host] if host in NAMES else await SystemLookup()(host, port)


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(timeout_s=5), lookup)
    yield made
    await made.aclose()


def test_the_canary_notices_every_connection(canary: Canary) -> None:
    with socket.create_connection(("127.0.0.1", canary.port)):
        assert canary.visitors == 1


def test_there_are_at_least_three_hundred_hostile_urls() -> None:
    assert len(hostile_urls(8080)) >= 300


async def test_every_hostile_url_is_refused_without_a_connection(sink: HttpSink, canary: Canary) -> None:
    urls = hostile_urls(canary.port)
    answers = await asyncio.gather(*(sink.deliver([delivery(url)]) for url in urls))
    reached = [(url, outcome) for url, [outcome] in zip(urls, answers, strict=True) if not isinstance(outcome, Dead)]
    assert reached == []
    assert canary.visitors == 0


async def test_the_same_urls_do_reach_the_canary_where_the_loopback_is_allowed(canary: Canary) -> None:
    """So it is the guard that keeps them out, and not that nothing would have come."""
    open_sink = HttpSink(HttpOptions(timeout_s=3, allow=("127.0.0.0/8", "0.0.0.0/8", "::/96")), lookup)
    urls = [f"http://{host}:{canary.port}/" for host in ("127.0.0.1", "127.0.0.2", "localhost.", "127.0.0.1.nip.io")]
    await asyncio.gather(*(open_sink.deliver([delivery(url)]) for url in urls))
    assert canary.visitors >= 1
    await open_sink.aclose()


async def test_a_name_that_answers_differently_the_second_time_leads_nowhere(canary: Canary) -> None:
    """DNS rebinding: a harmless answer for the check, the loopback for the connection. There is only one question."""
    with receiving(host="127.0.0.2") as receiver:
        answers = iter([["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"]])
        asked = 0

        async def rebinding(host: str, port: int) -> Sequence[str]:
            nonlocal asked
            asked += 1
            return next(answers)

        url = f"http://rebind.attacker.example:{receiver.port}/"
        first = HttpSink(HttpOptions(allow=("127.0.0.2",)), rebinding)
        assert await first.deliver([delivery(url, number=n) for n in range(5)]) == [DONE] * 5
        assert asked == 1
        await first.aclose()
        for _ in range(3):
            later = HttpSink(HttpOptions(allow=("127.0.0.2",)), rebinding)
            [outcome] = await later.deliver([delivery(f"http://rebind.attacker.example:{canary.port}/")])
            assert isinstance(outcome, Dead)
            assert "rebind.attacker.example (127.0.0.1) is the loopback" in outcome.reason
            await later.aclose()
    assert asked == 4
    assert canary.visitors == 0


async def test_a_name_that_changes_while_it_is_cached_is_asked_again_and_judged_again(canary: Canary) -> None:
    from mainspring.sinks import http_session

    answers = iter([["127.0.0.2"], ["127.0.0.1"]])

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return next(answers)

    with pytest.MonkeyPatch.context() as patch, receiving(host="127.0.0.2") as receiver:
        patch.setattr(http_session, "DNS_CACHE_S", 0)
        sink = HttpSink(HttpOptions(allow=("127.0.0.2",)), rebinding)
        assert await sink.deliver([delivery(f"http://a.example:{receiver.port}/")]) == [DONE]
        [outcome] = await sink.deliver([delivery(f"http://a.example:{canary.port}/")])
        assert isinstance(outcome, Dead)
        await sink.aclose()
    assert canary.visitors == 0


async def test_names_that_fail_to_resolve_fail_closed(canary: Canary) -> None:
    async def failing(host: str, port: int) -> Sequence[str]:
        if host == "slow.example":
            raise TimeoutError
        if host == "broken.example":
            raise OSError(-3, "Temporary failure in name resolution")
        return []

    sink = HttpSink(HttpOptions(), failing)
    for host in ("slow.example", "broken.example", "empty.example"):
        [outcome] = await sink.deliver([delivery(f"http://{host}:{canary.port}/")])
        assert isinstance(outcome, Retry), outcome
    await sink.aclose()
    assert canary.visitors == 0


async def test_the_last_gate_holds_even_when_all_before_it_are_open(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a URL ever be read in a new way, the socket itself is still judged."""
    from mainspring.sinks.http_network import AddressGuard

    async def unguarded(self: AddressGuard, host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(AddressGuard, "check_number", lambda *_: None)
    monkeypatch.setattr(AddressGuard, "resolve", unguarded)
    sink = HttpSink(HttpOptions())
    for host in ("127.0.0.1", "a.example"):
        [outcome] = await sink.deliver([delivery(f"http://{host}:{canary.port}/")])
        assert isinstance(outcome, Dead)
        assert "127.0.0.1 is the loopback" in outcome.reason
    await sink.aclose()
    assert canary.visitors == 0
