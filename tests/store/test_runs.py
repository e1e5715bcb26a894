"""The history of runs: written once with the call that ends them, within its budget, and read newest first."""

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Retry
from mainspring.model.errors import InvalidInput, Unavailable
from mainspring.model.ids import idh_of
from mainspring.model.job import End, Job, JobCancelled, Output
from mainspring.model.run import KeptRun, Run, RunDetails, RunFilter, RunRecord, bucket_of
from mainspring.store import job_queue
from mainspring.store import runs as history
from mainspring.store.keys import HOUR_MS, MINUTE_MS
from mainspring.store.owner import fire
from mainspring.store.runs import RunRef, list_runs, pack, read_run, unpack
from mainspring.store.store import Store
from mainspring.store.tasks.find import resolve
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import TARGET, HandWorker
from tests.support.owner import HandOwner

ENDS = ("done", "retry", "dead", "cancelled", "skipped", "lost")
texts = st.text(max_size=20)
records = st.builds(
    RunRecord,
    idh=st.binary(min_size=16, max_size=16),
    end=st.sampled_from(ENDS),
    attempt=st.integers(1, 99),
    due_ms=st.integers(0, 2**45),
    began_ms=st.integers(0, 2**45),
    ended_ms=st.integers(0, 2**45),
    target=texts,
    by=texts,
    reason=texts,
    code=st.none() | st.integers(-128, 599) | texts,
    id=st.none() | st.text(min_size=1, max_size=20),
    planned_ms=st.none() | st.integers(0, 2**45),
)


def record(store: Store, number: int = 0, end: Any = "done", **more: Any) -> RunRecord:
    now_ms = store.clock.now_ms()
    fields: dict[str, Any] = {
        "due_ms": now_ms - 12,
        "began_ms": now_ms - 10,
        "ended_ms": now_ms,
        "target": "https://example.com/hook",
    }
    fields |= {"by": "node-1", "attempt": 1, "idh": number.to_bytes(16, "big")}
    return RunRecord(end=end, **fields | more)


def of_schedule(store: Store, name: str, number: int = 0, **more: Any) -> RunRecord:
    task_id = f"{name}@{number}"
    return record(store, id=task_id, idh=idh_of(task_id), planned_ms=store.clock.now_ms(), **more)


class Recorder:
    """Owners by hand, which write runs with commits that do nothing else."""

    def __init__(self, store: Store, owners: list[HandOwner]) -> None:
        self.store, self.owners = store, owners

    def commit(self, runs: Iterable[Run | RunRecord], partition: int = 0) -> fire.Commit:
        owner = self.owners[partition]
        made = [one if isinstance(one, Run) else Run(one) for one in runs]
        return fire.Commit(owner.partition, owner.token, owner.seq + 1, 0, 0, [], [], [], [], runs=made)

    async def write(self, *runs: Run | RunRecord, partition: int = 0) -> None:
        assert await fire.commit(self.store, self.commit(runs, partition)) == "ok"
        self.owners[partition].seq += 1


@pytest.fixture
async def recorder(store: Store) -> Recorder:
    return Recorder(store, [await HandOwner.acquire(store, p) for p in range(len(store.keys))])


async def listed(store: Store, **where: Any) -> list[RunRecord]:
    found: list[RunRecord] = []
    cursor: str | None = None
    while True:
        page = await list_runs(store, RunFilter(**where), cursor, 1_000)
        found += [run.record for run in page.runs]
        if page.next is None:
            return found
        cursor = page.next


# -- bytes ---------------------------------------------------------------------------------------------------------


@given(st.lists(records, max_size=80))
def test_records_come_back_as_they_were_packed(some: list[RunRecord]) -> None:
    assert msgspec.msgpack.decode(unpack(pack(some)), type=list[RunRecord]) == some


@given(st.builds(RunRef, st.integers(0, 2**48 - 1), st.integers(0, 2**16 - 1), st.integers(0, 7), st.integers(0, 255)))
def test_the_id_of_a_run_is_read_back(ref: RunRef) -> None:
    assert RunRef.parse(ref.text, 8) == ref


@pytest.mark.parametrize("wrong", ["", "x", "1.2.3", "9.1.1.1", "0.-1.1.1", "0.1.1.zzzz", "0.1.1.1.1"])
def test_an_invalid_id_of_a_run_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="not the id of a run"):
        RunRef.parse(wrong, 8)


@given(st.integers(0, 2**40))
def test_each_bucket_is_four_times_as_wide_as_the_one_before(ms: int) -> None:
    bucket = bucket_of(ms)
    assert bucket == 0 or ms >= 4 ** (bucket - 1)
    assert bucket == 11 or ms < 4**bucket


def test_long_output_keeps_its_beginning_and_its_end() -> None:
    output = Output(0, b"begin" + b"x" * 100_000 + b"end", b"err", 100_008, 3)
    short = history.within(RunDetails(output=output, log=("one", "two")))
    assert short.output is not None
    assert short.output.stdout.startswith(b"beginx")
    assert short.output.stdout.endswith(b"xend")
    assert b" bytes left out]" in short.output.stdout
    assert len(short.output.stdout) < history.DETAILS_BYTES
    assert (short.output.stderr, short.output.stdout_bytes, short.log) == (b"err", 100_008, ("one", "two"))
    small = RunDetails(output=output, traceback="x" * 10)
    assert history.within(small, 200_000) is small


# -- writing: commits ------------------------------------------------------------------------------------------------


async def test_a_run_is_kept_with_the_commit_that_ends_it(recorder: Recorder, store: Store) -> None:
    one = record(store)
    await recorder.write(one)
    assert await listed(store) == [one]


async def test_a_commit_that_is_repeated_after_a_lost_reply_writes_its_runs_once(
    recorder: Recorder, store: Store
) -> None:
    work = recorder.commit([record(store)])
    assert [await fire.commit(store, work) for _ in range(2)] == ["ok", "ok"]
    assert len(await listed(store)) == 1
    assert (await history.history_state(store)).written == 1


async def test_a_former_owner_writes_no_runs(recorder: Recorder, store: Store, clock: ManualClock) -> None:
    work = recorder.commit([record(store)])
    clock.advance(seconds=10)
    await HandOwner.acquire(store, 0, owner="next")
    assert await fire.commit(store, work) == "fenced"
    assert await listed(store) == []


async def test_what_the_history_cannot_write_does_not_stop_a_commit(recorder: Recorder, store: Store) -> None:
    keys = store.keys.partitions[0]
    await store.run_one(keys.slot, [("SET", keys.runs, "not a stream")])
    await recorder.write(record(store))
    state = await history.history_state(store)
    assert (state.written, state.dropped) == (0, 1)
    await store.run_one(keys.slot, [("UNLINK", keys.runs)])


# -- writing: workers --------------------------------------------------------------------------------------------------


@pytest.fixture
async def ticker(tickers: Callable[..., Awaitable[Ticker]], store: Store) -> Ticker:
    return await tickers(workers=True)


@pytest.fixture
def worker(store: Store) -> HandWorker:
    return HandWorker(store)


async def taken(ticker: Ticker, worker: HandWorker, count: int, **options: Any) -> list[Job]:
    for number in range(count):
        await ticker.client.put(TARGET, number, **options)
    await ticker.turn()
    return await worker.take()


def end_of(job: Job, store: Store, outcome: Any = DONE, end: Any = "done") -> End:
    next_ms = store.clock.now_ms() if end == "retry" else None
    one = record(store, end=end, idh=job.idh, target=TARGET, queue="mail", next_ms=next_ms)
    return End(job, outcome, runs=(Run(one),))


async def test_the_run_of_a_job_is_kept_with_its_end(ticker: Ticker, worker: HandWorker, store: Store) -> None:
    jobs = await taken(ticker, worker, 5)
    assert await job_queue.finish(store, [end_of(job, store) for job in jobs]) == ["ok"] * 5
    assert {one.idh for one in await listed(store, queue="mail")} == {job.idh for job in jobs}


async def test_a_job_whose_claim_was_lost_leaves_no_run_and_takes_no_other_with_it(
    ticker: Ticker, worker: HandWorker, store: Store
) -> None:
    jobs = await taken(ticker, worker, 6)
    await worker.end(*jobs[:2])
    answers = await job_queue.finish(store, [end_of(job, store) for job in jobs])
    assert answers == ["lost"] * 2 + ["ok"] * 4
    assert {one.idh for one in await listed(store)} == {job.idh for job in jobs[2:]}
    assert await job_queue.finish(store, [end_of(job, store) for job in jobs]) == ["lost"] * 6
    assert len(await listed(store)) == 4


@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_runs_are_kept_once_if_the_end_of_a_job_is_sent_again(
    ticker: Ticker, worker: HandWorker, store: Store, fault: Fault
) -> None:
    jobs = await taken(ticker, worker, 3)
    ends = [end_of(job, store) for job in jobs]
    with bad_road(store) as road:
        road.next(fault, only=calls("queue_finish"))
        assert any(isinstance(one, Unavailable) for one in await job_queue.finish(store, ends))
        await job_queue.finish(store, ends)
        await road.deliver_held()
    assert sorted(one.idh for one in await listed(store)) == sorted(job.idh for job in jobs)


async def test_a_retry_of_a_job_that_was_cancelled_is_kept_as_cancelled(
    ticker: Ticker, worker: HandWorker, store: Store, client: Client
) -> None:
    [job] = await taken(ticker, worker, 1, id="mine")
    assert await client.cancel("mine") == "cancelling"
    assert await job_queue.finish(store, [end_of(job, store, Retry("no", after_ms=10), "retry")]) == ["ok"]
    assert [one.end for one in await listed(store)] == ["cancelled"]
    books = await balance(store)
    assert (books.cancelled, books.retried, books.pending) == (1, 0, 0)


async def test_a_task_that_was_cancelled_is_shown_with_the_run_that_was_stopped_and_with_no_earlier_one(
    ticker: Ticker, worker: HandWorker, store: Store, client: Client
) -> None:
    [job] = await taken(ticker, worker, 1, id="mine")
    await client.cancel("mine")
    await job_queue.finish(store, [end_of(job, store, JobCancelled(), "cancelled")])
    info = await client.get("mine")
    assert (info.state, info.target, info.worker) == ("cancelled", TARGET, "node-1")
    await ticker.advance(hours=2)
    await client.put("log:", id="mine", after="1h")
    assert await client.cancel("mine") == "cancelled"
    info = await client.get("mine")
    assert (info.state, info.target, info.since_ms) == ("cancelled", None, store.clock.now_ms())


# -- reading -------------------------------------------------------------------------------------------------------


async def test_runs_are_listed_newest_first_over_all_partitions(
    recorder: Recorder, store: Store, clock: ManualClock
) -> None:
    for number in range(40):
        clock.advance(seconds=1)
        await recorder.write(record(store, number, ENDS[number % 6]), partition=number % len(store.keys))
    assert [int.from_bytes(one.idh, "big") for one in await listed(store)] == list(reversed(range(40)))


@pytest.mark.parametrize("limit", [1, 3, 7, 1_000])
async def test_pages_join_without_a_gap_or_a_repeat(
    recorder: Recorder, store: Store, clock: ManualClock, limit: int
) -> None:
    for batch in range(6):
        clock.advance(seconds=batch % 2)
        some = [record(store, batch * 100 + i, ENDS[i % 6]) for i in range(70 if batch == 3 else 5)]
        await recorder.write(*some, partition=batch % len(store.keys))
    seen: list[KeptRun] = []
    cursor: str | None = None
    while True:
        page = await list_runs(store, RunFilter(), cursor, limit)
        seen += page.runs
        cursor = page.next
        if cursor is None:
            break
    assert len(seen) == len({run.record.idh for run in seen}) == 95
    assert [run.at_ms for run in seen] == sorted((run.at_ms for run in seen), reverse=True)


async def test_each_filter_selects_what_it_names(recorder: Recorder, store: Store, clock: ManualClock) -> None:
    began_ms = store.clock.now_ms()
    await recorder.write(record(store, 1), record(store, 2, "dead", by="node-2"), of_schedule(store, "nightly", 3))
    clock.advance(seconds=60)
    await recorder.write(record(store, 4, target=TARGET, queue="mail"), partition=1)
    wanted: list[tuple[dict[str, Any], int]] = [
        ({}, 4), ({"schedule": "nightly"}, 1), ({"target": "https://*"}, 3), ({"queue": "mail"}, 1),
        ({"by": "node-2"}, 1), ({"ends": frozenset(["dead"])}, 1), ({"ends": frozenset(["done"])}, 3),
        ({"from_ms": began_ms + 1}, 1), ({"to_ms": began_ms + 1}, 3), ({"to_ms": began_ms}, 0),
        ({"idhs": frozenset([idh_of("nightly@3")])}, 1), ({"schedule": "daily"}, 0),
    ]  # fmt: skip
    for where, count in wanted:
        assert len(await listed(store, **where)) == count, where


async def test_the_last_runs_of_a_schedule_are_found_through_its_ring_and_older_ones_behind_it(
    recorder: Recorder, store: Store, clock: ManualClock
) -> None:
    for number in range(120):
        clock.advance(seconds=1)
        end = "dead" if number % 10 == 0 else "done"
        others = [record(store, i) for i in range(3)]
        await recorder.write(*others, of_schedule(store, "nightly", number, end=end), partition=1)
    names = [f"nightly@{number}" for number in reversed(range(120))]
    page = await list_runs(store, RunFilter(schedule="nightly"), None, 50)
    assert [run.record.id for run in page.runs] == names[:50]
    assert [one.id for one in await listed(store, schedule="nightly")] == names
    assert [one.id for one in await listed(store, schedule="nightly", ends=frozenset(["dead"]))] == names[9::10]


@pytest.mark.parametrize("limit", [20, 50, 1_000])
async def test_runs_of_a_schedule_in_several_partitions_are_listed_without_a_gap(
    recorder: Recorder, store: Store, clock: ManualClock, limit: int
) -> None:
    """A schedule whose lane changed has runs in the partitions of both lanes."""
    for number in range(180):
        clock.advance(seconds=1)
        partition = 0 if number % 3 else 2 if number > 150 else 1
        await recorder.write(of_schedule(store, "nightly", number), partition=partition)
    seen: list[str | None] = []
    cursor: str | None = None
    while True:
        page = await list_runs(store, RunFilter(schedule="nightly"), cursor, limit)
        seen += [run.record.id for run in page.runs]
        cursor = page.next
        if cursor is None:
            break
    assert seen == [f"nightly@{number}" for number in reversed(range(180))]


async def test_a_run_is_shown_by_its_id_with_its_details(recorder: Recorder, store: Store) -> None:
    details = RunDetails(log=("one", "two"), traceback="Traceback" + "x" * 5_000)
    some = [Run(record(store, i, "dead" if i % 2 else "done"), details if i == 67 else None) for i in range(200)]
    await recorder.write(*some, partition=1)
    runs = {int.from_bytes(run.record.idh, "big"): run for run in (await list_runs(store, RunFilter(), None, 500)).runs}
    shown = await read_run(store, runs[67].id)
    assert shown == runs[67]._replace(details=details)
    assert await read_run(store, runs[66].id) == runs[66]
    assert await read_run(store, "0.1.1.1") is None


async def test_a_task_is_found_in_the_history_by_its_id(recorder: Recorder, store: Store, client: Client) -> None:
    handle = await client.put("log:", "x", after="1h")
    reference = await resolve(store, handle.id, None)
    await recorder.write(record(store, idh=reference.idh, end="retry"), record(store, 5), partition=reference.home)
    await recorder.write(record(store, idh=reference.idh, attempt=2), partition=reference.home)
    reference = reference._replace(address=None)  # it was due in an hour
    assert [
        run.record.attempt for run in (await history.runs_of_task(store, reference, RunFilter(), None, 10)).runs
    ] == [2, 1]


async def test_a_task_is_found_however_much_other_partitions_have_run_since(
    recorder: Recorder, store: Store, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 20)
    home = (await resolve(store, "order-1", None)).home
    await recorder.write(record(store, id="order-1", idh=idh_of("order-1")), partition=home)
    for number in range(60):
        await recorder.write(record(store, number), partition=(home + 1) % len(store.keys))
    [run] = (await client.runs(id="order-1")).runs
    assert run.record.id == "order-1"
    assert (await client.get("order-1")).state == "done"


async def test_a_run_of_a_schedule_is_found_in_the_partition_of_its_lane(
    recorder: Recorder, store: Store, client: Client
) -> None:
    home = (await resolve(store, "nightly@3", None)).home
    await recorder.write(of_schedule(store, "nightly", 3, lane="backups"), partition=(home + 1) % len(store.keys))
    [run] = (await client.runs(id="nightly@3")).runs
    assert run.record.lane == "backups"


async def test_a_task_that_is_no_longer_stored_is_known_from_its_last_run(
    recorder: Recorder, store: Store, client: Client
) -> None:
    assert (await client.get("order-1")).state == "unknown"
    reference = await resolve(store, "order-1", None)
    await recorder.write(record(store, idh=reference.idh, id="order-1", end="retry"), partition=reference.home)
    assert (await client.get("order-1")).state == "unknown", "another attempt was to follow"
    gone = record(store, idh=reference.idh, id="order-1", attempt=2, end="dead", reason="no route")
    await recorder.write(gone, partition=reference.home)
    assert (await client.get("order-1")).state == "unknown", "its dead letter was dropped, or it was replayed"
    last = record(store, idh=reference.idh, id="order-1", attempt=3)
    await recorder.write(last, partition=reference.home)
    info = await client.get("order-1")
    assert (info.state, info.attempt, info.errors, info.worker, info.since_ms) == (
        "done",
        3,
        (),
        "node-1",
        last.ended_ms,
    )
    await client.put("log:", id="order-1", after="1h")
    assert (await client.get("order-1")).state == "pending"


async def test_runs_of_a_later_version_are_left_out(
    recorder: Recorder, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await recorder.write(record(store, 1))
    await recorder.write(record(store, 2, "postponed"))
    await recorder.write(record(store, 3))
    assert [int.from_bytes(one.idh, "big") for one in await listed(store)] == [3, 1]
    assert "cannot be read" in caplog.text
    await recorder.write(of_schedule(store, "nightly", 1))
    await recorder.write(of_schedule(store, "nightly", 2, end="postponed"))
    assert [one.id for one in await listed(store, schedule="nightly")] == ["nightly@1"]


async def test_a_page_that_finds_nothing_ends_after_bounded_work(
    recorder: Recorder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 20)
    for number in range(60):
        await recorder.write(record(store, number))
    page = await list_runs(store, RunFilter(queue="mail"), None, 10)
    assert page.runs == []
    assert page.next is not None
    assert await listed(store, queue="mail") == []
    assert len(await listed(store)) == 60


async def test_every_page_gets_further_however_little_it_may_read(
    recorder: Recorder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 1)
    for number in range(20):
        end = "dead" if number % 3 else "done"
        await recorder.write(record(store, number, end), record(store, number + 50, end), partition=number % 4)
    cursors: list[str | None] = [None]
    while (page := await list_runs(store, RunFilter(queue="mail"), cursors[-1], 10)).next is not None:
        assert page.next not in cursors
        cursors.append(page.next)
    assert len(await listed(store)) == 40


# -- rollups ---------------------------------------------------------------------------------------------------------


async def test_runs_are_counted_by_target_queue_and_schedule(
    recorder: Recorder, store: Store, clock: ManualClock
) -> None:
    from_ms = store.clock.now_ms()
    await recorder.write(
        record(store), record(store, 2, "dead"), record(store, 3, "retry"),
        record(store, 4, "skipped", began_ms=0), record(store, target=TARGET, queue="mail"),
        of_schedule(store, "nightly", target=TARGET, queue="mail"),
    )  # fmt: skip
    clock.advance(seconds=90)
    await recorder.write(record(store, 9), partition=1)
    to_ms = store.clock.now_ms() + 1

    async def counts(kind: Any, name: str | None, width_ms: int = HOUR_MS) -> list[tuple[int, ...]]:
        some = await history.run_counts(store, kind, name, from_ms, to_ms, width_ms)
        return [(one.ok, one.failed, one.retried, one.skipped) for one in some if one.runs]

    assert await counts("t", None) == [(4, 1, 1, 1)]
    assert await counts("t", "https://example.com") == [(2, 1, 1, 1)]
    assert await counts("q", "mail") == [(2, 0, 0, 0)]
    assert await counts("s", "nightly") == [(1, 0, 0, 0)]
    assert await counts("t", None, MINUTE_MS) == [(3, 1, 1, 1), (1, 0, 0, 0)]
    [hour] = await history.run_counts(store, "t", None, from_ms, to_ms, HOUR_MS)
    assert sum(hour.durations) == sum(hour.latenesses) == 6
    assert (hour.durations[bucket_of(10)], hour.duration_ms, hour.lateness_ms) == (6, 60, 12)


async def test_subjects_beyond_the_bound_are_counted_together(recorder: Recorder, store: Store) -> None:
    store.shared.take({"history_bytes": "100000"})
    await recorder.write(*(record(store, i, target=f"log:{i}") for i in range(30)))
    await recorder.write(*(record(store, i, target=f"log:{i}") for i in range(30)))
    now_ms = store.clock.now_ms()
    [hour] = await history.run_counts(store, "t", None, now_ms, now_ms + 1, HOUR_MS)
    assert hour.ok == 60
    key = store.keys.partitions[0].rollup(HOUR_MS, now_ms)
    [size, ttl] = await store.run_one(store.keys.partitions[0].slot, [("HLEN", key), ("PTTL", key)])
    assert size <= 10
    assert 0 < ttl <= history.HOURS_KEPT * HOUR_MS


async def test_the_counts_of_all_runs_cost_the_same_with_many_subjects(recorder: Recorder, store: Store) -> None:
    """Two weeks of hours with all subjects are tens of megabytes: one request would hold up the node for seconds."""
    keys = store.keys.partitions[0]

    async def sent_bytes() -> int:
        [text] = await store.run_one(keys.slot, [("INFO", "stats")])
        return int(text.split(b"total_net_output_bytes:")[1].split()[0])

    store.shared.take({"history_bytes": str(1 << 32)})
    await recorder.write(*(record(store, i, target=f"log:{i}") for i in range(1_000)))
    now_ms, before = store.clock.now_ms(), await sent_bytes()
    [hour] = await history.run_counts(store, "t", None, now_ms, now_ms + 1, HOUR_MS)
    assert hour.ok == 1_000
    assert await sent_bytes() - before < 16_000


# -- budgets ---------------------------------------------------------------------------------------------------------


async def used_memory(store: Store) -> int:
    [text] = await store.run_one(store.keys.partitions[0].slot, [("INFO", "memory")])
    return int(text.split(b"used_memory:")[1].split()[0])


@pytest.mark.parametrize(
    ("batch", "share", "count"), [(1, 400_000, 3_000), (64, 4_000_000, 1_500), (500, 4_000_000, 200)]
)
async def test_the_oldest_runs_go_first_and_the_budget_holds(
    recorder: Recorder, store: Store, clock: ManualClock, batch: int, share: int, count: int
) -> None:
    store.shared.take({"history_bytes": str(share * len(store.keys))})
    noise, last = random.Random(7), 0
    await recorder.write(record(store))
    before = await used_memory(store)
    for _ in range(count):
        clock.advance(ms=10)
        idhs = [number.to_bytes(4, "big") + noise.randbytes(12) for number in range(last, last + batch)]
        last += batch
        await recorder.write(*(record(store, idh=idh, ended_ms=noise.randrange(1 << 41)) for idh in idhs))
    kept = [int.from_bytes(one.idh[:4], "big") for one in await listed(store)]
    assert kept == list(range(last - 1, last - 1 - len(kept), -1)), "the newest are kept, without a gap"
    state = await history.history_state(store)
    assert len(kept) < last
    assert state.oldest_ms > 0
    assert share // 2 * 0.95 <= state.bytes <= share // 2
    # The server's own figure: less room for what calls and scripts take meanwhile.
    assert await used_memory(store) - before <= share // 2 * 1.05 + 100_000


async def test_successes_never_push_out_failures(recorder: Recorder, store: Store) -> None:
    store.shared.take({"history_bytes": "400000"})
    await recorder.write(*(record(store, i, "dead", reason="no route") for i in range(20)))
    for _ in range(100):
        await recorder.write(*(record(store, i, began_ms=i * 7, ended_ms=i * 29) for i in range(100)))
    assert (await history.history_state(store)).oldest_ms > 0
    assert len(await listed(store, ends=frozenset(["dead"]))) == 20


async def test_details_have_a_budget_and_an_expiry_of_their_own(
    recorder: Recorder, store: Store, clock: ManualClock
) -> None:
    share = 100_000
    store.shared.take({"history_details_bytes": str(share * len(store.keys)), "history_details_keep": "3600000ms"})
    noise = random.Random(7)
    for number in range(100):
        await recorder.write(Run(record(store, number), RunDetails(traceback=noise.randbytes(2_000).hex())))
    shown = [await read_run(store, run.id) for run in (await list_runs(store, RunFilter(), None, 100)).runs]
    found = [one.details for one in shown if one is not None]
    kept = found.index(None)
    assert len(found) == 100
    assert 0 < kept < 100
    assert set(found[kept:]) == {None}
    clock.advance(seconds=3_601)
    await recorder.write(Run(record(store), RunDetails(traceback="last")))
    keys = store.keys.partitions[0]
    length, ttl = await store.run_one(keys.slot, [("XLEN", keys.run_details), ("PTTL", keys.run_details)])
    assert length == 1
    assert 0 < ttl <= 3_600_000
    assert (await history.history_state(store)).details_bytes < 200


async def test_rings_of_schedules_whose_runs_are_gone_are_removed(
    recorder: Recorder, store: Store, clock: ManualClock
) -> None:
    store.shared.take({"history_bytes": "200000"})
    await recorder.write(*(of_schedule(store, f"old-{i}") for i in range(5)))
    for number in range(400):
        clock.advance(seconds=1)
        some = [record(store, i, began_ms=i * 7, ended_ms=i * 29) for i in range(60)]
        await recorder.write(*some, of_schedule(store, "new", number))
    keys = store.keys.partitions[0]
    [names] = await store.run_one(keys.slot, [("HKEYS", keys.run_rings)])
    assert names == [b"new"]


async def test_a_history_without_memory_keeps_nothing(recorder: Recorder, store: Store) -> None:
    store.shared.take({"history_bytes": "0"})
    await recorder.write(record(store))
    assert await listed(store) == []
