"""Arguments of handlers: what a payload must hold, and what the caller hears of a mistake."""

import dataclasses
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from mainspring.model.errors import InvalidInput
from mainspring.worker.context import Context
from mainspring.worker.handler import Arguments, WrongArguments


@dataclasses.dataclass
class Item:
    name: str
    count: int = 1


def sell(
    order: int, items: list[Item], *, note: str | None = None, at: datetime | None = None, ctx: Context
) -> None: ...


SELL = Arguments(sell, "shop/sell")


def read(payload: Any) -> dict[str, Any]:
    return SELL.read(msgspec.json.encode(payload), raw=False)


def test_a_payload_becomes_typed_arguments() -> None:
    found = read({"order": 1, "items": [{"name": "nut"}], "at": "2030-01-01T00:00:00Z"})
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert found == {"order": 1, "items": [Item("nut")], "note": None, "at": at}


def test_the_context_is_no_part_of_the_payload() -> None:
    assert SELL.context_name == "ctx"
    with pytest.raises(WrongArguments, match="unknown field `ctx`"):
        read({"order": 1, "items": [], "ctx": {}})


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"order": "1", "items": []}, "argument order of handler 'shop/sell': Expected `int`, got `str`"),
        ({"order": 1, "items": [{"name": 2}]}, r"argument items\[0\].name of handler 'shop/sell': Expected `str`"),
        ({"order": 1}, "arguments of handler 'shop/sell': Object missing required field `items`"),
        ({"order": 1, "items": [], "extra": 1}, "unknown field `extra`"),
        ([1, []], "Expected `object`, got `array`"),
        (None, "Expected `object`, got `null`"),
    ],
)
def test_arguments_that_do_not_fit_are_named(payload: Any, said: str) -> None:
    with pytest.raises(WrongArguments, match=said):
        read(payload)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe", b"\x80\x04\x95."])
def test_a_payload_that_is_no_json_is_refused(payload: bytes) -> None:
    with pytest.raises(WrongArguments, match="'shop/sell'"):
        SELL.read(payload, raw=False)


def test_msgpack_is_read_where_the_payload_is_bytes() -> None:
    def store(data: bytes) -> None: ...

    arguments = Arguments(store, "files/store")
    payload = arguments.write((), {"data": b"\x00\xff"}, "msgpack")
    assert isinstance(payload, bytes)
    assert arguments.read(payload, raw=True) == {"data": b"\x00\xff"}


def test_a_function_without_arguments_takes_nothing() -> None:
    def tick() -> None: ...

    arguments = Arguments(tick, "t/tick")
    assert arguments.read(b"null", raw=False) == arguments.read(b"{}", raw=False) == {}
    with pytest.raises(WrongArguments, match="unknown field `n`"):
        arguments.read(b'{"n":1}', raw=False)


def test_unannotated_arguments_take_any_json() -> None:
    def any_of(it, other=5): ...  # type: ignore[no-untyped-def]

    assert Arguments(any_of, "t/any").read(b'{"it":[1,null]}', raw=False) == {"it": [1, None], "other": 5}


def test_a_mistake_is_refused_before_anything_is_put() -> None:
    for args, kwargs, said in (
        ((), {"order": 1}, "missing a required argument: 'items'"),
        ((1, [], 3), {}, "too many positional arguments"),
        ((), {"order": "1", "items": []}, "argument order of handler 'shop/sell'"),
        ((), {"order": 1, "items": [], "typo": 1}, "unexpected keyword argument 'typo'"),
        ((1, object()), {}, "cannot be written as json"),
    ):
        with pytest.raises(InvalidInput, match=said):
            SELL.write(args, kwargs, "json")


def test_positional_arguments_and_defaults_make_a_small_payload() -> None:
    payload = SELL.write((7, [Item("nut", 2)]), {}, "json")
    assert msgspec.json.decode(msgspec.json.encode(payload)) == {"order": 7, "items": [{"name": "nut", "count": 2}]}


def test_signatures_that_no_payload_fits_are_refused_where_they_are_made() -> None:
    def many(*names: str) -> None: ...
    def extra(**names: str) -> None: ...
    def first(a: int, /) -> None: ...
    def strange(it: pytest.MonkeyPatch) -> None: ...
    def twice(a: Context, b: Context) -> None: ...

    for function, said in (
        (many, "takes named arguments only"),
        (extra, "takes named arguments only"),
        (first, "takes named arguments only"),
        (strange, "argument it is a .*which no payload can hold"),
        (twice, "asks for its Context twice: a, b"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Arguments(function, "t/f")
