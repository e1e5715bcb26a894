"""Shares of all nodes in a rate, in slots and in a key's quota, on every kind of server."""

import pytest

from mainspring.model.clock import ManualClock
from mainspring.model.flow import Limit, Rate
from mainspring.store.limits import Ask, Granted, KeyPending, ask, count_pending, counts_until_ms
from mainspring.store.store import Store
from tests.support.verifying import found

LEASE_MS = 5_000


async def grant(store: Store, limit: Limit, want: int, *, node: str = "a", used: int = 0, have: int = 0) -> Granted:
    [granted] = await ask(store, node, [Ask("target:shop", limit, used, want, have)], LEASE_MS)
    return granted


async def test_a_rate_is_one_for_all_nodes(store: Store, clock: ManualClock) -> None:
    limit, got = Limit(Rate(100, burst=10)), {"a": 0, "b": 0}
    for _ in range(200):
        for node in got:
            got[node] += (await grant(store, limit, 5, node=node)).permits
        clock.advance(ms=50)
    assert 10 * 100 - 10 <= sum(got.values()) <= 10 * 100 + 10, "ten seconds of the rate, and the burst at its start"
    assert min(got.values()) > 0


async def test_after_a_pause_only_the_burst_comes_at_once(store: Store, clock: ManualClock) -> None:
    limit = Limit(Rate(100, burst=7))
    assert await grant(store, limit, 100) == Granted(7, 100, 10)
    clock.advance(seconds=3600)
    assert (await grant(store, limit, 100)).permits == 7
    assert await grant(store, limit, 100) == Granted(0, 100, 10)
    clock.advance(ms=10)
    assert (await grant(store, limit, 100)).permits == 1


@pytest.mark.parametrize(("rate", "wait_ms"), [(Rate.read("6/m"), 10_000), (Rate(1_000_000), 1)])
async def test_the_wait_says_when_the_next_permit_comes(
    store: Store, clock: ManualClock, rate: Rate, wait_ms: int
) -> None:
    limit = Limit(rate)
    await grant(store, limit, 10_000_000)
    none = await grant(store, limit, 1)
    assert (none.permits, none.wait_ms) == (0, wait_ms)
    clock.advance(ms=none.wait_ms)
    assert (await grant(store, limit, 1)).permits == 1


async def test_a_rate_that_was_raised_counts_at_once(store: Store, clock: ManualClock) -> None:
    await grant(store, Limit(Rate.read("1/h")), 1)
    assert (await grant(store, Limit(Rate(1000, burst=1)), 1)).wait_ms == 1
    clock.advance(ms=1)
    assert (await grant(store, Limit(Rate(1000, burst=1)), 1)).permits == 1


async def test_slots_are_never_more_than_there_are_and_shared_evenly(store: Store) -> None:
    limit = Limit(concurrency=4)
    assert (await grant(store, limit, 9, node="a")).permits == 4
    assert (await grant(store, limit, 9, node="b")).permits == 0
    # As a's deliveries end, b gets its half, and a gets no more than that.
    assert await grant(store, limit, 9, node="a", used=3) == Granted(0, 2, 50)
    assert await grant(store, limit, 9, node="a", used=2) == Granted(0, 2, 50)
    assert (await grant(store, limit, 9, node="b")).permits == 2
    assert (await grant(store, limit, 9, node="a", used=1)).permits == 1
    assert (await grant(store, limit, 0, node="b", used=0)).permits == 0
    assert (await grant(store, limit, 9, node="a", used=2)).permits == 2, "b wants nothing more"


async def test_the_slots_of_a_dead_node_come_free_with_its_lease(store: Store, clock: ManualClock) -> None:
    limit = Limit(concurrency=3)
    assert (await grant(store, limit, 3, node="dead")).permits == 3
    clock.advance(ms=LEASE_MS - 1)
    assert (await grant(store, limit, 3, node="live")).permits == 0
    clock.advance(ms=1)
    assert (await grant(store, limit, 3, node="live")).permits == 3


async def test_a_rate_and_slots_together_give_the_less_of_both(store: Store, clock: ManualClock) -> None:
    limit = Limit(Rate(10, burst=5), concurrency=2)
    assert (await grant(store, limit, 9)).permits == 2
    assert (await grant(store, limit, 9, used=0)).permits == 2
    assert (await grant(store, limit, 9, used=0)).permits == 1, "four of five permits are used up"
    assert (await grant(store, limit, 9, used=0)).permits == 0
    clock.advance(ms=100)
    assert (await grant(store, limit, 9, used=0)).permits == 1


async def test_a_node_with_unused_permits_gets_slots_for_them_and_no_more_permits(store: Store) -> None:
    limit = Limit(Rate.read("1/h"), concurrency=2)
    assert await grant(store, limit, 1) == Granted(1, 1, 0)
    assert await grant(store, limit, 0, have=1) == Granted(0, 0, 0), "nobody came: the slot is given back"
    assert await grant(store, limit, 1, have=1) == Granted(0, 1, 0)
    # Without a permit a slot is of no use, and is left to who has one.
    assert (await grant(store, limit, 2, node="b"))[:2] == (0, 0)
    assert (await grant(store, limit, 1, node="b", have=1))[:2] == (0, 1)
    assert (await grant(store, limit, 1, node="c", have=1))[:2] == (0, 0)


@pytest.mark.parametrize(
    ("ahead_ms", "end_ms"),
    [
        (1, 60_000),
        (59_999, 60_000),
        (60_000, 120_000),
        (3_599_999, 3_600_000),
        (3_600_000, 7_200_000),
        (4 * 86_400_000 - 1, 4 * 86_400_000),
        (4 * 86_400_000, 5 * 86_400_000),
    ],
)
def test_a_task_counts_until_the_end_of_its_minute_hour_or_day(ahead_ms: int, end_ms: int) -> None:
    midnight_ms = 86_400_000 * 20_000
    assert counts_until_ms(midnight_ms + ahead_ms, midnight_ms) == midnight_ms + end_ms


async def test_counts_of_nodes_add_up_and_what_has_passed_is_removed(store: Store, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    soon, late = now_ms + 60_000, now_ms + 86_400_000
    assert await count_pending(store, "k1", {}, now_ms) == KeyPending()
    assert await count_pending(store, "k1", {soon: (2, 50), late: (1, 7)}, now_ms) == KeyPending(3, 57, soon)
    assert await count_pending(store, "k1", {soon: (1, 0)}, now_ms) == KeyPending(4, 57, soon)
    assert await count_pending(store, "k2", {}, now_ms) == KeyPending(), "another key has counts of its own"
    name = store.keys.quota("k1")
    [left_ms] = await store.run_one(store.keys.slot, [("PTTL", name)])
    assert 86_000_000 < left_ms <= 86_400_000, "an earlier time does not shorten its life"
    assert await found(store) == {}, "verify knows the key"
    assert await count_pending(store, "k1", {soon: (5, 5)}, soon) == KeyPending(1, 7, late), "added too late"
    [fields] = await store.run_one(store.keys.slot, [("HKEYS", name)])
    assert sorted(fields) == sorted([b"%d:tasks" % late, b"%d:bytes" % late])
    assert await count_pending(store, "k1", {}, late) == KeyPending()
