"""The plan: even, stable, and the same for everyone who makes it from the same state."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mainspring.cluster import assign

NODES = st.lists(st.sampled_from([f"node-{i}" for i in range(12)]), min_size=1, max_size=8, unique=True)


def equal(*nodes: str) -> dict[str, int]:
    return dict.fromkeys(nodes, 100)


def moves(old: list[str], new: list[str]) -> int:
    return sum(a != b for a, b in zip(old, new, strict=True))


@given(st.integers(1, 128), NODES)
def test_equal_nodes_differ_by_at_most_one_partition(partitions: int, nodes: list[str]) -> None:
    counts = Counter(assign([""] * partitions, equal(*nodes)))
    held = [counts[node] for node in nodes]
    assert sum(held) == partitions
    assert max(held) - min(held) <= 1


@given(st.integers(1, 128), NODES, NODES)
def test_only_as_many_partitions_move_as_must(partitions: int, before: list[str], after: list[str]) -> None:
    old = assign([""] * partitions, equal(*before))
    new = assign(old, equal(*after))
    counts = Counter(new)
    assert max(counts[node] for node in after) - min(counts[node] for node in after) <= 1
    orphaned = sum(owner not in after for owner in old)
    # Only nodes with more than the smallest share must give some away.
    over = sum(max(0, n - partitions // len(after)) for node, n in Counter(old).items() if node in after)
    assert orphaned <= moves(old, new) <= orphaned + over


@given(st.integers(1, 128), NODES)
def test_a_plan_that_fits_is_not_touched(partitions: int, nodes: list[str]) -> None:
    plan = assign([""] * partitions, equal(*nodes))
    assert assign(plan, equal(*nodes)) == plan
    assert assign(plan, equal(*reversed(nodes))) == plan


def test_the_fifth_node_gets_its_share_and_nothing_else_moves() -> None:
    four = assign([""] * 32, equal("a", "b", "c", "d"))
    five = assign(four, equal("a", "b", "c", "d", "e"))
    assert moves(four, five) == five.count("e") == 6


def test_a_node_that_goes_leaves_the_others_what_they_have() -> None:
    plan = assign([""] * 32, equal("a", "b", "c", "d"))
    without = assign(plan, equal("a", "b", "c"))
    assert moves(plan, without) == 8
    assert Counter(without).most_common()[-1][1] == 10


def test_weights_decide_the_share() -> None:
    counts = Counter(assign([""] * 32, {"large": 300, "small": 100}))
    assert counts == {"large": 24, "small": 8}


def test_more_nodes_than_partitions_leaves_some_without() -> None:
    counts = Counter(assign([""] * 2, equal("a", "b", "c")))
    assert sorted(counts.values()) == [1, 1]


def test_with_no_node_left_the_plan_stays() -> None:
    assert assign(["a", "b"], {}) == ["a", "b"]
