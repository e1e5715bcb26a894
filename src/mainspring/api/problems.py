"""Errors as RFC 9457 problem documents."""

from http import HTTPStatus
from typing import Final

import msgspec

from ..model.errors import MainspringError, OutOfMemory, StoreError

RETRY_AFTER_S: Final = 1
_PREFIX: Final = "urn:mainspring:problem:"


class Problem(Exception):
    """An answer that is an error. `kind` is stable, for programs; `detail` is for people."""

    def __init__(self, status: int, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "type": _PREFIX + self.kind,
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": self.detail,
            }
        )


def not_ready(detail: str) -> Problem:
    return Problem(503, "unavailable", detail, retry_after=str(RETRY_AFTER_S))


def problem_of(error: MainspringError) -> Problem:
    """What the store's errors are over HTTP."""
    match error:
        case OutOfMemory():
            return Problem(507, "out-of-memory", str(error), retry_after=str(RETRY_AFTER_S))
        case StoreError():
            return not_ready(f"{error}. The same request may be sent again: it counts once")
        case _:
            return Problem(400, "invalid", str(error))
