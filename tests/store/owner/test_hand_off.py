"""Hand-off: a task leaves its slice only together with its place in a queue, once, and by the hand of its owner."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.engine import dispatcher as dispatcher_module
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Dead, Outcome, Retry
from mainspring.model.errors import InvalidInput, Refused, Unavailable
from mainspring.model.ids import IDH_BYTES
from mainspring.store.keys import SECOND_MS, Address, Slice
from mainspring.store.owner import fire
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker
from tests.support.fleets import Fleet
from tests.support.job_queues import QUEUE, TARGET, HandWorker, values
from tests.support.owner import HandOwner, address_of, handing_off

Tickers = Callable[..., Awaitable[Ticker]]
LEASE_S = 5.0


@pytest.fixture
async def ticker(tickers: Tickers, store: Store) -> Ticker:
    return await tickers(workers=True)


@pytest.fixture
def worker(store: Store) -> HandWorker:
    return HandWorker(store)


async def taken_over(first: Ticker, tickers: Tickers, clock: ManualClock) -> Ticker:
    """The first node dies without a word, and another one has its partitions when the leases are over."""
    await first.crash()
    clock.advance(seconds=LEASE_S + 1)
    return await tickers(workers=True)


# -- the common way ------------------------------------------------------------------------------------------


async def test_a_due_task_is_in_its_queue_and_over_for_its_slice(ticker: Ticker, worker: HandWorker) -> None:
    handle = await ticker.client.put(TARGET, {"n": 1}, after="1s", id="a")
    await ticker.advance(ms=999)
    assert await worker.take() == []
    await ticker.advance(ms=1)
    books = await balance(ticker.store)
    assert (books.queued, books.fired, books.pending) == (1, 0, 0)
    job = await worker.take_one()
    assert (job.id, job.queue, job.due_ms, job.original_due_ms) == ("a", QUEUE, handle.due_ms, handle.due_ms)
    assert await worker.end(job) == ["ok"]
    books = await balance(ticker.store)
    assert (books.queued, books.done) == (0, 1)


async def test_a_hand_off_that_breaks_off_half_way_leaves_no_task_done_without_its_place(
    ticker: Ticker, worker: HandWorker
) -> None:
    """A script that fails midway does not roll back: with its done bits written first the task would be lost."""
    handle = await ticker.client.put(TARGET, "x", after="1s")
    address = address_of(handle.id)
    keys = ticker.store.keys.partitions[address.partition]
    await ticker.store.run_one(keys.slot, [("SET", keys.queue(QUEUE), "somebody's hand in the data")])
    with pytest.raises(Refused, match="WRONGTYPE"):
        await ticker.advance(seconds=1)
    assert (await ticker.client.get(handle.id)).state == "fired"
    await ticker.store.run_one(keys.slot, [("DEL", keys.queue(QUEUE))])
    await ticker.turn()
    assert values(await worker.take()) == [b'"x"']


async def test_commands_go_to_the_queue_of_commands_or_to_their_own(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(command_queues={"report": "reports"}))
    await ticker.client.put("command:backup")
    await ticker.client.put("command:report")
    await ticker.turn()
    worker = HandWorker(store, queues=("commands", "reports"))
    found = {job.body.target: job.queue for job in await worker.take()}
    assert found == {"command:backup": "commands", "command:report": "reports"}


async def test_a_queue_that_cannot_be_named_is_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 64 of A-Z"):
        await client.put("queue:a b/send")


async def test_a_task_without_a_queue_dies_and_takes_no_other_along(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(command_queues={"report": "no queue"}))
    for name in ("report", "backup", "report", "backup"):
        await ticker.client.put(f"command:{name}", after="1s", lane=None)
    await ticker.advance(seconds=1)
    assert {dead_letter.target for dead_letter in await list_dead(store)} == {"command:report"}
    books = await balance(store)
    assert (books.dead, books.queued) == (2, 2)


async def test_a_slice_is_dropped_while_its_tasks_are_queued(ticker: Ticker, worker: HandWorker) -> None:
    handle = await ticker.client.put(TARGET, "x", after="1s", id="a")
    await ticker.advance(seconds=10)
    keys = ticker.store.keys.partitions
    slices = [await ticker.store.run_one(one.slot, [("ZCARD", one.slices)]) for one in keys]
    assert slices == [[0]] * len(keys)
    info = await ticker.client.get("a")
    assert (info.state, info.payload, info.due_ms) == ("queued", "x", handle.due_ms)
    assert values(await worker.take()) == [b'"x"']


async def test_an_id_in_a_queue_is_known_for_as_long_as_it_waits(ticker: Ticker, worker: HandWorker) -> None:
    await ticker.client.put(TARGET, "x", after="1s", id="a")
    await ticker.advance(hours=3)
    while await ticker.engine.sweeper.step() == 0.0:
        pass
    assert (await ticker.client.put(TARGET, "y", after="1s", id="a")).outcome == "kept"
    assert (await ticker.client.get("a")).state == "queued"
    await worker.end(await worker.take_one())
    assert (await ticker.client.put(TARGET, "z", after="1s", id="a")).outcome == "created"


# -- accidents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [None, "a"])
@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_a_hand_off_that_failed_is_sent_again_unchanged(
    ticker: Ticker, worker: HandWorker, fault: Fault, lane: str | None
) -> None:
    await ticker.client.put(TARGET, "x", after="1s", lane=lane)
    await ticker.turn()
    with bad_road(ticker.store) as road:
        road.next(fault, fault, only=calls("commit"))
        for _ in range(4):
            try:
                await ticker.advance(seconds=1)
            except Unavailable:
                continue
            finally:
                await road.deliver_held()
    await ticker.advance(seconds=1)
    job = await worker.take_one()
    await worker.end(job)
    await ticker.advance(seconds=1)
    assert await worker.take() == []
    books = await balance(ticker.store)
    assert (books.accepted, books.done, books.queued, books.aside) == (1, 1, 0, 0)


async def test_a_task_that_was_begun_by_a_dead_node_is_handed_off_by_the_next(
    tickers: Tickers, store: Store, clock: ManualClock, worker: HandWorker
) -> None:
    first = await tickers(workers=True)
    await first.client.put(TARGET, "x", after="1s")
    await first.turn()
    clock.advance(seconds=1)
    with bad_road(first.store) as road:
        road.next("never sent", only=calls("commit"))
        with pytest.raises(Unavailable):
            await first.engine.dispatcher.step()
    assert (await balance(store)).fired == 1
    second = await taken_over(first, tickers, clock)
    await second.turn()
    assert values(await worker.take()) == [b'"x"']


async def test_a_former_owner_hands_nothing_off(client: Client, store: Store, worker: HandWorker) -> None:
    address = address_of((await client.put(TARGET, "x", after="0s")).id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    [row] = await owner.rows(address.slice)
    touch = await owner.touch(address.slice, done=[0])
    work = handing_off(owner.partition, b"1.nobody", touch, {QUEUE: [address.pack() + row]})
    [handed] = await fire.commit_all(store, [work])
    assert not isinstance(handed, Exception)
    assert (handed.status, await worker.take()) == ("fenced", [])
    assert (await balance(store)).fired == 1


async def test_a_late_copy_of_a_hand_off_adds_nothing(client: Client, store: Store, worker: HandWorker) -> None:
    address = address_of((await client.put(TARGET, "x", after="0s")).id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    [row] = await owner.rows(address.slice)
    touch = await owner.touch(address.slice, done=[0])
    work = handing_off(owner.partition, owner.token, touch, {QUEUE: [address.pack() + row]})
    for _ in range(2):
        [handed] = await fire.commit_all(store, [work])
        assert not isinstance(handed, Exception)
        assert (handed.status, handed.answers) == ("ok", {})
    await worker.end(await worker.take_one())
    await fire.commit_all(store, [work])
    assert await worker.take() == []


async def test_a_slice_that_is_not_the_one_that_was_read_hands_nothing_off(client: Client, store: Store) -> None:
    address = address_of((await client.put(TARGET, "x", after="0s")).id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    [row] = await owner.rows(address.slice)
    touch = (await owner.touch(address.slice, done=[0]))._replace(g="1.5")
    work = handing_off(owner.partition, owner.token, touch, {QUEUE: [address.pack() + row]})
    [handed] = await fire.commit_all(store, [work])
    assert not isinstance(handed, Exception)
    assert handed.status == "stale"
    assert (await balance(store)).queued == 0


async def test_a_forgotten_script_is_no_accident(ticker: Ticker, worker: HandWorker) -> None:
    for _ in range(3):
        await ticker.client.put(TARGET, "x", after="1s")
        for primary in ticker.store.servers.all():
            await primary.pipeline([("SCRIPT", "FLUSH")])
        await ticker.advance(seconds=1)
        for primary in ticker.store.servers.all():
            await primary.pipeline([("SCRIPT", "FLUSH")])
        assert await worker.end(await worker.take_one()) == ["ok"]
    assert (await balance(ticker.store)).done == 3


async def test_retries_and_dead_letters_of_a_slice_do_not_get_lost_beside_a_hand_off(
    ticker: Ticker, worker: HandWorker
) -> None:
    answers: dict[str, Outcome] = {"retry": Retry("no", after_ms=1_000), "dead": Dead("never")}
    ticker.answer("log", lambda one: answers.get(one.value()) if one.attempt == 1 else None)
    for target, value in (("log:", "retry"), (TARGET, "work"), ("log:", "dead"), ("log:", "fine")):
        await ticker.client.put(target, value, after="1s", lane="a" if value == "fine" else None)
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"work"']
    await ticker.advance(seconds=2)
    books = await balance(ticker.store)
    assert (books.done, books.retried, books.dead, books.queued) == (2, 1, 1, 1)


async def test_many_tasks_and_large_ones_go_in_several_calls(ticker: Ticker, store: Store) -> None:
    worker = HandWorker(store, queues=("a", "b"))
    for i in range(2_600):
        await ticker.client.put(f"queue:{'ab'[i % 2]}/x", i, after="1s", lane=None, id=f"n{i}")
    for i in range(80):
        await ticker.client.put("queue:a/x", b"\0" * 60_000, after="1s", id=f"big{i}")
    await ticker.advance(seconds=1)
    assert (await balance(store)).queued == 2_680
    jobs = []
    while some := await worker.take(500):
        jobs += some
        assert set(await worker.end(*some)) == {"ok"}
    assert len({job.id for job in jobs}) == len(jobs) == 2_680


# -- two tasks of one id -----------------------------------------------------------------------------------------


async def test_two_tasks_of_one_id_never_run_at_the_same_time(ticker: Ticker, worker: HandWorker) -> None:
    await ticker.client.put(TARGET, "first", after="1s", id="a")
    await ticker.advance(seconds=1)
    await ticker.client.put(TARGET, "second", after="1s", id="a", on_conflict="replace")
    await ticker.advance(seconds=2)
    books = await balance(ticker.store)
    assert (books.queued, books.fired) == (1, 1), "the second one waits, fired, for the end of the first"
    job = await worker.take_one()
    assert values([job]) == [b'"first"']
    await ticker.advance(seconds=1)
    assert await worker.take() == []
    await worker.end(job)
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"second"']


async def test_a_task_that_waits_for_another_of_its_id_survives_a_takeover(
    tickers: Tickers, clock: ManualClock, worker: HandWorker
) -> None:
    first = await tickers(workers=True)
    await first.client.put(TARGET, "first", after="1s", id="a")
    await first.advance(seconds=1)
    await first.client.put(TARGET, "second", after="1s", id="a", on_conflict="replace")
    await first.advance(seconds=2)
    second = await taken_over(first, tickers, clock)
    await second.turn()
    await worker.end(await worker.take_one())
    await second.turn()
    assert values(await worker.take()) == [b'"second"']


async def test_the_reply_about_a_task_that_waits_is_lost(ticker: Ticker, worker: HandWorker) -> None:
    await ticker.client.put(TARGET, "first", after="1s", id="a")
    await ticker.advance(seconds=1)
    await ticker.client.put(TARGET, "second", after="1s", id="a", on_conflict="replace")
    await ticker.turn()
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("commit"))
        with pytest.raises(Unavailable):
            await ticker.advance(seconds=1)
    await ticker.advance(seconds=1)
    await worker.end(await worker.take_one())
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"second"']
    await worker.end(*await worker.reclaim())
    assert (await balance(ticker.store)).done == 2


# -- lanes ---------------------------------------------------------------------------------------------------------


async def in_lane(ticker: Ticker, *payloads: str, lane: str = "a") -> None:
    for i, payload in enumerate(payloads):
        await ticker.client.put(TARGET, payload, after=f"{i + 1}s", lane=lane)


async def test_a_lane_goes_through_workers_one_at_a_time_in_order(ticker: Ticker, worker: HandWorker) -> None:
    await in_lane(ticker, "1", "2", "3")
    await ticker.advance(seconds=5)
    ran = []
    for _ in range(3):
        job = await worker.take_one()
        await ticker.advance(seconds=1)
        assert await worker.take() == [], "the next one waits for the worker's word"
        ran += values([job])
        assert await worker.end(job) == ["ok"]
        await ticker.advance(seconds=1)
    assert ran == [b'"1"', b'"2"', b'"3"']
    assert (await balance(ticker.store)).done == 3
    assert await leftover_acks(ticker.store) == 0


async def test_an_ack_is_removed_by_the_call_that_settles_its_task(ticker: Ticker, worker: HandWorker) -> None:
    await in_lane(ticker, "1")
    await ticker.advance(seconds=1)
    assert await worker.end(await worker.take_one()) == ["ok"]
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("commit"))
        with pytest.raises(Unavailable):
            await ticker.turn()
    assert await leftover_acks(ticker.store) == 0, "no later call has to remove it"
    await ticker.turn()
    assert (await balance(ticker.store)).done == 1


async def leftover_acks(store: Store) -> int:
    counts = [await store.run_one(one.slot, [("HLEN", one.acks)]) for one in store.keys.partitions]
    return sum(count for [count] in counts)


async def left_by_a_former_owner(store: Store, count: int) -> None:
    """Acks of tasks that were settled, and whose slices are gone: it was over before it could forget them."""
    for keys in store.keys.partitions:
        gone = [Address(keys.number, Slice(SECOND_MS, 1_000_000), 7, index).pack() for index in range(count)]
        pairs = [value for address in gone for value in (address, b"i" * IDH_BYTES + b"d")]
        await store.run_one(keys.slot, [("HSET", keys.acks, *pairs)])


async def test_acks_of_a_former_owner_do_not_hide_the_workers_answer(
    ticker: Ticker, store: Store, worker: HandWorker
) -> None:
    await left_by_a_former_owner(store, 3 * fire.AT_ONCE)
    for n in range(40):
        await ticker.client.put(TARGET, n, after="1s", lane=f"lane {n}")
    await ticker.advance(seconds=1)
    jobs = await worker.take()
    await worker.end(*jobs)
    for _ in range(30):  # a round has some four parts, and may have begun before
        await ticker.turn()
    books = await balance(store)
    assert (books.done, books.fired) == (len(jobs), 0) == (40, 0)


async def test_acks_of_a_former_owner_are_removed_and_needed_ones_stay(
    ticker: Ticker, store: Store, worker: HandWorker
) -> None:
    await in_lane(ticker, "1", "2")
    await ticker.advance(seconds=1)
    await worker.end(await worker.take_one())  # its owner has not looked yet
    await left_by_a_former_owner(store, 10)
    for _ in store.keys.partitions:
        await ticker.engine.sweeper.step()
    assert await leftover_acks(store) == 1
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"2"']


async def test_a_failing_head_holds_up_its_lane_until_its_next_attempt(ticker: Ticker, worker: HandWorker) -> None:
    await in_lane(ticker, "1", "2")
    await ticker.advance(seconds=3)
    await worker.end(await worker.take_one(), outcome=Retry("busy", after_ms=10_000))
    await ticker.advance(seconds=9)
    assert await worker.take() == []
    await ticker.advance(seconds=1)
    job = await worker.take_one()
    assert (job.body.payload, job.body.attempt, job.body.errors) == (b'"1"', 2, ("busy",))
    await worker.end(job, outcome=Dead("gave up"))
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"2"']
    [dead_letter] = await list_dead(ticker.store)
    assert (dead_letter.reason, dead_letter.attempts, dead_letter.lane) == ("gave up", 2, "a")


@pytest.mark.parametrize("moment", ["queued", "running", "ended"])
async def test_a_lane_whose_head_is_with_a_worker_survives_a_takeover(
    tickers: Tickers, store: Store, clock: ManualClock, worker: HandWorker, moment: str
) -> None:
    first = await tickers(workers=True)
    await in_lane(first, "1", "2")
    await first.advance(seconds=3)
    job = await worker.take_one() if moment != "queued" else None
    if moment == "ended" and job is not None:
        await worker.end(job)
    second = await taken_over(first, tickers, clock)
    await second.turn()
    if moment != "ended":
        books = await balance(store)
        assert (books.aside, books.fired, books.places) == (1, 1, 1)
        if job is None:
            job = await worker.take_one()
        assert await worker.take() == [], "it is not there twice"
        await worker.end(job)
        await second.advance(seconds=1)
    assert values(await worker.take()) == [b'"2"']
    assert (await balance(store)).done == 1


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("why", ["expiry", "pause"])
async def test_a_new_owner_gives_up_nothing_that_is_with_a_worker(
    tickers: Tickers, clock: ManualClock, worker: HandWorker, ended: bool, why: str
) -> None:
    first = await tickers(workers=True)
    expires = "3s" if why == "expiry" else None
    await first.client.put(TARGET, "1", after="1s", id="head", lane="a", expires=expires)
    await first.client.put(TARGET, "2", after="2s", lane="a")
    await first.advance(seconds=2)
    job = await worker.take_one()
    if ended:
        await worker.end(job)
    if why == "pause":
        await first.client.pause(lane="a", mode="drop")
    second = await taken_over(first, tickers, clock)
    await second.turn()
    await second.client.resume(lane="a")
    if not ended:
        await second.turn()
        assert await worker.take() == [], "the lane waits for its head"
        assert (await second.client.get("head", lane="a")).state == "running"
        assert await worker.end(job) == ["ok"]
        await second.turn()
    assert await second.client.dead_get("head", lane="a") is None
    assert (await second.client.get("head", lane="a")).state in ("done", "finished")


async def test_lanes_at_workers_do_not_keep_a_partition_from_being_handed_over(ticker: Ticker) -> None:
    await in_lane(ticker, "1", "2")
    await ticker.advance(seconds=3)
    assert all(one.drained for one in ticker.engine.owned.values())


async def test_a_lane_waits_for_no_other(ticker: Ticker, worker: HandWorker) -> None:
    await in_lane(ticker, "1", "2", lane="a")
    await in_lane(ticker, "3", "4", lane="b")
    await ticker.advance(seconds=3)
    jobs = await worker.take()
    assert sorted(values(jobs)) == [b'"1"', b'"3"']
    await worker.end(next(job for job in jobs if job.body.lane == "b"), outcome=DONE)
    await ticker.advance(seconds=1)
    assert values(await worker.take()) == [b'"4"']


async def test_a_lane_continues_when_the_worker_answers_and_not_at_the_next_poll(
    fleet: Fleet, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "POLL_S", 3_600.0)
    store = await Store.open(fleet.url, namespace=namespace, partitions=2)
    engine = Engine(store, {})
    await engine.start()
    try:
        worker = HandWorker(store)
        for i in range(10):
            await Client.over(store).put(TARGET, i, lane="a")
        ran: list[bytes] = []
        async with asyncio.timeout(60):
            while len(ran) < 10:
                jobs = await worker.take()
                for primary in store.servers.all() if jobs and not ran else ():
                    await primary.pipeline(
                        [("SCRIPT", "FLUSH")]
                    )  # the word comes after the script, also when that is healed
                ran += values(jobs)
                await worker.end(*jobs)
                await asyncio.sleep(0.001)
        assert ran == [b"%d" % i for i in range(10)]
    finally:
        assert await engine.stop()
        await balance(store)
        await store.aclose()
