"""What the audit trail keeps of the things that change: never a payload, never a secret."""

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from .pause import Pause
from .task import TaskInfo

if TYPE_CHECKING:
    from .schedule_view import ScheduleView

MASK: Final = "***"
View = dict[str, Any] | None
"""None where there was nothing, or is nothing any more."""


def bare(address: str) -> str:
    """User, password and parameters of an address are often secrets."""
    if not address.startswith(("http://", "https://")):
        return address
    parts = urlsplit(address)
    host = f"{MASK}@{parts.netloc.rpartition('@')[2]}" if "@" in parts.netloc else parts.netloc
    return urlunsplit((parts.scheme, host, parts.path, MASK if parts.query else "", ""))


def of_task(info: TaskInfo) -> View:
    target = None if info.target is None else bare(info.target)
    return {"state": info.state, "target": target, "due_ms": info.due_ms, "lane": info.lane}


def of_pause(pause: Pause | None) -> View:
    if pause is None:
        return None
    return {
        "state": "paused", "mode": pause.mode, "reason": pause.reason, "by": pause.who, "since_ms": pause.since_ms,
        "until_ms": pause.until_ms,
    }  # fmt: skip


def of_schedule(view: "ScheduleView | None") -> View:
    from .schedule_view import written  # the language of schedules: much to load for who changes none

    if view is None:
        return None
    told = written(view.definition) | {"state": view.state, "generation": view.generation}
    return {name: value for name, value in told.items() if name != "payload"} | {"target": bare(view.definition.target)}


def changes(before: View, after: View) -> tuple[View, View]:
    """Both without what is the same in both."""
    if before is None or after is None:
        return before, after
    differ = [name for name in (before | after) if before.get(name) != after.get(name)]
    return _only(before, differ), _only(after, differ)


def _only(view: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: view[name] for name in names if name in view}
