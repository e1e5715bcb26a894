"""Generated ids: random, and neighbours of one call share a partition."""

from binascii import crc_hqx
from itertools import groupby

import pytest

from mainspring.store.generated import STRETCH, GeneratedIds

SIZE = 16


def partitions_of(block: bytes, partitions: int) -> list[int]:
    return [crc_hqx(block[at : at + SIZE], 0) % partitions for at in range(0, len(block), SIZE)]


@pytest.mark.parametrize("partitions", [1, 3, 32, 100, 4096])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100, 1_000])
def test_every_id_has_sixteen_bytes_and_none_comes_twice(partitions: int, count: int) -> None:
    block = GeneratedIds(partitions).draw(count)
    assert len(block) == SIZE * count
    assert len({block[at : at + SIZE] for at in range(0, len(block), SIZE)}) == count


@pytest.mark.parametrize("partitions", [32, 100, 4096])
def test_neighbours_of_a_call_share_a_partition(partitions: int) -> None:
    runs = [len(list(run)) for _, run in groupby(partitions_of(GeneratedIds(partitions).draw(100), partitions))]
    assert runs == [25, 25, 25, 25]


def test_calls_go_round_all_partitions() -> None:
    ids = GeneratedIds(32)
    seen = [partitions_of(ids.draw(STRETCH), 32)[0] for _ in range(64)]
    assert sorted(seen) == sorted([*range(32)] * 2)


def test_a_single_task_may_go_anywhere() -> None:
    ids = GeneratedIds(4)
    assert {partitions_of(ids.draw(1), 4)[0] for _ in range(500)} == {0, 1, 2, 3}


def test_a_large_call_is_left_to_chance() -> None:
    assert set(partitions_of(GeneratedIds(32).draw(STRETCH * 32), 32)) == set(range(32))
