"""Tools for tests of applications: a manual clock, a scheduler driven step by step, real servers on free ports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..model.clock import ManualClock
    from . import history, kafka, losses, servers
    from .sink_contract import Arrived, Receiver, SinkContract
    from .ticker import Ticker

__all__ = [
    "Arrived",
    "ManualClock",
    "Receiver",
    "SinkContract",
    "Ticker",
    "history",
    "kafka",
    "losses",
    "servers",
]

_MODULE_OF: Final = {
    "ManualClock": "..model.clock",
    "Ticker": ".ticker",
    **dict.fromkeys(("Arrived", "Receiver", "SinkContract"), ".sink_contract"),
}


def __getattr__(name: str) -> Any:
    # The pytest plugin lives in this package and is loaded by every test run: it must not import the engine.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name], __name__), name)
    return import_module(f".{name}", __name__)
