"""A client over a node's HTTP API: the calls that commands make of `Client`, by the same names and arguments.

Arguments that are sent as they are given are not named again: `Client` has them, and the API checks them.
"""

import base64
import http.client
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec

from mainspring.model.access import is_token
from mainspring.model.dead_letter import PROBLEMS_KEPT, DeadLetter, DeadPage, DropOutcome, Replayed, ReplaySummary
from mainspring.model.delivery import Response
from mainspring.model.errors import (
    Ambiguous,
    ConfigError,
    Conflict,
    InvalidInput,
    MainspringError,
    NotConfirmed,
    NotFound,
    OutOfMemory,
    Refused,
    Unavailable,
)
from mainspring.model.explain import UNKNOWN, Explanation
from mainspring.model.job import Result
from mainspring.model.lane import LaneAnswer, LaneInfo, Pause, Scope
from mainspring.model.limits import SCHEDULES_A_CALL
from mainspring.model.notice import Beat
from mainspring.model.retry import retry_line
from mainspring.model.run import KeptRun, RunLog, RunsPage, RunStats
from mainspring.model.targets.url import read_api_url
from mainspring.model.task import BulkCancelOutcome, Count, Handle, Page, TaskInfo
from mainspring.model.times import Delay, When, instant_ms, is_delay
from mainspring.model.workers import QueueInfo, QueuePage, WorkerInfo

if TYPE_CHECKING:
    from mainspring.client.schedules import AddOutcome, OnExisting
    from mainspring.model.retry import WorstCase
    from mainspring.model.schedule.definition import Definition, PauseMode
    from mainspring.model.schedule.view import Backfilled, ScheduleView


TIMEOUT_S: Final = 90.0
"""Longer than any request takes: replaying many dead letters may take half a minute."""


_AWAY: Final = (502, 503, 504)
"""Statuses of a proxy that cannot reach the node."""


class TooLate(Conflict):
    """The task has begun, or is over."""


class NoNamespace(MainspringError):
    """The namespace does not exist for this key. Not a `NotFound`, which concerns objects in a namespace."""


class ConflictAnswer(Conflict):
    """The request changed nothing; `answer` is the reason code."""

    def __init__(self, detail: str, answer: str) -> None:
        super().__init__(detail)
        self.answer = answer


_PREFIX: Final = "urn:mainspring:problem:"
_ERRORS: Final[dict[str, Callable[[str], MainspringError]]] = {
    "malformed": InvalidInput,
    "invalid": InvalidInput,
    "too-large": InvalidInput,
    "not-found": NotFound,
    "conflict": Conflict,
    "too-late": TooLate,
    "out-of-memory": OutOfMemory,
    "not-confirmed": NotConfirmed,
}


class Api:
    """Calls one API. No request is repeated: one whose response was lost may have been executed."""

    def __init__(self, url: str, *, namespace: str | None = None, token: str | None = None) -> None:
        try:
            parts = read_api_url(url)
        except InvalidInput as error:
            raise ConfigError(f"api_url: {error}") from None
        self.where = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/")
        self._headers = {"accept": "application/json"}
        if namespace is not None:
            self._headers["mainspring-namespace"] = namespace
        if token is not None:
            if not is_token(token):
                raise ConfigError("api_token is not an API key; keys begin with msk_")
            self._headers["authorization"] = f"Bearer {token}"
        self._connection = _connect(parts.scheme, parts.hostname or "", parts.port)

    def close(self) -> None:
        self._connection.close()

    def get(self, *path: str, **query: object) -> Any:
        return self.call("GET", *path, query=query)

    def post(self, *path: str, query: Mapping[str, object] | None = None, **body: object) -> Any:
        """Post a request, leaving out fields that are None."""
        for name, value in body.items():
            if isinstance(value, float) and not isfinite(value):
                # JSON can only write null for it, which would mean that no value was given.
                raise InvalidInput(f"{name} is {value}; give a number")
        return self.call("POST", *path, query=query, body=_given(body))

    def delete(self, *path: str, **query: object) -> Any:
        return self.call("DELETE", *path, query=query)

    def call(
        self,
        method: str,
        *path: str,
        query: Mapping[str, object] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Any:
        """Return the decoded response, or raise its problem as an error. `path` is given in segments, not encoded."""
        headers = self._headers | ({} if body is None else {"content-type": "application/json"})
        content = None if body is None else msgspec.json.encode(body)
        try:
            self._connection.request(method, self._path + _path(path, query), content, headers)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.where}: cannot connect: {_reason(error)}", sent=False) from None
        try:
            answer = self._connection.getresponse()
            return self._read(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.where}: no answer: {_reason(error)}; it may have been done", sent=True) from None

    def _read(self, status: int, body: bytes) -> Any:
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if status in _AWAY:
                raise self._away(f"no node responds (status {status})") from None
            raise Refused(
                f"{self.where} does not respond like Mainspring's API (status {status}); is this its address?"
            ) from None
        if status < 400:
            return answer
        problem = answer if isinstance(answer, dict) else {}
        kind = str(problem.get("type", "")).removeprefix(_PREFIX)
        detail = str(problem.get("detail", f"status {status}"))
        if kind == "unauthenticated":
            detail += ". Commands send the one in MAINSPRING_API_TOKEN, or in the file MAINSPRING_API_TOKEN_FILE names"
        if kind == "not-found" and problem.get("missing") == "namespace":
            raise NoNamespace(detail)
        if kind == "conflict" and "answer" in problem:
            raise ConflictAnswer(detail, str(problem["answer"]))
        if kind == "ambiguous":
            raise Ambiguous(str(problem.get("id", "")), [str(lane) for lane in problem.get("lanes", ())])
        if kind == "unavailable":
            raise self._away(detail)
        if kind in _ERRORS:
            raise _with_handle(_ERRORS[kind](detail), problem)
        raise Refused(f"{self.where}: {detail}")

    def _away(self, why: str) -> Unavailable:
        return Unavailable(f"{self.where}: {why}", sent=True)


def _with_handle(error: MainspringError, problem: Mapping[str, Any]) -> MainspringError:
    """Add the handle in the problem of a task that is stored but not confirmed."""
    if isinstance(error, NotConfirmed) and "id" in problem:
        named = {name: problem[name] for name in ("id", "due_ms", "outcome") if name in problem}
        error.handles = [msgspec.convert(named, Handle)]
    return error


def _connect(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def _path(segments: tuple[str, ...], query: Mapping[str, object] | None) -> str:
    first, *names = segments
    if "" in names:  # it would be the path of another resource
        raise InvalidInput("the id, or the name, is empty; give 1 to 256 bytes")
    path = "/".join([first, *(quote(name, safe="") for name in names)])
    given = _given(query or {})
    return f"{path}?{urlencode(given)}" if given else path


def moment_of(when: When | None) -> str | int | float | None:
    """Return a time in a form that the API reads."""
    if not isinstance(when, datetime):
        return when
    instant_ms(when)  # refuses one without an offset
    return when.isoformat()


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not None, times in a form that the API reads."""
    found = {name: value for name, value in fields.items() if value is not None}
    return {name: moment_of(value) if isinstance(value, datetime) else value for name, value in found.items()}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


_DEAD: Final = "/v1/dead"
_DEAD_LETTERS_A_PAGE: Final = 1_000
_COUNTED: Final = ("replayed", "conflict", "damaged", "gone")


class RemoteDeadLetters:
    """Calls for dead letters over HTTP. Filters are those of `Client`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def _page(self, limit: int, cursor: str | None, filters: dict[str, Any]) -> Any:
        return self._api.get(_DEAD, limit=limit, cursor=cursor, **_chosen(filters))

    async def count(self, *, died_after: When | None = None, died_before: When | None = None) -> None:
        """Return None: the API cannot count dead letters without reading them."""

    async def get(self, id: str, *, lane: str | None = None) -> DeadLetter | None:
        try:
            return _dead_letter(self._api.get(_DEAD, id, lane=lane))
        except NotFound:
            return None

    async def replay(self, id: str, *, lane: str | None = None, **given: Any) -> Replayed:
        try:
            return msgspec.convert(self._api.post(_DEAD, id, "replay", query={"lane": lane}, **given), Replayed)
        except NotFound:
            return Replayed(id, "unknown", None, "there is no dead letter with this id")
        except Conflict as error:
            return Replayed(id, "conflict", None, str(error))

    async def replay_many(
        self,
        *,
        dry_run: bool = False,
        progress: Callable[[ReplaySummary], None] | None = None,
        **filters: Any,
    ) -> ReplaySummary:
        """Send requests of at most half a minute each until no dead letters are left."""
        given = {name: filters.pop(name, None) for name in ("at", "after", "rate", "new_key")} | {"dry_run": dry_run}
        summary = ReplaySummary(dry_run)
        while True:
            answer = self._api.post(f"{_DEAD}:replay", **_chosen_or_all(filters), **given)
            for name in _COUNTED:
                # Each request meets the ones that cannot be replayed again, so the last count is the right one.
                before = getattr(summary, name) if name == "replayed" else 0
                setattr(summary, name, before + answer[name])
            summary.problems = msgspec.convert(answer["problems"], type=list[Replayed])[:PROBLEMS_KEPT]
            if progress is not None:
                progress(summary)
            if answer["complete"] or dry_run or not answer["replayed"]:
                return summary
            # Leave dead letters that died again since the first request: otherwise this loop might never end.
            filters["died_before"] = answer.get("died_before", filters.get("died_before"))

    async def drop(self, id: str, *, lane: str | None = None) -> DropOutcome:
        try:
            self._api.delete(_DEAD, id, lane=lane)
        except NotFound:
            return "unknown"
        return "dropped"

    async def drop_many(
        self, *, dry_run: bool = False, progress: Callable[[int], None] | None = None, **filters: Any
    ) -> int:
        count = 0
        while True:
            answer = self._api.post(f"{_DEAD}:drop", **_chosen_or_all(filters), dry_run=dry_run)
            count += int(answer["dropped"])
            if progress is not None:
                progress(count)
            if answer["complete"] or dry_run or not answer["dropped"]:
                return count

    async def export(
        self, write: Callable[[bytes], Any], *, progress: Callable[[int], None] | None = None, **filters: Any
    ) -> int:
        """Fetch all pages, which come newest first, then write them oldest first."""
        dead_letters: list[Any] = []
        cursor: str | None = None
        while True:
            answer = self._page(_DEAD_LETTERS_A_PAGE, cursor, filters)
            dead_letters += answer["letters"]
            cursor = answer["next"]
            if progress is not None:
                progress(len(dead_letters))
            if cursor is None:
                break
        for dead_letter in reversed(dead_letters):
            # Times in milliseconds alone, as an export from the server has them.
            write(msgspec.json.encode({k: v for k, v in dead_letter.items() if k not in ("died", "due")}) + b"\n")
        return len(dead_letters)

    async def list(self, *, limit: int = 50, cursor: str | None = None, **filters: Any) -> DeadPage:
        answer = self._page(limit, cursor, filters)
        return DeadPage([_dead_letter(one) for one in answer["letters"]], answer["next"])


def _chosen(filters: dict[str, Any]) -> dict[str, Any]:
    times = {name: moment_of(filters.get(name)) for name in ("died_after", "died_before")}
    return filters | {name: None if at is None else str(at) for name, at in times.items()}


def _chosen_or_all(filters: dict[str, Any]) -> dict[str, Any]:
    chosen = _chosen(filters)
    return chosen if any(value is not None for value in chosen.values()) else {"all": True}


def _dead_letter(answer: dict[str, Any]) -> DeadLetter:
    """Decode a dead letter; its key is recomputed from id and time."""
    fields = {name: answer[name] for name in ("id", "reason", "died_ms", "due_ms")}
    if answer["damaged"]:
        return DeadLetter(**fields, entry=base64.b64decode(answer.get("entry_base64", "")))
    fields |= {name: answer.get(name) for name in ("target", "lane", "retry", "timeout_ms")}
    raw = answer.get("payload_base64")
    payload = base64.b64decode(raw) if raw is not None else msgspec.json.encode(answer.get("payload"))
    dead_letter = DeadLetter(
        **fields,
        attempts=answer["attempts"],
        errors=tuple(answer["errors"]),
        raw=raw is not None,
        payload=payload,
        traceback=answer.get("traceback") or "",
    )
    return dead_letter.answered(None if answer.get("response") is None else Response.from_dict(answer["response"]))


_SCHEDULES: Final = "/v1/schedules"
_SCHEDULES_A_PAGE: Final = 500
_BATCH_BYTES: Final = 32 * 1024
"""Approximate size of a batch of schedules: a quarter of the largest body that nodes take by default."""


class RemoteSchedules:
    """Schedule operations over HTTP. The audit entry names the API key."""

    def __init__(self, api: Api) -> None:
        self._api = api

    # -- writing -------------------------------------------------------------------------------------------

    async def add(self, name: str, *, on_conflict: "OnExisting" = "reject", **fields: Any) -> "ScheduleView":
        return _view(self._api.post(_SCHEDULES, name=name, on_conflict=on_conflict, **_fields(fields)))

    async def add_many(
        self, definitions: "Iterable[Definition]", *, on_conflict: "OnExisting" = "reject"
    ) -> "list[tuple[ScheduleView, AddOutcome]]":
        """Add any number of schedules in batches. An invalid one stops the call; batches before it are stored."""
        added: list[tuple[ScheduleView, AddOutcome]] = []
        for some in _by_size({"name": one.name, **_fields(_fields_of(one))} for one in definitions):
            answer = self._api.post(f"{_SCHEDULES}:batch", schedules=some, on_conflict=on_conflict)
            added += [(_view(one), one["outcome"]) for one in answer["schedules"]]
        return added

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
        return msgspec.convert(self._api.post(_SCHEDULES, name, "trigger", after=after), Handle)

    async def backfill(
        self, name: str, *, progress: "Callable[[int, int], None] | None" = None, **given: Any
    ) -> "Backfilled":
        del progress  # a single request has no progress to report
        from mainspring.model.schedule.view import Backfilled

        return msgspec.convert(self._api.post(_SCHEDULES, name, "backfill", **given), Backfilled)

    # -- reading -------------------------------------------------------------------------------------------

    async def get(self, name: str) -> "ScheduleView | None":
        try:
            return _view(self._api.get(_SCHEDULES, name))
        except NotFound:
            return None

    async def get_many(self, names: Sequence[str]) -> "dict[str, ScheduleView]":
        found: dict[str, ScheduleView] = {}
        for first in range(0, len(names), SCHEDULES_A_CALL):
            answer = self._api.post(f"{_SCHEDULES}:find", names=names[first : first + SCHEDULES_A_CALL])
            found |= {one["name"]: _view(one) for one in answer["schedules"]}
        return found

    async def history(self, name: str) -> "list[Definition]":
        revisions = self._api.get(_SCHEDULES, name, "history")["revisions"]
        return [_definition({"name": name, "changed": one, **one}, at_ms=one["at_ms"]) for one in revisions]

    async def diff(self, name: str, **fields: Any) -> dict[str, tuple[Any, Any]]:
        answer = self._api.call("POST", _SCHEDULES, name, "diff", body=_fields(fields))
        return {field: (before, after) for field, (before, after) in answer.items()}

    async def all(self) -> "AsyncIterator[ScheduleView]":
        cursor: str | None = None
        while True:
            answer = self._api.get(_SCHEDULES, limit=_SCHEDULES_A_PAGE, cursor=cursor)
            for one in answer["schedules"]:
                yield _view(one)
            cursor = answer["next"]
            if cursor is None:
                return


# -- conversion from and to JSON -------------------------------------------------------------------------------


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule's fields for the API, which determines the author itself."""
    given = {name: value for name, value in fields.items() if name != "by"}
    for name in ("start", "end"):
        if given.get(name) is not None:
            given[name] = moment_of(given[name])
    return given


def _by_size(schedules: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Divide schedules into batches that a request may have."""
    some: list[dict[str, Any]] = []
    size = 0
    for one in schedules:
        more = len(msgspec.json.encode(one))
        if some and (len(some) == SCHEDULES_A_CALL or size + more > _BATCH_BYTES):
            yield some
            some, size = [], 0
        some.append(one)
        size += more
    if some:
        yield some


def _fields_of(definition: "Definition") -> dict[str, Any]:
    from mainspring.model.schedule.view import written

    if definition.raw:
        raise InvalidInput(f"schedule {definition.name!r}: a payload of bytes cannot be sent as JSON")
    given = written(definition)
    return {**given, **({"note": definition.note} if definition.note else {})}


def _definition(answer: dict[str, Any], *, at_ms: int) -> "Definition":
    from mainspring.model.schedule.input import FIELDS, define
    from mainspring.model.schedule.recurrence import TIMES

    fields = {name: value for name, value in answer.items() if name in FIELDS and name not in ("by", "note")}
    changed = answer["changed"]
    if not any(word in fields for word in TIMES):
        fields["cron"] = answer["specs"]  # a node of an older version
    made = define(answer["name"], **fields)
    return msgspec.structs.replace(
        made,
        generation=answer["generation"],
        by=changed["by"],
        note=changed["note"],
        at_ms=at_ms,
        tz_version=answer.get("tz_version", ""),
        paused=_paused(answer.get("paused")),
    )


def _paused(answer: dict[str, Any] | None) -> Any:
    from mainspring.model.schedule.definition import SchedulePause

    if answer is None:
        return None
    return SchedulePause(
        _ms(answer["since"]), answer["mode"], _ms_or_none(answer["until"]), answer["reason"], answer["by"]
    )


def _view(answer: dict[str, Any]) -> "ScheduleView":
    from mainspring.model.schedule.chain import NotRun, PastRun
    from mainspring.model.schedule.view import Finding, ScheduleView

    following = tuple(map(_ms, answer["next"]))
    starts_ms = following[0] if following else None
    return ScheduleView(
        name=answer["name"],
        state=answer["state"],
        definition=_definition(answer, at_ms=_ms(answer["changed"]["at"])),
        generation=answer["generation"],
        next_ms=following,
        due_ms=_ms(answer["starts"]) if "starts" in answer else starts_ms,
        runs=answer["runs"],
        not_run=answer["not_run"],
        recent_not_run=tuple(
            NotRun(from_ms=_ms(one["from"]), to_ms=_ms(one["to"]), count=one["count"], reason=one["reason"])
            for one in answer["recent_not_run"]
        ),
        last_runs=tuple(
            PastRun(
                planned_ms=_ms(one["planned"]),
                began_ms=_ms(one["began"]),
                ended_ms=_ms_or_none(one["ended"]),
                outcome=one["outcome"],
            )
            for one in answer["last_runs"]
        ),
        running_since_ms=_ms_or_none(answer["running_since"]),
        worst_case=_worst_case(answer.get("worst_case")),
        # Not checked against the codes known here: a newer node may have others.
        findings=tuple(Finding(one["code"], one["message"]) for one in answer.get("findings", ())),
    )


def _worst_case(answer: dict[str, Any] | None) -> "WorstCase | None":
    """Return None in lists, and for nodes of an older version."""
    from mainspring.model.retry import WorstCase

    return None if answer is None else WorstCase(answer["ms"], answer["sum"])


def _ms(text: str) -> int:
    return instant_ms(text)


def _ms_or_none(text: str | None) -> int | None:
    return None if text is None else _ms(text)


_TASKS: Final = "/v1/tasks"
_LANES: Final = "/v1/lanes"
_RUNS: Final = "/v1/runs"
_PAUSES: Final = "/v1/pauses"
_BEATS: Final = "/v1/beats"
_REFUSALS: Final[dict[str, LaneAnswer]] = {"no head": "no head", "gone": "gone"}


class RemoteClient:
    """Tasks, lanes and pauses over HTTP. The audit entry names the API key, not the caller."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.schedules = RemoteSchedules(api)
        self.dead = RemoteDeadLetters(api)

    # -- tasks ---------------------------------------------------------------------------------------------

    async def put(self, target: str, payload: Any = None, **given: Any) -> Handle:
        if given.get("retry") is not None:
            given["retry"] = retry_line(given["retry"])
        return msgspec.convert(self.api.post(_TASKS, target=target, payload=payload, **given), Handle)

    async def beat(self, name: str, **given: Any) -> Beat:
        return Beat.from_dict(self.api.post(_BEATS, name, **given))

    async def beats(self) -> list[Beat]:
        return [Beat.from_dict(one) for one in self.api.get(_BEATS)["beats"]]

    async def remove_beat(self, name: str) -> bool:
        try:
            self.api.delete(_BEATS, name)
        except NotFound:
            return False
        return True

    async def get(self, id: str, *, lane: str | None = None) -> TaskInfo:
        try:
            return _task(self.api.get(_TASKS, id, lane=lane))
        except NotFound:
            return TaskInfo(id, "unknown")

    async def explain(self, id: str, *, lane: str | None = None) -> Explanation:
        try:
            return msgspec.convert(self.api.get(_TASKS, id, "explain", lane=lane), Explanation)
        except NotFound:
            now_ms = time.time_ns() // 1_000_000
            return Explanation(id=id, code="unknown", text=UNKNOWN, state="unknown", now_ms=now_ms)

    async def find_result(self, id: str, *, lane: str | None = None) -> Result | None:
        answer = self.api.get(_TASKS, id, "result", lane=lane)
        return Result.from_dict(answer) if "ending" in answer else None

    async def cancel_many(self, ids: Iterable[str], *, lane: str | None = None) -> list[BulkCancelOutcome]:
        wanted = list(ids)
        outcomes = {id: self._cancel(id, lane) for id in dict.fromkeys(wanted)}  # an id given twice is cancelled once
        return [outcomes[id] for id in wanted]

    def _cancel(self, id: str, lane: str | None) -> BulkCancelOutcome:
        try:
            outcome: BulkCancelOutcome = self.api.delete(_TASKS, id, lane=lane)["outcome"]
        except NotFound:
            return "unknown"
        except TooLate:
            return "too late"
        except Ambiguous:
            return "ambiguous"
        return outcome

    async def reschedule(self, id: str, *, lane: str | None = None, **given: Any) -> Handle:
        return msgspec.convert(self.api.post(_TASKS, id, "reschedule", query={"lane": lane}, **given), Handle)

    async def list(self, **filters: Any) -> Page:
        answer = self.api.get(_TASKS, **filters)
        return Page([_task(one) for one in answer["tasks"]], answer["next"])

    async def count(self, **filters: Any) -> Count:
        return msgspec.convert(self.api.get(f"{_TASKS}:count", **filters), Count)

    # -- queues --------------------------------------------------------------------------------------------

    async def queues(self) -> Sequence[QueueInfo]:
        found: list[QueueInfo] = []
        cursor: str | None = None
        while True:
            page = msgspec.convert(self.api.get("/v1/queues", cursor=cursor), QueuePage)
            found += page.queues
            cursor = page.next
            if cursor is None:
                return found

    async def workers(self) -> Sequence[WorkerInfo]:
        return msgspec.convert(self.api.get("/v1/workers")["workers"], list[WorkerInfo])

    # -- runs ----------------------------------------------------------------------------------------------

    async def runs(self, **filters: Any) -> RunsPage:
        answer = self.api.get(_RUNS, **filters)
        return RunsPage([KeptRun.from_dict(one) for one in answer["runs"]], answer["next"])

    async def run(self, id: str) -> KeptRun | None:
        try:
            return KeptRun.from_dict(self.api.get(_RUNS, id))
        except NotFound:
            return None

    async def run_stats(self, **filters: Any) -> RunStats:
        return msgspec.convert(self.api.get("/v1/stats", **filters), RunStats)

    async def run_log(self, id: str, **given: Any) -> RunLog:
        return msgspec.convert(self.api.get(_RUNS, id, "log", **given), RunLog)

    # -- lanes ---------------------------------------------------------------------------------------------

    async def lanes(self) -> Sequence[LaneInfo]:
        found: list[LaneInfo] = []
        cursor: str | None = None
        while True:
            answer = self.api.get(_LANES, limit=1000, cursor=cursor)
            found += msgspec.convert(answer["lanes"], type=list[LaneInfo])
            cursor = answer["next"]
            if cursor is None:
                return found

    async def lane(self, lane: str) -> LaneInfo:
        return msgspec.convert(self.api.get(_LANES, lane), LaneInfo)

    async def lane_retry_head(self, lane: str) -> LaneAnswer:
        return self._lane(lane, "retry-head")

    async def lane_skip_head(self, lane: str, *, reason: str = "skipped by hand") -> LaneAnswer:
        return self._lane(lane, "skip-head", reason=reason)

    async def lane_resume(self, lane: str) -> LaneAnswer:
        return self._lane(lane, "resume")

    def _lane(self, lane: str, what: str, **body: Any) -> LaneAnswer:
        try:
            self.api.post(_LANES, lane, what, **body)
        except TooLate:
            return "too late"
        except ConflictAnswer as refused:
            if refused.answer not in _REFUSALS:
                raise
            return _REFUSALS[refused.answer]
        return "ok"

    # -- pauses --------------------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        target: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        by: str = "",
        for_: Delay | None = None,
        **given: Any,
    ) -> Pause:
        del by  # the API knows who calls
        return _pause(self.api.post(_PAUSES, **_scope(target, queue, lane) | {"for": for_}, **given))

    async def resume(self, *, target: str | None = None, queue: str | None = None, lane: str | None = None) -> bool:
        scope: dict[str, Any] = {"all": "true"} if target is queue is lane is None else _scope(target, queue, lane)
        try:
            self.api.delete(_PAUSES, **scope)
        except NotFound:
            return False
        return True

    async def pauses(self) -> Sequence[Pause]:
        return [_pause(one) for one in self.api.get(_PAUSES)["pauses"]]


def _task(answer: dict[str, Any]) -> TaskInfo:
    """Decode a task; payloads that are not JSON have a field of their own."""
    if "payload_base64" in answer:
        answer = answer | {"payload": base64.b64decode(answer["payload_base64"])}
    return msgspec.convert(answer, TaskInfo)


def _scope(target: str | None, queue: str | None, lane: str | None) -> dict[str, Any]:
    if target is queue is lane is None:
        return {"all": True}
    return {"target": target, "queue": queue, "lane": lane}


def _pause(answer: dict[str, Any]) -> Pause:
    fields = {name: answer[name] for name in ("mode", "reason", "since_ms", "until_ms")}
    by = answer["by"] if "by" in answer else answer["who"]  # a node of an older version
    return Pause(Scope.parse(answer["scope"]), by=by, **fields)
