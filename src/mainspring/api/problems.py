"""Errors as RFC 9457 problem documents. Their types never change their meaning: programs decide by them."""

from http import HTTPStatus
from typing import Any, Final

import msgspec

from ..model.errors import Conflict, MainspringError, NotConfirmed, NotFound, OutOfMemory, StoreError

RETRY_AFTER_S: Final = 1
PREFIX: Final = "urn:mainspring:problem:"

PROBLEMS: Final = {
    "malformed": (400, "the request cannot be read: no JSON, no UTF-8, no HTTP"),
    "invalid": (400, "a value is wrong; the detail names it"),
    "unauthenticated": (401, "no API key, or one that is unknown, expired or revoked"),
    "forbidden": (403, "the key's role or its targets do not allow this"),
    "not-found": (404, "nothing is there, or nothing that this key may see"),
    "method": (405, "the path answers other methods; they are in the header Allow"),
    "timeout": (408, "the request came too slowly"),
    "conflict": (409, "the id is taken, or the object has changed meanwhile"),
    "too-late": (409, "the task has begun, or is over"),
    "too-large": (413, "the body, or a part of it, is larger than the limit"),
    "content-type": (415, "the body is of another type than the route takes, or compressed"),
    "idempotency": (422, "the Idempotency-Key was used before with another request"),
    "rate": (429, "too many requests; Retry-After says when to come again"),
    "headers": (431, "the headers are larger than the limit"),
    "bug": (500, "an error in Mainspring itself"),
    "unavailable": (503, "the server does not answer, or the node is starting or stopping; come again"),
    "not-confirmed": (503, "stored, but the asked durability was not reached: repeat with the same id"),
    "out-of-memory": (507, "the server is full; nothing was written"),
}
"""Slug -> status and meaning."""


class Problem(Exception):
    """An answer that is an error. `kind` is stable, for programs; `detail` is for people."""

    def __init__(self, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, _ = PROBLEMS[kind]
        self.kind = kind
        self.detail = detail
        self.members: dict[str, Any] = {}
        """What programs may want to know besides."""
        self.headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "type": PREFIX + self.kind,
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail.encode("utf-8", "replace").decode(),
        } | self.members

    def body(self) -> bytes:
        return msgspec.json.encode(self.fields)


def not_ready(detail: str) -> Problem:
    return Problem("unavailable", detail, retry_after=str(RETRY_AFTER_S))


def problem_of(error: MainspringError) -> Problem:
    """What the store's errors are over HTTP."""
    match error:
        case OutOfMemory():
            return Problem("out-of-memory", str(error), retry_after=str(RETRY_AFTER_S))
        case NotConfirmed():
            problem = Problem("not-confirmed", str(error), retry_after=str(RETRY_AFTER_S))
            if error.handles and (handle := error.handles[0]) is not None:
                problem.members = {"id": handle.id, "due_ms": handle.due_ms, "outcome": handle.outcome}
            return problem
        case StoreError():
            return not_ready(f"{error}. The same request may be sent again: with an id it counts once")
        case NotFound():
            return Problem("not-found", str(error))
        case Conflict():
            return Problem("conflict", str(error))
        case _:
            return Problem("invalid", str(error))
