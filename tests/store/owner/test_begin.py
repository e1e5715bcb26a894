"""Begin: nothing fires early, twice, after its cancel, or by the hand of a former owner."""

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.task import Task
from mainspring.store.keys import Slice, partition_of
from mainspring.store.owner import fire, leases
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from tests.support.owner import HandOwner, address_of

LANE = "a lane keeps tasks in one partition"


class Planned:
    """Some tasks in one slice and the owner of their partition, with the clock at their time."""

    def __init__(self, owner: HandOwner, place: Slice, ids: list[str]) -> None:
        self.owner, self.place, self.ids = owner, place, ids


@pytest.fixture(params=["whole bitmaps", "ranges"])
async def planned(client: Client, store: Store, clock: ManualClock, request: pytest.FixtureRequest) -> Planned:
    tasks = [Task("log:", n, after=f"{2000 + n}ms", lane=LANE) for n in range(3)]
    summary = await client.put_many(tasks, handles=True)
    assert summary.handles is not None
    address = address_of(summary.handles[0].id)
    clock.advance(ms=2002)
    owner = await HandOwner.acquire(store, address.partition)
    owner.whole = request.param == "whole bitmaps"
    return Planned(owner, address.slice, [handle.id for handle in summary.handles])


async def test_begin_sets_the_fired_bits_and_the_sequence_number(planned: Planned, store: Store) -> None:
    answer = await planned.owner.begin(planned.place, [0, 2])
    assert (answer.status, answer.x) == ("ok", [b""])
    assert await planned.owner.bits("f", planned.place) == [0, 2]
    assert await planned.owner.raw("GET", planned.owner.keys.fence) == planned.owner.token + b":1"
    assert (await balance(store))[:3] == (3, 1, 2)


async def test_begin_before_due_by_server_clock_is_early(planned: Planned, clock: ManualClock) -> None:
    section = await planned.owner.section(planned.place, begin=[0, 1, 2], done=[0], max_due_ms=clock.now_ms())
    clock.advance(ms=-1)  # the server's clock lags behind what the owner believed
    assert (await planned.owner.tick(section)).status == "early"
    assert await planned.owner.bits("f", planned.place) == []
    assert await planned.owner.bits("d", planned.place) == []
    clock.advance(ms=1)
    assert (await planned.owner.tick(section)).status == "ok"


async def test_a_former_owner_cannot_begin(planned: Planned, store: Store, clock: ManualClock) -> None:
    section = await planned.owner.section(planned.place, begin=[0])
    clock.advance(seconds=5)
    await HandOwner.acquire(store, planned.owner.partition, owner="next")
    assert (await planned.owner.tick(section)).status == "fenced"
    assert await planned.owner.bits("f", planned.place) == []


async def test_an_owner_that_released_the_partition_cannot_begin(planned: Planned, store: Store) -> None:
    """A call that was still on its way would fire what the next owner fires as well."""
    section = await planned.owner.section(planned.place, begin=[0])
    await leases.release(store, {planned.owner.partition: planned.owner.token})
    assert (await planned.owner.tick(section)).status == "fenced"
    assert await planned.owner.bits("f", planned.place) == []


async def test_a_repeated_begin_after_a_lost_reply_changes_nothing(planned: Planned, client: Client) -> None:
    assert await client.cancel(planned.ids[1]) == "cancelled"
    section = await planned.owner.section(planned.place, begin=[0, 1], done=[0])
    first = await planned.owner.tick(section)
    again = await planned.owner.tick(section)
    assert first == again, "the repeat must answer the same reads"
    assert again.x[0][0] & 0x40
    assert await planned.owner.raw("HGET", planned.owner.keys.n, "done") == b"1"


async def test_a_call_for_thousands_of_slices_is_done_once_and_whole(planned: Planned, store: Store) -> None:
    """More keys than Lua can spread at once: a script that failed midway would count what is done with each repeat."""
    owner = planned.owner
    section = await owner.section(planned.place, begin=[0], done=[0])
    names = [Slice(1000, planned.place.start_ms + n * 1000).name for n in range(1, 9_001)]
    bits = (fire.WHOLE, b"\x80", fire.WHOLE, b"\x80")
    many = [fire.Touch(name, owner.keys.slice_keys(name), "0.0", -1, b"", *bits) for name in names]
    section = section._replace(touches=[*section.touches, *many])
    for _ in range(2):
        answer = await owner.tick(section)
        assert (answer.status, len(answer.x)) == ("ok", 9_001)
    last = owner.keys.slice_keys(names[-1])
    assert await owner.raw("MGET", *last[1:3]) == [b"\x80", b"\x80"]
    assert await owner.raw("HGET", owner.keys.n, "done") == b"1"
    assert (await balance(store))[:3] == (3, 2, 0)


async def test_an_old_begin_that_arrives_late_changes_nothing(planned: Planned, store: Store) -> None:
    section = await planned.owner.section(planned.place, begin=[0])
    late = planned.owner.command(section)
    await planned.owner.tick(section)
    await planned.owner.finish(planned.place, [0])
    await planned.owner.begin(planned.place, [0, 1])
    before = await planned.owner.bits("f", planned.place), await balance(store)
    await store.run_one(planned.owner.keys.slot, [late])
    assert (await planned.owner.bits("f", planned.place), await balance(store)) == before


async def test_a_rolled_back_server_is_noticed_by_seq(planned: Planned) -> None:
    await planned.owner.begin(planned.place, [0])
    await planned.owner.finish(planned.place, [0])
    # A failover that lost the last call: the server is where it was before it.
    await planned.owner.raw("SET", planned.owner.keys.fence, planned.owner.token + b":1")
    await planned.owner.raw("SETBIT", planned.owner.keys.slice_keys(planned.place.name)[2], 0, 0)
    await planned.owner.raw("HINCRBY", planned.owner.keys.n, "done", -1)
    answer = await planned.owner.begin(planned.place, [0, 1])
    assert answer.status == "rolledback"
    assert await planned.owner.bits("f", planned.place) == [0]


async def test_a_recreated_slice_is_not_the_one_that_was_read(
    planned: Planned, client: Client, store: Store, clock: ManualClock
) -> None:
    old = await planned.owner.section(planned.place, begin=[0, 1, 2])
    await planned.owner.begin(planned.place, [0, 1, 2])
    await planned.owner.finish(planned.place, [0, 1, 2])
    clock.advance(seconds=4)
    assert await planned.owner.drop(planned.place) == "ok"
    clock.advance(seconds=-6)
    await client.put_many([Task("log:", n, after="2s", lane=LANE) for n in range(3)])
    clock.advance(seconds=6)
    assert (await planned.owner.tick(old._replace(seq=planned.owner.seq + 1))).status == "stale"
    assert await planned.owner.bits("f", planned.place) == []


async def test_a_list_that_lost_its_end_is_not_the_one_that_was_read(planned: Planned, store: Store) -> None:
    section = await planned.owner.section(planned.place, begin=[0])
    lost = await planned.owner.raw("RPOP", planned.owner.keys.entries(planned.place.name))
    assert (await planned.owner.tick(section)).status == "stale"
    await planned.owner.raw("RPUSH", planned.owner.keys.entries(planned.place.name), lost)


async def test_cancel_then_begin_never_fires(planned: Planned, client: Client) -> None:
    section = await planned.owner.section(planned.place, begin=[0, 1, 2])
    assert await client.cancel(planned.ids[2]) == "cancelled"
    answer = await planned.owner.tick(section)
    assert answer.status == "ok", "a cancelled tail is still proof of what was read"
    assert answer.x == [b"\x20"]


async def test_a_cancelled_tail_still_proves_the_list_when_read_after_the_cancel(
    planned: Planned, client: Client
) -> None:
    await client.cancel(planned.ids[2])
    assert (await planned.owner.begin(planned.place, [0, 1])).status == "ok"


async def test_a_lane_does_not_begin_while_an_earlier_task_may_be_unread(
    planned: Planned, client: Client, clock: ManualClock
) -> None:
    known = [await planned.owner.known(planned.place, 3)]
    section = await planned.owner.section(planned.place, begin=[0], known=known)
    await client.put("log:", "late", at=clock.now_ms(), lane=LANE)
    assert (await planned.owner.tick(section)).status == "more"
    assert await planned.owner.bits("f", planned.place) == []
    grown = section._replace(known=[await planned.owner.known(planned.place, 4)])
    assert (await planned.owner.tick(grown)).status == "ok"


async def test_a_lane_does_not_begin_while_an_unknown_slice_exists(
    planned: Planned, client: Client, clock: ManualClock
) -> None:
    known = [await planned.owner.known(planned.place, 3)]
    clock.advance(seconds=-2)
    await client.put("log:", "earlier", at=clock.now_ms(), lane=LANE)
    clock.advance(seconds=2)
    answer = await planned.owner.begin(planned.place, [0], known=known)
    assert answer.status == "more"


async def test_one_stale_partition_does_not_hold_up_the_others(
    client: Client, store: Store, clock: ManualClock
) -> None:
    """Each section of a call is checked by its own token."""
    owners: list[tuple[HandOwner, fire.Section]] = []
    for p in range(2):
        lane = next(lane for lane in map(str, range(1000)) if _partition(store, lane) == p)
        handle = await client.put("log:", p, after="0s", lane=lane)
        owner = await HandOwner.acquire(store, p)
        owners.append((owner, await owner.section(address_of(handle.id).slice, begin=[0])))
    fenced = owners[0][1]._replace(token=b"1.former")
    first, second = await fire.tick(store, [fenced, owners[1][1]])
    assert isinstance(first, fire.TickReply)
    assert isinstance(second, fire.TickReply)
    assert (first.status, second.status) == ("fenced", "ok")


def _partition(store: Store, lane: str) -> int:
    return partition_of(lane, len(store.keys))


async def test_only_the_newest_time_of_all_servers_of_a_tick_counts(
    client: Client, store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old one, taken last, would set the clock back behind a begin of the same call: expired tasks would go out."""
    summary = await client.put_many([Task("log:", n, after="2s") for n in range(60)], handles=True)
    assert summary.handles is not None
    clock.advance(ms=2000)
    places = {address.partition: address.slice for address in (address_of(one.id) for one in summary.handles)}
    owners = {number: await HandOwner.acquire(store, number) for number in places}
    sections = [await owners[number].section(place, begin=[0]) for number, place in places.items()]
    taken: list[int] = []
    monkeypatch.setattr(clock, "sample", taken.append)
    answers = await fire.tick(store, sections)
    assert [one.status for one in answers if isinstance(one, fire.TickReply)] == ["ok"] * len(places)
    assert len(places) > 1
    assert taken == [clock.now_ms() * 1000]
