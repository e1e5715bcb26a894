"""Schedules over a node's HTTP API, by the names that `client.schedules` has for them."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mainspring.cli.remote import Api, moment_of
from mainspring.model.errors import InvalidInput, NotFound
from mainspring.model.times import is_delay

if TYPE_CHECKING:
    from mainspring.model.schedule import Definition, PauseMode
    from mainspring.model.schedule_view import Backfilled, ScheduleView
    from mainspring.model.task import Handle
    from mainspring.model.times import Delay, When
    from mainspring.model.worst_case import WorstCase
    from mainspring.schedules import AddOutcome, OnExisting

_SCHEDULES: Final = "/v1/schedules"
_PAGE: Final = 500


class RemoteSchedules:
    """What commands ask of schedules. Who changed one is told by the API key."""

    def __init__(self, api: Api) -> None:
        self._api = api

    # -- writing -------------------------------------------------------------------------------------------

    async def add(self, name: str, *, on_conflict: "OnExisting" = "reject", **fields: Any) -> "ScheduleView":
        return _view(self._api.post(_SCHEDULES, name=name, on_conflict=on_conflict, **_fields(fields)))

    async def add_many(
        self, definitions: "Iterable[Definition]", *, on_conflict: "OnExisting" = "reject"
    ) -> "list[tuple[ScheduleView, AddOutcome]]":
        """One by one; those before one that is refused are stored."""
        outcome: AddOutcome = "created" if on_conflict == "reject" else "replaced"
        return [(await self.add(one.name, on_conflict=on_conflict, **_said(one)), outcome) for one in definitions]

    async def edit(self, name: str, *, generation: int | None = None, **fields: Any) -> "ScheduleView":
        body = _fields(fields) | ({} if generation is None else {"generation": generation})
        return _view(self._api.call("PATCH", _SCHEDULES, name, body=body))

    async def pause(
        self,
        name: str,
        *,
        reason: str = "",
        by: str = "",
        until: "When | Delay | None" = None,
        mode: "PauseMode" = "drop",
    ) -> "ScheduleView":
        del by
        # The same option takes a time and a delay; the API tells them apart by name.
        span = until is not None and is_delay(until)
        when = {"for": until} if span else {"until": moment_of(until)}  # type: ignore[arg-type]
        return _view(self._api.post(_SCHEDULES, name, "pause", reason=reason, mode=mode, **when))

    async def resume(self, name: str, *, by: str = "") -> "ScheduleView":
        del by
        return _view(self._api.post(_SCHEDULES, name, "resume"))

    async def remove(self, name: str) -> bool:
        try:
            self._api.delete(_SCHEDULES, name)
        except NotFound:
            return False
        return True

    async def rollback(self, name: str, generation: int | None = None, *, by: str = "") -> "ScheduleView":
        del by
        return _view(self._api.post(_SCHEDULES, name, "rollback", generation=generation))

    async def trigger(self, name: str, *, after: "Delay | None" = None) -> "Handle":
        from mainspring.model.task import Handle

        return msgspec.convert(self._api.post(_SCHEDULES, name, "trigger", after=after), Handle)

    async def backfill(
        self,
        name: str,
        *,
        start: "When",
        end: "When",
        rate: float | None = None,
        dry_run: bool = False,
        progress: "Callable[[int, int], None] | None" = None,
    ) -> "Backfilled":
        del progress  # it is one request: nothing is known of it before its answer
        from mainspring.model.schedule_view import Backfilled

        told = self._api.post(
            _SCHEDULES, name, "backfill", start=moment_of(start), end=moment_of(end), rate=rate, dry_run=dry_run
        )
        return msgspec.convert(told, Backfilled)

    # -- reading -------------------------------------------------------------------------------------------

    async def get(self, name: str) -> "ScheduleView | None":
        try:
            return _view(self._api.get(_SCHEDULES, name))
        except NotFound:
            return None

    async def get_many(self, names: Sequence[str]) -> "dict[str, ScheduleView]":
        found = [await self.get(name) for name in names]
        return {view.name: view for view in found if view is not None}

    async def history(self, name: str) -> "list[Definition]":
        revisions = self._api.get(_SCHEDULES, name, "history")["revisions"]
        return [_definition({"name": name, "changed": one, **one}, at_ms=one["at_ms"]) for one in revisions]

    async def diff(self, name: str, **fields: Any) -> dict[str, tuple[Any, Any]]:
        told = self._api.call("POST", _SCHEDULES, name, "diff", body=_fields(fields))
        return {field: (before, after) for field, (before, after) in told.items()}

    async def all(self) -> "AsyncIterator[ScheduleView]":
        cursor: str | None = None
        while True:
            told = self._api.get(_SCHEDULES, limit=_PAGE, cursor=cursor)
            for one in told["schedules"]:
                yield _view(one)
            cursor = told["next"]
            if cursor is None:
                return


# -- from and to what the API says -----------------------------------------------------------------------------


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    """What a caller says of a schedule; who says it is the API's to tell."""
    said = {name: value for name, value in fields.items() if name != "by"}
    for name in ("start", "end"):
        if said.get(name) is not None:
            said[name] = moment_of(said[name])
    return said


def _said(definition: "Definition") -> dict[str, Any]:
    from mainspring.model.schedule_view import written

    if definition.raw:
        raise InvalidInput(f"schedule {definition.name!r}: a payload of bytes cannot be sent as JSON")
    said = written(definition)
    return {"cron": said.pop("specs"), **said, **({"note": definition.note} if definition.note else {})}


def _definition(told: dict[str, Any], *, at_ms: int) -> "Definition":
    from mainspring.model.schedule_input import FIELDS, define

    fields = {name: value for name, value in told.items() if name in FIELDS and name not in ("by", "note")}
    changed = told["changed"]
    made = define(told["name"], cron=told["specs"], **fields)
    return msgspec.structs.replace(
        made,
        generation=told["generation"],
        by=changed["by"],
        note=changed["note"],
        at_ms=at_ms,
        tz_version=told.get("tz_version", ""),
        paused=_paused(told.get("paused")),
    )


def _paused(told: dict[str, Any] | None) -> Any:
    from mainspring.model.schedule import Pause

    if told is None:
        return None
    return Pause(_ms(told["since"]), told["mode"], _ms_or_none(told["until"]), told["reason"], told["by"])


def _view(told: dict[str, Any]) -> "ScheduleView":
    from mainspring.model.chain import NotRun, Run
    from mainspring.model.lint import Finding
    from mainspring.model.schedule_view import ScheduleView

    following = tuple(map(_ms, told["next"]))
    starts_ms = following[0] if following else None
    return ScheduleView(
        name=told["name"],
        state=told["state"],
        definition=_definition(told, at_ms=_ms(told["changed"]["at"])),
        generation=told["generation"],
        next_ms=following,
        due_ms=_ms(told["starts"]) if "starts" in told else starts_ms,
        runs=told["runs"],
        not_run=told["not_run"],
        recent_not_run=tuple(
            NotRun(from_ms=_ms(one["from"]), to_ms=_ms(one["to"]), count=one["count"], reason=one["reason"])
            for one in told["recent_not_run"]
        ),
        last_runs=tuple(
            Run(
                planned_ms=_ms(one["planned"]),
                began_ms=_ms(one["began"]),
                ended_ms=_ms_or_none(one["ended"]),
                outcome=one["outcome"],
            )
            for one in told["last_runs"]
        ),
        running_since_ms=_ms_or_none(told["running_since"]),
        worst_case=_worst_case(told.get("worst_case")),
        # Not checked against the codes known here: a newer node may have others.
        findings=tuple(Finding(one["code"], one["message"]) for one in told.get("findings", ())),
    )


def _worst_case(told: dict[str, Any] | None) -> "WorstCase | None":
    """None in lists, and from a node of an older version."""
    from mainspring.model.worst_case import WorstCase

    return None if told is None else WorstCase(told["ms"], told["sum"])


def _ms(text: str) -> int:
    from mainspring.model.times import instant_ms

    return instant_ms(text)


def _ms_or_none(text: str | None) -> int | None:
    return None if text is None else _ms(text)
