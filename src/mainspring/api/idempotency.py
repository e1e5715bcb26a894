"""`Idempotency-Key`: the same request sent again gets the same answer, and does its work once."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

from ..model.errors import MainspringError, StoreError
from ..store import answers
from ..store.answers import Claim, Kept
from ..store.store import Store
from .asgi import Answer
from .call import Call
from .problems import Problem

MAX_KEY_CHARS: Final = 255
_REPLAYED: Final = (b"idempotency-replayed", b"true")

Work = Callable[[str | None, bool], Awaitable[Answer]]
"""Gets an id to use where the request names none (the same every time), and whether it may have run before."""


async def once(call: Call, work: Work) -> Answer:
    """Do the work, unless the same caller's same key has an answer already."""
    given = call.headers.get(b"idempotency-key")
    if given is None:
        return await work(None, False)
    store = call.client.store
    window_ms = int(call.node.config.idempotency_window_s * 1000)
    place = Claim.of(store, call.key.id, checked_key(given))
    fingerprint = _fingerprint(call)
    known = await answers.claim(store, place, fingerprint, window_ms=window_ms)
    if known is not None and known.fingerprint != fingerprint:
        raise Problem("idempotency", "this Idempotency-Key was used with another request; take a new one")
    if known is not None and known.answered:
        return Answer(known.status, known.body, headers=(*_location(known.location), _REPLAYED))
    try:
        found = await work(f"idem-{place.hashed[:40]}", known is not None)
    except (Problem, MainspringError) as error:
        if known is None and not _may_have_run(error):
            await _forget(store, place)
        raise
    location = dict(found.headers).get(b"location", b"")
    await answers.keep(store, place, Kept(fingerprint, found.status, found.body, location), window_ms=window_ms)
    return found


def checked_key(given: bytes) -> str:
    text = given.decode("latin-1")
    if not 1 <= len(text) <= MAX_KEY_CHARS or not text.isascii() or not text.isprintable():
        raise Problem("invalid", f"Idempotency-Key: use 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return text


def _fingerprint(call: Call) -> bytes:
    hashed = hashlib.sha256()
    for part in (call.method, call.path, call.query_string, call.namespace.encode(), call.raw_body):
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.digest()


def _location(kept: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"location", kept),) if kept else ()


def _may_have_run(error: Problem | MainspringError) -> bool:
    return isinstance(error, StoreError) or (isinstance(error, Problem) and error.status >= 500)


async def _forget(store: Store, place: Claim) -> None:
    try:
        await answers.release(store, place)
    except StoreError:
        return  # it stays taken for the same request only, which is harmless
