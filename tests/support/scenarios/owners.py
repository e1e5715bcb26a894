"""Scenarios about owners: stalls, crashes, hand-overs, clocks of servers that do not agree."""

from typing import Final

from mainspring.model.delivery import Retry
from mainspring.store.keys import partition_of
from mainspring.testing.faults import calls

from .world import LEASE_S, RETRY_MS, World, on_the_way

STALL_MS: Final = (LEASE_S + 1) * 1000
LANE: Final = "lane"
NAMES: Final = ("one", "two", "three", "four", "five", "six")


async def stalled_owner_begins(world: World) -> None:
    """A node stops for longer than its lease, another one takes over; the first wakes up and continues from memory."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(2_000))
    await first.read()
    stalled_us = world.now_us()
    world.go_to(STALL_MS)
    world.failed("a node stalled", node="a", since_us=stalled_us)
    await second.work()
    world.go_to(STALL_MS + 1)
    await first.fire()
    await first.commit()
    await world.settle(second)


async def stalled_owner_commits(world: World) -> None:
    """A node stops in the middle of a delivery for longer than its lease, and then reports how it went."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(1_000))
    gate = first.hold(then=Retry("busy"))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    stalled_us = world.now_us()
    world.go_to(1_000 + STALL_MS)
    world.failed("a node stalled", node="a", since_us=stalled_us)
    await second.work()
    world.go_to(1_001 + STALL_MS)
    gate.set()
    await first.breathe()
    await first.commit()
    await world.settle(second)


async def tick_of_which_one_partition_is_fenced(world: World) -> None:
    """A stalled node begins in two partitions with one call; meanwhile another node has taken one of them."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    for partition in range(world.partitions):
        await caller.put(world.at(2_000), id=next(name for name in NAMES if partition_of(name, 2) == partition))
    await first.read()
    stalled_us = world.now_us()
    world.go_to(STALL_MS)
    world.failed("a node stalled", node="a", since_us=stalled_us)
    second.engine.follow({1}, set())
    await second.work()
    world.go_to(STALL_MS + 1)
    await first.fire()
    await first.commit()
    await second.commit()
    await world.settle(first)


async def stalled_owner_after_a_release(world: World) -> None:
    """The node that took over has stopped cleanly when the stalled one wakes up: the partition has no owner."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(2_000))
    await first.read()
    stalled_us = world.now_us()
    world.go_to(STALL_MS)
    world.failed("a node stalled", node="a", since_us=stalled_us)
    await second.work()
    await second.stop()
    world.go_to(STALL_MS + 1)
    await first.fire()
    await first.commit()
    await world.settle(await world.node("c"))


async def stalled_owner_stops(world: World) -> None:
    """A former owner wakes up and stops cleanly: it gives back what another one has, and is delivering."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await first.read()
    stalled_us = world.now_us()
    world.go_to(STALL_MS)
    world.failed("a node stalled", node="a", since_us=stalled_us)
    await caller.put(world.at(STALL_MS + 1_000))
    gate = second.hold()
    await second.read()
    world.go_to(STALL_MS + 1_000)
    await second.fire()
    await first.stop()
    world.go_to(STALL_MS + 1_500)
    gate.set()
    await second.breathe()
    await second.commit()
    await world.settle(second)


async def answer_after_the_lease(world: World) -> None:
    """The answer to a begin takes longer than the lease; another node has delivered the task by then."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(1_000))
    await first.read()
    world.go_to(1_000)
    sent_us = world.now_us()

    async def long_after() -> None:
        world.go_to(1_000 + STALL_MS)
        first.oversleep(STALL_MS / 1000)
        world.failed("an answer took long", node="a", since_us=sent_us)
        await second.work()
        world.go_to(1_001 + STALL_MS)

    with on_the_way(first.store, calls("tick"), after=long_after):
        await first.fire()
    await world.settle(second)


async def twin_owners(world: World) -> None:
    """A failover loses the first owner's acquisition; in the same microsecond another one gets the same epoch."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_500))
    replica = await world.keep()
    await first.read()
    await world.fall_back(replica)
    world.failed("a failover lost an acquisition", node="a")
    await second.read()
    world.go_to(1_000)
    await second.fire()
    await second.commit()
    world.go_to(1_500)
    await first.fire()
    await world.settle(second)


async def crash_in_a_delivery(world: World) -> None:
    """A node dies while it delivers: it is unknown whether the target has the task."""
    first, caller = await world.node("a"), world.caller
    await caller.put(world.at(500))
    await first.until(world, 500)
    await caller.put(world.at(1_000))
    first.hold()
    await first.read()
    world.go_to(1_000)
    await first.fire()
    await first.commit()
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


async def clean_hand_over(world: World) -> None:
    """One node stops cleanly, another one continues: nothing has failed, so nothing may be repeated."""
    first, caller = await world.node("a"), world.caller
    for after_ms in (1_000, 1_500):
        await caller.put(world.at(after_ms))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    await first.commit()
    await first.stop()
    second = await world.node("b")
    await second.until(world, 1_100, 1_500)
    await world.settle(second)


async def lane_hand_over(world: World) -> None:
    """A lane waits for the second attempt of its head when its partition gets another owner."""
    first, caller = await world.node("a"), world.caller
    first.answers(Retry("busy"))
    await caller.put(world.at(1_000), lane=LANE)
    await caller.put(world.at(2_000), lane=LANE)
    await first.until(world, 1_000)
    await first.stop()
    second = await world.node("b")
    await second.until(world, 1_500, 2_000, 1_000 + RETRY_MS, 2_000 + RETRY_MS)
    await world.settle(second)


async def two_live_nodes(world: World) -> None:
    """A second node comes while the first one delivers; nothing is wrong with either."""
    first, second, caller = await world.node("a"), await world.node("b"), world.caller
    await caller.put(world.at(1_000))
    gate = first.hold()
    await first.read()
    world.go_to(1_000)
    await first.fire()
    world.go_to(1_500)
    await second.work()
    world.go_to(2_000)
    gate.set()
    await first.breathe()
    await first.commit()
    await world.settle(first)


async def clock_of_the_server_lags(world: World) -> None:
    """The server on which a node got its lease was an hour ahead of the one that took its place."""
    first, caller = await world.node("a"), world.caller
    await caller.put(world.at(1_000))
    world.go_to(3_600_000)
    await first.read()
    world.go_to(0)
    world.failed("a failover to a server whose clock lags")
    world.go_to(1_000)
    await first.fire()
    await first.commit()
    world.go_to(2_000)
    await first.crash()
    world.failed("a node died", node="a")
    await caller.put(world.at(90_000))
    second = await world.node("b")
    await second.turn()
    await world.settle(second)


OWNERS: Final = (
    stalled_owner_begins,
    stalled_owner_commits,
    tick_of_which_one_partition_is_fenced,
    stalled_owner_after_a_release,
    stalled_owner_stops,
    answer_after_the_lease,
    twin_owners,
    crash_in_a_delivery,
    clean_hand_over,
    lane_hand_over,
    two_live_nodes,
    clock_of_the_server_lags,
)
