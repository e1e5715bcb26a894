"""Names that do not answer keep no other name from being resolved."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mainspring.sinks import http_network
from mainspring.sinks.http_network import SystemLookup


class Names:
    """The system's resolver; names that begin with `dead` are answered when the test says so."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()

    def __call__(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked[host] += 1
        if host.startswith("dead"):
            self.over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answered")
        if host.startswith("wrong"):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.over.set()


async def ended(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_name_is_found_beside_many_that_do_not_answer(names: Names) -> None:
    lookup = SystemLookup()
    assert await lookup("known", 80) == ["192.0.2.1"]
    stuck = [asyncio.create_task(lookup(f"dead-{n}", 80)) for n in range(20)]
    async with asyncio.timeout(60):
        assert await lookup("new", 80) == ["192.0.2.1"]
    stuck += [asyncio.create_task(lookup(f"dead-{n}", 80)) for n in range(20, 200)]
    async with asyncio.timeout(60):
        assert await lookup("known", 80) == ["192.0.2.1"], "it answered the last time: it has threads of its own"
    assert sum(count for name, count in names.asked.items() if name.startswith("dead")) == 48
    names.over.set()
    await ended(*stuck)
    lookup.close()


async def test_a_name_that_does_not_answer_occupies_one_thread_for_all_requests(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_network, "_LOOKUP_TIMEOUT_S", 0.01)
    lookup = SystemLookup()
    for _ in range(5):
        with pytest.raises(OSError, match="no answer within"):
            await lookup("dead", 80)
    assert names.asked == {"dead": 1}
    names.over.set()
    lookup.close()


async def test_a_name_that_answered_and_does_not_any_more_gives_its_privilege_up(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = SystemLookup()
    with pytest.raises(OSError, match="no such name"):
        await lookup("wrong", 80)
    await lookup("fine", 80)
    assert list(lookup._answered) == ["fine"]
    lookup._answered["dead"] = None
    monkeypatch.setattr(http_network, "_LOOKUP_TIMEOUT_S", 0.01)
    with pytest.raises(OSError, match="no answer within"):
        await lookup("dead", 80)
    assert list(lookup._answered) == ["fine"]
    names.over.set()
    lookup.close()


async def test_concurrent_look_ups_of_a_name_share_one_answer(names: Names) -> None:
    lookup = SystemLookup()
    found = await asyncio.gather(*(lookup("new", 80) for _ in range(10)))
    assert found == [["192.0.2.1"]] * 10
    assert names.asked == {"new": 1}
    assert lookup._unproven._value == 48, "every permit is back"
    lookup.close()
