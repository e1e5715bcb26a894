"""Generated ids: random, and neighbours of one call share a partition."""

from binascii import crc_hqx
from collections import Counter

import pytest

from mainspring.store.tasks.encode import GATHERED, STRETCH, GeneratedIds

SIZE = 16


def ids_of(ids: GeneratedIds, count: int) -> list[tuple[int, bytes]]:
    return [(stretch.partition, head + stretch.tail) for stretch in ids.draw(count) for head in stretch.heads]


@pytest.mark.parametrize("partitions", [1, 3, 32, 100, 4096])
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 1_000, 20_000, 70_000])
def test_every_id_is_unique_and_its_crc_gives_the_partition(partitions: int, count: int) -> None:
    drawn = ids_of(GeneratedIds(partitions), count)
    assert len({idh for _, idh in drawn}) == count
    assert all(len(idh) == SIZE for _, idh in drawn)
    assert all(crc_hqx(idh, 0) % partitions == partition for partition, idh in drawn)


@pytest.mark.parametrize("partitions", [32, 100, 4096])
def test_neighbours_of_a_call_share_a_partition(partitions: int) -> None:
    stretches = list(GeneratedIds(partitions).draw(1_000))
    assert [len(stretch.heads) for stretch in stretches] == [250, 250, 250, 250]
    assert len({stretch.partition for stretch in stretches}) == 4


def test_no_stretch_is_longer_than_one_may_be() -> None:
    stretches = list(GeneratedIds(3).draw(STRETCH * 20 + 1))
    assert max(len(stretch.heads) for stretch in stretches) <= STRETCH
    assert len(stretches) == 21


def test_calls_go_round_all_partitions() -> None:
    ids = GeneratedIds(32)
    seen = [next(ids.draw(STRETCH)).partition for _ in range(64)]
    assert sorted(seen) == sorted([*range(32)] * 2)


@pytest.mark.parametrize("stretches", [2, 32, 64])
def test_large_calls_bring_the_same_times_to_all_partitions(stretches: int) -> None:
    ids = GeneratedIds(32)
    seen = [next(ids.draw(stretches * STRETCH)).partition for _ in range(64)]
    assert sorted(seen) == sorted([*range(32)] * 2)


@pytest.mark.parametrize("stretches", [8, 9, 20])
def test_gathered_calls_that_fill_every_partition_begin_alike_several_times_in_a_row(stretches: int) -> None:
    ids = GeneratedIds(8, gathered=True)
    seen = [next(ids.draw(stretches * STRETCH)).partition for _ in range(8 * GATHERED)]
    assert seen == [partition for partition in range(8) for _ in range(GATHERED)]


def test_gathered_calls_that_do_not_fill_every_partition_go_round() -> None:
    ids = GeneratedIds(8, gathered=True)
    assert {next(ids.draw(7 * STRETCH)).partition for _ in range(8)} == set(range(8))


def test_a_single_task_may_go_anywhere() -> None:
    ids = GeneratedIds(4)
    assert {next(ids.draw(1)).partition for _ in range(500)} == {0, 1, 2, 3}


def test_a_large_call_fills_all_partitions_evenly() -> None:
    counts = Counter(partition for partition, _ in ids_of(GeneratedIds(32), STRETCH * 64))
    assert counts == dict.fromkeys(range(32), 2 * STRETCH)


def test_calls_have_nothing_in_common() -> None:
    ids = GeneratedIds(2)
    stretches = [next(ids.draw(2)) for _ in range(2_000)]
    assert len({stretch.tail for stretch in stretches}) == 2_000
    assert len({stretch.heads[0] for stretch in stretches}) > 1_990


def test_ids_differ_in_their_first_four_bytes() -> None:
    """That is what is kept of a cancelled task."""
    drawn = ids_of(GeneratedIds(32), 5_000)
    assert len({idh[:4] for _, idh in drawn}) > 4_980
    assert len({idh[:4] for _, idh in drawn[:STRETCH]}) == STRETCH


def test_ids_one_by_one_are_those_of_the_stretches() -> None:
    drawn = list(GeneratedIds(8).each(300))
    assert len(set(drawn)) == 300
    assert {len(idh) for idh in drawn} == {SIZE}
    assert len({crc_hqx(idh, 0) % 8 for idh in drawn}) == 2
