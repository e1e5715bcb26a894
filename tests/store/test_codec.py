"""Entries: nothing is lost on the way in and out, and damage is noticed."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.delivery import Body
from mainspring.model.errors import InvalidInput
from mainspring.model.task import encode_payload
from mainspring.store.codec import (
    FORWARD,
    HEADER_BYTES,
    INDEXED,
    LANE,
    MARK_BYTES,
    RESENT,
    TOMBSTONE,
    bin_head,
    decode,
    decode_many,
    decode_payload,
    entry,
    forward_mark,
    header,
    is_tombstone,
    short_head,
    target_of_all,
    without_headers,
)
from mainspring.store.keys import Address, Slice

IDH = bytes(range(16))


class Point(msgspec.Struct):
    x: float
    y: float | None


times = st.none() | st.integers(0, 2**45)
names = st.none() | st.text(min_size=1, max_size=30)
bodies = st.builds(
    Body, st.text(max_size=30), st.binary(max_size=300), names, names, times, times, st.integers(1, 99), times,
    st.booleans(), st.lists(st.text(max_size=9), max_size=3).map(tuple),
)  # fmt: skip


@given(bodies, st.integers(0, 3_599_999), st.sampled_from([0, INDEXED, LANE, INDEXED | LANE | RESENT]))
def test_an_entry_is_read_back_as_it_was_written(body: Body, offset_ms: int, flags: int) -> None:
    row = entry(offset_ms, flags, IDH, body)
    assert decode(row) == body
    assert (int.from_bytes(row[:4], "big"), row[4], row[5:HEADER_BYTES]) == (offset_ms, flags, IDH)
    assert not is_tombstone(row)


@given(st.lists(bodies, max_size=20))
def test_many_entries_are_read_at_once(some: list[Body]) -> None:
    assert decode_many(without_headers([entry(0, 0, IDH, body) for body in some])) == some


@given(st.lists(bodies, min_size=1, max_size=6))
def test_one_target_for_all_bodies_needs_bodies_without_more_than_id_and_lane(some: list[Body]) -> None:
    told = target_of_all(without_headers([entry(0, 0, IDH, body) for body in some]))
    if told is not None:
        assert [body.target for body in some] == [told] * len(some)
        assert some == [Body(told, body.payload, body.id, body.lane) for body in some]


@given(st.text(max_size=300), st.lists(st.binary(max_size=40), min_size=1, max_size=9), names)
def test_the_target_of_plain_tasks_is_returned(target: str, payloads: list[bytes], id: str | None) -> None:
    some = [entry(0, 0, IDH, Body(target, payload, id)) for payload in payloads]
    assert target_of_all(without_headers(some)) == target
    longer = [entry(0, 0, IDH, Body(target + "x", b"", id)), entry(0, 0, IDH, Body(target + "a", b"", id))]
    assert target_of_all(without_headers(some + longer)) is None


def test_fields_with_defaults_at_the_end_cost_nothing() -> None:
    assert entry(0, 0, IDH, Body("log:", b"1"))[HEADER_BYTES:] == b"\x92\xa4log:\xc4\x011"
    assert entry(0, 0, IDH, Body("log:", b"1", "a"))[HEADER_BYTES:] == b"\x93\xa4log:\xc4\x011\xa1a"


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536])
def test_the_hand_made_head_of_a_payload_is_that_of_msgpack(size: int) -> None:
    made = short_head("kafka:ticks") + bin_head(size) + bytes(size)
    assert made == msgspec.msgpack.encode(("kafka:ticks", bytes(size)))


def test_fields_of_a_newer_version_are_ignored() -> None:
    fields = [*msgspec.to_builtins(Body("log:", b"1"), builtin_types=(bytes,)), "a field from the future"]
    assert decode(bytes(HEADER_BYTES) + msgspec.msgpack.encode(fields)) == Body("log:", b"1")


@pytest.mark.parametrize("body", [b"", b"\x92", b"\x91\xa4log:", b"\x92\x01\x02", b"\x92\xa4log:\xc4\xffx", b"{}"])
def test_a_damaged_body_is_noticed(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(bytes(HEADER_BYTES) + body)


@pytest.mark.parametrize("payload", [None, True, 1, 1.5, "ä", [1, None], {"item": "user1234"}, {"a": {"b": []}}])
def test_json_values_come_back_as_they_were(payload: Any) -> None:
    data, raw = encode_payload(payload)
    assert not raw
    assert decode_payload(Body("log:", data, raw=raw)) == payload


@pytest.mark.parametrize("data", [b"{", b"", b'"\xff"', b"[" * 100_000], ids=["cut", "empty", "not text", "deep"])
def test_a_payload_that_is_not_json_is_shown_as_bytes(data: bytes) -> None:
    assert decode_payload(Body("log:", data)) == data


@pytest.mark.parametrize("payload", [b"\x00\xff", bytearray(b"x"), memoryview(b"xyz")])
def test_bytes_travel_untouched(payload: bytes) -> None:
    data, raw = encode_payload(payload)
    assert raw
    assert decode_payload(Body("log:", data, raw=raw)) == bytes(payload)


def test_a_payload_that_is_no_json_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for payload in (object(), {1j: 2}, loop, "\ud800"):
        with pytest.raises(InvalidInput, match="payload"):
            encode_payload(payload)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_express_is_refused_anywhere_in_a_payload(number: float) -> None:
    for payload in (number, [1, number], {"a": {"b": (None, number)}}, Point(1.0, number)):
        with pytest.raises(InvalidInput, match=f"payload holds {number}"):
            encode_payload(payload)


def test_none_and_the_word_null_are_payloads() -> None:
    for payload in (None, [None], {"a": None, "null": "null"}, Point(1.0, None)):
        assert encode_payload(payload) == (msgspec.json.encode(payload), False)


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    assert encode_payload(b"x" * 10, limit=10) == (b"x" * 10, True)
    with pytest.raises(InvalidInput, match="11 bytes; at most 10"):
        encode_payload(b"x" * 11, limit=10)
    with pytest.raises(InvalidInput, match="at most 10"):
        encode_payload("x" * 9, limit=10)  # the quotes count


@pytest.mark.parametrize("payload", [b"1", b"123456"], ids=["short", "as long as an address"])
@pytest.mark.parametrize("flags", [TOMBSTONE, TOMBSTONE | FORWARD, TOMBSTONE | RESENT, 255])
def test_an_entry_with_a_body_is_no_tombstone_with_any_flags(flags: int, payload: bytes) -> None:
    assert len(entry(7, 0, IDH, Body("log:", b"123456"))) == MARK_BYTES
    assert not is_tombstone(entry(7, flags, IDH, Body("log:", payload)))


def test_the_header_is_the_same_with_other_flags_and_another_body() -> None:
    first = entry(7, 0, IDH, Body("log:", b"1"))
    again = entry(7, RESENT | INDEXED, IDH, Body("log:", b"2"))
    assert header(first) == header(again)
    assert header(first) != header(entry(8, 0, IDH, Body("log:", b"1")))


def test_a_tombstone_is_four_bytes_or_carries_its_flag_and_no_body() -> None:
    row = entry(7, 0, IDH, Body("log:", b"1"))
    assert is_tombstone(IDH[:4])
    assert is_tombstone(row[:4] + bytes((TOMBSTONE | RESENT,)) + row[5:HEADER_BYTES])
    assert is_tombstone(forward_mark(row) + Address(0, Slice(1000, 1_800_000_000_000), 1, 2).pack())
    assert not is_tombstone(forward_mark(row)), "it has lost its address"
    assert not is_tombstone(b"")
    assert not is_tombstone(b"\xff" * 20)
    assert header(IDH[:4]) == IDH[:4]
