"""Mainspring: a distributed scheduler and delay queue on Redis or Valkey."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import Client
    from .model.clock import ManualClock
    from .model.dead import DeadLetter, DeadPage, Replayed, ReplaySummary
    from .model.errors import (
        ConfigError,
        Conflict,
        EmbeddedError,
        InvalidCron,
        InvalidInput,
        MainspringError,
        NotConfirmed,
        OutOfMemory,
        Refused,
        StoreError,
        Unavailable,
        WrongFormat,
    )
    from .model.explain import Explanation
    from .model.failure import Failure
    from .model.outcome import DONE, Dead, Done, Retry
    from .model.retry import RetryPolicy
    from .model.task import Count, Handle, Page, PutSummary, Task, TaskInfo
    from .sync import SyncClient

__all__ = [
    "DONE",
    "Client",
    "ConfigError",
    "Conflict",
    "Count",
    "Dead",
    "DeadLetter",
    "DeadPage",
    "Done",
    "EmbeddedError",
    "Explanation",
    "Failure",
    "Handle",
    "InvalidCron",
    "InvalidInput",
    "MainspringError",
    "ManualClock",
    "NotConfirmed",
    "OutOfMemory",
    "Page",
    "PutSummary",
    "Refused",
    "ReplaySummary",
    "Replayed",
    "Retry",
    "RetryPolicy",
    "StoreError",
    "SyncClient",
    "Task",
    "TaskInfo",
    "Unavailable",
    "WrongFormat",
]
__version__ = "0.1.0"

_MODULES: Final = {
    "client": ("Client",),
    "sync": ("SyncClient",),
    "model.clock": ("ManualClock",),
    "model.dead": ("DeadLetter", "DeadPage", "ReplaySummary", "Replayed"),
    "model.explain": ("Explanation",),
    "model.failure": ("Failure",),
    "model.outcome": ("DONE", "Dead", "Done", "Retry"),
    "model.retry": ("RetryPolicy",),
    "model.task": ("Count", "Handle", "Page", "PutSummary", "Task", "TaskInfo"),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # On first use: a command that prints its help, or a test run that uses none of this, should not wait for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'model.errors')}", __name__), name)
