"""Exceptions in logs and dead letters: bounded, on lines of their own, and without messages if they are redacted."""

import traceback

import pytest

from mainspring.model.limits import MAX_TRACEBACK_BYTES
from mainspring.model.text import bounded, describe, escape, placed, redact, trace_of


class OutOfStock(Exception):
    pass


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001  # the test's own
        return caught


def shown(error: BaseException) -> str:
    made = redact(error)
    return "".join(traceback.format_exception(type(made), made, made.__traceback__))


def test_a_stand_in_is_printed_like_the_error_without_its_words() -> None:
    text = shown(raised(OutOfStock("canary"), raised(KeyError("canary"))))
    assert "in raised" in text
    assert "test_redaction.OutOfStock\n" in text
    assert "KeyError\n" in text
    assert "direct cause" in text
    assert "canary" not in text


def test_the_errors_of_a_task_group_are_shown_each() -> None:
    text = shown(raised(ExceptionGroup("canary", [raised(ValueError("canary")), raised(OSError("canary"))])))
    assert "ValueError\n" in text
    assert "OSError\n" in text
    assert "canary" not in text


def test_a_chain_that_leads_back_ends() -> None:
    first, second = raised(ValueError("canary")), raised(KeyError("canary"))
    first.__context__, second.__context__ = second, first
    assert "canary" not in shown(first)


@pytest.mark.parametrize(
    "error", [SyntaxError("canary", ("canary", 1, 1, "canary")), UnicodeDecodeError("x", b"y", 0, 1, "canary")]
)
def test_errors_with_fields_of_their_own_keep_them_to_themselves(error: Exception) -> None:
    assert "canary" not in shown(raised(error))


def test_an_error_is_placed_where_it_was_raised() -> None:
    assert placed(raised(OutOfStock("canary"))).startswith("OutOfStock in raised (test_redaction.py:")
    assert placed(OutOfStock("canary")) == "OutOfStock"


def test_a_bounded_error_is_printed_with_what_it_says() -> None:
    text = trace_of(raised(OutOfStock("no shirts"), raised(KeyError("size"))))
    assert "in raised" in text
    assert "test_redaction.OutOfStock: no shirts" in text
    assert "KeyError: 'size'" in text


def test_a_message_cannot_look_like_a_line_of_the_log() -> None:
    text = trace_of(raised(OutOfStock("a\n12:00:00 error all is lost\x1b[2J\x9b\u2028")))
    assert text.splitlines()[-1].endswith("OutOfStock: a\\n12:00:00 error all is lost\\x1b[2J\\x9b\\u2028")
    assert escape("tab\tand \ud800") == "tab\tand ?"


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    def dig(depth: int) -> None:
        if depth:
            dug(depth - 1)
        raise OutOfStock("x" * 100_000)

    def dug(depth: int) -> None:
        dig(depth)

    with pytest.raises(OutOfStock) as caught:
        dig(400)
    text = trace_of(caught.value)
    assert len(text.encode()) <= MAX_TRACEBACK_BYTES
    assert text.startswith("Traceback (most recent call last):\n")
    assert "\n... cut ...\n" in text
    assert text.endswith("frames in the middle are left out)")
    whole = "".join(traceback.format_exception(bounded(caught.value)))
    assert "xxx...\n" in whole
    assert len(whole) < 20_000


def test_a_long_chain_is_cut() -> None:
    error = raised(ValueError("0"))
    for number in range(1, 500):
        error = raised(ValueError(str(number)), error)
    text = "".join(traceback.format_exception(bounded(error)))
    assert "ValueError: 499\n" in text
    assert text.count("ValueError: ") == 10


def test_an_error_that_was_not_raised_or_has_no_text_is_logged_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert trace_of(None) == ""
    assert trace_of(ValueError("not raised")) == ""
    assert "Mute" in trace_of(raised(Mute()))
    assert describe(Mute()) == "Mute, whose message cannot be read"


def test_an_exception_whose_own_properties_raise_is_shown_like_any_other() -> None:
    def unreadable(_error: object) -> None:
        raise RuntimeError("not this one")

    names = ("__class__", "__cause__", "__context__")
    odd = type("Odd", (Exception,), dict.fromkeys(names, property(unreadable)))
    text = trace_of(raised(ValueError("outer"), raised(odd("odd"))))
    assert "Odd: odd" in text
    assert "ValueError: outer" in text
    assert "Odd" in "".join(traceback.format_exception(redact(raised(odd("odd")))))
