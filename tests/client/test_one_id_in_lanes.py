"""One id in several lanes is several tasks: none of them is taken for another."""

from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.client.sync import SyncClient
from mainspring.model.delivery import Dead
from mainspring.model.errors import Ambiguous, Conflict
from mainspring.model.task import OnConflict, Task
from mainspring.store.keys import partition_of
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker

PARTITIONS = 4


def lanes_of(partition: int, count: int) -> list[str]:
    """Lanes of one partition."""
    return [name for name in map("lane-{}".format, range(100)) if partition_of(name, PARTITIONS) == partition][:count]


HOME = partition_of("dup", PARTITIONS)
X, Y, Z = (lanes_of((HOME + n) % PARTITIONS, 1)[0] for n in (1, 2, 3))
BESIDE_X = lanes_of((HOME + 1) % PARTITIONS, 2)[1]
AT_HOME = lanes_of(HOME, 1)[0]
"""A lane in the partition of the id itself."""


async def put_in_all(client: Client) -> None:
    for lane in (X, Y, Z, None):
        made = await client.put("log:", {"lane": lane}, after="1h", id="dup", lane=lane)
        assert made.outcome == "created"


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("get", {}),
        ("cancel", {}),
        ("reschedule", {"after": "2h"}),
        ("explain", {}),
        ("result", {"timeout": 5}),
        ("find_result", {}),
    ],
)
async def test_an_id_that_several_lanes_have_is_ambiguous_and_the_lanes_are_named(
    client: Client, call: str, options: dict[str, Any]
) -> None:
    await put_in_all(client)
    with pytest.raises(Ambiguous, match=f"lane '{X}'") as refused:
        await getattr(client, call)("dup", **options)
    assert refused.value.lanes == tuple(sorted(("", X, Y, Z)))
    for lane in refused.value.lanes:
        info = await client.get("dup", lane=lane)
        assert (info.state, info.lane, info.payload) == ("pending", lane or None, {"lane": lane or None})


async def test_each_is_cancelled_by_its_lane_and_the_one_without_by_an_empty_one(client: Client) -> None:
    await put_in_all(client)
    assert await client.cancel_many(["dup", "other"]) == ["ambiguous", "unknown"]
    assert (await client.count()).pending == 4
    assert await client.cancel("dup", lane="") == "cancelled"
    assert await client.cancel("dup", lane=X) == "cancelled"
    assert {one.lane for one in (await client.list()).tasks} == {Y, Z}
    assert await client.cancel("dup", lane=Y) == "cancelled"
    assert await client.cancel("dup") == "cancelled"
    assert (await client.count()).pending == 0


async def test_what_is_over_counts_too(client: Client, ticker: Ticker) -> None:
    for lane in (X, Y):
        await client.put("log:", id="dup", lane=lane)
    assert len(await ticker.turn()) == 2
    with pytest.raises(Ambiguous):
        await client.get("dup")


async def test_dead_letters_of_one_id_are_told_apart(client: Client, ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Dead("no"))
    for lane in (X, Y):
        await client.put("log:", id="dup", lane=lane)
    await ticker.turn()
    with pytest.raises(Ambiguous) as refused:
        await client.dead_get("dup")
    assert refused.value.lanes == tuple(sorted((X, Y)))
    with pytest.raises(Ambiguous):
        await client.dead_drop("dup")
    letter = await client.dead_get("dup", lane=Y)
    assert letter is not None
    assert letter.lane == Y
    assert await client.dead_drop("dup", lane=Y) == "dropped"
    assert await client.dead_drop("dup") == "dropped"


async def test_lanes_that_share_a_partition_never_answer_for_each_other(client: Client) -> None:
    await client.put("log:", after="1h", id="dup", lane=X)
    for other in (BESIDE_X, ""):
        assert (await client.get("dup", lane=other)).state == "unknown"
        assert await client.cancel("dup", lane=other) == "unknown"
        with pytest.raises(Conflict, match="no such task"):
            await client.reschedule("dup", after="2h", lane=other)
    await client.put("log:", after="1h", id="home", lane=lanes_of(partition_of("home", PARTITIONS), 1)[0])
    assert await client.cancel("home", lane="") == "unknown"
    assert (await client.count()).pending == 2


@pytest.mark.parametrize("on_conflict", ["keep", "replace", "earliest", "reject"])
async def test_an_id_that_another_lane_of_the_partition_has_is_refused_by_name(
    client: Client, on_conflict: OnConflict
) -> None:
    await client.put("log:", 1, after="2h", id="dup", lane=X)
    with pytest.raises(Conflict, match=f"lane '{X}'"):
        await client.put("log:", 2, after="1h", id="dup", lane=BESIDE_X, on_conflict=on_conflict)
    assert (await client.put("log:", 1, after="1h", id="dup", lane=X)).outcome == "kept"
    await client.put("log:", after="1h", id="dup")
    with pytest.raises(Conflict, match="no lane"):
        await client.put("log:", after="1h", id="dup", lane=AT_HOME)
    assert [one.payload for one in (await client.list()).tasks if one.lane == X] == [1]


async def test_of_two_in_one_call_the_second_is_not_taken_for_the_first(client: Client) -> None:
    wanted = [Task("log:", n, after="1h", id="dup", lane=lane) for n, lane in enumerate((X, BESIDE_X, Y))]
    with pytest.raises(Conflict, match=f"lane '{BESIDE_X}'") as refused:
        await client.put_many(wanted)
    assert refused.value.stored == 2
    assert {one.lane for one in (await client.list()).tasks} == {X, Y}


def test_the_synchronous_client_says_the_same(server: Server) -> None:
    with SyncClient(server.url, namespace="dup-sync", partitions=PARTITIONS) as client:
        for lane in (X, Y):
            client.put("log:", after="1h", id="dup", lane=lane)
        for call in (client.get, client.cancel):
            with pytest.raises(Ambiguous) as refused:
                call("dup")
            assert refused.value.lanes == tuple(sorted((X, Y)))
    server.call("FLUSHALL")


async def test_a_bulk_cancel_finds_each_of_them(client: Client) -> None:
    """Ids without lanes cost no question more: only partitions that ever had an id in a lane are asked besides."""
    ids = [f"id-{n}" for n in range(64)]
    await client.put_many(Task("log:", after="1h", id=id) for id in ids)
    assert await client.cancel_many(ids[:8]) == ["cancelled"] * 8
    [elsewhere] = lanes_of((partition_of(ids[8], PARTITIONS) + 1) % PARTITIONS, 1)
    await client.put("log:", after="1h", id=ids[8], lane=elsewhere)
    await client.put_many([Task("log:", after="1h", id=f"in-{lane}", lane=lane) for lane in (X, Y)])
    outcomes = await client.cancel_many([*ids[8:], f"in-{X}", f"in-{Y}", "never put"])
    assert outcomes == ["ambiguous", *["cancelled"] * 57, "unknown"]
