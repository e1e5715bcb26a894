"""State of the API in the store, on every kind of server: keys, the audit trail, answers, neighbours."""

import pytest

from mainspring.client.client import Client
from mainspring.model.access import ApiKey
from mainspring.model.audit import Change
from mainspring.model.errors import InvalidInput
from mainspring.store import records
from mainspring.store.access import add_key, list_keys, new_key_id, read_audit, record_change, revoke_key
from mainspring.store.records import Claim, KeptAnswer
from mainspring.store.store import Store
from tests.support.verifying import found


async def test_keys_are_kept_listed_and_revoked(store: Store) -> None:
    first = ApiKey(new_key_id(), "one", "reader", "h1", 1, targets=("log:",), namespaces=("*",), rate=2.5)
    second = ApiKey(new_key_id(), "two", "admin", "h2", 2, expires_ms=99)
    await add_key(store, second)
    await add_key(store, first)
    assert await list_keys(store) == [first, second]
    assert await revoke_key(store, first.id) == first
    assert await revoke_key(store, first.id) is None
    assert await list_keys(store) == [second]


async def test_an_unreadable_key_authenticates_no_caller_and_hides_no_other_key(store: Store) -> None:
    good = ApiKey(new_key_id(), "good", "reader", "h", 1)
    await add_key(store, good)
    await store.run_one(store.keys.slot, [("HSET", store.keys.access, "bad", b"\xff{")])
    assert await list_keys(store) == [good]


async def test_the_trail_is_in_order_and_paged(store: Store) -> None:
    for n in range(5):
        await record_change(store, Change("me", "task.cancel", f"n{n}", "127.0.0.1", "admin", {"n": n}, None))
    first = await read_audit(store, limit=3)
    rest = await read_audit(store, limit=3, cursor=first.next)
    assert [one.change.object for one in (*first.changes, *rest.changes)] == ["n4", "n3", "n2", "n1", "n0"]
    assert rest.next is None
    assert first.changes[0].change.before == {"n": 4}
    for wrong in ("", "1", "(1-1", "-", "+", "9" * 40 + "-1"):
        with pytest.raises(InvalidInput):
            await read_audit(store, cursor=wrong)


async def test_an_entry_that_cannot_be_read_is_shown_as_such(store: Store) -> None:
    await record_change(store, Change("me", "a", "b"))
    await store.run_one(
        store.keys.slot, [("XADD", store.keys.audit, "*", "c", b"\xff"), ("XADD", store.keys.audit, "*", "d", "e")]
    )
    assert [one.change.what for one in (await read_audit(store)).changes] == ["unreadable", "unreadable", "a"]


async def test_an_answer_is_claimed_once_and_kept(store: Store) -> None:
    place = Claim.of(store, "caller", "key")
    assert place != Claim.of(store, "other", "key")
    assert await records.claim_request(store, place, b"f", window_ms=60_000) is None
    under_way = await records.claim_request(store, place, b"g", window_ms=60_000)
    assert under_way is not None
    assert (under_way.fingerprint, under_way.answered) == (b"f", False)
    done = KeptAnswer(b"f", 201, b"{}", b"/v1/tasks/a")
    await records.keep_answer(store, place, done, window_ms=60_000)
    assert await records.claim_request(store, place, b"f", window_ms=60_000) == done
    await records.release_request(store, place)
    assert await records.claim_request(store, place, b"x", window_ms=60_000) is None


async def test_a_neighbour_is_found_and_never_made(store: Store, client: Client) -> None:
    assert await store.open_namespace(f"{store.keys.namespace}x") is None
    same = await store.open_namespace(store.keys.namespace)
    assert same is not None
    assert len(same.keys) == len(store.keys)
    handle = await Client.over(same).put("null:", 1, at=store.clock.now_ms() + 60_000)
    assert (await client.get(handle.id)).state == "pending"
    await store.run_one(store.keys.slot, [("HSET", store.keys.meta, "format", "99")])
    assert await store.open_namespace(store.keys.namespace) is None
    await store.run_one(store.keys.slot, [("HSET", store.keys.meta, "format", "1")])


async def test_a_namespace_that_is_another_programs_is_none(store: Store) -> None:
    name = f"{store.keys.namespace}:x"  # a key of ours that holds something else
    with pytest.raises(InvalidInput):
        await store.open_namespace(name)
    await store.run_one(store.keys.slot, [("RENAME", store.keys.meta, store.keys.audit), ("SET", store.keys.meta, "x")])
    assert await store.open_namespace(store.keys.namespace) is None
    await store.run_one(store.keys.slot, [("RENAME", store.keys.audit, store.keys.meta)])


async def test_verify_knows_all_of_these_keys(store: Store) -> None:
    await add_key(store, ApiKey(new_key_id(), "one", "reader", "h1", 1))
    await record_change(store, Change("me", "a", "b"))
    await records.claim_request(store, Claim.of(store, "c", "k"), b"f", window_ms=60_000)
    assert await found(store) == {}
