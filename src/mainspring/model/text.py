"""Texts from outside, made safe to store and show: cleaned, redacted, with suggestions for unknown names."""

from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import Any

from .errors import InvalidInput


def clean(text: str) -> str:
    """Replace lone surrogates: they come from bytes that are not UTF-8, and cannot be encoded again."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def plain(text: Any) -> Any:
    """A text as a `str` proper: encoders refuse subclasses, and an enum's own text is another one. What is no text is
    left to those who check it."""
    return text if type(text) is str or not isinstance(text, str) else str.__str__(text)


def check_text(value: object, field: str) -> str:
    """Return a cleaned text; refuse anything that is not a text."""
    value = plain(value)
    if not isinstance(value, str):
        raise InvalidInput(f"{field} is a {type(value).__name__}; give a text")
    return clean(value)


def describe(error: BaseException) -> str:
    """Describe an exception in one line, even if its own `str()` fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # it is somebody else's code, and this is how we tell of its errors
        return f"{name}, which cannot be put into words"
    return clean(f"{name}: {text}" if text else name)


def check_known(given: Iterable[object], known: Collection[str], what: str, besides: str = "") -> None:
    """Refuse the first name that `what` (a webhook, a queue) does not have; `besides` is what else there may be."""
    for name in given:
        if name not in known:
            meant = did_you_mean([str(name)], known)
            raise InvalidInput(f"{name} is not known of {what}; there are {', '.join(known)}{besides}{meant}")


def did_you_mean(names: Iterable[str], known: Collection[str]) -> str:
    """`; did you mean retries?`, or nothing where no name is near."""
    near = [match for name in names if (match := nearest(name, known)) is not None]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like this one; None if none is near."""
    from difflib import get_close_matches  # only for an error: it is slow to load

    return next(iter(get_close_matches(name, known, n=1)), None)


# Exceptions of foreign code without their messages, for logs. A message often contains the arguments of the handler;
# the type and the traceback do not.


def placed(error: BaseException) -> str:
    """`ValueError in charge (orders.py:12)`: its type, and where it was raised."""
    trace = error.__traceback__
    if trace is None:
        return type(error).__name__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_name} ({PurePath(code.co_filename).name}:{trace.tb_lineno})"


def redact(error: BaseException) -> BaseException:
    """A stand-in that every formatter of logs prints like `error`, with its frames and causes, but without a text."""
    return _stand_in(error, set())


def _stand_in(error: BaseException, seen: set[int]) -> BaseException:
    seen.add(id(error))
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if isinstance(error, BaseExceptionGroup):
        # The errors of a task group are worth more than the group.
        inner = [_stand_in(one, seen) for one in error.exceptions if id(one) not in seen]
        made: BaseException = type(kind.__name__, (BaseExceptionGroup,), named)("several", inner or [Exception()])
    else:
        made = type(kind.__name__, (BaseException,), named)()
    made.__traceback__ = error.__traceback__
    # A chain may lead back to where it began.
    if error.__cause__ is not None and id(error.__cause__) not in seen:
        made.__cause__ = _stand_in(error.__cause__, seen)
    elif error.__context__ is not None and id(error.__context__) not in seen and not error.__suppress_context__:
        made.__context__ = _stand_in(error.__context__, seen)
    made.__suppress_context__ = error.__suppress_context__
    return made
