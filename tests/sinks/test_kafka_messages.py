"""Tasks become the same messages, whether they are made side by side or one by one."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mainspring.model.delivery import Body, Delivery, GivenDelivery
from mainspring.sinks.kafka import identity_of, messages_of
from tests.support.kafka_flights import START_MS, flight, plain, slice_from

UNUSUAL = {
    "an id": Body("kafka:t", b"x", "a/b, c"),
    "a lane": Body("kafka:t", b"x", None, "lane"),
    "both": Body("kafka:t", b"x", "id", "lane"),
    "overdue": Body("kafka:t", b"x", due_ms=START_MS - 5),
    "a retry": Body("kafka:t", b"x", original_due_ms=START_MS - 9, attempt=12, errors=("no",)),
    "bytes": Body("kafka:t", b"\0\xff", raw=True),
    "nothing": Body("kafka:t", b""),
}


def copied(chunk: Sequence[Delivery]) -> list[Any]:
    """As the library takes them: headers in their order, before the next message is made."""
    return [(value, key, list(headers.items())) for value, key, headers in messages_of(chunk)]


def by_hand(one: Delivery) -> Delivery:
    """The same delivery, of a kind that has no columns."""
    return GivenDelivery(one.body, one.namespace, one.idh, one.due_ms)


def test_plain_tasks_side_by_side_are_the_messages_they_are_one_by_one() -> None:
    chunk = plain(1_000)
    assert type(chunk[0]).columns(chunk) is not None
    assert copied(chunk) == [copied([by_hand(one)])[0] for one in chunk]


def test_a_message_says_its_key_its_value_and_four_headers() -> None:
    [(value, key, headers)] = copied(plain(5)[4:])
    id = plain(5)[4].idh.hex().encode()
    assert (value, key) == (b"4", id)
    assert headers == [
        ("idempotency-key", b"main/%b/%d" % (id, START_MS + 1)),
        ("id", id),
        ("due", b"%d" % (START_MS + 1)),
        ("attempt", b"1"),
    ]


@pytest.mark.parametrize("kind", UNUSUAL)
def test_one_task_of_another_kind_changes_nothing_for_those_beside_it(kind: str) -> None:
    chunk = [*plain(20), flight(99, UNUSUAL[kind], 7), *plain(20)]
    assert copied(chunk) == [copied([by_hand(one)])[0] for one in chunk]


def test_tasks_of_several_slices_keep_their_own_due_times() -> None:
    body = Body("kafka:t", b"x")
    chunk = [flight(number, body, 5, slice_from(START_MS + number * 1_000)) for number in range(3)]
    assert [dict(headers)["due"] for _, _, headers in copied(chunk)] == [
        b"%d" % (START_MS + number * 1_000 + 5) for number in range(3)
    ]


def test_tasks_of_a_named_target_are_messages_like_others() -> None:
    """These tasks were renamed: their entries name the target, their bodies the topic."""
    named = [flight(number, Body("target:shop", b"x")) for number in range(3)]
    aimed = [msgspec.structs.replace(one, body=Body("kafka:t", b"x")) for one in named]
    assert copied(aimed) == copied(named)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_report_finds_its_task_by_key_and_value(kind: str) -> None:
    chunk = [flight(1, UNUSUAL[kind])]
    [(value, key, _)] = copied(chunk)
    assert identity_of(chunk[0]) == (key, value)
