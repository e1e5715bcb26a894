"""Entries: `offset:4 | flags:1 | idh:16 | msgpack body`. See docs/wire-format.md."""

from operator import itemgetter
from typing import Any, Final

import msgspec

from ..model.delivery import Body

INDEXED: Final = 1
LANE: Final = 2
RESENT: Final = 4
TOMBSTONE: Final = 8
FORWARD: Final = 16
SCHEDULED: Final = 32
"""Flag of a schedule's planned occurrence: the call that begins it puts the next one."""

HEADER_BYTES: Final = 21
TOMBSTONE_BYTES: Final = 4
"""A cancelled entry keeps the first four bytes of its id hash: enough to prove which entry it was."""
MARK_BYTES: Final = HEADER_BYTES + 14
"""Length of the mark of a moved task: its header and its new address."""

_CUT: Final = 0xC1
"""Replaces the body in a large entry returned by `heads.lua`. No msgpack value begins with this byte."""
_CUT_BYTES: Final = HEADER_BYTES + 5

_ARRAYS_FROM: Final = 0x90
"""Bodies begin with this byte or a higher one; addresses begin with the number of a width, which is lower."""
TWO_FIELDS: Final = 0x92
"""First byte of a body with only target and payload."""
_FOUR_FIELDS: Final = 0x94
"""First byte of a body that has an id and a lane as well."""

_BODY: Final = itemgetter(slice(HEADER_BYTES, None))
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Body).decode


def decode_payload(body: Body) -> Any:
    """Return the payload as the caller gave it; raw bytes if they should be JSON but are not."""
    if body.raw:
        return body.payload
    try:
        return msgspec.json.decode(body.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.payload  # clients in any language write entries: one wrong payload must not hide the others


def entry(offset_ms: int, flags: int, idh: bytes, body: Body) -> bytes:
    return b"%b%c%b%b" % (offset_ms.to_bytes(4, "big"), flags, idh, _encode(_fields(body)))


def _fields(body: Body) -> Body | tuple[Any, ...]:
    """Return the body without trailing defaults: most tasks have two, three or four fields."""
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
    """Return the body of one entry; raise msgspec.DecodeError (or a relative) if it is damaged."""
    try:
        return _decode(row[HEADER_BYTES:])
    except RecursionError:
        raise _too_deep() from None


def is_cut(row: bytes) -> bool:
    """Return whether an entry lacks its payload, as `heads.lua` returns large ones."""
    return len(row) >= _CUT_BYTES and row[HEADER_BYTES] == _CUT


def whole_bytes(row: bytes) -> int:
    """Return the length of an entry, cut or not."""
    return int.from_bytes(row[HEADER_BYTES + 1 : _CUT_BYTES], "big") if is_cut(row) else len(row)


def decode_head(row: bytes) -> Body:
    """Decode like `decode`; a cut entry has only target, id and lane."""
    return decode(row[:HEADER_BYTES] + row[_CUT_BYTES:] if is_cut(row) else row)


def without_headers(rows: list[bytes]) -> list[bytes]:
    """Return the bodies of entries as they are stored."""
    return list(map(_BODY, rows))


def decode_many(bodies: list[bytes]) -> list[Body]:
    """Decode each body on its own: as one array, a short body could swallow the start of the next."""
    try:
        return list(map(_decode, bodies))
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> msgspec.DecodeError:
    """Return the error for an unknown field that is nested too deeply to be skipped."""
    return msgspec.DecodeError("values are nested too deeply")


def target_of_all(bodies: list[bytes]) -> str | None:
    """Return the target of these bodies if all share it and have nothing beyond id and lane; else None.

    In byte order, every body between the first and the last begins with the bytes that these two have in common:
    number of fields and target. So comparing two bodies is enough.
    """
    first, last = min(bodies), max(bodies)
    if not TWO_FIELDS <= first[0] <= _FOUR_FIELDS:
        return None
    target = _decode(first).target
    head = first[:1] + _encode(target)
    return target if first.startswith(head) and last.startswith(head) else None


def is_tombstone(row: bytes) -> bool:
    """Return whether an entry is a tombstone. One that still has its body is damaged, whatever its flags say."""
    if len(row) == MARK_BYTES:
        return row[4] & (TOMBSTONE | FORWARD) == TOMBSTONE | FORWARD and row[HEADER_BYTES] < _ARRAYS_FROM
    return len(row) == TOMBSTONE_BYTES or (len(row) == HEADER_BYTES and row[4] & (TOMBSTONE | FORWARD) == TOMBSTONE)


def forward_mark(row: bytes) -> bytes:
    """Return what remains of an entry whose task moves; its new address follows. See `bury` in `_copies.lua`."""
    return b"%b%c%b" % (row[:4], row[4] & (INDEXED | LANE | RESENT) | TOMBSTONE | FORWARD, row[5:HEADER_BYTES])


def header(row: bytes) -> bytes:
    """Return the bytes that identify an entry: offset and id hash, not the flags."""
    return row if len(row) == TOMBSTONE_BYTES else row[:4] + row[5:HEADER_BYTES]


def same_entry(row: bytes, head: bytes) -> bool:
    """Return whether this is the entry with that header, also after it was cancelled and shrank, as in `_entry.lua`."""
    if len(row) == TOMBSTONE_BYTES:
        return row in (head, head[4 : 4 + TOMBSTONE_BYTES])
    return header(row) == head


BIN8: Final = tuple(b"\xc4" + bytes((size,)) for size in range(256))


def short_head(target: str) -> bytes:
    """Return the start of a two-field body up to its payload: the same for all tasks of one target."""
    return b"\x92" + _encode(target)


def bin_head(size: int) -> bytes:
    """Return the msgpack header of a payload; written by hand because bulk puts spend most of their time here."""
    if size < 256:
        return BIN8[size]
    return b"\xc5" + size.to_bytes(2, "big") if size < 65536 else b"\xc6" + size.to_bytes(4, "big")
