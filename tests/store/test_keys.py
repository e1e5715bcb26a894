"""Key names and the arithmetic of partitions, slices and addresses."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.ids import GENERATED
from mainspring.store.keys import (
    SLOTS,
    WIDTHS_MS,
    Address,
    Keyspace,
    Slice,
    check_namespace,
    partition_of,
    r_of,
    score_of,
    slot_of,
    tags,
)
from mainspring.store.redis.servers import key_slot

slices = st.builds(Slice.at, st.integers(0, 2**42), st.sampled_from(WIDTHS_MS))
addresses = st.builds(Address, st.integers(0, 4095), slices, st.integers(0, 2**20 - 1), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 6])
def test_partitions_spread_evenly_over_the_servers_of_a_cluster(servers: int) -> None:
    held = Counter(slot_of(tag) * servers // SLOTS for tag in tags("main", 32))
    assert max(held.values()) - min(held.values()) <= 1


def test_all_keys_of_a_partition_fall_into_its_slot() -> None:
    for names in Keyspace("main", 8).partitions:
        keys = [names.slices, names.own, names.fence, names.n, names.dead, names.dead_times, names.held, names.ids]
        keys += [names.wake, *names.slice_keys("1000.5000")]
        assert {key_slot(key.encode()) for key in keys} == {names.slot}


def test_namespaces_do_not_share_keys() -> None:
    assert not set(tags("a", 32)) & set(tags("b", 32))
    assert not set(tags("a", 32)) & set(tags("a-1", 32))


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "ä", "x" * 65, None, 5])
def test_a_namespace_that_could_break_a_key_is_refused(name: object) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        check_namespace(name)


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_a_count_of_partitions_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match="partitions"):
        Keyspace("main", count)


@given(st.text(min_size=1, max_size=20), st.integers(1, 4096))
def test_any_name_has_a_partition(name: str, count: int) -> None:
    assert 0 <= partition_of(name, count) < count


def test_names_spread_over_the_partitions() -> None:
    held = Counter(partition_of(f"order-{i}", 32) for i in range(32_000))
    assert len(held) == 32
    assert max(held.values()) < 1_300


@given(st.integers(0, 2**42), st.sampled_from(WIDTHS_MS))
def test_a_slice_holds_the_times_it_is_named_after(due_ms: int, width_ms: int) -> None:
    place = Slice.at(due_ms, width_ms)
    assert place.start_ms <= due_ms < place.end_ms
    assert place.start_ms % width_ms == 0
    assert Slice.parse(place.name) == place == Slice.parse(place.name.encode())


@given(st.integers(0, 2**42), st.integers(0, 2**20 - 1))
def test_a_score_keeps_second_and_incarnation_exactly(start_ms: int, r: int) -> None:
    score = float(repr(score_of(start_ms, r)))
    assert (int(score), r_of(score)) == (start_ms // 1000, r)


@given(addresses)
def test_an_address_survives_packing_and_text(address: Address) -> None:
    packed = address.pack()
    assert len(packed) == 14
    assert Address.unpack(address.partition, packed) == address
    assert Address.parse(address.text()) == address


@given(addresses)
def test_an_address_makes_a_generated_id(address: Address) -> None:
    assert GENERATED.fullmatch(f"{'0' * 32}~{address.text()}")
