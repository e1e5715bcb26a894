"""A task as a message of Kafka: its value, its key and its headers.

All in bytes: the library would have to turn every text into them, at a tenth of the cost of a message. A dict of
headers spares it the look into a tuple for each.
"""

from binascii import hexlify
from collections.abc import Iterator, Sequence
from typing import Final

from ..model.delivery import Columns, Delivery

Headers = dict[str, str | bytes | None]
Message = tuple[bytes, bytes, Headers]

_IDH_BYTES: Final = 16


def messages_of(chunk: Sequence[Delivery]) -> Iterator[Message]:
    """Value, key and headers of each. The headers hold until the next one is asked for: the library copies them."""
    prefix = chunk[0].namespace.encode() + b"/"
    columns = type(chunk[0]).columns(chunk)
    if columns is None:
        return (_message_of(one, prefix) for one in chunk)
    return _side_by_side(chunk, columns, prefix)


def identity_of(one: Delivery) -> tuple[bytes, bytes]:
    """Its key and its value, by which reports tell messages apart."""
    return (one.id if one.lane is None else one.lane).encode(), one.body.payload


def _side_by_side(chunk: Sequence[Delivery], columns: Columns, prefix: bytes) -> Iterator[Message]:
    """The same as `_message_of` makes, for half of its cost. Neighbours are mostly due in the same millisecond."""
    ids = hexlify(columns.idhs, b"/", _IDH_BYTES).split(b"/")
    headers: Headers = {"idempotency-key": b"", "id": b"", "due": b"", "attempt": b"1"}
    written_ms, ending = -1, b""
    for one, id, due_ms in zip(chunk, ids, columns.dues_ms, strict=True):
        if due_ms != written_ms:
            written_ms, headers["due"], ending = due_ms, b"%d" % due_ms, b"/%d" % due_ms
        headers["idempotency-key"] = prefix + id + ending
        headers["id"] = id
        yield one.body.payload, id, headers


def _message_of(one: Delivery, prefix: bytes) -> Message:
    body, due = one.body, b"%d" % one.original_due_ms
    if body.id is None:
        # Hexadecimal digits need no quoting, which would cost as much as all of this.
        id = hexlify(one.idh)
        idempotency_key = b"".join((prefix, id, b"/", due))
    else:
        id, idempotency_key = body.id.encode(), one.idempotency_key.encode()
    key = id if body.lane is None else body.lane.encode()
    attempt = b"1" if body.attempt == 1 else b"%d" % body.attempt
    return body.payload, key, {"idempotency-key": idempotency_key, "id": id, "due": due, "attempt": attempt}
