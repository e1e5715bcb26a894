"""Names of targets and queues."""

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.targets.names import check_target, receiver_of


@pytest.mark.parametrize(
    ("target", "scheme"),
    [
        ("kafka:ticks", "kafka"),
        ("http://localhost:8000/hook", "http"),
        ("https://example.com/" + "x" * 1000, "https"),
        ("queue:mail/expire_order", "queue"),
        ("command:cleanup", "command"),
        ("log:", "log"),
        ("null:", "null"),
    ],
)
def test_a_target_says_its_scheme(target: str, scheme: str) -> None:
    assert check_target(target) == scheme


@pytest.mark.parametrize("target", ["", "ticks", "ftp://x", "KAFKA:ticks", " kafka:ticks", ":x"])
def test_an_unknown_scheme_is_refused_with_those_that_exist(target: str) -> None:
    with pytest.raises(InvalidInput, match=r"command:, http:, https:, kafka:"):
        check_target(target)


@pytest.mark.parametrize("target", ["kafka:", "http://", "queue:", "command:", "https:///"])
def test_a_target_that_names_nothing_is_refused(target: str) -> None:
    with pytest.raises(InvalidInput, match="names nothing"):
        check_target(target)


@pytest.mark.parametrize("target", ["kafka:" + "x" * 251, "queue:" + "ä" * 126, "http://x/" + "x" * 8192])
def test_a_target_that_is_too_long_is_refused(target: str) -> None:
    with pytest.raises(InvalidInput, match="longer than"):
        check_target(target)


@pytest.mark.parametrize("target", [None, 5, b"kafka:ticks"])
def test_a_target_of_another_type_is_refused(target: object) -> None:
    with pytest.raises(InvalidInput, match="target is of type"):
        check_target(target)


@pytest.mark.parametrize(
    ("target", "receiver"),
    [
        ("https://shop.example:8443/a?b=1", "https://shop.example:8443"),
        ("queue:mail/send", "queue:mail"),
        ("command:backup", "queue:commands"),
        ("command:report", "queue:reports"),
        ("kafka:ticks", "kafka:ticks"),
        ("target:ledger", "target:ledger"),
    ],
)
def test_each_target_has_its_receiver(target: str, receiver: str) -> None:
    assert receiver_of(target, {"report": "reports"}) == receiver


def test_without_queues_each_command_is_its_own_receiver() -> None:
    assert receiver_of("command:backup") == "command:backup"
