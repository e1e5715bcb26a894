"""Texts that others wrote, made fit to be kept."""

from typing import Any

from .errors import InvalidInput


def clean(text: str) -> str:
    """Without lone surrogates: what came as bytes that are no UTF-8 cannot be written as UTF-8 again."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def plain(text: Any) -> Any:
    """A text as a `str` proper: encoders refuse subclasses, and an enum's own text is another one. What is no text is
    left to those who check it."""
    return text if type(text) is str or not isinstance(text, str) else str.__str__(text)


def check_text(value: object, field: str) -> str:
    """Any text at all."""
    value = plain(value)
    if not isinstance(value, str):
        raise InvalidInput(f"{field} is a {type(value).__name__}; give a text")
    return clean(value)


def told(error: BaseException) -> str:
    """An exception in one line, whatever its own text does."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # it is somebody else's code, and this is how we tell of its errors
        return f"{name}, which cannot be put into words"
    return clean(f"{name}: {text}" if text else name)
