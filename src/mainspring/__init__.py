"""Mainspring: a distributed scheduler and delay queue on Redis or Valkey."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client.client import Client
    from .client.sync import SyncClient
    from .config.config import Config
    from .model.clock import ManualClock
    from .model.dead_letter import DeadLetter, DeadPage, Replayed, ReplaySummary
    from .model.delivery import DONE, Dead, Done, Failure, Retry
    from .model.errors import (
        Ambiguous,
        ConfigError,
        Conflict,
        EmbeddedError,
        InvalidCron,
        InvalidInput,
        MainspringError,
        NotConfirmed,
        OutOfMemory,
        PayloadTooLarge,
        Refused,
        SchedulerRunning,
        StoreError,
        TaskFailed,
        Unavailable,
        WrongFormat,
    )
    from .model.explain import Explanation
    from .model.job import Output, Result
    from .model.retry import RetryPolicy
    from .model.task import Count, Handle, Page, PutSummary, Task, TaskInfo
    from .scheduler.scheduler import Entry, Scheduler
    from .worker.context import Context, current, idempotent

__all__ = [
    "DONE",
    "Ambiguous",
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
    "PayloadTooLarge",
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
    "client.client": ("Client",),
    "client.sync": ("SyncClient",),
    "config.config": ("Config",),
    "model.clock": ("ManualClock",),
    "model.dead_letter": ("DeadLetter", "DeadPage", "ReplaySummary", "Replayed"),
    "model.delivery": ("DONE", "Dead", "Done", "Failure", "Retry"),
    "model.explain": ("Explanation",),
    "model.job": ("Output", "Result"),
    "model.retry": ("RetryPolicy",),
    "model.task": ("Count", "Handle", "Page", "PutSummary", "Task", "TaskInfo"),
    "scheduler.scheduler": ("Entry", "Scheduler"),
    "worker.context": ("Context", "current", "idempotent"),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # On first use: a command that prints its help, or a test run that uses none of this, should not wait for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'model.errors')}", __name__), name)
