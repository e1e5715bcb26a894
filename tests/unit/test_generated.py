"""Generated ids: random, and neighbours of one call share a partition."""

from binascii import crc_hqx
from collections import Counter
from itertools import groupby

import pytest

from mainspring.store.generated import LARGE, SHARE, STRETCH, GeneratedIds

SIZE = 16


def partitions_of(block: bytes, partitions: int) -> list[int]:
    return [crc_hqx(block[at : at + SIZE], 0) % partitions for at in range(0, len(block), SIZE)]


@pytest.mark.parametrize("partitions", [1, 3, 32, 100, 4096])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1_000, 20_000, 70_000])
def test_every_id_has_sixteen_bytes_and_none_comes_twice(partitions: int, count: int) -> None:
    block = GeneratedIds(partitions).draw(count)
    assert len(block) == SIZE * count
    assert len({block[at : at + SIZE] for at in range(0, len(block), SIZE)}) == count


@pytest.mark.parametrize("partitions", [32, 100, 4096])
def test_neighbours_of_a_call_share_a_partition(partitions: int) -> None:
    runs = [len(list(run)) for _, run in groupby(partitions_of(GeneratedIds(partitions).draw(1_000), partitions))]
    assert runs == [250, 250, 250, 250]


def test_calls_go_round_all_partitions() -> None:
    ids = GeneratedIds(32)
    seen = [partitions_of(ids.draw(STRETCH), 32)[0] for _ in range(64)]
    assert sorted(seen) == sorted([*range(32)] * 2)


def test_a_single_task_may_go_anywhere() -> None:
    ids = GeneratedIds(4)
    assert {partitions_of(ids.draw(1), 4)[0] for _ in range(500)} == {0, 1, 2, 3}


def test_a_large_call_is_left_to_chance() -> None:
    assert set(partitions_of(GeneratedIds(32).draw(STRETCH * 32), 32)) == set(range(32))


@pytest.mark.parametrize("partitions", [1, 3, 32, 100])
def test_in_a_large_call_what_is_due_in_one_second_shares_a_partition(partitions: int) -> None:
    dues_ms = [1_000 * (n % 600) + n % 1_000 for n in range(LARGE * 100)]
    block = GeneratedIds(partitions).draw_by_second(dues_ms)
    assert len({block[at : at + SIZE] for at in range(0, len(block), SIZE)}) == len(dues_ms)
    seconds: dict[int, set[int]] = {}
    for due_ms, partition in zip(dues_ms, partitions_of(block, partitions), strict=True):
        seconds.setdefault(due_ms // 1000, set()).add(partition)
    assert all(len(found) == 1 for found in seconds.values())
    counts = Counter(next(iter(found)) for found in seconds.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == partitions


def test_a_crowded_second_is_spread_evenly() -> None:
    """One second is crowded, and the others are far from it: its tasks go round all partitions."""
    dues_ms = [5_000] * (SHARE * 64) + [1_000 * n for n in range(100, 700)]
    counts = Counter(partitions_of(GeneratedIds(32).draw_by_second(dues_ms), 32)[: SHARE * 64])
    assert counts == dict.fromkeys(range(32), 2 * SHARE)


def test_where_slices_fill_by_themselves_nothing_is_chosen() -> None:
    ids = GeneratedIds(32)
    runs = groupby(partitions_of(ids.draw_by_second([5_000 + n % 2_000 for n in range(8_192)]), 32))
    assert max(len(list(run)) for _, run in runs) < 10


def test_a_second_falls_into_another_partition_with_every_call() -> None:
    ids = GeneratedIds(32)
    dues_ms = [1_000 * (n % 64) for n in range(LARGE * 32)]
    assert len({partitions_of(ids.draw_by_second(dues_ms), 32)[0] for _ in range(300)}) == 32
