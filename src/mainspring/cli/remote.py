"""The road to a node's HTTP API: one connection, JSON both ways, problems as the errors they stand for."""

import http.client
import ssl
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from mainspring.model.access import is_token
from mainspring.model.api_address import read_api_url
from mainspring.model.errors import (
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
from mainspring.model.task import Handle
from mainspring.model.times import When, instant_ms

TIMEOUT_S: Final = 90.0
"""Longer than any request may take: replaying many letters goes on for half a minute."""


_AWAY: Final = (502, 503, 504)
"""What a proxy says of a node behind it that it cannot reach."""


class TooLate(Conflict):
    """The task has begun, or is over."""


class NoNamespace(MainspringError):
    """It is not there, or not for this key. No `NotFound`, which is of what a namespace may hold."""


class Answered(Conflict):
    """Nothing was done; `answer` is the word for why."""

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
    """Calls one API. Nothing is sent twice: a request whose answer was lost may have been done."""

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
                raise ConfigError("api_token is no API key; they begin with msk_")
            self._headers["authorization"] = f"Bearer {token}"
        self._road = _road(parts.scheme, parts.hostname or "", parts.port)

    def close(self) -> None:
        self._road.close()

    def get(self, *path: str, **query: object) -> Any:
        return self.call("GET", *path, query=query)

    def post(self, *path: str, query: Mapping[str, object] | None = None, **body: object) -> Any:
        """Fields that are None are left out."""
        for name, value in body.items():
            if isinstance(value, float) and not isfinite(value):
                # JSON has no word for it but null, which would mean that nothing was said.
                raise InvalidInput(f"{name} is {value}; give a number")
        return self.call("POST", *path, query=query, body=_said(body))

    def delete(self, *path: str, **query: object) -> Any:
        return self.call("DELETE", *path, query=query)

    def call(
        self,
        method: str,
        *path: str,
        query: Mapping[str, object] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Any:
        """The answer, decoded; its error when it is a problem. `path` is given segment by segment, not encoded."""
        headers = self._headers | ({} if body is None else {"content-type": "application/json"})
        content = None if body is None else msgspec.json.encode(body)
        try:
            self._road.request(method, self._path + _path(path, query), content, headers)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.where}: cannot connect: {_why(error)}", sent=False) from None
        try:
            answer = self._road.getresponse()
            return self._read(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.where}: no answer: {_why(error)}; it may have been done", sent=True) from None

    def _read(self, status: int, body: bytes) -> Any:
        try:
            told = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if status in _AWAY:
                raise self._away(f"no node answers (status {status})") from None
            raise Refused(
                f"{self.where} does not answer as Mainspring's API does (status {status}); is this its address?"
            ) from None
        if status < 400:
            return told
        problem = told if isinstance(told, dict) else {}
        kind = str(problem.get("type", "")).removeprefix(_PREFIX)
        detail = str(problem.get("detail", f"status {status}"))
        if kind == "unauthenticated":
            detail += ". Commands send the one in MAINSPRING_API_TOKEN, or in the file MAINSPRING_API_TOKEN_FILE names"
        if kind == "not-found" and problem.get("missing") == "namespace":
            raise NoNamespace(detail)
        if kind == "conflict" and "answer" in problem:
            raise Answered(detail, str(problem["answer"]))
        if kind == "unavailable":
            raise self._away(detail)
        if kind in _ERRORS:
            raise _with_handle(_ERRORS[kind](detail), problem)
        raise Refused(f"{self.where}: {detail}")

    def _away(self, why: str) -> Unavailable:
        return Unavailable(f"{self.where}: {why}", sent=True)


def _with_handle(error: MainspringError, problem: Mapping[str, Any]) -> MainspringError:
    """A task that is stored, but not confirmed, is named in the problem."""
    if isinstance(error, NotConfirmed) and "id" in problem:
        named = {name: problem[name] for name in ("id", "due_ms", "outcome") if name in problem}
        error.handles = [msgspec.convert(named, Handle)]
    return error


def _road(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def _path(segments: tuple[str, ...], query: Mapping[str, object] | None) -> str:
    first, *names = segments
    if "" in names:  # it would be the path of something else
        raise InvalidInput("the id, or the name, is empty; give 1 to 256 bytes")
    path = "/".join([first, *(quote(name, safe="") for name in names)])
    said = _said(query or {})
    return f"{path}?{urlencode(said)}" if said else path


def moment_of(when: When | None) -> str | int | float | None:
    """A time as the API reads it."""
    return when if when is None or isinstance(when, (str, int, float)) else instant_ms(when)


def _said(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
