"""Looks at the dead letters of a partition: each has a record and a time."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import msgspec

from ..model.dead import DeadLetter
from .keys import PartitionKeys
from .store import Store
from .verify_report import Finding, Repair

LETTERS_A_PAGE: Final = 100
"""Few: a scan of records brings their payloads along."""

_PROBLEMS: Final = {
    "record": "a dead letter without its time: no list shows it",
    "time": "the time of a dead letter that is not there",
}
_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode


async def check_dead_letters(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    told: set[bytes] = set()
    for command, key in (("HSCAN", keys.dead), ("ZSCAN", keys.dead_times)):
        cursor = 0
        while True:
            [reply] = await store.run_one(keys.slot, [(command, key, cursor, "COUNT", LETTERS_A_PAGE)])
            cursor, idhs = int(reply[0]), reply[1][::2]
            for at in range(0, len(idhs), LETTERS_A_PAGE):
                for idh, there in await _halves(store, keys, idhs[at : at + LETTERS_A_PAGE]):
                    if idh not in told:
                        told.add(idh)
                        repair = partial(_repair, store, keys, idh)
                        yield Finding("dead-letter", keys.number, f"{key} {idh.hex()}", _PROBLEMS[there], repair)
            if not cursor:
                break


async def _halves(store: Store, keys: PartitionKeys, idhs: Sequence[bytes]) -> list[tuple[bytes, str]]:
    """Those that have only one half, and which."""
    reply = await store.call(keys.number, "verify_dead", [keys.dead, keys.dead_times], [len(idhs), *idhs])
    return [(idhs[at - 1], there.decode()) for at, there in zip(reply[::2], reply[1::2], strict=True)]


async def _repair(store: Store, keys: PartitionKeys, idh: bytes) -> Repair:
    [record] = await store.run_one(keys.slot, [("HGET", keys.dead, idh)])
    time_ms = _died_ms(record) or store.clock.now_ms()
    reply = await store.call(keys.number, "repair_dead", [keys.dead, keys.dead_times], [idh, time_ms])
    match reply:
        case b"dated":
            return Repair(True, f"listed again, with the time {time_ms} ms")
        case b"removed":
            return Repair(True, "removed: there is no letter to it")
        case _:
            return Repair(True, "it has changed by now, and is fine")


def _died_ms(record: bytes | None) -> int | None:
    try:
        return _decode(record).died_ms if record is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
