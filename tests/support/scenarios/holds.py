"""Scenarios about held work: a lane behind a failing head, and what is moved aside meanwhile."""

from typing import Final

from mainspring.engine.holds import FEW_BEHIND
from mainspring.model.delivery import Retry
from mainspring.testing.faults import bad_road, calls

from .world import RETRY_MS, NodeByHand, World, on_the_way

LANE: Final = "lane"
MANY: Final = FEW_BEHIND + 8
"""Enough tasks behind a failed head to be moved into the hold slice of its lane."""


async def _fill(world: World, node: NodeByHand) -> list[str]:
    """A lane whose head fails once; all of it is due from one second on, a millisecond apart."""
    node.answers(Retry("busy"))
    return [await world.caller.put(world.at(1_000 + n), lane=LANE) for n in range(MANY)]


async def many_behind_a_failing_head(world: World) -> None:
    """They are moved aside, new ones join them, and all come back in order."""
    node = await world.node("a")
    await _fill(world, node)
    await node.until(world, 1_000, 2_000)
    await world.caller.put(world.at(3_000), lane=LANE)
    await world.caller.put(world.at(1_500), lane=LANE)
    await node.until(world, 3_000, 4_000, 1_000 + RETRY_MS, 1_000 + RETRY_MS + 500)
    await world.settle(node)


async def arrival_while_held_work_comes_back(world: World) -> None:
    """The head gets through; the next task of the lane is due before those that were moved aside are read."""
    node = await world.node("a")
    await _fill(world, node)
    await node.until(world, 1_000, 2_000)
    await world.caller.put(world.at(1_001 + RETRY_MS), lane=LANE)
    world.go_to(RETRY_MS)
    await node.read()
    for moment_ms in (1_000 + RETRY_MS, 1_001 + RETRY_MS):
        world.go_to(moment_ms)
        await node.fire()
    await node.until(world, 1_100 + RETRY_MS)
    await world.settle(node)


async def _up_to_the_move(world: World, node: NodeByHand) -> list[str]:
    """The head has failed; the commit that moves the others has not left yet."""
    tasks = await _fill(world, node)
    await node.read()
    world.go_to(1_500)
    await node.fire()
    return tasks


async def cancel_while_tasks_are_moved(world: World) -> None:
    """A cancel gets to the server just before the commit that moves its task."""
    node = await world.node("a")
    tasks = await _up_to_the_move(world, node)

    async def cancel() -> None:
        await world.caller.cancel(tasks[5])

    with on_the_way(node.store, calls("commit"), before=cancel):
        await node.commit()
    await node.until(world, 1_500 + RETRY_MS, 2_000 + RETRY_MS)
    await world.settle(node)


async def cancel_by_the_place_a_task_was_moved_from(world: World) -> None:
    """The caller that put a task knows only its first place."""
    node = await world.node("a")
    tasks = await _fill(world, node)
    await node.until(world, 1_000, 2_000)
    await world.caller.cancel(tasks[5])
    await node.until(world, 1_000 + RETRY_MS, 1_500 + RETRY_MS)
    await world.settle(node)


async def reply_to_a_move_is_lost(world: World) -> None:
    """Tasks are moved aside, but the node does not know it and sends the same again."""
    node = await world.node("a")
    await _up_to_the_move(world, node)
    with bad_road(node.store) as road:
        road.next("lose reply", only=calls("commit"))
        await node.commit()
    world.failed("the reply to a commit was lost", node="a")
    world.go_to(1_501)
    await node.commit()
    await node.until(world, 1_500 + RETRY_MS, 2_000 + RETRY_MS)
    await world.settle(node)


async def node_dies_after_a_move(world: World) -> None:
    """The commit that moves tasks aside is the last that a node gets through before it dies."""
    first = await world.node("a")
    await _up_to_the_move(world, first)
    commit = calls("commit")
    with bad_road(first.store) as road:
        road.next("never sent", "never sent", only=lambda commands: not commit(commands))
        await first.commit()
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


async def node_dies_while_tasks_are_held(world: World) -> None:
    """Tasks wait aside when their owner dies, and the next one continues with them."""
    first = await world.node("a")
    await _fill(world, first)
    await first.until(world, 1_000, 2_000)
    await first.crash()
    world.failed("a node died", node="a")
    await world.settle(await world.node("b"))


HOLDS: Final = (
    many_behind_a_failing_head,
    arrival_while_held_work_comes_back,
    cancel_while_tasks_are_moved,
    cancel_by_the_place_a_task_was_moved_from,
    reply_to_a_move_is_lost,
    node_dies_after_a_move,
    node_dies_while_tasks_are_held,
)
