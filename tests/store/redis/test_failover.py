"""A primary is lost, or handed over, under load: what was promised is there, and what was not is counted."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mainspring.client.client import Client
from mainspring.model.errors import NotConfirmed
from mainspring.model.task import Handle, Task
from mainspring.store import durability
from mainspring.store.keys import partition_of
from mainspring.store.store import Store
from mainspring.testing.losses import losses, report
from mainspring.testing.servers import (
    Sentinels,
    Server,
    ServerCluster,
    caught_up,
    cluster,
    cut_off_replicas,
    sentinel,
    standalone,
    wait_until,
)
from mainspring.testing.ticker import Ticker
from tests.support.traffic import PARTITIONS, QUICK, Scene, Traffic, now_us, scene, until

ALL = "replicas=1"
"""Every primary here has one replica."""


@pytest.fixture(autouse=True)
def shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not answer is waited for a second, not five."""
    monkeypatch.setattr(durability, "WAIT_MS", 1_000)


@contextmanager
def patience() -> Iterator[None]:
    """Wait for a replica that does answer, even on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durability, "WAIT_MS", 30_000)
        yield


@pytest.fixture(scope="module")
def nodes() -> Iterator[ServerCluster]:
    """The other masters continue while one is away: without this setting all of them refuse everything meanwhile."""
    with cluster(3, 1, extra_config={"cluster-require-full-coverage": "no"}) as started:
        yield started


@pytest.fixture
def group() -> Iterator[Sentinels]:
    with sentinel() as started:
        yield started


async def confirmed_and_killed(made: Scene, traffic: Traffic, primary: Server, replica: Server) -> int:
    """Kill a primary under load. A cancel has no level: the last ones must have reached the replica before."""
    traffic.cancels = False
    await traffic.go_on(2)
    await asyncio.to_thread(wait_until, lambda: caught_up(primary, replica), "the replica has all cancels")
    began = now_us()
    primary.kill()
    return began


async def none_lost(made: Scene, level: str) -> None:
    found = await losses(made.client, made.cancel_less, made.delivered)
    assert report(found) == f"lost at level {level}: 0 of {len(made.cancel_less)}"
    assert made.violations() == []


# -- cluster ---------------------------------------------------------------------------------------------------


async def test_a_planned_failover_under_load_loses_nothing_at_any_level(nodes: ServerCluster) -> None:
    async with scene(nodes.url) as made:
        traffic = Traffic(made)
        await traffic.go_on(3)
        slot = made.store.keys.partitions[0].slot
        for _ in ("there", "back"):
            master = nodes.owner_of(slot)
            replica = await asyncio.to_thread(nodes.replica_of, master)
            began = now_us()
            await asyncio.to_thread(nodes.promote, replica)
            await asyncio.to_thread(wait_until, lambda: caught_up(replica, master), "the old master follows")  # noqa: B023
            await traffic.go_on(3)
            made.fault(began, "handed over")
        await traffic.stop()
        await made.all_delivered()
        await none_lost(made, "server")


async def test_a_master_killed_under_load_loses_nothing_that_all_replicas_had(nodes: ServerCluster) -> None:
    async with scene(nodes.url) as made:
        slot = made.store.keys.partitions[0].slot
        master = nodes.owner_of(slot)
        replica = await asyncio.to_thread(nodes.replica_of, master)
        others = {keys.number for keys in made.store.keys.partitions if nodes.owner_of(keys.slot) is not master}
        traffic, elsewhere = Traffic(made, level=ALL), Traffic(made, level=ALL, partitions=others, cancels=False)
        await traffic.go_on(3)
        began = await confirmed_and_killed(made, traffic, master, replica)
        fired = made.delivered_from(others)
        await elsewhere.go_on(3)
        await until(lambda: made.delivered_from(others) > fired + 10)  # its partitions wait; those of others do not
        await asyncio.to_thread(nodes.wait_promoted, replica)
        # The promoted one has no replica of its own: what is put there now is stored, and said to be unconfirmed.
        name = next(name for n in range(99) if partition_of(name := f"lone{n}", PARTITIONS) == 0)
        with pytest.raises(NotConfirmed, match="0 of 1 confirmed"):
            await made.client.put("log:", name, id=name, after="1s", durability=ALL)
        made.unsure.add(name)
        await asyncio.to_thread(master.restart)
        await asyncio.to_thread(wait_until, lambda: caught_up(replica, master), "the killed one follows", timeout_s=60)
        confirmed = traffic.confirmed
        await until(lambda: traffic.confirmed > confirmed + 30)
        await traffic.stop()
        await elsewhere.stop()
        made.fault(began, "killed", loses=True)
        await made.all_delivered()
        await none_lost(made, ALL)


# -- sentinel --------------------------------------------------------------------------------------------------


async def test_a_primary_killed_under_sentinels_loses_nothing_that_all_replicas_had(group: Sentinels) -> None:
    async with scene(group.url) as made:
        traffic = Traffic(made, level=ALL)
        await traffic.go_on(5)
        began = await confirmed_and_killed(made, traffic, group.primary, group.replica)
        stopping = asyncio.create_task(traffic.stop())
        await asyncio.to_thread(group.wait_failover)
        await stopping
        made.fault(began, "killed", loses=True)
        await made.all_delivered()
        assert made.handles
        await none_lost(made, ALL)
        last = await made.client.put("log:", "goes on")
        await until(lambda: last.id.partition("~")[0] in made.delivered)


async def put(client: Client, count: int, level: str, *, after: str = "1h") -> list[Handle]:
    named = [Task("log:", n, id=f"{level}-{after}-{n}", after=after) for n in range(count // 2)]
    plain = [Task("log:", n, after=after) for n in range(count - count // 2)]
    summary = await client.put_many([*named, *plain], durability=level, handles=True)
    assert summary.handles is not None
    return summary.handles


async def test_losses_at_a_weaker_level_are_counted_and_reported(
    group: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    """An old state is promoted: the owner notices even if nothing is due, and continues from the present state."""
    async with scene(group.url, lease_s=12) as made:  # so long that no lease ends by itself meanwhile
        client, engine = made.client, made.engine
        with patience():
            safe = await put(client, 40, ALL)
            soon = await put(client, 10, ALL, after="200ms")
            await until(lambda: len(made.delivered) == 10)
            forgiven = await client.put("log:", "cancelled", id="cancelled", after="1h", durability=ALL)
        await asyncio.to_thread(wait_until, lambda: caught_up(group.primary, group.replica), "the replica has all")
        cut_off_replicas(group.primary)
        unsafe = await put(client, 30, "server")
        fired = await put(client, 20, "server", after="100ms")
        await until(lambda: len(made.delivered) == 30)
        assert await client.cancel(forgiven.id) == "cancelled"
        with pytest.raises(NotConfirmed, match="0 of 1 confirmed"):
            await put(client, 1, ALL, after="2h")
        await until(lambda: sum(engine.lookahead.accepted.values()) == 40 + 10 + 1 + 30 + 20 + 1)
        taken = engine.keeper.takeovers
        group.primary.kill()
        await asyncio.to_thread(group.wait_failover)
        # Nothing is due and nothing is put: the rollback is noticed all the same.
        await until(lambda: engine.lookahead.forgotten == 30 + 20 + 1 and engine.healthy, 60)
        await until(lambda: engine.keeper.takeovers > taken and len(engine.owned) == PARTITIONS)
        assert "the server has forgotten" in caplog.text
        assert "given up: rolledback" in caplog.text
        found = await losses(client, [*safe, *soon, *unsafe, *fired], made.delivered)
        assert report(found) == "lost at level replicas=1: 0 of 50\nlost at level server: 30 of 50"
        assert set(found[1].lost) == {handle.id for handle in unsafe}
        # Documented: a cancel has no level, and this one was forgotten with the primary.
        assert (await client.get(forgiven.id)).state == "pending"
        await client.reschedule(forgiven.id, after="100ms")
        await until(lambda: "cancelled" in made.delivered)
        assert (await made.books()).pending == 40


async def test_an_owner_whose_writes_were_forgotten_delivers_again_with_the_same_key(
    group: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    """No put is lost and nothing is due: only the sequence number shows the rollback."""
    async with scene(group.url, lease_s=30) as made:  # longer than a failover: no lease ends by itself meanwhile
        with patience():
            await put(made.client, 10, ALL, after="5s")
        await until(lambda: made.engine.lookahead.held == 10)
        await asyncio.to_thread(wait_until, lambda: caught_up(group.primary, group.replica), "the replica has all")
        cut_off_replicas(group.primary)
        await until(lambda: len(made.delivered) == 10)
        async with asyncio.timeout(60):
            while (await made.books()).done < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        group.primary.kill()
        await asyncio.to_thread(group.wait_failover)
        await until(lambda: len(made.sink.deliveries) == 20, 60)
        assert len({one.idempotency_key for one in made.sink.deliveries}) == 10
        assert "given up: rolledback" in caplog.text
        assert made.engine.lookahead.forgotten == 0
        async with asyncio.timeout(60):
            while (await made.books()).done < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_an_idle_owner_looks_back_whether_the_server_still_knows_its_last_call() -> None:
    with standalone() as server:
        async with Ticker(server.url, partitions=1) as ticker:
            await ticker.client.put("log:", after="1s")
            await ticker.advance(seconds=1)
            [partition] = ticker.engine.owned.values()
            assert partition.seq > 1
            keys = ticker.store.keys.partitions[0]
            await ticker.engine.keeper.step()
            assert ticker.engine.owned[0] is partition, "the server knows everything"
            server.call("SET", keys.fence, b"%b:%d" % (partition.token, partition.seq - 1))
            await ticker.engine.keeper.step()
            assert ticker.engine.owned[0] is not partition, "it was given up, and acquired anew"
            assert ticker.engine.owned[0].seq == 0


# -- the report itself -----------------------------------------------------------------------------------------


def partition(id: str) -> int:
    """Return the partition of a task: by its id, or by the address in the handle of a task without one."""
    return int(id.split("~")[1].split(".")[0], 36) if "~" in id else partition_of(id, PARTITIONS)


async def test_the_report_counts_what_is_gone_and_nothing_else() -> None:
    with standalone() as server:
        store = await Store.open(server.url, namespace="count", partitions=PARTITIONS, options=QUICK)
        client = Client.over(store)
        handles = await put(client, 10, "server")
        assert report(await losses(client, handles)) == "lost at level server: 0 of 10"
        await client.cancel(handles[0].id)
        gone = [handles[1], handles[-1]]
        # As if they had never been put: their partitions, perhaps the same one, are emptied.
        for number in {partition(handle.id) for handle in gone}:
            keys = store.keys.partitions[number]
            names = await store.run_one(keys.slot, [("KEYS", f"{{{keys.tag}}}:*")])
            await store.run_one(keys.slot, [("UNLINK", *names[0])])
        found = await losses(client, handles)
        [loss] = found
        assert {handle.id for handle in gone} <= set(loss.lost)
        for handle in handles[2:-1]:
            stands = (await client.get(handle.id)).state == "pending"
            assert stands != (handle.id in loss.lost)
        delivered = [handle.id for handle in gone]
        [less] = await losses(client, handles, delivered)
        assert len(less.lost) == len(loss.lost) - 2
        await store.aclose()
