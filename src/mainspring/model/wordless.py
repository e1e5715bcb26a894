"""Exceptions without their words: what a log may show of code that is not ours.

What a handler raises often holds what it was called with. Its type and the lines it passed through do not.
"""

from pathlib import PurePath


def placed(error: BaseException) -> str:
    """`ValueError in charge (orders.py:12)`: its type, and where it was raised."""
    trace = error.__traceback__
    if trace is None:
        return type(error).__name__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_name} ({PurePath(code.co_filename).name}:{trace.tb_lineno})"


def wordless(error: BaseException) -> BaseException:
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
