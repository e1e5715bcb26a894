"""One id in several lanes is several tasks: none of them is taken for another."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from mainspring.client.client import Client
from mainspring.client.sync import SyncClient
from mainspring.model.delivery import Body, Dead
from mainspring.model.errors import Ambiguous, Conflict, InvalidInput, NotFound, Unavailable
from mainspring.model.ids import idh_in_lane, idh_of
from mainspring.model.job import Result
from mainspring.model.task import PutSummary, Task
from mainspring.store.codec import INDEXED, LANE, entry
from mainspring.store.keys import HOUR_MS, Slice, partition_of
from mainspring.store.records import KeptResult, keep_results, read_result
from mainspring.store.tasks.find import resolve
from mainspring.store.tasks.index import LANES_KEPT_MS, IdRow, replace
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker

PARTITIONS = 4
Tickers = Callable[..., Awaitable[Ticker]]


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


async def test_a_task_is_cancelled_by_its_lane_and_one_without_a_lane_by_an_empty_one(client: Client) -> None:
    await put_in_all(client)
    assert await client.cancel_many(["dup", "other"]) == ["ambiguous", "unknown"]
    assert (await client.count()).pending == 4
    assert await client.cancel("dup", lane="") == "cancelled"
    assert await client.cancel("dup", lane=X) == "cancelled"
    assert {one.lane for one in (await client.list()).tasks} == {Y, Z}
    assert await client.cancel("dup", lane=Y) == "cancelled"
    assert await client.cancel("dup") == "cancelled"
    assert (await client.count()).pending == 0


async def test_finished_tasks_make_an_id_ambiguous_too(client: Client, ticker: Ticker) -> None:
    for lane in (X, Y):
        await client.put("log:", id="dup", lane=lane)
    assert len(await ticker.turn()) == 2
    with pytest.raises(Ambiguous):
        await client.get("dup")


async def test_a_finished_task_without_a_lane_is_named_too(client: Client, ticker: Ticker) -> None:
    for lane in (X, Y, None):
        await client.put("log:", id="dup", lane=lane)
    assert len(await ticker.turn()) == 3
    await ticker.advance(minutes=5)  # the slice is gone, the id still known
    with pytest.raises(Ambiguous) as refused:
        await client.get("dup")
    assert refused.value.lanes == tuple(sorted(("", X, Y)))


@pytest.mark.parametrize("lanes", [(X, Y), (X, None), (X, AT_HOME, None)])
async def test_the_history_does_not_answer_for_one_of_several_lanes(
    tickers: Tickers, lanes: tuple[str | None, ...]
) -> None:
    ticker = await tickers(handlers={"https": None})
    client = ticker.client
    for lane in lanes:
        await client.put("https://example.com/hook", id="dup", lane=lane)
    assert len(await ticker.turn()) == len(lanes)
    await ticker.advance(hours=2)  # past the dedupe window
    for _ in range(2 * PARTITIONS):  # a step looks at one partition
        await ticker.engine.sweeper.step()
    assert await client.cancel_many(["dup"]) == ["unknown"], "only the history knows them"
    with pytest.raises(Ambiguous) as refused:
        await client.get("dup")
    assert refused.value.lanes == tuple(sorted(lane or "" for lane in lanes))
    for lane in lanes:
        info = await client.get("dup", lane=lane or "")
        assert (info.state, info.lane) == ("done", lane)
    assert {run.record.lane for run in (await client.runs(id="dup")).runs} == set(lanes)
    assert [run.record.lane for run in (await client.runs(id="dup", lane=X)).runs] == [X]
    with pytest.raises(InvalidInput, match="lane: give the id of the task too"):
        await client.runs(lane=X)


async def test_dead_letters_of_one_id_are_distinguished(client: Client, ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Dead("no"))
    for lane in (X, Y):
        await client.put("log:", id="dup", lane=lane)
    await ticker.turn()
    with pytest.raises(Ambiguous) as refused:
        await client.dead_get("dup")
    assert refused.value.lanes == tuple(sorted((X, Y)))
    with pytest.raises(Ambiguous):
        await client.dead_drop("dup")
    dead_letter = await client.dead_get("dup", lane=Y)
    assert dead_letter is not None
    assert dead_letter.lane == Y
    assert await client.dead_drop("dup", lane=Y) == "dropped"
    assert await client.dead_drop("dup") == "dropped"


async def test_lanes_that_share_a_partition_never_answer_for_each_other(client: Client) -> None:
    await client.put("log:", after="1h", id="dup", lane=X)
    for other in (BESIDE_X, ""):
        assert (await client.get("dup", lane=other)).state == "unknown"
        assert await client.cancel("dup", lane=other) == "unknown"
        with pytest.raises(NotFound, match="there is no task 'dup'"):
            await client.reschedule("dup", after="2h", lane=other)
    await client.put("log:", after="1h", id="home", lane=lanes_of(partition_of("home", PARTITIONS), 1)[0])
    assert await client.cancel("home", lane="") == "unknown"
    assert (await client.count()).pending == 2


LANES = [f"customer-{n}" for n in range(200)]


async def put_reminders(client: Client, payload: object = 0, **options: Any) -> PutSummary:
    wanted = [Task("log:", payload, after="1h", id="reminder", lane=lane) for lane in LANES]
    return await client.put_many(wanted, handles=True, **options)


def outcomes(summary: PutSummary) -> set[str]:
    assert summary.handles is not None
    return {handle.outcome for handle in summary.handles}


async def test_an_id_in_more_lanes_than_partitions_is_a_task_in_each(client: Client, ticker: Ticker) -> None:
    assert outcomes(await put_reminders(client)) == {"created"}
    assert outcomes(await put_reminders(client, 1)) == {"kept"}
    assert (await client.put("log:", 1, after="2h", id="reminder", lane=LANES[7])).outcome == "kept"
    assert (await client.put("log:", 1, after="2h", id="reminder")).outcome == "created"
    assert (await client.count()).pending == 201
    with pytest.raises(Conflict, match="exists"):
        await client.put("log:", id="reminder", lane=LANES[7], on_conflict="reject")
    replaced = await put_reminders(client, 2, on_conflict="replace")
    assert outcomes(replaced) == {"replaced"}
    delivered = await ticker.advance(hours=1)
    assert {one.lane: one.value() for one in delivered} == dict.fromkeys(LANES, 2)
    assert len(delivered) == len({one.idempotency_key for one in delivered}) == 200
    assert outcomes(await put_reminders(client, 3)) == {"kept"}, "within the dedupe window"
    assert not (await balance(client.store)).missing


async def test_each_of_many_lanes_is_reached_by_its_name(client: Client) -> None:
    await put_reminders(client)
    late, gone, *others = LANES
    await client.reschedule("reminder", after="3h", lane=late)
    assert await client.cancel("reminder", lane=gone) == "cancelled"
    assert await client.cancel("reminder", lane=gone) == "cancelled", "again"
    assert (await client.get("reminder", lane=gone)).state == "cancelled"
    assert await client.cancel("reminder", lane="") == await client.cancel("reminder", lane="nobody's") == "unknown"
    first_ms = (await client.get("reminder", lane=others[0])).due_ms
    assert first_ms is not None
    for lane in others:
        info = await client.get("reminder", lane=lane)
        assert (info.state, info.lane, info.due_ms) == ("pending", lane, first_ms)
    assert (await client.get("reminder", lane=late)).due_ms == pytest.approx(first_ms + 7_200_000, abs=60_000)
    assert (await client.explain("reminder", lane=late)).state == "pending"
    assert await client.cancel_many(["reminder", "never put"], lane=others[0]) == ["cancelled", "unknown"]
    assert (await client.count()).pending == 198


async def test_an_id_alone_leads_to_all_its_lanes(client: Client) -> None:
    await put_reminders(client)
    with pytest.raises(Ambiguous, match="and 190 more") as refused:
        await client.get("reminder")
    assert refused.value.lanes == tuple(sorted(LANES))
    assert len(str(refused.value)) < 500
    assert await client.cancel_many(["reminder", "never put"]) == ["ambiguous", "unknown"]
    for lane in LANES[1:]:
        assert await client.cancel("reminder", lane=lane) == "cancelled"
    assert (await client.get("reminder")).lane == LANES[0], "what is not there any more is not named"
    await client.reschedule("reminder", after="2h")
    assert await client.cancel_many(["reminder", "never put"]) == ["cancelled", "unknown"]


async def test_a_lane_is_forgotten_some_time_after_its_task_was_due(ticker: Ticker) -> None:
    client, store = ticker.client, ticker.store
    await client.put("log:", after="1h", id="dup", lane=X)
    await client.put("log:", after="9h", id="dup", lane=Y)
    await client.reschedule("dup", after="20h", lane=X)
    keys = store.keys.partitions[partition_of("dup", len(store.keys))]
    key = keys.lanes_of(idh_of("dup"))
    [pairs, left_ms] = await store.run_one(keys.slot, [("ZRANGE", key, 0, -1, "WITHSCORES"), ("PTTL", key)])
    kept_ms = ticker.clock.now_ms() + store.shared.dedupe_window_ms + LANES_KEPT_MS
    hours = [(float(until_ms) - kept_ms) / HOUR_MS for until_ms in pairs[1::2]]
    assert pairs[::2] == [Y.encode(), X.encode()]
    assert hours == [9, 20]
    assert left_ms == pytest.approx(kept_ms + 20 * HOUR_MS - ticker.clock.now_ms(), abs=60_000)
    ticker.clock.advance(seconds=36_000, ms=store.shared.dedupe_window_ms + LANES_KEPT_MS)
    await client.put("log:", after="1h", id="dup", lane=Z)
    [lanes] = await store.run_one(keys.slot, [("ZRANGE", key, 0, -1)])
    assert set(lanes) == {X.encode(), Z.encode()}


@pytest.mark.parametrize("script", ["note_lanes", "put_ids"])
@pytest.mark.parametrize("fault", ["lose reply", "never sent"])
async def test_a_lane_is_noted_before_its_task_is_stored(client: Client, script: str, fault: Fault) -> None:
    await client.put("log:", after="1h", id="dup", lane=X)
    with bad_road(client.store) as road:
        road.next(fault, only=calls(script))
        assert (await client.put("log:", after="1h", id="dup", lane=Y)).outcome == "created"
        road.next(fault, fault, fault, only=calls(script))
        with suppress(Unavailable):
            await client.put("log:", after="1h", id="dup", lane=BESIDE_X)
    stored = {one.lane for one in (await client.list()).tasks}
    with pytest.raises(Ambiguous) as refused:
        await client.get("dup")
    assert set(refused.value.lanes) == stored >= {X, Y}


async def test_a_task_whose_lane_cannot_be_noted_fails_alone(client: Client) -> None:
    wanted = [Task("log:", after="1h", id=id, lane=lane) for id, lane in (("free", None), ("dup", X), (None, X))]
    with bad_road(client.store) as road:
        road.next("never sent", "never sent", only=calls("note_lanes"))
        with pytest.raises(Unavailable) as refused:
            await client.put_many(wanted)
    assert refused.value.stored == 2
    assert (await client.get("free")).state == "pending"
    assert (await client.get("dup")).state == "unknown"
    assert await client.cancel_many(["dup", "never put"]) == ["unknown", "unknown"]
    summary = await client.put_many(wanted[:2], handles=True)
    assert summary.handles is not None
    assert [handle.outcome for handle in summary.handles] == ["kept", "created"]


async def test_results_and_dead_letters_belong_to_their_lanes(client: Client, ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Dead("no") if one.lane in (X, None) else None)
    for lane in (X, BESIDE_X, AT_HOME, None):
        await client.put("log:", id="dup", lane=lane)
    assert len(await ticker.turn()) == 4
    store, lanes = ticker.store, (BESIDE_X, AT_HOME)
    kept = [
        KeptResult(partition_of(lane, PARTITIONS), idh_in_lane(idh_of("dup"), lane), result_of(lane), 60_000)
        for lane in lanes
    ]
    await keep_results(store, [*kept, KeptResult(HOME, idh_of("dup"), result_of("none"), 60_000)])
    for lane in lanes:
        found = await client.find_result("dup", lane=lane)
        assert found is not None
        assert (found.ending, found.value) == ("done", lane)
    assert await read_result(store, await resolve(store, "dup", X)) is None
    with pytest.raises(Ambiguous, match=BESIDE_X):
        await read_result(store, await resolve(store, "dup", None))
    with pytest.raises(Ambiguous) as refused:
        await client.dead_get("dup")
    assert refused.value.lanes == tuple(sorted(("", X)))
    assert await client.dead_get("dup", lane=BESIDE_X) is None
    ticker.answer("log", lambda _: None)
    assert (await client.dead_replay("dup", lane=X)).outcome == "replayed"
    [again] = await ticker.turn()
    assert (again.id, again.lane) == ("dup", X)
    assert await client.dead_drop("dup") == "dropped"


def result_of(lane: str) -> bytes:
    return msgspec.msgpack.encode(Result("done", value=lane))


async def put_as_before(client: Client, lane: str, after_ms: int) -> None:
    """Put the task "dup" with the hash of its id alone, as earlier versions did."""
    store = client.store
    due_ms = await store.fresh_ms() + after_ms
    place = Slice.at(due_ms, 1000)
    row = entry(due_ms - place.start_ms, INDEXED | LANE, idh_of("dup"), Body("log:", b"1", "dup", lane))
    new = IdRow(idh_of("dup"), place, row, due_ms)
    p = partition_of(lane, PARTITIONS)
    await replace(store, new, partition=p, expected=None, old=None, now_ms=due_ms)


@pytest.mark.parametrize("lane", [X, AT_HOME])
async def test_a_task_of_an_earlier_version_is_found_and_kept_by_its_lane_alone(client: Client, lane: str) -> None:
    await put_as_before(client, lane, 3_600_000)
    assert (await client.get("dup")).lane == (await client.get("dup", lane=lane)).lane == lane
    assert (await client.put("log:", 2, after="2h", id="dup", lane=lane)).outcome == "kept"
    assert (await client.get("dup")).payload == (await client.get("dup", lane=lane)).payload == 1
    await client.reschedule("dup", after="2h", lane=lane)
    moved = await client.put("log:", 3, after="3h", id="dup", lane=lane, on_conflict="replace")
    assert moved.outcome == "replaced"
    other = next(name for name in lanes_of(partition_of(lane, PARTITIONS), 2) if name != lane)
    assert (await client.put("log:", 4, after="1h", id="dup", lane=other)).outcome == "created"
    with pytest.raises(Ambiguous) as refused:
        await client.get("dup")
    assert refused.value.lanes == tuple(sorted((lane, other)))
    assert await client.cancel_many(["dup", "never put"], lane=lane) == ["cancelled", "unknown"]
    assert await client.cancel_many(["dup", "never put"]) == ["cancelled", "unknown"]
    assert (await client.count()).pending == 0


async def test_a_task_of_an_earlier_version_is_cancelled_by_its_id_alone_and_known_when_it_is_over(
    client: Client, ticker: Ticker
) -> None:
    await put_as_before(client, X, 3_600_000)
    assert await client.cancel_many(["dup", "never put"]) == ["cancelled", "unknown"]
    await put_as_before(client, X, 1_000)
    assert len(await ticker.advance(minutes=1)) == 1
    assert (await client.put("log:", id="dup", lane=X)).outcome == "kept", "within the dedupe window"


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
