"""Dead letters over a node's HTTP API, by the names that `Client` has for them."""

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec

from mainspring.cli.remote import Api, moment_of
from mainspring.model.dead import PROBLEMS_KEPT, DeadLetter, DeadPage, DropOutcome, Replayed, ReplaySummary
from mainspring.model.errors import Conflict, NotFound
from mainspring.model.outcome import Response
from mainspring.model.times import Delay, When

_DEAD: Final = "/v1/dead"
_PAGE: Final = 1_000
_COUNTED: Final = ("replayed", "conflict", "damaged", "gone")


class RemoteLetters:
    """What commands do with dead letters. Filters are those of `Client`."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def dead_list(self, *, limit: int = 50, cursor: str | None = None, **filters: Any) -> DeadPage:
        told = self._page(limit, cursor, filters)
        return DeadPage([_letter(one) for one in told["letters"]], told["next"])

    def _page(self, limit: int, cursor: str | None, filters: dict[str, Any]) -> Any:
        return self.api.get(_DEAD, limit=limit, cursor=cursor, **_chosen(filters))

    async def dead_count(self, *, died_after: When | None = None, died_before: When | None = None) -> None:
        """The API counts no letters without reading them."""

    async def dead_get(self, id: str, *, lane: str | None = None) -> DeadLetter | None:
        try:
            return _letter(self.api.get(_DEAD, id, lane=lane))
        except NotFound:
            return None

    async def dead_replay(
        self,
        id: str,
        *,
        lane: str | None = None,
        at: When | None = None,
        after: Delay | None = None,
        new_key: bool = False,
        dry_run: bool = False,
    ) -> Replayed:
        said: dict[str, Any] = {"at": moment_of(at), "after": after, "new_key": new_key, "dry_run": dry_run}
        try:
            return msgspec.convert(self.api.post(_DEAD, id, "replay", query={"lane": lane}, **said), Replayed)
        except NotFound:
            return Replayed(id, "unknown", None, "there is no dead letter with this id")
        except Conflict as error:
            return Replayed(id, "conflict", None, str(error))

    async def dead_replay_many(
        self,
        *,
        at: When | None = None,
        after: Delay | None = None,
        rate: float | None = None,
        new_key: bool = False,
        dry_run: bool = False,
        progress: Callable[[ReplaySummary], None] | None = None,
        **filters: Any,
    ) -> ReplaySummary:
        """A request goes on for half a minute at most; more of them follow as long as letters are left."""
        said: dict[str, Any] = {
            "at": moment_of(at),
            "after": after,
            "rate": rate,
            "new_key": new_key,
            "dry_run": dry_run,
        }
        summary = ReplaySummary(dry_run)
        while True:
            told = self.api.post(f"{_DEAD}:replay", **_chosen_or_all(filters), **said)
            for name in _COUNTED:
                # What cannot be replayed is met again each time: the last count is the true one.
                before = getattr(summary, name) if name == "replayed" else 0
                setattr(summary, name, before + told[name])
            summary.problems = msgspec.convert(told["problems"], type=list[Replayed])[:PROBLEMS_KEPT]
            if progress is not None:
                progress(summary)
            if told["complete"] or dry_run or not told["replayed"]:
                return summary
            # What has died once more since the first request is left for another time: else this might never end.
            filters["died_before"] = told.get("died_before", filters.get("died_before"))

    async def dead_drop(self, id: str, *, lane: str | None = None) -> DropOutcome:
        try:
            self.api.delete(_DEAD, id, lane=lane)
        except NotFound:
            return "unknown"
        return "dropped"

    async def dead_drop_many(
        self, *, dry_run: bool = False, progress: Callable[[int], None] | None = None, **filters: Any
    ) -> int:
        count = 0
        while True:
            told = self.api.post(f"{_DEAD}:drop", **_chosen_or_all(filters), dry_run=dry_run)
            count += int(told["dropped"])
            if progress is not None:
                progress(count)
            if told["complete"] or dry_run or not told["dropped"]:
                return count

    async def dead_export(
        self, write: Callable[[bytes], Any], *, progress: Callable[[int], None] | None = None, **filters: Any
    ) -> int:
        """Pages come with the newest first: all of them are fetched before the oldest is written."""
        letters: list[Any] = []
        cursor: str | None = None
        while True:
            told = self._page(_PAGE, cursor, filters)
            letters += told["letters"]
            cursor = told["next"]
            if progress is not None:
                progress(len(letters))
            if cursor is None:
                break
        for letter in reversed(letters):
            write(msgspec.json.encode(letter) + b"\n")
        return len(letters)


def _chosen(filters: dict[str, Any]) -> dict[str, Any]:
    times = {name: moment_of(filters.get(name)) for name in ("died_after", "died_before")}
    return filters | {name: None if at is None else str(at) for name, at in times.items()}


def _chosen_or_all(filters: dict[str, Any]) -> dict[str, Any]:
    chosen = _chosen(filters)
    return chosen if any(value is not None for value in chosen.values()) else {"all": True}


def _letter(told: dict[str, Any]) -> DeadLetter:
    """As the API tells it; its key is worked out again from id and time."""
    fields = {name: told[name] for name in ("id", "reason", "died_ms", "due_ms")}
    if told["damaged"]:
        return DeadLetter(**fields, entry=base64.b64decode(told.get("entry_base64", "")))
    fields |= {name: told.get(name) for name in ("target", "lane", "retry", "timeout_ms")}
    raw = told.get("payload_base64")
    payload = base64.b64decode(raw) if raw is not None else msgspec.json.encode(told.get("payload"))
    letter = DeadLetter(
        **fields, attempts=told["attempts"], errors=tuple(told["errors"]), raw=raw is not None, payload=payload
    )
    return letter.answered(None if told.get("response") is None else Response.from_dict(told["response"]))
