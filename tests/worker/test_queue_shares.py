"""How a worker divides its room between queues, and where it asks."""

import random
from collections import Counter

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.queue_rules import parse_queues
from mainspring.worker.worker import ReadyQueues


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


def turn(ready: ReadyQueues, room: int, left: dict[tuple[int, str], int]) -> Counter[str]:
    """Ask once for this many jobs, and take what is there; return what each queue got."""
    asks = ready.asks(ready.split(room, ready.queues))
    assert sum(sum(shares.values()) for shares in asks.values()) <= room
    assert all(most > 0 for shares in asks.values() for most in shares.values())
    came: Counter[tuple[int, str]] = Counter()
    for partition, shares in asks.items():
        for queue, most in shares.items():
            place = partition, queue
            came[place] = min(most, left.get(place, 0))
            left[place] = left.get(place, 0) - came[place]
    ready.came(asks, came.elements())
    got: Counter[str] = Counter()
    for (_, queue), count in came.items():
        got[queue] += count
    return got


def served(ready: ReadyQueues, rounds: int, left: dict[tuple[int, str], int], room: int | None = None) -> Counter[str]:
    """What each queue got in so many rounds, of which every hundredth begins with a poll."""
    got: Counter[str] = Counter()
    dice = random.Random(1)
    for number in range(rounds):
        if number % 100 == 0:
            ready.add_all()
        got += turn(ready, room or dice.randint(1, 5), left)
    return got


@pytest.mark.parametrize("room", [None, 1, 7, 64])
def test_full_queues_share_by_weight_also_one_job_at_a_time(room: int | None) -> None:
    ready = ReadyQueues({"mail": 3, "reports": 1}, 1)
    got = served(ready, 2000, {(0, "mail"): 10**6, (0, "reports"): 10**6}, room)
    assert got["mail"] / got["reports"] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("room", [1, 2, 8, 64])
def test_weights_hold_with_any_spread_of_tasks_over_partitions(room: int) -> None:
    left = {(5, "high"): 10**6} | {(partition, "low"): 10**6 for partition in range(32)}
    got = served(ReadyQueues({"high": 3, "low": 1}, 32), 2000, left, room)
    assert got["high"] / got["low"] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("room", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("first_empty", ["high", "low"])
def test_a_queue_that_runs_empty_leaves_all_room_to_the_other(room: int, first_empty: str) -> None:
    left = {(5, "high"): 10**6, (5, "low"): 10**6} | {(5, first_empty): 50}
    got = served(ReadyQueues({"high": 3, "low": 1}, 8), 1000, left, room)
    assert got[first_empty] == 50
    assert got.total() > 0.6 * 1000 * room


def test_room_that_one_queue_does_not_use_goes_to_the_others() -> None:
    got = served(ReadyQueues({"mail": 3, "reports": 1}, 1), 100, {(0, "reports"): 10**6}, 64)
    assert got["reports"] > 6000


@pytest.mark.parametrize("named", [True, False])
def test_a_message_that_names_a_queue_makes_no_other_one_worth_asking(named: bool) -> None:
    ready = ReadyQueues({"high": 3, "low": 1}, 8)
    ready.add_all()
    left = {(5, "high"): 10**6}
    for _ in range(100):
        turn(ready, 1, left)
    assert ready.queues == ["high"]
    ready.add(5, ["high", "another worker's"] if named else ())
    assert ready.queues == (["high"] if named else ["high", "low"])
    ready = ReadyQueues({"high": 3, "low": 1}, 8)
    ready.add(5, ["another worker's"] if named else ())
    assert ready.queues == ([] if named else ["high", "low"])


def test_a_queue_that_a_message_names_is_no_longer_taken_for_empty() -> None:
    ready = ReadyQueues({"high": 3, "low": 1}, 8)
    ready.add_all()
    left = {(5, "high"): 10**6}
    for _ in range(100):
        turn(ready, 1, left)
    ready.add_all()  # of "low" eight partitions are worth asking again, but one round in eight asks one of them
    left[7, "low"] = 1
    ready.add(7, ["low"])
    assert sum((turn(ready, 1, left) for _ in range(40)), Counter())["low"] == 1


def test_strict_queues_are_served_in_order() -> None:
    ready = ReadyQueues({"now": 1, "soon": 9, "late": 1}, 1, strict=True)
    assert ready.split(10, ["now", "soon", "late"]) == {}
    ready.add_all()
    assert ready.split(10, ["late", "soon", "now"]) == {"now": 10}
    assert ready.split(10, ["late", "soon"]) == {"soon": 10}


def test_partitions_that_called_are_asked_and_those_that_are_empty_are_not() -> None:
    ready = ReadyQueues({"mail": 1}, 8)
    assert ready.queues == []
    ready.add(3)
    ready.add(5)
    asks = ready.asks({"mail": 10})
    assert asks == {3: {"mail": 5}, 5: {"mail": 5}}
    ready.came(asks, [(3, "mail")] * 5 + [(5, "mail")] * 2)
    assert ready.asks({"mail": 10}) == {3: {"mail": 10}}


@pytest.mark.parametrize("queues", [(), ("mail",)])
def test_a_call_that_comes_while_a_partition_is_asked_is_not_forgotten(queues: tuple[str, ...]) -> None:
    ready = ReadyQueues({"mail": 1}, 8)
    ready.add(3)
    asks = ready.asks({"mail": 10})
    ready.add(3, queues)
    ready.came(asks, [])
    assert ready.asks({"mail": 10}) == {3: {"mail": 10}}
    ready.came({3: {"mail": 10}}, [])
    assert ready.queues == []


def test_all_partitions_get_their_turn() -> None:
    ready = ReadyQueues({"mail": 1}, 8)
    ready.add_all()
    seen: set[int] = set()
    for _ in range(20):
        asks = ready.asks({"mail": 2})
        ready.came(asks, [(p, "mail") for p, queues in asks.items() for _ in range(queues["mail"])])
        seen |= asks.keys()
    assert seen == set(range(8))
