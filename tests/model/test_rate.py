"""Rates as people write them."""

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.flow import Limit, Rate


@pytest.mark.parametrize(
    ("value", "per_s", "at_once"),
    [
        ("100/s", 100, 10),
        ("5/s", 5, 1),
        (50, 50, 5),
        ("2.5", 2.5, 1),
        ("30 / m", 0.5, 1),
        ("3600/h burst 50", 1, 50),
        ("1/d", 1 / 86_400, 1),
    ],
)
def test_a_rate_is_read_and_written_the_same(value: object, per_s: float, at_once: int) -> None:
    rate = Rate.read(value)
    assert rate.per_s == pytest.approx(per_s)
    assert rate.at_once == at_once
    assert Rate.read(str(rate)).per_s == pytest.approx(per_s)
    assert Rate.read(str(rate)).at_once == at_once


@pytest.mark.parametrize("value", ["fast", "100/year", "-1/s", "0/s", True, None, "1/s burst"])
def test_a_value_that_is_no_rate_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="rate"):
        Rate.read(value)


def test_a_limit_without_anything_is_none() -> None:
    assert not Limit()
    assert Limit(concurrency=3)
    with pytest.raises(InvalidInput, match="concurrency is 0"):
        Limit(concurrency=0)
