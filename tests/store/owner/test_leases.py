"""Owning a partition: one owner at a time, epochs that only grow, leases that cannot lock anybody out."""

from mainspring.model.clock import ManualClock
from mainspring.store.owner import leases
from mainspring.store.store import Store
from tests.support.owner import HandOwner


async def acquire(store: Store, owner: str, *, lease_ms: int = 5_000) -> leases.Acquired | leases.Busy | Exception:
    [answer] = await leases.acquire(store, [0], owner=owner, nonce=owner, lease_ms=lease_ms)
    return answer


async def test_a_partition_has_one_owner_at_a_time(store: Store, clock: ManualClock) -> None:
    assert isinstance(await acquire(store, "a"), leases.Acquired)
    clock.advance(seconds=2)
    assert await acquire(store, "b") == leases.Busy("a", 3_000)
    clock.advance(seconds=3)
    assert isinstance(await acquire(store, "b"), leases.Acquired)


async def test_epoch_only_grows_and_lease_is_clamped(store: Store, clock: ManualClock) -> None:
    first = await HandOwner.acquire(store, owner="a")
    # A promoted server whose clock lags by an hour: by its time the lease ends in an hour and five seconds.
    clock.advance(seconds=-3600)
    assert await acquire(store, "b") == leases.Busy("a", 5_000)
    clock.advance(seconds=4)
    assert await acquire(store, "b") == leases.Busy("a", 1_000), "asking again must not prolong the lease"
    clock.advance(seconds=1)
    second = await acquire(store, "b")
    assert isinstance(second, leases.Acquired)
    assert epoch(second.token) > epoch(first.token), "the clock went back, the epoch must not"


async def test_the_clamp_uses_the_lease_of_the_owner_not_of_the_caller(store: Store) -> None:
    await HandOwner.acquire(store, owner="slow", lease_ms=60_000)
    assert await acquire(store, "quick", lease_ms=1_000) == leases.Busy("slow", 60_000)


async def test_the_same_owner_may_acquire_again_and_gets_a_new_token(store: Store) -> None:
    first = await HandOwner.acquire(store, owner="a")
    again = await HandOwner.acquire(store, owner="a")
    assert epoch(again.token) > epoch(first.token)
    assert await leases.renew(store, {0: first.token}, lease_ms=5_000) == {0: False}


async def test_a_renewed_lease_counts_from_now(store: Store, clock: ManualClock) -> None:
    owner = await HandOwner.acquire(store, owner="a")
    clock.advance(seconds=4)
    assert await leases.renew(store, {0: owner.token}, lease_ms=5_000) == {0: True}
    clock.advance(seconds=4)
    assert await acquire(store, "b") == leases.Busy("a", 1_000)


async def test_a_former_owner_cannot_renew_or_release(store: Store, clock: ManualClock) -> None:
    former = await HandOwner.acquire(store, owner="a")
    clock.advance(seconds=5)
    await HandOwner.acquire(store, owner="b")
    assert await leases.renew(store, {0: former.token}, lease_ms=5_000) == {0: False}
    await leases.release(store, {0: former.token})
    assert await acquire(store, "c") == leases.Busy("b", 5_000)


async def test_a_released_partition_is_free_at_once_and_its_token_is_dead(store: Store) -> None:
    owner = await HandOwner.acquire(store, owner="a")
    await leases.release(store, {0: owner.token})
    assert await leases.renew(store, {0: owner.token}, lease_ms=5_000) == {0: False}
    assert isinstance(await acquire(store, "b"), leases.Acquired)


async def test_leases_of_all_partitions_are_renewed_at_once(store: Store) -> None:
    tokens = {p: (await HandOwner.acquire(store, p)).token for p in range(len(store.keys))}
    tokens[1] = b"1.somebody-else"
    renewed = await leases.renew(store, tokens, lease_ms=5_000)
    assert renewed == {0: True, 1: False, 2: True, 3: True}


def epoch(token: bytes) -> int:
    return int(token.partition(b".")[0])
