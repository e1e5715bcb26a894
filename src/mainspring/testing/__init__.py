"""Tools for tests of applications: a manual clock, a scheduler driven step by step, real servers on free ports."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..model.clock import ManualClock
    from . import servers
    from .ticker import Ticker

__all__ = ["ManualClock", "Ticker", "servers"]


def __getattr__(name: str) -> Any:
    # The pytest plugin lives in this package and is loaded by every test run: it must not import the engine.
    if name == "ManualClock":
        from ..model.clock import ManualClock

        return ManualClock
    if name == "Ticker":
        from .ticker import Ticker

        return Ticker
    if name == "servers":
        from importlib import import_module

        return import_module(".servers", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
