"""Mainspring: a distributed scheduler and delay queue on Redis or Valkey."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client.client import Client
    from .client.dead_letters import DeadLetters
    from .client.schedules import Schedules
    from .client.sync import SyncClient, SyncDeadLetters, SyncSchedules
    from .config.config import Config
    from .model.clock import ManualClock
    from .model.dead_letter import DeadLetter, DeadPage, Replayed, ReplaySummary
    from .model.delivery import DONE, Dead, Delivery, DeliveryBatch, Done, Failure, Outcome, Response, Retry
    from .model.errors import (
        Ambiguous,
        ConfigError,
        Conflict,
        EmbeddedError,
        InvalidCron,
        InvalidInput,
        MainspringError,
        NotConfirmed,
        NotFound,
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
    from .model.lane import LaneInfo, LanePolicy, Pause, Scope
    from .model.notice import Beat
    from .model.retry import RetryPolicy, WorstCase, worst_case
    from .model.run import HistoryState, KeptRun, RunCounts, RunDetails, RunLog, RunRecord, RunsPage, RunStats
    from .model.schedule.chain import NotRun, PastRun
    from .model.schedule.definition import Definition, SchedulePause
    from .model.schedule.recurrence import Recurrence
    from .model.schedule.view import Backfilled, Finding, SchedulePage, ScheduleView
    from .model.targets.command import Command
    from .model.targets.webhook import Signer
    from .model.task import Count, Handle, Page, PutSummary, Task, TaskInfo
    from .model.workers import QueueInfo, QueuePage, WorkerInfo
    from .node.node import Node
    from .scheduler.declarations import Function, Order
    from .scheduler.scheduler import Entry, EntryRun, Scheduler
    from .scheduler.worker_process import Workplace
    from .sinks.base import Sink
    from .store import embedded
    from .store.embedded import EmbeddedServer
    from .store.redis.servers import LinkOptions
    from .worker.context import Context, current, idempotent

__all__ = [
    "DONE",
    "Ambiguous",
    "Backfilled",
    "Beat",
    "Client",
    "Command",
    "Config",
    "ConfigError",
    "Conflict",
    "Context",
    "Count",
    "Dead",
    "DeadLetter",
    "DeadLetters",
    "DeadPage",
    "Definition",
    "Delivery",
    "DeliveryBatch",
    "Done",
    "EmbeddedError",
    "EmbeddedServer",
    "Entry",
    "EntryRun",
    "Explanation",
    "Failure",
    "Finding",
    "Function",
    "Handle",
    "HistoryState",
    "InvalidCron",
    "InvalidInput",
    "KeptRun",
    "LaneInfo",
    "LanePolicy",
    "LinkOptions",
    "MainspringError",
    "ManualClock",
    "Node",
    "NotConfirmed",
    "NotFound",
    "NotRun",
    "Order",
    "OutOfMemory",
    "Outcome",
    "Output",
    "Page",
    "PastRun",
    "Pause",
    "PayloadTooLarge",
    "PutSummary",
    "QueueInfo",
    "QueuePage",
    "Recurrence",
    "Refused",
    "ReplaySummary",
    "Replayed",
    "Response",
    "Result",
    "Retry",
    "RetryPolicy",
    "RunCounts",
    "RunDetails",
    "RunLog",
    "RunRecord",
    "RunStats",
    "RunsPage",
    "SchedulePage",
    "SchedulePause",
    "ScheduleView",
    "Scheduler",
    "SchedulerRunning",
    "Schedules",
    "Scope",
    "Signer",
    "Sink",
    "StoreError",
    "SyncClient",
    "SyncDeadLetters",
    "SyncSchedules",
    "Task",
    "TaskFailed",
    "TaskInfo",
    "Unavailable",
    "WorkerInfo",
    "Workplace",
    "WorstCase",
    "WrongFormat",
    "current",
    "embedded",
    "idempotent",
    "worst_case",
]
__version__ = "0.1.0"

_MODULES: Final = {
    "client.client": ("Client",),
    "client.dead_letters": ("DeadLetters",),
    "client.schedules": ("Schedules",),
    "client.sync": (
        "SyncClient",
        "SyncDeadLetters",
        "SyncSchedules",
    ),
    "config.config": ("Config",),
    "model.clock": ("ManualClock",),
    "model.dead_letter": (
        "DeadLetter",
        "DeadPage",
        "ReplaySummary",
        "Replayed",
    ),
    "model.delivery": (
        "DONE",
        "Dead",
        "Delivery",
        "DeliveryBatch",
        "Done",
        "Failure",
        "Outcome",
        "Response",
        "Retry",
    ),
    "model.explain": ("Explanation",),
    "model.job": (
        "Output",
        "Result",
    ),
    "model.lane": (
        "LaneInfo",
        "LanePolicy",
        "Pause",
        "Scope",
    ),
    "model.notice": ("Beat",),
    "model.retry": (
        "RetryPolicy",
        "WorstCase",
        "worst_case",
    ),
    "model.run": (
        "HistoryState",
        "KeptRun",
        "RunCounts",
        "RunDetails",
        "RunLog",
        "RunRecord",
        "RunsPage",
        "RunStats",
    ),
    "model.schedule.chain": ("NotRun", "PastRun"),
    "model.schedule.definition": (
        "Definition",
        "SchedulePause",
    ),
    "model.schedule.recurrence": ("Recurrence",),
    "model.schedule.view": (
        "Backfilled",
        "Finding",
        "SchedulePage",
        "ScheduleView",
    ),
    "model.targets.command": ("Command",),
    "model.task": (
        "Count",
        "Handle",
        "Page",
        "PutSummary",
        "Task",
        "TaskInfo",
    ),
    "model.workers": ("QueueInfo", "QueuePage", "WorkerInfo"),
    "node.node": ("Node",),
    "scheduler.declarations": (
        "Function",
        "Order",
    ),
    "scheduler.scheduler": (
        "Entry",
        "EntryRun",
        "Scheduler",
    ),
    "scheduler.worker_process": ("Workplace",),
    "sinks.base": ("Sink",),
    "model.targets.webhook": ("Signer",),
    "store.embedded": ("EmbeddedServer",),
    "store.redis.servers": ("LinkOptions",),
    "worker.context": (
        "Context",
        "current",
        "idempotent",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # On first use: a command that prints its help, or a test run that uses none of this, should not wait for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "embedded":
        return import_module(".store.embedded", __name__)
    return getattr(import_module(f".{_MODULE_OF.get(name, 'model.errors')}", __name__), name)
