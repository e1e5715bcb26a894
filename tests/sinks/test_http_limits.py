"""Hosts do not wait for each other, and none is asked for more than it may be."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import pytest

from mainspring.model.delivery import DONE, EXPIRED, Body, Dead, Delivery, DeliveryBatch, GivenDelivery, Outcome, Retry
from mainspring.model.flow import Rate
from mainspring.sinks import http_limits
from mainspring.sinks.http_limits import Hosts, Limits


def deliveries(count: int) -> list[Delivery]:
    return [GivenDelivery(Body("http://a/", b"1"), "main", n.to_bytes(16, "big"), 0) for n in range(count)]


class Target:
    """Counts concurrent requests, and answers on request."""

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


async def test_requests_are_sent_once_in_order_and_within_the_limit() -> None:
    hosts, target = Hosts(room=1000, connections=200), Target()
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
    began = time.monotonic()
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
    # Each counts from its own moment: one that was told later may wait less by what has passed since.
    passed_ms = (time.monotonic() - began) * 1000
    assert all(later >= sooner - passed_ms for sooner, later in pairwise(waits))
    assert 1000 <= waits[0] < waits[-1] <= 300_000


async def test_all_requests_that_may_be_sent_at_once_find_room() -> None:
    hosts, target = Hosts(room=1, connections=100), Target()
    assert await hosts.carry("a", Limits(3), deliveries(3), target.send) == [DONE] * 3


async def test_requests_not_begun_in_time_are_put_off_and_begun_ones_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "MAX_QUEUED_S", 0.01)
    hosts, target = Hosts(room=1000, connections=100), Target(is_open=False)
    load = asyncio.create_task(hosts.carry("a", Limits(2), deliveries(100), target.send))
    await target.arrived.wait()
    async with asyncio.timeout(60):
        while hosts.waiting:  # noqa: ASYNC110  # nothing tells when patience ends
            await asyncio.sleep(0.01)
    assert not load.done()
    target.open.set()
    outcomes = await load
    assert outcomes[:2] == [DONE, DONE]
    assert len(untried(outcomes)) == 98
    assert len(target.seen) == 2


async def test_targets_with_limits_of_their_own_share_the_limit_of_their_host() -> None:
    hosts, all_of_them = Hosts(room=1000, connections=100), Target()
    two, three = Target(), Target()

    def through(own: Target) -> Callable[[Delivery], Awaitable[Outcome]]:
        async def send(delivery: Delivery) -> Outcome:
            outcome, _ = await asyncio.gather(all_of_them.send(delivery), own.send(delivery))
            return outcome

        return send

    outcomes = await asyncio.gather(
        hosts.carry("host", Limits(4), deliveries(20), all_of_them.send),
        hosts.carry("host", Limits(4), deliveries(20), through(two), ("two", Limits(2))),
        hosts.carry("host", Limits(4), deliveries(20), through(three), ("three", Limits(3))),
    )
    assert list(outcomes) == [[DONE] * 20] * 3
    assert (all_of_them.most, two.most) == (4, 2)
    assert three.most <= 3
    assert len(hosts) == 1


async def test_a_target_at_its_limit_holds_up_no_other_on_its_host() -> None:
    hosts, narrow, wide = Hosts(room=1000, connections=100), Target(is_open=False), Target()
    stuck = asyncio.create_task(
        hosts.carry("host", Limits(4), deliveries(20), narrow.send, ("narrow", Limits(1, rate=Rate(0.001))))
    )
    await narrow.arrived.wait()
    async with asyncio.timeout(60):
        assert await hosts.carry("host", Limits(4), deliveries(100), wide.send) == [DONE] * 100
    assert len(narrow.seen) == 1
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert hosts.waiting == 0


async def test_the_rate_of_a_host_holds_for_all_its_targets_together() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()
    began = time.monotonic()
    await asyncio.gather(
        *(
            hosts.carry("a", Limits(10, rate=Rate(100)), deliveries(7), target.send, (n, Limits(10, Rate(1000))))
            for n in "abc"
        )
    )
    assert time.monotonic() - began >= 0.199  # 21 at 100 a second


async def test_a_rate_is_kept_to() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target()
    began = time.monotonic()
    await hosts.carry("a", Limits(10, rate=Rate(100)), deliveries(11), target.send)
    await hosts.carry("a", Limits(10, rate=Rate(100)), deliveries(10), target.send)
    assert time.monotonic() - began >= 0.199  # 21 at 100 a second: the first at once, the last 200 ms later


async def test_the_burst_of_a_rate_goes_at_once_and_the_rest_at_the_rate() -> None:
    hosts, target = Hosts(room=1000, connections=2_000), Target(is_open=False)
    slow = Limits(20, Rate.read("0.001/s burst 15"))
    load = asyncio.create_task(hosts.carry("a", slow, deliveries(18), target.send))
    await target.arrived.wait()
    await asyncio.sleep(0)
    assert len(target.seen) == 15
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load


async def test_connections_are_bounded_over_all_hosts() -> None:
    hosts, target = Hosts(room=1000, connections=8), Target()
    await asyncio.gather(*(hosts.carry(name, Limits(5), deliveries(20), target.send) for name in "abcdef"))
    assert target.most == 8


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a loaded machine takes for what is sent here, none of it is put off."""
    monkeypatch.setattr(http_limits, "MAX_QUEUED_S", 3600.0)


@pytest.mark.parametrize("hanging", [20, 40, 150])
async def test_hosts_that_hang_leave_connections_to_the_others(hanging: int, endless_patience: None) -> None:
    hosts, dead, well = Hosts(room=100_000, connections=512), Target(is_open=False), Target()
    stuck = [asyncio.create_task(hosts.carry(n, Limits(64), deliveries(200), dead.send)) for n in range(hanging)]
    await dead.arrived.wait()
    assert hosts.free >= 100
    async with asyncio.timeout(60):
        for _ in range(10):
            assert await hosts.carry("well", Limits(64), deliveries(300), well.send) == [DONE] * 300
    assert well.most >= 40, "and what it proves that it can take"
    dead.open.set()
    assert await asyncio.gather(*stuck) == [[DONE] * 200] * hanging
    assert hosts.free == 512


@pytest.mark.parametrize("hanging", [10, 40])
async def test_hosts_that_were_well_and_hang_all_at_once_leave_connections_too(
    hanging: int, endless_patience: None
) -> None:
    hosts, dead, well = Hosts(room=100_000, connections=512), Target(), Target()
    for n in range(hanging):
        assert await hosts.carry(n, Limits(64), deliveries(500), dead.send) == [DONE] * 500
    dead.open.clear()
    dead.arrived.clear()
    stuck = [asyncio.create_task(hosts.carry(n, Limits(64), deliveries(200), dead.send)) for n in range(hanging)]
    await dead.arrived.wait()
    async with asyncio.timeout(60):
        assert await hosts.carry("well", Limits(64), deliveries(300), well.send) == [DONE] * 300
    dead.open.set()
    await asyncio.gather(*stuck)


@pytest.mark.parametrize(("connections", "most"), [(2_000, 200), (512, 200), (100, 45)])
async def test_a_host_that_answers_has_as_many_as_it_may_and_never_those_of_all_others(
    connections: int, most: int
) -> None:
    hosts, target = Hosts(room=100_000, connections=connections), Target()
    assert await hosts.carry("a", Limits(200), deliveries(5_000), target.send) == [DONE] * 5_000
    assert target.most == most


async def test_a_host_that_stopped_answering_has_to_prove_itself_again() -> None:
    hosts, target = Hosts(room=1000, connections=64), Target()

    async def refused(delivery: Delivery) -> Outcome:
        await target.send(delivery)
        return Retry("cannot connect")

    await hosts.carry("a", Limits(20), deliveries(200), target.send)
    assert target.most == 20
    await hosts.carry("a", Limits(20), deliveries(200), refused)
    target.most = 0
    await hosts.carry("a", Limits(20), deliveries(100), refused)
    assert target.most == 3, "an eighth of what is still free of the first half"


async def test_with_no_connection_left_hosts_take_turns() -> None:
    hosts, target = Hosts(room=10_000, connections=2), Target()
    order: list[str] = []

    def send_for(name: str) -> Callable[[Delivery], Awaitable[Outcome]]:
        async def send(delivery: Delivery) -> Outcome:
            order.append(name)
            return await target.send(delivery)

        return send

    await asyncio.gather(*(hosts.carry(name, Limits(5), deliveries(50), send_for(name)) for name in "abcdef"))
    assert set(order[:12]) == set("abcdef"), "nobody waits until others have nothing left"
    assert target.most == 2


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


async def test_a_request_that_waited_is_checked_again_before_it_is_sent() -> None:
    hosts, target = Hosts(room=1000, connections=100), Target(is_open=False)
    expired: dict[int, Outcome] = {}
    asked: list[int] = []

    def unwanted(at: int) -> Outcome | None:
        asked.append(at)
        return expired.get(at)

    # The rate allows four at once: what is not sent takes none of them.
    limits, batch = Limits(2, Rate(1 / 60, 4)), DeliveryBatch(deliveries(6), unwanted)
    carried = asyncio.create_task(hosts.carry("a", limits, batch, target.send))
    await target.arrived.wait()
    assert asked == []  # nothing had waited: nothing is asked
    expired.update({2: Dead(EXPIRED), 3: Dead(EXPIRED), 5: Dead(EXPIRED)})
    target.open.set()
    assert await carried == [DONE, DONE, Dead(EXPIRED), Dead(EXPIRED), DONE, Dead(EXPIRED)]
    assert [int.from_bytes(idh, "big") for idh in target.seen] == [0, 1, 4]
    assert hosts.waiting == 0
