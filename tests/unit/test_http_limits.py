"""Hosts do not wait for each other, and none is asked for more than it may be."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from mainspring.model.delivery import Body, Delivery, GivenDelivery
from mainspring.model.outcome import DONE, Outcome, Retry
from mainspring.sinks import http_limits
from mainspring.sinks.http_limits import Hosts, Limits


def deliveries(count: int) -> list[Delivery]:
    return [GivenDelivery(Body("http://a/", b"1"), "main", n.to_bytes(16, "big"), 0) for n in range(count)]


class Target:
    """Counts what it has at one time; answers when it is told to."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.open = asyncio.Event()
        if is_open:
            self.open.set()
        self.seen: list[bytes] = []
        self.now = self.most = 0
        self.arrived = asyncio.Event()

    async def send(self, delivery: Delivery) -> Outcome:
        self.seen.append(delivery.idh)
        self.now += 1
        self.most = max(self.most, self.now)
        self.arrived.set()
        await asyncio.sleep(0)
        await self.open.wait()
        self.now -= 1
        return DONE


def untried(outcomes: Sequence[Outcome]) -> list[Retry]:
    return [one for one in outcomes if isinstance(one, Retry) and one.untried]


async def test_each_is_sent_once_in_order_and_never_more_at_one_time_than_allowed() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()
    batches = [hosts.carry("a", Limits(7), deliveries(50), target.send) for _ in range(3)]
    assert await asyncio.gather(*batches) == [[DONE] * 50] * 3
    assert len(target.seen) == 150
    assert target.seen[:50] == [one.idh for one in deliveries(50)]
    assert target.most == 7
    assert hosts.waiting == 0


async def test_a_host_that_does_not_answer_holds_up_no_other() -> None:
    hosts = Hosts(room=1000, connections=100)
    dead, well = Target(is_open=False), Target()
    stuck = asyncio.create_task(hosts.carry("dead", Limits(5), deliveries(400), dead.send))
    await dead.arrived.wait()
    for _ in range(10):
        assert await hosts.carry("well", Limits(5), deliveries(100), well.send) == [DONE] * 100
    assert not stuck.done()
    dead.open.set()
    assert await stuck == [DONE] * 400


async def test_a_host_never_takes_the_room_of_all_others() -> None:
    hosts = Hosts(room=1000, connections=100)
    dead, well = Target(is_open=False), Target()
    loads = [asyncio.create_task(hosts.carry("dead", Limits(5), deliveries(300), dead.send)) for _ in range(20)]
    await dead.arrived.wait()
    assert hosts.waiting <= 500
    assert await hosts.carry("well", Limits(5), deliveries(200), well.send) == [DONE] * 200
    dead.open.set()
    outcomes = [one for load in loads for one in await load]
    put_off = untried(outcomes)
    assert outcomes.count(DONE) + len(put_off) == 6000
    assert outcomes.count(DONE) >= 400
    waits = [one.after_ms or 0 for one in put_off]
    assert waits == sorted(waits)
    assert 1000 <= waits[0] < waits[-1] <= 300_000


async def test_as_many_as_may_be_sent_at_one_time_always_find_room() -> None:
    hosts, target = Hosts(room=1, connections=100), Target()
    assert await hosts.carry("a", Limits(3), deliveries(3), target.send) == [DONE] * 3


async def test_what_cannot_be_begun_in_time_is_put_off_and_what_was_begun_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "PATIENCE_S", 0.01)
    hosts, target = Hosts(room=1000, connections=100), Target(is_open=False)
    load = asyncio.create_task(hosts.carry("a", Limits(2), deliveries(100), target.send))
    await target.arrived.wait()
    async with asyncio.timeout(30):
        while hosts.waiting:  # noqa: ASYNC110  # nothing tells when patience ends
            await asyncio.sleep(0.01)
    assert not load.done()
    target.open.set()
    outcomes = await load
    assert outcomes[:2] == [DONE, DONE]
    assert len(untried(outcomes)) == 98
    assert len(target.seen) == 2


async def test_a_rate_is_kept_to() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()
    began = time.monotonic()
    await hosts.carry("a", Limits(10, rate=100.0), deliveries(11), target.send)
    await hosts.carry("a", Limits(10, rate=100.0), deliveries(10), target.send)
    assert time.monotonic() - began >= 0.199  # 21 at 100 a second: the first at once, the last 200 ms later


async def test_connections_are_bounded_over_all_hosts() -> None:
    hosts, target = Hosts(room=1000, connections=8), Target()
    await asyncio.gather(*(hosts.carry(name, Limits(5), deliveries(20), target.send) for name in "abcdef"))
    assert target.most == 8


async def test_hosts_are_forgotten_when_they_are_idle() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()
    for number in range(5000):
        await hosts.carry(number, Limits(5), deliveries(1), target.send)
    assert len(hosts) <= 512


async def test_a_cancelled_batch_leaves_the_queue() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target(is_open=False)
    load = asyncio.create_task(hosts.carry("a", Limits(1), deliveries(50), target.send))
    await target.arrived.wait()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert hosts.waiting == 0
    target.open.set()
    assert await hosts.carry("a", Limits(1), deliveries(1), target.send) == [DONE]


async def test_a_bug_in_sending_fails_its_own_batch_only() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()

    async def broken(_: Delivery) -> Outcome:
        raise RuntimeError("a bug")

    first = asyncio.create_task(hosts.carry("a", Limits(1), deliveries(3), broken))
    second = asyncio.create_task(hosts.carry("a", Limits(1), deliveries(3), target.send))
    with pytest.raises(RuntimeError, match="a bug"):
        await first
    assert await second == [DONE] * 3
    assert hosts.waiting == 0


async def test_closing_ends_what_is_under_way() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target(is_open=False)
    load = asyncio.create_task(hosts.carry("a", Limits(2), deliveries(5), target.send))
    await target.arrived.wait()
    await hosts.aclose()
    with pytest.raises(asyncio.CancelledError):
        await load
