"""Membership and leadership: decided by the server, in one step, on every kind of server."""

from mainspring.model.clock import ManualClock
from mainspring.model.workers import WorkerInfo
from mainspring.store import members
from mainspring.store.members import About, ClusterView, Identity, NodeIdTaken
from mainspring.store.store import Store

LEASE_MS = 5_000


def node(name: str, nonce: str = "") -> Identity:
    return Identity(name, nonce or f"nonce-of-{name}", LEASE_MS)


async def join(store: Store, *names: str) -> None:
    for name in names:
        assert isinstance(await members.join(store, node(name), About(host="h", pid=1)), int)


async def beat(store: Store, name: str, *, leaving: bool = False) -> ClusterView:
    view = await members.beat(store, node(name), About(host="h", pid=1), leaving=leaving)
    assert view is not None, f"{name} is not registered"
    return view


async def test_the_first_to_register_leads_even_if_another_beats_first(store: Store) -> None:
    await join(store, "zoe", "adam")
    assert (await beat(store, "adam")).leader == ""
    assert (await beat(store, "zoe")).leader == "zoe"
    view = await beat(store, "adam")
    assert (view.leader, view.term) == ("zoe", 1)
    assert {one.id: one.order for one in view.members.values()} == {"zoe": 1, "adam": 2}


async def test_when_the_leader_dies_the_next_oldest_leads_within_one_lease(store: Store, clock: ManualClock) -> None:
    await join(store, "a", "b", "c")
    await beat(store, "a")
    clock.advance(ms=LEASE_MS - 1)
    for name in ("b", "c"):
        assert (await beat(store, name)).leader == "a"
    clock.advance(ms=1)
    assert (await beat(store, "c")).leader == "", "c is not the next oldest"
    view = await beat(store, "b")
    assert (view.leader, view.term, set(view.members)) == ("b", 2, {"b", "c"})


async def test_a_leader_that_leaves_is_followed_at_once(store: Store) -> None:
    await join(store, "a", "b")
    assert (await beat(store, "a")).leader == "a"
    assert (await beat(store, "a", leaving=True)).leader == ""
    assert (await beat(store, "b")).leader == "b"
    assert (await beat(store, "a", leaving=True)).leader == "b", "who leaves does not take the lead back"
    await members.leave(store, node("a"))
    assert set((await beat(store, "b")).members) == {"b"}


async def test_a_second_live_node_with_the_same_id_is_refused(store: Store, clock: ManualClock) -> None:
    await join(store, "pod-1")
    clock.advance(ms=1_000)
    other = await members.join(store, node("pod-1", "another process"), About())
    assert other == NodeIdTaken(LEASE_MS - 1_000, About(host="h", pid=1))
    clock.advance(ms=LEASE_MS - 1_000)
    assert await members.join(store, node("pod-1", "another process"), About()) == 2


async def test_a_repeated_registration_whose_reply_was_lost_keeps_its_place(store: Store) -> None:
    assert await members.join(store, node("a"), About()) == 1
    assert await members.join(store, node("a"), About()) == 1
    await join(store, "b")
    assert (await beat(store, "b")).members["b"].order == 2


async def test_a_node_that_was_silent_for_a_lease_is_gone_even_if_no_other_noticed(
    store: Store, clock: ManualClock
) -> None:
    await join(store, "a")
    clock.advance(ms=LEASE_MS)
    assert await members.beat(store, node("a"), About()) is None


async def test_a_former_process_cannot_beat_or_leave_for_the_one_that_has_its_id_now(
    store: Store, clock: ManualClock
) -> None:
    await join(store, "a")
    clock.advance(ms=LEASE_MS)
    assert await members.join(store, node("a", "new"), About()) == 2
    assert await members.beat(store, node("a"), About()) is None
    await members.leave(store, node("a"))
    assert await members.beat(store, node("a", "new"), About()) is not None


async def test_a_lease_written_by_a_server_whose_clock_ran_ahead_is_clamped(store: Store, clock: ManualClock) -> None:
    await join(store, "a", "b")
    clock.advance(seconds=-3600)  # a promoted server whose clock lags by an hour
    assert (await beat(store, "b")).members["a"].left_ms == LEASE_MS
    clock.advance(ms=LEASE_MS)
    assert await members.join(store, node("a", "restarted"), About()) == 3


async def test_only_one_of_two_leaders_can_write_the_plan(store: Store, clock: ManualClock) -> None:
    await join(store, "a", "b")
    first = await beat(store, "a")
    assert await members.write_plan(store, node("a"), first, ["a", "b", "a", "b"])
    assert not await members.write_plan(store, node("a"), first, ["a"] * 4), "that plan is not the last one"
    seen = await beat(store, "a")
    assert (seen.version, seen.owners) == (1, ("a", "b", "a", "b"))
    clock.advance(ms=LEASE_MS - 1)
    await beat(store, "b")
    clock.advance(ms=1)
    second = await beat(store, "b")
    assert second.leader == "b"
    assert not await members.write_plan(store, node("a"), seen, ["a"] * 4), "a leads no more"
    assert await members.write_plan(store, node("b"), second, ["b"] * 4)
    assert (await beat(store, "b")).owners == ("b",) * 4


async def test_an_onlooker_sees_the_same_as_the_nodes(store: Store, clock: ManualClock) -> None:
    await join(store, "a", "b")
    view = await beat(store, "a")
    await members.write_plan(store, node("a"), view, ["a", "a", "b", "b"])
    inside = await beat(store, "a")
    outside, holdings = await members.look(store)
    assert outside._replace(now_us=0) == inside._replace(now_us=0)
    assert [one.owner for one in holdings] == [""] * 4
    clock.advance(ms=LEASE_MS)
    assert (await members.look(store))[0].members == {}


async def listed(store: Store) -> list[tuple[str, int]]:
    return [(one.id, one.seen_ms) for one in await members.live_workers(store)]


async def test_a_worker_is_listed_until_its_lease_is_over_and_forgotten_with_the_next_beat(
    store: Store, clock: ManualClock
) -> None:
    about = WorkerInfo(id="a", queues={"mail": 3}, lease_ms=LEASE_MS)
    began_ms = clock.now_ms()
    await members.worker_beat(store, "a/1", about)
    await members.worker_beat(store, "a/2", about)
    assert await listed(store) == [("a", began_ms)] * 2, "two processes of one name are two workers"
    clock.advance(ms=LEASE_MS - 1)
    await members.worker_beat(store, "a/2", about)
    assert len(await listed(store)) == 2
    clock.advance(ms=1)
    assert await listed(store) == [("a", began_ms + LEASE_MS - 1)]
    await members.worker_beat(store, "a/2", about)
    keys = store.keys
    kept = await store.run_one(keys.slot, [("HLEN", keys.workers), ("ZCARD", keys.worker_times)])
    assert kept == [1, 1]
    for _ in range(2):
        await members.worker_leave(store, "a/2")
        assert await listed(store) == []


async def test_a_record_that_cannot_be_read_hides_no_other_worker(store: Store) -> None:
    about = WorkerInfo(id="a", lease_ms=LEASE_MS)
    for key in ("a/1", "a/2"):
        await members.worker_beat(store, key, about)
    await store.run_one(store.keys.slot, [("HSET", store.keys.workers, "a/1", "[1]")])
    assert [one.id for one in await members.live_workers(store)] == ["a"]
