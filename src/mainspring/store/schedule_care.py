"""Looks after the chains of schedules: does each have its planned occurrence? One that has not is planted anew."""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from ..model.chain import Link, State, after_loss, from_here, link_to
from ..model.errors import StoreError
from ..model.schedule import Definition
from .cancelled_ids import last_cancelled
from .index import look_up
from .query import look_at
from .schedule_rows import row_of
from .schedules import Change, Seen, Written, see_at, write
from .searches import searched
from .store import Store

AT_ONCE: Final = 500
_TRIES: Final = 8


class Doubtful(NamedTuple):
    """A chain whose planned occurrence may be missing."""

    name: str
    link: Link


async def check(store: Store, partition: int, cursor: int, *, overdue_ms: int) -> tuple[int, list[Doubtful]]:
    """Look through some chains; the next cursor is 0 at the end."""
    keys = store.keys.partitions[partition]
    reply = await store.call(partition, "schedule_check", [keys.next, keys.ids], [cursor, AT_ONCE, overdue_ms])
    raws = reply[1]
    found = []
    for name, raw in zip(raws[::2], raws[1::2], strict=True):
        try:
            found.append(Doubtful(name.decode(), Link.unpack(raw)))
        except (msgspec.DecodeError, ValueError):
            continue  # `mainspring verify` names it
    return int(reply[0]), found


async def still_planned(store: Store, partition: int, links: Sequence[Link]) -> list[tuple[bool, str]]:
    """Does the planned occurrence of each chain wait in its slice? And its state."""
    addresses = await look_up(store, [(partition, link.idh) for link in links])
    there = [(at, link.idh) for at, link in zip(addresses, links, strict=True) if at is not None]
    found = iter(await look_at(store, there) if there else ())
    states = [next(found).state if address is not None else "unknown" for address in addresses]
    if "unknown" in states:  # the index forgets a cancelled id at once
        cancelled = await last_cancelled(store, [partition])
        gone = [state == "unknown" and link.idh in cancelled for state, link in zip(states, links, strict=True)]
        states = ["cancelled" if is_gone else state for is_gone, state in zip(gone, states, strict=True)]
    return [(state == "pending", state) for state in states]


async def with_called_off(store: Store, seen: Sequence[Seen]) -> list[Seen]:
    """Schedules as they stand, for who writes them: a planned occurrence that somebody has cancelled, and that no check
    has found yet, is noted, for an edit must not plant it anew."""
    planned = [
        (i, one.partition, one.link)
        for i, one in enumerate(seen)
        if one.definition is not None and one.link is not None and one.link.planned_ms
    ]
    found = list(seen)
    addresses = await look_up(store, [(partition, link.idh) for _, partition, link in planned]) if planned else []
    missing = [one for one, address in zip(planned, addresses, strict=True) if address is None]
    if missing:  # the index forgets a cancelled id at once
        cancelled = await last_cancelled(store, {partition for _, partition, _ in missing})
        for i, _, link in missing:
            if link.idh in cancelled:
                state = link.state.called_off(link.planned_ms, "cancelled")
                found[i] = found[i]._replace(link=msgspec.structs.replace(link, state=state))
    return found


def reason_of(state: str) -> str:
    """Why a planned occurrence did not run that is found in this state."""
    return "cancelled" if state == "cancelled" else "lost"


async def plant_anew(store: Store, partition: int, name: str, claim: bytes | None, why: str) -> Written:
    """Put the next occurrence of a chain that stands at this claim (None: has no state at all) and lacks it."""
    [seen] = await see_at(store, [(partition, name)])
    definition = seen.definition
    if definition is None or (None if seen.link is None else seen.link.claim) != claim:
        return "changed"
    now_ms = store.clock.now_ms()
    next_ms, memory = await searched((definition,), lambda: _onward(definition, seen.link, now_ms, reason_of(why)))
    for _ in range(_TRIES):
        new = link_to(definition, next_ms, memory)
        written = await _write(store, Change(name, seen, definition, new, row_of(definition, new, now_ms), True))
        if written != "taken" or next_ms is None:
            return written
        [(waits, _)] = await still_planned(store, partition, [new])
        if waits:  # it is there, only the chain did not know it
            return await _write(store, Change(name, seen, definition, new, None, True))
        # that one ran already
        next_ms = await searched((definition,), partial(definition.slots.after, next_ms))
    return "taken"


def _onward(definition: Definition, link: Link | None, now_ms: int, reason: str) -> tuple[int | None, State]:
    if link is None:
        return from_here(definition, definition.at_ms, now_ms, State())
    return after_loss(definition, link, now_ms, reason)


async def _write(store: Store, change: Change) -> Written:
    [written] = await write(store, [change])
    if isinstance(written, StoreError):
        raise written
    return written
