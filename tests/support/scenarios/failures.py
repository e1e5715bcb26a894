"""Scenarios about failed deliveries, lost replies of owners, and servers that forget."""

import asyncio
import time
from typing import Final

from mainspring.engine.dispatcher import COMMIT_WAIT_S
from mainspring.engine.partition import MOST_OUTCOMES
from mainspring.model.delivery import Dead, Retry
from mainspring.testing.faults import bad_road, calls

from .world import RETRY_MS, World, on_the_way


async def failures(world: World) -> None:
    """One task fails once, another one always."""
    node, caller = await world.node("a"), world.caller
    node.answers(Dead("never"), Retry("busy"))
    await caller.put(world.at(1_000), id="dies")
    await caller.put(world.at(2_000))
    await node.until(world, 1_000, 2_000, 2_000 + RETRY_MS)
    await world.settle(node)


async def node_dies_after_its_commit(world: World) -> None:
    """The commit of a failed delivery is the last that a node gets through before it dies."""
    first, caller = await world.node("a"), world.caller
    first.answers(Retry("busy"))
    await caller.put(world.at(1_000))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    commit = calls("commit")
    with bad_road(first.store) as road:
        road.next("never sent", only=lambda commands: not commit(commands))
        await first.commit()
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


async def reply_to_a_commit_is_lost(world: World) -> None:
    """A failed delivery is committed, but the node does not know it and commits again."""
    node, caller = await world.node("a"), world.caller
    node.answers(Retry("busy"))
    await caller.put(world.at(1_000))
    await node.read()
    world.go_to(1_000)
    await node.fire()
    with bad_road(node.store) as road:
        road.next("lose reply", only=calls("commit"))
        await node.commit()
    world.failed("the reply to a commit was lost", node="a")
    world.go_to(1_001)
    await node.commit()
    await node.until(world, 1_000 + RETRY_MS)
    await world.settle(node)


async def commit_never_sent(world: World) -> None:
    """The commit of a failed delivery does not get through; then another task of the same second is delivered."""
    node, caller = await world.node("a"), world.caller
    node.answers(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_500))
    await node.read()
    world.go_to(1_000)
    await node.fire()
    with bad_road(node.store) as road:
        road.next("never sent", only=calls("commit"))
        await node.commit()
    world.failed("a commit was not sent", node="a")
    await node.until(world, 1_500, 1_000 + RETRY_MS)
    await world.settle(node)


async def failure_while_commits_run_out_of_time(world: World) -> None:
    """A delivery fails while another one's retry is written, which takes so long that the tick comes first; then the
    node dies."""
    first, caller = await world.node("a"), world.caller
    gate = first.hold(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_500))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    first.answers(Retry("busy"))
    world.go_to(1_500)
    await first.fire()

    async def second_fails() -> None:
        await first.failing(gate)()
        over_s = time.monotonic() + COMMIT_WAIT_S
        while time.monotonic() < over_s:  # noqa: ASYNC110 - the node goes by this clock
            await asyncio.sleep(0)

    with on_the_way(first.store, calls("commit"), after=second_fails):
        await first.fire()
    with bad_road(first.store) as road:
        road.next("never sent", only=calls("commit"))
        await first.fire()
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


async def more_failures_than_a_commit_takes(world: World) -> None:
    """A node dies after the first of several commits that a burst of failures needs."""
    first, caller = await world.node("a"), world.caller
    await asyncio.gather(*(caller.put(world.at(1_000)) for _ in range(MOST_OUTCOMES + 1)))
    first.answers(*[Retry("busy")] * (MOST_OUTCOMES + 1))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    with bad_road(first.store) as road:

        async def cut() -> None:
            road.next("never sent", only=calls("commit"))

        with on_the_way(first.store, calls("commit"), after=cut):
            await first.commit()
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


async def slice_is_read_again_with_a_failure_unwritten(world: World) -> None:
    """A begin finds that a slice is gone: its owner reads all that it touched again. Meanwhile a delivery of another of
    these slices fails; a call that would write its outcome does not get through before the slice is read."""
    node, caller = await world.node("a"), world.caller
    gate = node.hold(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_900))
    await node.read()
    world.go_to(1_000)
    await node.fire()
    node.answers()
    replica = await world.keep()
    await caller.put(world.at(2_000), sure=False)
    await node.read()
    await world.fall_back(replica)
    world.failed("a failover lost a put", loses=True)
    await caller.put(world.at(3_000))  # as many were accepted as before: the counters show nothing
    world.go_to(2_000)
    with bad_road(node.store) as road:
        road.next("never sent", only=calls("commit"))
        with on_the_way(node.store, calls("tick"), before=node.failing(gate)):
            await node.fire()
    await node.until(world, 2_001, 3_000, 2_001 + RETRY_MS, 3_000 + RETRY_MS)
    await world.settle(node)


async def commit_fails_at_a_stop(world: World) -> None:
    """One call of a clean stop does not get through. That is no excuse for a repeat: it is sent again."""
    first, caller = await world.node("a"), world.caller
    first.answers(None, Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_000))
    await first.read()
    world.go_to(1_000)
    await first.fire()
    with bad_road(first.store) as road:
        road.next("never sent", only=calls("commit"))
        await first.engine.stop()
    second = await world.node("b")
    await second.until(world, 1_500, 1_000 + RETRY_MS)
    await world.settle(second)


async def late_copy_of_a_tick(world: World) -> None:
    """A call of an owner hangs somewhere, is sent again, and arrives once more when others have followed it."""
    node, caller = await world.node("a"), world.caller
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_200))
    await node.read()
    world.go_to(1_000)
    await node.fire()
    with bad_road(node.store) as road:
        road.next("hold back", only=calls("tick"))
        await node.commit()
        world.failed("a call was held back", node="a")
        await node.until(world, 1_100, 1_200)
        world.go_to(1_300)
        await road.deliver_held()
    await world.settle(node)


async def failover_loses_a_commit(world: World) -> None:
    """A replica that lacks the last commit takes over; the owner continues as if nothing had happened."""
    node, caller = await world.node("a"), world.caller
    node.answers(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_500))
    await node.read()
    world.go_to(1_000)
    await node.fire()
    replica = await world.keep()
    world.go_to(1_001)
    await node.commit()
    await world.fall_back(replica)
    world.failed("a failover lost writes", loses=True)
    world.go_to(1_500)
    await node.fire()
    await node.commit()
    await node.until(world, 2_000, 2_000 + RETRY_MS)
    await world.settle(node)


async def failover_loses_a_put(world: World) -> None:
    """A row that the owner has read is gone, and another one has its place."""
    node, caller = await world.node("a"), world.caller
    await caller.put(world.at(1_000))
    replica = await world.keep()
    await caller.put(world.at(1_200), sure=False)
    await node.read()
    owner = {key: value for key, value in (await world.keep()).items() if key.endswith((b":own", b":fence"))}
    await world.fall_back(replica | owner)
    world.failed("a failover lost a put", loses=True)
    world.go_to(500)
    await caller.put(world.at(1_400))
    world.go_to(1_400)
    await node.fire()
    await node.commit()
    await node.until(world, 1_500)
    await world.settle(node)


async def failover_nobody_hears_of(world: World) -> None:
    """As many tasks were lost in a failover as were put since: the counters look as if nothing had happened."""
    node, caller = await world.node("a"), world.caller
    await caller.put(world.at(1_000))
    await node.until(world, 1_000)
    replica = await world.keep()
    await caller.put(world.at(900_000), sure=False)
    await node.until(world, 2_000)
    await world.fall_back(replica)
    world.failed("a failover lost a put", loses=True)
    world.go_to(2_500)
    await caller.put(world.at(4_000))
    world.healed()
    await node.until(world, 4_000, 60_000, 120_000, 180_000)


FAILURES: Final = (
    failures,
    node_dies_after_its_commit,
    reply_to_a_commit_is_lost,
    commit_never_sent,
    failure_while_commits_run_out_of_time,
    more_failures_than_a_commit_takes,
    slice_is_read_again_with_a_failure_unwritten,
    commit_fails_at_a_stop,
    late_copy_of_a_tick,
    failover_loses_a_commit,
    failover_loses_a_put,
    failover_nobody_hears_of,
)
