"""Identity: what may be an id, and the key that stays the same for every attempt."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.ids import check_id, check_name, idempotency_key, idh_of


@pytest.mark.parametrize("name", ["a", "order-42", "{x}:1", "a b\n", "🙂" * 64, "x" * 256, "%2F", "\x00"])
def test_any_text_of_1_to_256_bytes_is_a_name(name: str) -> None:
    assert check_name(name, "id") == name
    assert check_id(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("x" * 257, "257 bytes"),
        ("🙂" * 65, "260 bytes"),
        ("\ud800", "surrogate"),
        (7, "int"),
        (b"a", "bytes"),
        (None, "NoneType"),
    ],
)
def test_an_impossible_name_is_refused_with_the_reason(name: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=rf"lane.*{why}"):
        check_name(name, "lane")


@pytest.mark.parametrize("taken", ["0" * 32 + "~0.rs.mywpiww0.b8g0.7", "f" * 32 + "~0.0.0.0.0"])
def test_the_form_of_generated_ids_is_reserved(taken: str) -> None:
    with pytest.raises(InvalidInput, match="generated"):
        check_id(taken)


@pytest.mark.parametrize(
    "free", ["0" * 31, "0" * 32, "0" * 33, "A" * 32, "0" * 32 + "~", "0" * 32 + "~a", "0" * 32 + "\n"]
)
def test_an_id_that_only_looks_generated_is_free(free: str) -> None:
    assert check_id(free) == free


def test_an_id_is_known_by_16_bytes_of_its_hash() -> None:
    assert len(idh_of("order-42")) == 16
    assert idh_of("order-42") != idh_of("order-43")


def test_an_idempotency_key_has_three_parts_with_any_id() -> None:
    assert idempotency_key("main", "a/b\r\nx: y", 5) == "main/a%2Fb%0D%0Ax%3A%20y/5"
    assert idempotency_key("main", "ä", 5).isascii()


def test_different_ids_never_share_a_key() -> None:
    assert idempotency_key("main", "a/1", 5) != idempotency_key("main", "a%2F1", 5)
    assert idempotency_key("main", "a", 5) != idempotency_key("main", "a", 6)
    assert idempotency_key("main", "a", 5) != idempotency_key("other", "a", 5)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_key_quotes_an_id_as_urls_do(task_id: str) -> None:
    assert idempotency_key("main", task_id, 5) == f"main/{quote(task_id, safe='')}/5"
