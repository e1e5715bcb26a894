"""Dead letters: tasks that were given up, with everything a person needs to judge them."""

from typing import Final

import msgspec

from ..model.errors import StoreError
from .store import Group, Store


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a task died, every error on the way, and the task itself (or its raw entry if it was unreadable)."""

    id: str
    reason: str
    died_ms: int
    due_ms: int
    target: str = ""
    payload: bytes = b""
    raw: bool = False
    lane: str | None = None
    attempts: int = 1
    errors: tuple[str, ...] = ()
    entry: bytes = b""

    def encode(self) -> bytes:
        return _encode(self)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode


async def list_dead(store: Store, *, limit: int = 100) -> list[DeadLetter]:
    """The newest dead letters of all partitions."""
    newest: list[tuple[float, int, bytes]] = []
    groups: list[Group] = [
        (keys.slot, [("ZRANGE", keys.dead_times, 0, limit - 1, "REV", "WITHSCORES")]) for keys in store.keys.partitions
    ]
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        [reply] = result
        newest += [(float(reply[i + 1]), p, reply[i]) for i in range(0, len(reply), 2)]
    letters = []
    for _, p, idh in sorted(newest, reverse=True)[:limit]:
        keys = store.keys.partitions[p]
        [record] = await store.run_one(keys.slot, [("HGET", keys.dead, idh)])
        if record is not None:
            letters.append(_decode(record))
    return letters
