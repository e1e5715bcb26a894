"""One change as the audit trail records it. Payloads and secrets are never recorded."""

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from .lane import Pause
from .task import Handle, TaskInfo

if TYPE_CHECKING:
    from .dead_letter import DeadLetter
    from .lane import LaneInfo
    from .schedule.view import ScheduleView


class Change(msgspec.Struct, frozen=True, omit_defaults=True, rename={"address": "from"}):
    """One change: caller, operation, object and address; `before` and `after` hold only what changed."""

    who: str
    what: str
    """`task.cancel`, `dead.drop`, `key.add`, …"""
    object: str
    address: str = ""
    role: str = ""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class Audited(msgspec.Struct, frozen=True):
    """A change in the trail: its position, and when it was written by the server's clock."""

    id: str
    at_ms: int
    change: Change


class AuditPage(msgspec.Struct, frozen=True):
    """Changes, newest first, and the cursor of the next page (None on the last)."""

    changes: list[Audited]
    next: str | None


MASK: Final = "***"
_LEFT_OUT: Final = ("payload", "at_ms", "by", "note", "tz_version")
"""Fields of a schedule that the trail leaves out: the payload is private, and the rest only says who saved it when."""
View = dict[str, Any] | None
"""Part of an object; None if the object did not exist before, or no longer exists."""


def bare(address: str) -> str:
    """Return an address without user, password and parameters: these are often secrets."""
    if not address.startswith(("http://", "https://")):
        return address
    parts = urlsplit(address)
    host = f"{MASK}@{parts.netloc.rpartition('@')[2]}" if "@" in parts.netloc else parts.netloc
    return urlunsplit((parts.scheme, host, parts.path, MASK if parts.query else "", ""))


def of_task(info: TaskInfo) -> View:
    target = None if info.target is None else bare(info.target)
    return {"state": info.state, "target": target, "due_ms": info.due_ms, "lane": info.lane}


def of_replaced(handle: Handle, target: str, lane: str | None) -> tuple[View, View] | None:
    """Return the task that a put replaced and its replacement; None if it changed no task."""
    if handle.replaced is None:
        return None
    now = TaskInfo(handle.id, "pending", handle.due_ms, target, lane=lane)
    return changes(of_task(handle.replaced), of_task(now))


def of_pause(pause: Pause | None) -> View:
    if pause is None:
        return None
    return {
        "state": "paused", "mode": pause.mode, "reason": pause.reason, "by": pause.by, "since_ms": pause.since_ms,
        "until_ms": pause.until_ms,
    }  # fmt: skip


def of_dead_letter(dead_letter: "DeadLetter | None") -> View:
    if dead_letter is None:
        return None
    return {
        "target": bare(dead_letter.target),
        "lane": dead_letter.lane,
        "died_ms": dead_letter.died_ms,
        "attempts": dead_letter.attempts,
    }


def of_dead_letters(**filters: object) -> dict[str, str]:
    """Return the filters that chose the dead letters of a bulk change."""
    return {name: bare(str(value)) for name, value in filters.items() if value is not None}


def of_lane(lane: "LaneInfo") -> dict[str, Any]:
    """Return a stalled lane with the task it waits for: skipping the lane gives up that task."""
    return {"state": lane.state, "head_id": lane.head_id, "behind": lane.behind}


def of_schedule(view: "ScheduleView | None") -> View:
    from .schedule.view import revision_as_dict  # slow to load, and most changes are not of schedules

    if view is None:
        return None
    fields = revision_as_dict(view.definition) | {"state": view.state, "target": bare(view.definition.target)}
    return {name: value for name, value in fields.items() if name not in _LEFT_OUT}


def changes(before: View, after: View) -> tuple[View, View]:
    """Return both views without the fields that are equal in both."""
    if before is None or after is None:
        return before, after
    differ = [name for name in (before | after) if before.get(name) != after.get(name)]
    return _only(before, differ), _only(after, differ)


def _only(view: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: view[name] for name in names if name in view}
