"""Scenarios about slices: dropped, recreated, written to at unexpected moments."""

from typing import Final

from mainspring.testing.faults import bad_road, calls

from .world import NodeByHand, World

LANE: Final = "lane"
PAST_MS: Final = 5_000
"""By then the second in which the first task was due is over, and its grace too."""


async def _one_done(world: World, *, lane: str | None = None) -> NodeByHand:
    """A node that has delivered all of a second which may now be dropped."""
    node = await world.node("a")
    await world.caller.put(world.at(1_000), lane=lane)
    await node.read()
    world.go_to(1_000)
    await node.fire()
    await node.commit()
    return node


async def _dropped_unheard(world: World, node: NodeByHand) -> None:
    """The server drops the slice, but the node does not get the answer."""
    world.go_to(PAST_MS)
    with bad_road(node.store) as road:
        road.next("lose reply", only=calls("drop"))
        await node.sweep()
    world.failed("the reply to a drop was lost", node="a")


async def late_put_before_the_drop(world: World) -> None:
    """A task arrives in a second that is over when its owner is about to drop it."""
    node = await _one_done(world)
    world.go_to(PAST_MS)
    await world.caller.put(world.at(1_500), client=await world.slow_client(4_000))
    await node.sweep()
    await node.turn()
    await world.settle(node)


async def recreated_slice(world: World) -> None:
    """Tasks arrive in a second that was dropped, and whose owner does not know that."""
    node = await _one_done(world)
    await _dropped_unheard(world, node)
    slow = await world.slow_client(4_000)
    for _ in range(2):
        await world.caller.put(world.at(1_500), client=slow)
    await node.work()
    await world.settle(node)


async def recreated_slice_is_dropped(world: World) -> None:
    """The owner tries once more to drop a slice that is another one by now."""
    node = await _one_done(world)
    await _dropped_unheard(world, node)
    await world.caller.put(world.at(1_500), client=await world.slow_client(4_000))
    await node.sweep()
    await node.turn()
    await world.settle(node)


async def lane_in_a_recreated_slice(world: World) -> None:
    """An earlier task of a lane arrives in a second that was dropped; a later one is about to begin."""
    node = await _one_done(world, lane=LANE)
    await world.caller.put(world.at(PAST_MS + 1_000), lane=LANE)
    world.go_to(PAST_MS - 1_000)
    await node.read()
    await _dropped_unheard(world, node)
    await world.caller.put(world.at(1_500), lane=LANE, client=await world.slow_client(4_000))
    world.go_to(PAST_MS + 1_000)
    await node.fire()
    world.go_to(PAST_MS + 1_001)
    await node.turn()
    await world.settle(node)


SLICES: Final = (
    late_put_before_the_drop,
    recreated_slice,
    recreated_slice_is_dropped,
    lane_in_a_recreated_slice,
)
