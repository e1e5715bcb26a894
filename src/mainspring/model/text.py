"""Texts from outside, made safe to store and show: cleaned, escaped, redacted; and suggestions for unknown names."""

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from .errors import InvalidInput
from .limits import MAX_TRACEBACK_BYTES


def clean(text: str) -> str:
    """Replace lone surrogates: they come from bytes that are not UTF-8, and cannot be encoded again."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def plain(text: Any) -> Any:
    """Return a text as a plain `str`: encoders refuse subclasses, and the `str()` of an enum differs. Return any other
    value unchanged for the caller to check."""
    return text if type(text) is str or not isinstance(text, str) else str.__str__(text)


def check_text(value: object, field: str) -> str:
    """Return a cleaned text; refuse anything that is not a text."""
    value = plain(value)
    if not isinstance(value, str):
        raise InvalidInput(f"{field} is of type {type(value).__name__}; give a text")
    return clean(value)


CONTROLS: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that begin a new line or a command of the terminal, in one encoding or another, or turn around the order
in which text is shown."""


def escape(text: str) -> str:
    """Return the text as one line that a log or a terminal can show: control characters as `\\n` or `\\x1b`."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), clean(text))


def describe(error: BaseException) -> str:
    """Describe an exception in one line, even if its own `str()` fails."""
    name = type(error).__name__
    text = _words(error)
    if text is None:
        return f"{name}, whose message cannot be read"
    return clean(f"{name}: {text}" if text else name)


def _words(error: BaseException) -> str | None:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  # it is the application's code, and this is how its errors are reported
        return None


def raised_at(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception, past its own class: its properties are the application's code."""
    trace: TracebackType | None = getattr(BaseException, "__traceback__").__get__(error)  # noqa: B009
    return trace


def check_known(given: Iterable[object], known: Collection[str], what: str, besides: str = "") -> None:
    """Refuse the first name that `what` (a webhook, a queue) does not have; `besides` names what else is allowed."""
    for name in given:
        if name not in known:
            meant = did_you_mean([str(name)], known)
            raise InvalidInput(f"{name} is not a setting of {what}; use {', '.join(known)}{besides}{meant}")


T = TypeVar("T")


class Tables(Mapping[str, T]):
    """Settings by name, each from a table of its own; immutable."""

    def __init__(self, tables: Mapping[str, T] | None = None) -> None:
        self._tables = dict(tables or {})

    @classmethod
    def read_each(cls, kind: str, tables: object, read: Callable[[str, Mapping[str, Any]], T]) -> Self:
        """Read every `[<kind>.<name>]`; an error begins with the name."""
        if not isinstance(tables, Mapping):
            raise InvalidInput(f"expected a table of tables; write [{kind}.<name>] and its settings below")
        found = {}
        for name, table in tables.items():
            try:
                if not isinstance(table, Mapping):
                    raise InvalidInput(f"expected a table; write [{kind}.<name>] and its settings below")
                found[name] = read(name, table)
            except InvalidInput as error:
                raise InvalidInput(f"{name}: {error}") from None
        return cls(found)

    def __getitem__(self, name: str) -> T:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __hash__(self) -> int:
        return hash(frozenset(self._tables))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._tables)})"


def did_you_mean(names: Iterable[str], known: Collection[str]) -> str:
    """Return `; did you mean retries?`, or an empty text if no name is similar."""
    near = [match for name in names if (match := nearest(name, known)) is not None]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name most similar to this one; None if none is similar."""
    from difflib import get_close_matches  # only for an error: it is slow to load

    return next(iter(get_close_matches(name, known, n=1)), None)


# Exceptions of applications, for logs and dead letters.


def placed(error: BaseException) -> str:
    """Return `ValueError in charge (orders.py:12)`: the exception's type, and where it was raised."""
    trace = raised_at(error)
    if trace is None:
        return type(error).__name__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_name} ({PurePath(code.co_filename).name}:{trace.tb_lineno})"


MAX_MESSAGE_CHARS: Final = 1_000
FIRST_FRAMES: Final = 10
LAST_FRAMES: Final = 30
MAX_CHAINED: Final = 10
"""Most exceptions of one chain or group that are shown."""


def redact(error: BaseException) -> BaseException:
    """Return a stand-in that every log formatter prints like `error`, with its frames and causes but without a message:
    messages often contain the arguments of a handler."""
    return _stand_in(error, set(), redacted=True)


def bounded(error: BaseException) -> BaseException:
    """Return a stand-in that every log formatter prints like `error`, with each message escaped and cut, and only the
    first and last of many frames."""
    return _stand_in(error, set(), redacted=False)


def trace_of(error: BaseException | None) -> str:
    """Return the traceback of a raised exception as text; only the beginning and end of a long one."""
    if error is None or raised_at(error) is None:
        return ""
    text = clean("".join(traceback.format_exception(bounded(error)))).rstrip().encode()
    if len(text) <= MAX_TRACEBACK_BYTES:
        return text.decode()
    gap = b"\n... cut ...\n"
    head = MAX_TRACEBACK_BYTES // 4
    kept = text[:head] + gap + text[-(MAX_TRACEBACK_BYTES - head - len(gap)) :]
    return kept.decode(errors="ignore")


def _stand_in(error: BaseException, seen: set[int], *, redacted: bool) -> BaseException:
    seen.add(id(error))
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if issubclass(kind, BaseExceptionGroup):
        # The errors inside a task group say more than the group itself.
        some = [one for one in BaseExceptionGroup.exceptions.__get__(error) if id(one) not in seen][:MAX_CHAINED]
        inner = [_stand_in(one, seen, redacted=redacted) for one in some]
        text = "several" if redacted else _message(BaseExceptionGroup.message.__get__(error))
        made: BaseException = type(kind.__name__, (BaseExceptionGroup,), named)(text, inner or [Exception()])
    else:
        text = "" if redacted else _message(_words(error) or "")
        made = type(kind.__name__, (BaseException,), named)(text)
    # Past the exception's own class: its properties are the application's code, and may raise.
    trace, cause, context, suppressed = (
        getattr(BaseException, name).__get__(error)
        for name in ("__traceback__", "__cause__", "__context__", "__suppress_context__")
    )
    made.__traceback__, left_out = _ends_of(trace)
    if left_out:
        made.add_note(f"({left_out} frames in the middle are left out)")
    # A chain may contain a cycle.
    if len(seen) >= MAX_CHAINED:
        return made
    if cause is not None and id(cause) not in seen:
        made.__cause__ = _stand_in(cause, seen, redacted=redacted)
    elif context is not None and id(context) not in seen and not suppressed:
        made.__context__ = _stand_in(context, seen, redacted=redacted)
    made.__suppress_context__ = suppressed
    return made


def _message(text: str) -> str:
    return escape(text[:MAX_MESSAGE_CHARS]) + ("..." if len(text) > MAX_MESSAGE_CHARS else "")


def _ends_of(trace: TracebackType | None) -> tuple[TracebackType | None, int]:
    """Return the first and last frames of a traceback, and the number of frames left out between them."""
    whole: list[TracebackType] = []
    at = trace
    while at is not None:
        whole.append(at)
        at = at.tb_next
    left_out = len(whole) - FIRST_FRAMES - LAST_FRAMES
    if left_out <= 0:
        return trace, 0
    made = whole[-LAST_FRAMES]
    for one in reversed(whole[:FIRST_FRAMES]):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made, left_out
