"""Mainspring: a distributed scheduler and delay queue on Redis or Valkey."""

from .client import Client
from .model.clock import ManualClock
from .model.errors import (
    ConfigError,
    Conflict,
    EmbeddedError,
    InvalidInput,
    MainspringError,
    NotConfirmed,
    OutOfMemory,
    Refused,
    StoreError,
    Unavailable,
    WrongFormat,
)
from .model.outcome import DONE, Dead, Done, Retry
from .model.retry import RetryPolicy
from .model.task import Count, Handle, Page, PutSummary, Task, TaskInfo

__all__ = [
    "DONE",
    "Client",
    "ConfigError",
    "Conflict",
    "Count",
    "Dead",
    "Done",
    "EmbeddedError",
    "Handle",
    "InvalidInput",
    "MainspringError",
    "ManualClock",
    "NotConfirmed",
    "OutOfMemory",
    "Page",
    "PutSummary",
    "Refused",
    "Retry",
    "RetryPolicy",
    "StoreError",
    "Task",
    "TaskInfo",
    "Unavailable",
    "WrongFormat",
]
__version__ = "0.1.0"
