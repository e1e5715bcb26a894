"""Scenarios about schedules: accidents around the step in which one occurrence begins and the next is put.

Each planned time counts as accepted from the start: it has to run, once, and nothing else may."""

from typing import Any, Final

from mainspring.model.ids import idempotency_key, occurrence_id
from mainspring.store.redis.connection import RedisCommand
from mainspring.testing.faults import bad_road, calls
from mainspring.testing.history import AcceptedEvent

from .owners import STALL_MS
from .world import World, on_the_way

NAME: Final = "job"
OFTEN: Final[dict[str, Any]] = {"every": "1s", "target": "log:", "overlap": "allow", "grace": "1h", "misfire": "all"}


async def _add(world: World, *planned_ms: int, **fields: Any) -> None:
    """Add the schedule and write down when it has to run."""
    await world.caller.client.schedules.add(NAME, **{**OFTEN, "max_runs": len(planned_ms), **fields})
    _expect(world, *planned_ms)


def _expect(world: World, *planned_ms: int) -> None:
    for planned in planned_ms:
        due_ms = world.at(planned)
        task = occurrence_id(NAME, due_ms)
        key = idempotency_key(world.namespace, task, due_ms)
        world.history.events.append(AcceptedEvent(world.now_us(), task, key, due_ms))


async def schedule_runs_and_ends(world: World) -> None:
    """Nothing goes wrong."""
    node = await world.node("a")
    await _add(world, 1_000, 2_000, 3_000)
    await node.until(world, 1_000, 2_000, 3_000, 4_000, 5_000)
    await world.settle(node)


async def node_dies_between_begin_and_commit_of_a_run(world: World) -> None:
    """Runs that had begun go out again, and the chain continues: no planned time is lost, none is doubled."""
    first = await world.node("a")
    await _add(world, 1_000, 2_000, 3_000)
    await first.read()
    first.hold()
    world.go_to(1_000)
    await first.fire()
    await first.crash()
    world.failed("a node died", node="a")
    world.go_to(1_000 + STALL_MS)
    second = await world.node("b")
    await second.turn()
    await world.settle(second)


async def reply_to_the_begin_of_a_run_is_lost(world: World) -> None:
    """The tick that begins a run and puts the next is sent again: that puts nothing a second time."""
    node = await world.node("a")
    await _add(world, 1_000, 2_000, 3_000)
    await node.read()
    world.go_to(1_000)
    since_us = world.now_us()
    with bad_road(node.store) as road:
        road.next("lose reply", only=calls("tick"))
        await node.fire()
        world.failed("a reply was lost", since_us=since_us)
    await node.fire()
    await node.until(world, 1_000, 2_000, 3_000, 4_000)
    await world.settle(node)


async def late_copy_of_the_begin_of_a_run(world: World) -> None:
    """An old copy of a tick arrives when the chain has long moved on."""
    node = await world.node("a")
    await _add(world, 1_000, 2_000, 3_000)
    await node.read()
    world.go_to(1_000)
    sent: list[tuple[int, list[RedisCommand]]] = []
    with bad_road(node.store) as road:
        await node.fire()
        slot = node.store.keys.partitions[0].slot
        sent = [(slot, list(commands)) for _, commands in road.trips if calls("tick")(commands)]
    await node.until(world, 1_000, 2_000)
    await node.store.run(sent)
    await node.until(world, 2_000, 3_000, 4_000)
    await world.settle(node)


async def edit_of_a_schedule_that_was_read(world: World) -> None:
    """The owner has the next occurrence in memory when the schedule is edited: the old one never runs."""
    node = await world.node("a")
    await world.caller.client.schedules.add(NAME, **OFTEN)
    await node.read()
    await world.caller.client.schedules.edit(NAME, every="5s", start=world.at(5_000), max_runs=2)
    _expect(world, 5_000, 10_000)
    world.go_to(1_000)
    await node.fire()
    await node.until(world, 1_000, 2_000, 3_000, 5_000, 10_000, 15_000)
    await world.settle(node)


async def edit_while_a_run_begins(world: World) -> None:
    """The edit reaches the server just before the begin of what it cancels."""
    node, schedules = await world.node("a"), world.caller.client.schedules
    await schedules.add(NAME, **OFTEN)
    await node.read()
    world.go_to(1_000)

    async def edit() -> None:
        await schedules.edit(NAME, every="5s", start=world.at(5_000), max_runs=1)

    with on_the_way(node.store, calls("tick"), before=edit):
        await node.fire()
    _expect(world, 5_000)
    await node.until(world, 1_000, 2_000, 3_000, 5_000, 6_000)
    await world.settle(node)


async def run_that_is_skipped(world: World) -> None:
    """The previous run is not over: the next one is left out, and the chain continues."""
    node = await world.node("a")
    await world.caller.client.schedules.add(NAME, every="1s", target="log:", grace="1h", end=world.at(3_000))
    _expect(world, 1_000, 3_000)
    gate = node.hold()
    for moment_ms in (1_000, 2_000):
        world.go_to(moment_ms)
        for _ in range(3):
            await node.read()
            await node.fire()
    gate.set()
    await node.until(world, 3_000, 4_000)
    await world.settle(node)


async def two_owners_of_a_schedule(world: World) -> None:
    """A stalled owner begins a run that the next owner has begun already."""
    first = await world.node("a")
    await _add(world, 1_000, 2_000, 3_000)
    await first.read()
    world.failed("a node stalled", node="a")
    world.go_to(1_000 + STALL_MS)
    second = await world.node("b")
    await second.turn()
    await first.fire()
    await world.settle(second)


SCHEDULES: Final = (
    schedule_runs_and_ends,
    node_dies_between_begin_and_commit_of_a_run,
    reply_to_the_begin_of_a_run_is_lost,
    late_copy_of_the_begin_of_a_run,
    edit_of_a_schedule_that_was_read,
    edit_while_a_run_begins,
    run_that_is_skipped,
    two_owners_of_a_schedule,
)
