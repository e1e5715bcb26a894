"""A queue has a lane policy of its own: nodes and workers that have the same settings act by it alike."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from mainspring import Config, Dead, Retry, Scheduler
from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Failure
from mainspring.model.lane import LanePolicy
from mainspring.model.queue_rules import QueueRules
from mainspring.model.targets.command import read_commands
from mainspring.node.node import engine_options
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import PATIENCE_S, until

FALSE = {"argv": ["/bin/false"], "retry": "1"}
COMMANDS = read_commands({"backup": FALSE, "report": {**FALSE, "queue": "reports"}})


def settings(node: str, **queues: str) -> Config:
    rules = QueueRules.read({name: {"lane_policy": policy} for name, policy in queues.items()})
    return Config(redis_url="redis://nobody.invalid", lane_policy=LanePolicy.parse(node), queue=rules)


class Program:
    """Serves some queues. Orders with the number 0 fail; the lane of an order has the name of its queue."""

    def __init__(self, config: Config, *queues: str, failure: Retry | Dead) -> None:
        self.failure: Retry | Dead | None = failure
        self.told: list[Failure] = []
        self.ran: dict[str, list[int]] = {queue: [] for queue in queues}
        self.scheduler = Scheduler(replace(config, error_handler=self._tell))
        for queue in queues:
            self._serve(queue)

    async def _tell(self, failure: Failure) -> None:
        self.told.append(failure)

    def _serve(self, queue: str) -> None:
        @self.scheduler.handler(queue=queue, result_ttl="1h")
        async def order(number: int) -> None:
            self.ran[queue].append(number)
            if number == 0 and self.failure is not None:
                raise self.failure

    async def put(self, client: Client) -> None:
        """Two orders for each queue."""
        for queue in self.ran:
            for number in range(2):
                payload, name = {"number": number}, f"{queue} {number}"
                await client.put(f"queue:{queue}/order", payload, after=f"{number + 1}s", id=name, lane=queue)

    async def fates(self, count: int) -> list[tuple[str | None, str]]:
        """The lanes of failures, and what the error handler hears of them."""
        await until(lambda: len(self.told) >= count, f"{count} failures are told")
        return sorted((one.lane, one.outcome) for one in self.told)


Open = Callable[[Program], Ticker]


@pytest.fixture
def node_of(fleet: Fleet, namespace: str, clock: ManualClock) -> Open:
    """Node and worker of a program, both by its settings."""

    def make(program: Program) -> Ticker:
        options = engine_options(program.scheduler.config, "node")
        made = Ticker(fleet.url, namespace=namespace, partitions=PARTITIONS, clock=clock, options=options)
        return made.running(program.scheduler)

    return make


async def standing(ticker: Ticker) -> dict[str, str]:
    return {one.lane: one.state for one in await ticker.client.lanes()}


async def test_one_queue_skips_its_failing_heads_another_parks_and_the_rest_blocks_as_the_node_says(
    node_of: Open, store: Store
) -> None:
    config = settings("block", loose="skip", strict="park")
    program = Program(config, "loose", "strict", "other", failure=Retry("busy", after_ms=600_000))
    async with node_of(program) as ticker:
        await program.put(ticker.client)
        await ticker.advance(seconds=5)
        assert program.ran == {"loose": [0, 1], "strict": [0], "other": [0]}
        assert await standing(ticker) == {"strict": "parked", "other": "retrying"}
        assert await program.fates(3) == [("loose", "retry"), ("other", "retry"), ("strict", "parked")]
        program.failure = None
        await ticker.advance(minutes=11)
        assert program.ran == {"loose": [0, 1, 0], "strict": [0], "other": [0, 0, 1]}
        assert await ticker.client.lane_resume("strict") == "ok"
        await ticker.advance(seconds=1)
        assert program.ran["strict"] == [0, 0, 1]
        assert not (await verify(store)).reported


@pytest.mark.parametrize(("node", "queue", "fate"), [("block", "park", "parked"), ("park", "block", "dead")])
async def test_the_policy_of_the_queue_decides_whether_a_permanent_failure_parks_the_lane(
    node_of: Open, store: Store, node: str, queue: str, fate: str
) -> None:
    program = Program(settings(node, orders=queue), "orders", failure=Dead("no such order"))
    async with node_of(program) as ticker:
        await program.put(ticker.client)
        await ticker.advance(seconds=5)
        assert await program.fates(1) == [("orders", fate)]
        result = await ticker.client.find_result("orders 0", lane="orders")
        if fate == "parked":
            assert (program.ran["orders"], await standing(ticker)) == ([0], {"orders": "parked"})
            assert (result, await list_dead(store)) == (None, []), "it is not over"
        else:
            assert (program.ran["orders"], await standing(ticker)) == ([0, 1], {})
            assert result is not None
            assert (result.ending, [one.reason for one in await list_dead(store)]) == ("dead", ["no such order"])


async def test_a_queue_says_how_long_its_lanes_block(node_of: Open) -> None:
    config = settings("block 1h", hasty="block 10s")
    program = Program(config, "hasty", "patient", failure=Retry("busy", after_ms=300_000))
    async with node_of(program) as ticker:
        await program.put(ticker.client)
        await ticker.advance(seconds=5)
        assert await standing(ticker) == {"hasty": "parked", "patient": "retrying"}
        # The worker speaks of a retry; that the lane does not wait so long, the node tells.
        assert await program.fates(3) == [("hasty", "parked"), ("hasty", "retry"), ("patient", "retry")]


@pytest.mark.parametrize(
    ("queue", "parked", "buried"), [("commands", "backup", "report"), ("reports", "report", "backup")]
)
async def test_the_policy_of_a_queue_holds_for_its_commands(
    node_of: Open, store: Store, queue: str, parked: str, buried: str
) -> None:
    config = replace(settings("block", **{queue: "park"}), commands=COMMANDS)
    program = Program(config, failure=Dead("not asked"))
    async with node_of(program) as ticker:
        for name in COMMANDS:
            await ticker.client.put(f"command:{name}", after="1s", lane=name)
        await ticker.advance(seconds=5)
        assert await standing(ticker) == {parked: "parked"}
        assert await program.fates(2) == sorted([(parked, "parked"), (buried, "dead")])
        assert [one.target for one in await list_dead(store)] == [f"command:{buried}"]


async def test_a_running_scheduler_gives_the_rules_of_queues_to_its_node_and_its_worker(server: Server) -> None:
    config = replace(settings("block", strict="park"), redis_url=server.url, partitions=PARTITIONS)
    program = Program(config, "strict", failure=Dead("no such order"))
    async with Client(server.url, partitions=PARTITIONS) as client, program.scheduler:
        await client.put("queue:strict/order", {"number": 0}, lane="strict")
        assert await program.fates(1) == [("strict", "parked")]
        async with asyncio.timeout(PATIENCE_S):
            while (await client.lane("strict")).state != "parked":  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.02)
