"""Scenarios about tasks: cancels, moves, lanes, puts whose replies get lost."""

from typing import Final

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.clock import ServerClock
from mainspring.model.delivery import Retry
from mainspring.store.store import Store
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.ticker import RecordingSink, turn
from tests.support.recording import RecordingClient, record

from .world import RETRY_MS, World, on_the_way

LANE: Final = "lane"


async def cancel_before_begin(world: World) -> None:
    """An owner has read tasks; then one is cancelled, and many of another second at once."""
    node, caller = await world.node("a"), world.caller
    one, _ = await caller.put(world.at(1_000)), await caller.put(world.at(1_100))
    many = [await caller.put(world.at(2_000)) for _ in range(20)]
    await node.read()
    await caller.cancel(one)
    await caller.cancel(*many[:18])
    await node.until(world, 1_000, 1_500, 2_000)
    await world.settle(node)


async def cancel_in_flight(world: World) -> None:
    """Somebody cancels a task while it is being delivered."""
    node, caller = await world.node("a"), world.caller
    one = await caller.put(world.at(1_000))
    gate = node.hold()
    await node.read()
    world.go_to(1_000)
    await node.fire()
    world.go_to(1_001)
    await caller.cancel(one)
    gate.set()
    await node.breathe()
    await world.settle(node)


async def move_while_it_begins(world: World) -> None:
    """A reschedule is on its way when its task begins."""
    node, caller = await world.node("a"), world.caller
    one = await caller.put(world.at(1_000), id="one")
    await node.read()
    world.go_to(1_000)
    with on_the_way(world.store, calls("replace"), before=node.fire):
        await caller.reschedule(one, world.at(4_000))
    await world.settle(node)


async def move_what_was_read(world: World) -> None:
    """A task is moved after its owner has read it at its old place; another one before that."""
    node, caller = await world.node("a"), world.caller
    one, two = await caller.put(world.at(1_000), id="one"), await caller.put(world.at(1_000), id="two")
    await caller.reschedule(two, world.at(3_500))
    await node.read()
    await caller.reschedule(one, world.at(3_000))
    await node.until(world, 1_000, 3_000, 3_500)
    await world.settle(node)


async def unread_row_in_a_lane(world: World) -> None:
    """An earlier task of a lane arrives when the owner is about to begin a later one."""
    node, caller = await world.node("a"), world.caller
    await caller.put(world.at(2_000), lane=LANE)
    await node.read()
    world.go_to(1_000)
    await caller.put(world.at(1_500), lane=LANE)
    world.go_to(2_000)
    await node.fire()
    await node.until(world, 2_001, 2_002)
    await world.settle(node)


async def failing_head_of_a_lane(world: World) -> None:
    """The first task of a lane fails; the next one comes due before its second attempt."""
    node, caller = await world.node("a"), world.caller
    node.answers(Retry("busy"))
    await caller.put(world.at(1_000), lane=LANE)
    await caller.put(world.at(2_000), lane=LANE)
    await node.until(world, 1_000, 2_000, 1_000 + RETRY_MS, 2_000 + RETRY_MS)
    await world.settle(node)


async def lane_under_way(world: World) -> None:
    """Two tasks of a lane come due while the first is being delivered."""
    node, caller = await world.node("a"), world.caller
    await caller.put(world.at(1_000), lane=LANE)
    await caller.put(world.at(1_100), lane=LANE)
    gate = node.hold()
    await node.read()
    for moment_ms in (1_000, 1_100):
        world.go_to(moment_ms)
        await node.fire()
    world.go_to(1_200)
    gate.set()
    await node.breathe()
    await world.settle(node)


async def put_whose_reply_is_lost(world: World) -> None:
    """The server has the task, but the client does not know it and sends it again."""
    node, caller = await world.node("a"), world.caller
    with bad_road(world.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        await caller.put(world.at(1_000))
    world.failed("the reply to a put was lost")
    await node.until(world, 500, 1_000)
    await world.settle(node)


async def late_copy_of_a_put(world: World) -> None:
    """The first copy of a put hangs somewhere, and arrives when the second one has been delivered."""
    node, caller = await world.node("a"), world.caller
    with bad_road(world.store) as road:
        road.next("hold back", only=uses("MULTI"))
        await caller.put(world.at(1_000))
        world.failed("a put was held back")
        await node.until(world, 500, 1_000)
        world.go_to(1_500)
        await road.deliver_held()
    await node.turn()
    await world.settle(node)


async def repeated_request(world: World) -> None:
    """A caller is not sure and asks again, with the same id."""
    node, caller = await world.node("a"), world.caller
    for _ in range(2):
        await caller.put(world.at(1_000), id="order-42")
    await node.until(world, 1_000)
    await world.settle(node)


class _HourAhead(ServerClock):
    """The clock of a machine that is an hour ahead and does not listen to the server."""

    def now_ms(self) -> int:
        return super().now_ms() + 3_600_000

    def sample(self, server_us: int) -> None:
        """It knows better."""


async def clock_an_hour_ahead(world: World) -> None:
    """A node believes that what is due in ten minutes is due. The only scenario by the server's own clock."""
    honest = await Store.open(world.url, namespace=world.namespace, partitions=1)
    fast = await Store.open(world.url, namespace=world.namespace, partitions=1, clock=_HourAhead())
    try:
        caller = RecordingClient(Client.over(honest), world.history)
        await caller.put(honest.clock.now_ms() + 600_000)
        engine = Engine(fast, {"log": RecordingSink()}, EngineOptions(node="fast"))
        record(engine, world.history.events.append, node="fast")
        await turn(engine)
        await caller.look_back()
        await engine.keeper.release()
    finally:
        await fast.aclose()
        await honest.aclose()


TASKS: Final = (
    cancel_before_begin,
    cancel_in_flight,
    move_while_it_begins,
    move_what_was_read,
    unread_row_in_a_lane,
    failing_head_of_a_lane,
    lane_under_way,
    put_whose_reply_is_lost,
    late_copy_of_a_put,
    repeated_request,
    clock_an_hour_ahead,
)
