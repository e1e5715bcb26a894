"""Looks at the schedules of a partition: each has a chain, and the occurrence that its chain says is next."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import msgspec

from ..model.chain import Link
from ..model.schedule import unpack_definition
from .keys import PartitionKeys
from .schedule_care import plant_anew, still_planned
from .schedules import is_pointer
from .store import Store
from .verify_report import Finding, Repair

A_PAGE: Final = 200
KIND: Final = "schedule-chain"


async def check_schedules(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.sched, cursor, "COUNT", A_PAGE)])
        cursor, names = int(reply[0]), reply[1][::2]
        if names:
            for finding in await _look(store, keys, names):
                yield finding
        if not cursor:
            break
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.next, cursor, "COUNT", A_PAGE)])
        cursor, names = int(reply[0]), reply[1][::2]
        for finding in await _without_schedule(store, keys, names) if names else ():
            yield finding
        if not cursor:
            break


async def _look(store: Store, keys: PartitionKeys, names: Sequence[bytes]) -> list[Finding]:
    findings = []
    suspects = await _broken(store, keys, names)
    # Twice: a chain that moved on between the two looks is not broken, and is found where it stands by then.
    again = await _broken(store, keys, [name for name, _, _ in suspects]) if suspects else []
    for name, link, why in again:
        if (name, link, why) not in suspects:
            continue
        where = f"{keys.sched} {name.decode(errors='replace')}"
        if why == "unreadable":
            advice = "write it anew: mainspring schedule remove, then add"
            findings.append(Finding(KIND, keys.number, where, "a schedule that cannot be read", None, advice))
            continue
        problem = f"a schedule without its next occurrence ({why}): it would not run any more"
        claim = None if link is None else link.claim
        repair = partial(_repair, store, keys, name.decode(), claim, why)
        findings.append(Finding(KIND, keys.number, where, problem, repair))
    return findings


async def _broken(store: Store, keys: PartitionKeys, names: Sequence[bytes]) -> list[tuple[bytes, Link | None, str]]:
    """Those whose planned occurrence does not wait: name, chain, and what is the matter."""
    definitions, raws = await store.run_one(keys.slot, [("HMGET", keys.sched, *names), ("HMGET", keys.next, *names)])
    found: list[tuple[bytes, Link | None, str]] = []
    planned: list[tuple[bytes, Link]] = []
    for name, definition, raw in zip(names, definitions, raws, strict=True):
        if definition is None or is_pointer(definition):
            continue  # removed by now, or living in the partition of its lane
        try:
            unpack_definition(definition)
            link = None if raw is None else Link.unpack(raw)
        except (msgspec.DecodeError, ValueError):
            found.append((name, None, "unreadable"))
            continue
        if link is None:
            found.append((name, None, "no chain"))
        elif link.planned_ms:
            planned.append((name, link))
    states = await still_planned(store, keys.number, [link for _, link in planned]) if planned else []
    found += [(name, link, why) for (name, link), (waits, why) in zip(planned, states, strict=True) if not waits]
    return found


async def _repair(store: Store, keys: PartitionKeys, name: str, claim: bytes | None, why: str) -> Repair:
    written = await plant_anew(store, keys.number, name, claim, why)
    if written == "ok":
        return Repair(True, "its next occurrence is planted")
    return Repair(written == "changed", "it has changed by now" if written == "changed" else f"not planted: {written}")


async def _without_schedule(store: Store, keys: PartitionKeys, names: Sequence[bytes]) -> list[Finding]:
    [definitions] = await store.run_one(keys.slot, [("HMGET", keys.sched, *names)])
    findings = []
    for name, definition in zip(names, definitions, strict=True):
        if definition is None:
            where = f"{keys.next} {name.decode(errors='replace')}"
            repair = partial(_forget, store, keys, name)
            findings.append(Finding(KIND, keys.number, where, "the chain of a schedule that is not there", repair))
    return findings


async def _forget(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    removed = await store.call(keys.number, "repair_schedule", [keys.sched, keys.next], [name])
    return Repair(True, "removed" if removed else "it has changed by now, and is fine")
