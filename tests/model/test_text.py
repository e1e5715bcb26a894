"""Texts of others are made fit to be kept."""

from mainspring.model.delivery import Dead, Retry
from mainspring.model.job import Result, decode_result
from mainspring.model.text import clean, describe


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_lone_surrogates_are_replaced_and_nothing_else() -> None:
    assert clean("caf\udce9 é \ud800") == "caf? é ?"
    assert clean("plain") == "plain"


def test_reasons_of_outcomes_with_any_text_can_be_written() -> None:
    assert (Retry("a\udce9").reason, Dead("b\udce9").reason) == ("a?", "b?")


def test_an_exception_is_described_even_if_its_own_text_fails() -> None:
    assert describe(ValueError("bad \udce9")) == "ValueError: bad ?"
    assert describe(KeyError()) == "KeyError"
    assert describe(Unspeakable()) == "Unspeakable, whose message cannot be read"


def test_a_result_is_kept_without_what_cannot_be_written() -> None:
    kept = decode_result(Result("done", value="x\udce9", log=("y\udce9",)).encode())
    assert (kept.ending, kept.value, kept.log) == ("done", None, ())
    assert "cannot be stored" in kept.reason
