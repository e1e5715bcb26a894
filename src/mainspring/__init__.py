"""Mainspring: a distributed scheduler and delay queue on Redis or Valkey."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import Client
    from .config import Config
    from .entry import Entry
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
        SchedulerRunning,
        StoreError,
        TaskFailed,
        Unavailable,
        WrongFormat,
    )
    from .model.explain import Explanation
    from .model.failure import Failure
    from .model.outcome import DONE, Dead, Done, Retry
    from .model.result import Output, Result
    from .model.retry import RetryPolicy
    from .model.task import Count, Handle, Page, PutSummary, Task, TaskInfo
    from .scheduler import Scheduler
    from .sync import SyncClient
    from .worker.context import Context, current
    from .worker.idempotent import idempotent

__all__ = [
    "DONE",
    "Client",
    "Config",
    "ConfigError",
    "Conflict",
    "Context",
    "Count",
    "Dead",
    "DeadLetter",
    "DeadPage",
    "Done",
    "EmbeddedError",
    "Entry",
    "Explanation",
    "Failure",
    "Handle",
    "InvalidCron",
    "InvalidInput",
    "MainspringError",
    "ManualClock",
    "NotConfirmed",
    "OutOfMemory",
    "Output",
    "Page",
    "PutSummary",
    "Refused",
    "ReplaySummary",
    "Replayed",
    "Result",
    "Retry",
    "RetryPolicy",
    "Scheduler",
    "SchedulerRunning",
    "StoreError",
    "SyncClient",
    "Task",
    "TaskFailed",
    "TaskInfo",
    "Unavailable",
    "WrongFormat",
    "current",
    "idempotent",
]
__version__ = "0.1.0"

_MODULES: Final = {
    "client": ("Client",),
    "config": ("Config",),
    "entry": ("Entry",),
    "scheduler": ("Scheduler",),
    "sync": ("SyncClient",),
    "model.clock": ("ManualClock",),
    "model.dead": ("DeadLetter", "DeadPage", "ReplaySummary", "Replayed"),
    "model.explain": ("Explanation",),
    "model.failure": ("Failure",),
    "model.outcome": ("DONE", "Dead", "Done", "Retry"),
    "model.result": ("Output", "Result"),
    "model.retry": ("RetryPolicy",),
    "model.task": ("Count", "Handle", "Page", "PutSummary", "Task", "TaskInfo"),
    "worker.context": ("Context", "current"),
    "worker.idempotent": ("idempotent",),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # On first use: a command that prints its help, or a test run that uses none of this, should not wait for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'model.errors')}", __name__), name)
