"""Times as people write them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.limits import HORIZON_MS
from mainspring.model.times import check_horizon, delay_ms, expiry_ms, instant_ms

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("30m", 1_800_000),
        ("1h30m", 5_400_000),
        ("1.5h", 5_400_000),
        ("2d", 172_800_000),
        ("1w", 604_800_000),
        (" 5s ", 5_000),
        ("0s", 0),
        ("PT10M", 600_000),
        ("P1DT2H3M4.5S", 93_784_500),
        ("P2W", 1_209_600_000),
        ("pt1s", 1_000),
        ("8.3m", 498_000),
        ("16.1s", 16_100),
        ("1.1h0.27m", 3_976_200),
        ("PT4.03S", 4_030),
    ],
)
def test_a_delay_is_read_in_milliseconds(text: str, ms: int) -> None:
    assert delay_ms(text) == ms


def test_a_delay_is_rounded_up_so_that_nothing_fires_early() -> None:
    assert delay_ms("0.1ms") == 1
    assert delay_ms("PT0.0001S") == 1
    assert delay_ms(timedelta(microseconds=1)) == 1
    assert delay_ms(timedelta(minutes=30)) == 1_800_000


@pytest.mark.parametrize(
    "text", ["", "soon", "30", "30 m", "1h30", "-5s", "P", "PT", "P1M", "P1Y", "1h 30m", "5S", "٣m", "PT٣S"]
)
def test_a_value_that_is_no_delay_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match="'30m'"):
        delay_ms(text)


@pytest.mark.parametrize("text", ["9" * 300_000, "1s" * 100_000 + "9" * 100_000, "P" + "9" * 300_000])
def test_a_text_without_end_is_refused_as_fast_as_it_is_read(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a delay"):
        delay_ms(text)


@pytest.mark.parametrize("text", ["1" * 400 + "s", "99999999w", "P" + "9" * 30 + "D", "PT" + "9" * 400 + "S"])
def test_a_delay_of_more_than_ten_years_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="after is longer than ten years") as refused:
        delay_ms(text)
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize(
    ("text", "ms"),
    [("999s", 999_000), ("3600s", 3_600_000), ("1500ms", 1_500), ("20270101ms", 20_270_101), ("PT1H", 3_600_000)],
)
def test_an_expiry_may_be_a_delay_from_the_due_time(text: str, ms: int) -> None:
    assert expiry_ms(text, NOW_MS) == NOW_MS + ms


@pytest.mark.parametrize("text", ["2027-01-15T08:00:00Z", "20270115T080000Z", "2027-01-15 08:00:00+00:00"])
def test_an_expiry_may_be_a_time(text: str) -> None:
    assert expiry_ms(text, NOW_MS - 5) == NOW_MS
    with pytest.raises(InvalidInput, match="before the due time"):
        expiry_ms(text, NOW_MS + 1)


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(InvalidInput, match="negative"):
        delay_ms(timedelta(seconds=-1))


@pytest.mark.parametrize("delay", [30, 1.5, None, True])
def test_a_bare_number_is_no_delay_because_its_unit_is_unknown(delay: object) -> None:
    with pytest.raises(InvalidInput, match="after is of type"):
        delay_ms(delay)  # type: ignore[arg-type]


def test_the_error_names_the_field_that_was_wrong() -> None:
    with pytest.raises(InvalidInput, match="dedupe_window"):
        delay_ms("x", field="dedupe_window")


def test_an_instant_is_an_aware_datetime_epoch_milliseconds_or_iso_text() -> None:
    when = datetime(2027, 1, 15, 8, 0, 0, tzinfo=UTC)
    assert instant_ms(when) == NOW_MS
    assert instant_ms(NOW_MS) == NOW_MS
    assert instant_ms(float(NOW_MS)) == NOW_MS
    assert instant_ms("2027-01-15T08:00:00Z") == NOW_MS
    assert instant_ms("2027-01-15T10:00:00+02:00") == NOW_MS
    assert instant_ms(when.astimezone(timezone(timedelta(hours=-5)))) == NOW_MS


def test_an_instant_is_rounded_up_so_that_nothing_fires_early() -> None:
    assert instant_ms(NOW_MS + 0.25) == NOW_MS + 1
    assert instant_ms(datetime(2027, 1, 15, 8, 0, 0, 1, tzinfo=UTC)) == NOW_MS + 1


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(InvalidInput, match="naive"):
        instant_ms(datetime(2027, 1, 15))  # noqa: DTZ001
    with pytest.raises(InvalidInput, match="naive"):
        instant_ms("2027-01-15T08:00:00")


@pytest.mark.parametrize("when", [float("nan"), float("inf"), True, None, [], "tomorrow", "2030-01-01T00:00:00Z\0x"])
def test_a_value_that_is_no_instant_is_refused(when: object) -> None:
    with pytest.raises(InvalidInput, match=r"^at"):
        instant_ms(when)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (0, "seconds"), (1_893_488_400, "seconds"), (1_893_488_400.5, "seconds"), (10**11 - 1, "seconds"),
        (3 * 10**14, "microseconds"), (1_893_488_400_000_000.0, "microseconds"), (1_893_488_400 * 10**9, "nanoseconds"),
        (1 << 9000, "nanoseconds"),
    ],
)  # fmt: skip
def test_a_number_in_another_unit_is_refused_with_the_unit_it_looks_like(number: float, unit: str) -> None:
    with pytest.raises(InvalidInput, match=f"which looks like {unit}; give milliseconds, or a datetime") as refused:
        instant_ms(number)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("1893488400", "seconds"),
        ("1893488400.25", "seconds"),
        ("1893488400000000", "microseconds"),
        ("1893488400000000000", "nanoseconds"),
    ],
)
def test_the_digits_of_a_number_in_another_unit_are_refused_with_the_unit_too(text: str, unit: str) -> None:
    with pytest.raises(InvalidInput, match=f"^at is .*, which looks like {unit}; give milliseconds"):
        instant_ms(text)
    with pytest.raises(InvalidInput, match=f"^expires is .*, which looks like {unit}; give milliseconds"):
        expiry_ms(text, NOW_MS)


def test_the_digits_of_epoch_milliseconds_are_a_time_and_no_date_or_delay() -> None:
    assert instant_ms("1893488400000") == 1_893_488_400_000
    assert instant_ms("1893488400000.5") == 1_893_488_400_001
    assert instant_ms("1712010100930") == 1_712_010_100_930, "Python reads it as a minute of the year 1712"
    assert expiry_ms("1893488400000", NOW_MS) == 1_893_488_400_000
    with pytest.raises(InvalidInput, match="naive"):
        instant_ms("20300101")
    with pytest.raises(InvalidInput, match="is not a delay"):
        expiry_ms("30", NOW_MS)


def test_a_time_that_is_written_out_may_be_of_the_seventies() -> None:
    assert instant_ms("1970-01-01T00:00:01Z") == instant_ms(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == 1000
    assert instant_ms(10**11) == 10**11


def test_the_horizon_is_ten_years_and_a_refusal_suspects_the_unit() -> None:
    check_horizon(NOW_MS + HORIZON_MS, NOW_MS)
    check_horizon(10**11, NOW_MS)
    with pytest.raises(InvalidInput, match="looks like seconds"):
        check_horizon(10**11 - 1, NOW_MS)
    with pytest.raises(InvalidInput, match="microseconds"):
        check_horizon(NOW_MS * 1000, NOW_MS)
    with pytest.raises(InvalidInput, match="before 1970"):
        check_horizon(-1, NOW_MS)
