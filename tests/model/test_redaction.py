"""Exceptions in logs: their types and frames, and nothing that they say."""

import traceback

import pytest

from mainspring.model.text import placed, redact


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
