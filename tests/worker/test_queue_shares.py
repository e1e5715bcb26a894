"""How a worker divides its room between queues, and where it asks."""

import random
from collections import Counter

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.queue_rules import parse_queues
from mainspring.worker.worker import PartitionHints, Shares


def test_queues_are_read_with_their_weights_in_order() -> None:
    assert list(parse_queues("mail:3, reports:1,rest").items()) == [("mail", 3), ("reports", 1), ("rest", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a name is missing"),
        ("mail,,x", "a name is missing"),
        ("mail:0", "the weight of mail is '0'"),
        ("mail:x", "the weight of mail is 'x'"),
        ("mail:1001", "from 1 to 1000"),
        ("mail:1:2", "the weight of mail is '1:2'"),
        ("mail,mail:2", "mail is named twice"),
        ("ma il", "queue 'ma il'"),
    ],
)
def test_a_wrong_list_of_queues_is_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_queues(text)


def served(shares: Shares, rounds: int, backlog: dict[str, int], room: int | None = None) -> dict[str, int]:
    """What each queue got in so many rounds."""
    got = dict.fromkeys(backlog, 0)
    left = dict(backlog)
    dice = random.Random(1)
    for _ in range(rounds):
        most = room or dice.randint(1, 5)
        asks = shares.split(most, [name for name, count in backlog.items() if count])
        assert 0 < sum(asks.values()) <= most
        came = {name: min(count, left[name]) for name, count in asks.items()}
        for name, count in came.items():
            got[name] += count
            left[name] -= count
        shares.came(asks, came, [name for name, count in left.items() if count])
    return got


def test_full_queues_share_by_weight_also_one_job_at_a_time() -> None:
    for room in (None, 1, 7, 64):
        got = served(Shares({"mail": 3, "reports": 1}), 2000, {"mail": 10**6, "reports": 10**6}, room)
        assert got["mail"] / got["reports"] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("room", [1, 2, 8, 64])
def test_weights_hold_however_the_tasks_lie_in_partitions(room: int) -> None:
    shares, hints = Shares({"high": 3, "low": 1}), PartitionHints(["high", "low"], 32)
    hints.add_all()
    left = {(5, "high"): 10**6} | {(partition, "low"): 10**6 for partition in range(32)}
    got = Counter[str]()
    for round_ in range(2000):
        if round_ % 100 == 0:
            hints.add_all()  # the poll, once a second
        wanted = shares.split(room, hints.having())
        asks = hints.asks(wanted)
        came = [
            (partition, queue)
            for partition, queues in asks.items()
            for queue, most in queues.items()
            for _ in range(min(most, left.get((partition, queue), 0)))
        ]
        hints.came(asks, came)
        shares.came(wanted, Counter(queue for _, queue in came), hints.having())
        got.update(queue for _, queue in came)
    assert got["high"] / got["low"] == pytest.approx(3, rel=0.05)


def test_what_one_queue_does_not_use_goes_to_the_others() -> None:
    got = served(Shares({"mail": 3, "reports": 1}), 100, {"mail": 0, "reports": 10**6}, 64)
    assert got == {"mail": 0, "reports": 6400}
    got = served(Shares({"mail": 9, "reports": 1}), 100, {"mail": 5, "reports": 10**6}, 64)
    assert got["mail"] == 5
    assert got["reports"] > 5000


@pytest.mark.parametrize("room", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("first_empty", ["high", "low"])
def test_a_queue_that_runs_empty_leaves_all_room_to_the_other(room: int, first_empty: str) -> None:
    left = {"high": 10**6, "low": 10**6, first_empty: 50}
    shares, hints = Shares({"high": 3, "low": 1}), PartitionHints(["high", "low"], 8)
    got = Counter[str]()
    for round_ in range(1000):
        if round_ % 100 == 0:
            hints.add_all()
        wanted = shares.split(room, hints.having())
        asks = hints.asks(wanted)
        came = [
            (partition, queue)
            for partition, queues in asks.items()
            for queue, most in queues.items()
            for _ in range(min(most, left[queue] if partition == 5 else 0))
        ]
        hints.came(asks, came)
        counts = Counter(queue for _, queue in came)
        shares.came(wanted, counts, hints.having())
        got.update(counts)
        left = {queue: count - counts[queue] for queue, count in left.items()}
    assert got[first_empty] == 50
    assert sum(got.values()) > 0.6 * 1000 * room


def test_strict_queues_are_served_in_order() -> None:
    shares = Shares({"now": 1, "soon": 9, "late": 1}, strict=True)
    assert shares.split(10, ["late", "soon", "now"]) == {"now": 10}
    assert shares.split(10, ["late", "soon"]) == {"soon": 10}
    assert shares.split(10, []) == {}


def test_partitions_that_called_are_asked_and_those_that_are_empty_are_not() -> None:
    hints = PartitionHints(["mail"], 8)
    assert hints.having() == []
    hints.add(3)
    hints.add(5)
    asks = hints.asks({"mail": 10})
    assert asks == {3: {"mail": 5}, 5: {"mail": 5}}
    hints.came(asks, [(3, "mail")] * 5 + [(5, "mail")] * 2)
    assert hints.asks({"mail": 10}) == {3: {"mail": 10}}


def test_a_call_that_comes_while_a_partition_is_asked_is_not_forgotten() -> None:
    hints = PartitionHints(["mail"], 8)
    hints.add(3)
    asks = hints.asks({"mail": 10})
    hints.add(3)
    hints.came(asks, [])
    assert hints.asks({"mail": 10}) == {3: {"mail": 10}}
    hints.came({3: {"mail": 10}}, [])
    assert hints.having() == []


def test_never_more_is_asked_for_than_there_is_room() -> None:
    hints = PartitionHints(["mail", "reports"], 32)
    hints.add_all()
    asked = hints.asks({"mail": 3, "reports": 1})
    assert sum(sum(one.values()) for one in asked.values()) == 4
    assert all(count > 0 for one in asked.values() for count in one.values())


def test_all_partitions_get_their_turn() -> None:
    hints = PartitionHints(["mail"], 8)
    hints.add_all()
    seen: set[int] = set()
    for _ in range(20):
        asks = hints.asks({"mail": 2})
        hints.came(asks, [(p, "mail") for p, queues in asks.items() for _ in range(queues["mail"])])
        seen |= asks.keys()
    assert seen == set(range(8))
