"""Drop: a slice goes when all of it is done, and nothing that came since goes with it."""

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.store.keys import Slice
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of

LANE = "one"


@pytest.fixture
async def finished(client: Client, store: Store, clock: ManualClock) -> tuple[HandOwner, Slice]:
    """A slice with one task, done, just past its grace."""
    handle = await client.put("log:", after="1s", lane=LANE)
    place = address_of(handle.id).slice
    clock.set(place.end_ms)
    owner = await HandOwner.acquire(store, address_of(handle.id).partition)
    await owner.begin(place, [0])
    await owner.finish(place, [0])
    clock.set(place.end_ms + 2_001)
    return owner, place


async def test_a_finished_slice_leaves_no_key_behind(finished: tuple[HandOwner, Slice], store: Store) -> None:
    owner, place = finished
    assert await owner.drop(place) == "ok"
    assert await owner.raw("EXISTS", *owner.keys.slice_keys(place.name), owner.keys.slices) == 0
    assert (await balance(store)).done == 1


async def test_a_repeated_drop_after_a_lost_reply_changes_nothing(finished: tuple[HandOwner, Slice]) -> None:
    owner, place = finished
    g = await owner.incarnation(place)
    assert await owner.drop(place) == "ok"
    assert await owner.drop(place, g=g) == "stale"


async def test_an_entry_appended_since_keeps_its_slice(
    finished: tuple[HandOwner, Slice], client: Client, clock: ManualClock
) -> None:
    owner, place = finished
    now_ms = clock.now_ms()
    clock.set(place.start_ms)  # a client whose clock lags
    await client.put("log:", "late", lane=LANE)
    clock.set(now_ms)
    assert await owner.drop(place) == "refused"
    assert len(await owner.rows(place)) == 2


async def test_a_late_drop_cannot_touch_the_recreated_slice(
    finished: tuple[HandOwner, Slice], client: Client, clock: ManualClock
) -> None:
    owner, place = finished
    g = await owner.incarnation(place)
    await owner.drop(place)
    clock.advance(seconds=-3)
    handle = await client.put("log:", lane=LANE, at=place.start_ms + 5)
    clock.advance(seconds=3)
    assert address_of(handle.id).slice == place
    assert await owner.drop(place, g=g) == "stale"
    assert len(await owner.rows(place)) == 1


async def test_the_current_second_is_not_dropped_and_made_all_the_time(
    finished: tuple[HandOwner, Slice], clock: ManualClock
) -> None:
    owner, place = finished
    clock.set(place.end_ms + 1_999)
    assert await owner.drop(place) == "early"


async def test_a_former_owner_cannot_drop(finished: tuple[HandOwner, Slice], store: Store, clock: ManualClock) -> None:
    owner, place = finished
    clock.advance(seconds=5)
    await HandOwner.acquire(store, owner.partition, owner="next")
    assert await owner.drop(place) == "fenced"


async def test_a_slice_with_a_task_under_way_is_not_dropped(
    finished: tuple[HandOwner, Slice], client: Client, clock: ManualClock
) -> None:
    owner, place = finished
    clock.advance(seconds=-3)
    await client.put("log:", lane=LANE, at=place.start_ms + 5)
    clock.advance(seconds=3)
    await owner.begin(place, [0, 1])
    assert await owner.drop(place) == "refused"


async def test_a_late_put_into_a_dropped_slice_is_not_lost(ticker: Ticker, clock: ManualClock) -> None:
    await ticker.client.put("log:", "first", after="500ms", lane=LANE)
    place = Slice.at(clock.now_ms(), 1000)
    await ticker.advance(seconds=10)
    assert await ticker.store.run_one(0, [("PING",)])
    now_ms = clock.now_ms()
    clock.set(place.start_ms + 100)  # a put that was frozen ten seconds ago arrives only now
    handle = await ticker.client.put("log:", "late", at=place.start_ms + 700, lane=LANE)
    clock.set(now_ms)
    assert address_of(handle.id).slice == place
    assert [one.value() for one in await ticker.turn()] == ["late"]
    assert (await balance(ticker.store)).done == 2
