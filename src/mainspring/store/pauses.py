"""The pauses of a namespace: one hash, read by nodes and workers. See docs/lanes.md."""

from typing import Final

import msgspec

from ..model.pause import Pause, Scope
from .store import Store

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Pause).decode


async def read_pauses(store: Store) -> list[Pause]:
    """All that were written and not ended by somebody; some may be over by time. One round trip.

    A record that cannot be read (a later version wrote it) counts as a pause of what its name says: to stand still by
    mistake is the lesser evil.
    """
    [reply] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.pauses)])
    return [_read(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]


def _read(name: bytes, raw: bytes) -> Pause:
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        scope = Scope.parse(name.decode(errors="replace"))
        return Pause(scope, reason="its record cannot be read; resume it, or look at it with a later version")


async def write_pause(store: Store, pause: Pause) -> None:
    """Nodes and workers hear of it at once, and look every few seconds in any case."""
    await store.run_one(
        store.keys.slot,
        [
            ("HSET", store.keys.pauses, pause.scope.text, _encode(pause)),
            ("SPUBLISH", store.keys.cluster, "pauses"),
        ],
    )


async def write_if_none(store: Store, pause: Pause) -> bool:
    """The same, unless something of that name is paused: what a person wrote is not overwritten.

    True when this is the pause that stands: also when it was written before, and the reply lost.
    """
    written = _encode(pause)
    _, standing, _ = await store.run_one(
        store.keys.slot,
        [
            ("HSETNX", store.keys.pauses, pause.scope.text, written),
            ("HGET", store.keys.pauses, pause.scope.text),
            ("SPUBLISH", store.keys.cluster, "pauses"),
        ],
    )
    return bool(standing == written)


async def remove_pause(store: Store, scope: Scope) -> bool:
    """False when nothing of that name was paused."""
    removed, _ = await store.run_one(
        store.keys.slot,
        [
            ("HDEL", store.keys.pauses, scope.text),
            ("SPUBLISH", store.keys.cluster, "pauses"),
        ],
    )
    return bool(removed)


async def clear_away(store: Store, pause: Pause) -> None:
    """Remove a pause that is over by time, unless it was written anew meanwhile."""
    call = store.scripts.call("unpause", [store.keys.pauses], [pause.scope.text, _encode(pause)])
    await store.run_one(store.keys.slot, [call])
