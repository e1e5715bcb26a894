"""Entries: `offset:4 | flags:1 | idh:16 | msgpack body`. See docs/wire-format.md."""

from operator import itemgetter
from typing import Any, Final

import msgspec

from ..model.delivery import Body

INDEXED: Final = 1
LANE: Final = 2
RESENT: Final = 4
TOMB: Final = 8
FORWARD: Final = 16
SCHEDULED: Final = 32
"""The planned occurrence of a schedule: its begin puts the following one."""

HEADER_BYTES: Final = 21
TOMB_BYTES: Final = 4
"""A cancelled entry keeps the first four bytes of its idh: enough to prove which entry stood there."""
MARK_BYTES: Final = HEADER_BYTES + 14
"""The header of a task that has moved, and its new address."""

_CUT: Final = 0xC1
"""In place of a body, in what `heads.lua` returns of a large entry. No msgpack value begins so."""
_CUT_BYTES: Final = HEADER_BYTES + 5

_ARRAYS_FROM: Final = 0x90
"""Bodies begin with a byte from here on, addresses with the number of a width."""
TWO_FIELDS: Final = 0x92
"""How bodies begin that say nothing beyond target and payload."""
_FOUR_FIELDS: Final = 0x94
"""And those that have an id and a lane as well."""

_BODY: Final = itemgetter(slice(HEADER_BYTES, None))
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Body).decode


def decode_payload(body: Body) -> Any:
    """The payload as the caller gave it; its bytes where they are not the JSON that they should be."""
    if body.raw:
        return body.payload
    try:
        return msgspec.json.decode(body.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.payload  # any client in any language writes entries: one wrong payload must not hide the others


def entry(offset_ms: int, flags: int, idh: bytes, body: Body) -> bytes:
    return b"%b%c%b%b" % (offset_ms.to_bytes(4, "big"), flags, idh, _encode(_fields(body)))


def _fields(body: Body) -> Body | tuple[Any, ...]:
    """The body without the defaults at its end: of most tasks two, three or four fields are left."""
    ordinary = body.due_ms is None and body.original_due_ms is None and body.expires_ms is None
    if body.by is not None:
        return body
    if body.lane_in_key:
        return msgspec.structs.astuple(body)[:-1]
    if body.timeout_ms is not None:
        return msgspec.structs.astuple(body)[:-2]
    if body.occurrence is not None or body.retry is not None:
        return msgspec.structs.astuple(body)[: -3 if body.occurrence is not None else -4]
    if not ordinary or body.attempt != 1 or body.raw or body.errors:
        return msgspec.structs.astuple(body)[:-5]
    if body.lane is not None:
        return (body.target, body.payload, body.id, body.lane)
    return (body.target, body.payload) if body.id is None else (body.target, body.payload, body.id)


def decode(row: bytes) -> Body:
    """The body of one entry; raises msgspec.DecodeError (or its kin) when it is damaged."""
    try:
        return _decode(row[HEADER_BYTES:])
    except RecursionError:
        raise _too_deep() from None


def is_cut(row: bytes) -> bool:
    """Is this an entry without its payload, as `heads.lua` returns large ones?"""
    return len(row) >= _CUT_BYTES and row[HEADER_BYTES] == _CUT


def whole_bytes(row: bytes) -> int:
    """The length of an entry, cut or not."""
    return int.from_bytes(row[HEADER_BYTES + 1 : _CUT_BYTES], "big") if is_cut(row) else len(row)


def decode_head(row: bytes) -> Body:
    """Like `decode`; of a cut entry only target, id and lane."""
    return decode(row[:HEADER_BYTES] + row[_CUT_BYTES:] if is_cut(row) else row)


def without_headers(rows: list[bytes]) -> list[bytes]:
    """The bodies of entries as they are written."""
    return list(map(_BODY, rows))


def decode_many(bodies: list[bytes]) -> list[Body]:
    """Each for itself: joined to one array they would cost the same, and what one lacks the next could bring."""
    try:
        return list(map(_decode, bodies))
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> msgspec.DecodeError:
    """A field that we do not know may hold anything; it is skipped, level by level."""
    return msgspec.DecodeError("values stand too deep within one another")


def target_of_all(bodies: list[bytes]) -> str | None:
    """The target of these bodies where all have the same and say nothing beyond id and lane; else None.

    In the order of their bytes whatever lies between the first and the last begins with what these two have in
    common: the number of fields, and the target. So two of them tell of all.
    """
    first, last = min(bodies), max(bodies)
    if not TWO_FIELDS <= first[0] <= _FOUR_FIELDS:
        return None
    target = _decode(first).target
    head = first[:1] + _encode(target)
    return target if first.startswith(head) and last.startswith(head) else None


def is_tomb(row: bytes) -> bool:
    """Is this what was left of an entry? One that still has its body is not, whatever its flags say: it is damaged."""
    if len(row) == MARK_BYTES:
        return row[4] & (TOMB | FORWARD) == TOMB | FORWARD and row[HEADER_BYTES] < _ARRAYS_FROM
    return len(row) == TOMB_BYTES or (len(row) == HEADER_BYTES and row[4] & (TOMB | FORWARD) == TOMB)


def forward_mark(row: bytes) -> bytes:
    """What stays of an entry whose task moves away; its new address follows. `bury` in `_copies.lua` does the same."""
    return b"%b%c%b" % (row[:4], row[4] & (INDEXED | LANE | RESENT) | TOMB | FORWARD, row[5:HEADER_BYTES])


def header(row: bytes) -> bytes:
    """What proves that an entry is still the one that was read: offset and idh, not the flags."""
    return row if len(row) == TOMB_BYTES else row[:4] + row[5:HEADER_BYTES]


def same_entry(row: bytes, head: bytes) -> bool:
    """Is this the entry with that header? One that was cancelled since has shrunk; `_entry.lua` says the same."""
    if len(row) == TOMB_BYTES:
        return row in (head, head[4 : 4 + TOMB_BYTES])
    return header(row) == head


BIN8: Final = tuple(b"\xc4" + bytes((size,)) for size in range(256))


def short_head(target: str) -> bytes:
    """The start of a body of two fields up to its payload: the same for all tasks of one target."""
    return b"\x92" + _encode(target)


def bin_head(size: int) -> bytes:
    """The msgpack header of a payload: written by hand because this is the hottest line of a bulk put."""
    if size < 256:
        return BIN8[size]
    return b"\xc5" + size.to_bytes(2, "big") if size < 65536 else b"\xc6" + size.to_bytes(4, "big")
