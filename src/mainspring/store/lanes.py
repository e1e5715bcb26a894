"""Stalled lanes and pauses: which exist, why, and how to end them. See docs/lanes.md."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from ..model.dead_letter import DeadLetter
from ..model.errors import StoreError
from ..model.lane import PARKED, RETRY, HoldRecord, LaneAnswer, LaneInfo, LaneState, Pause, Scope
from .keys import HOLDS_FROM_S, Address, Slice, partition_of, score_of
from .owner.holds import FailedHead, waits_for
from .owner.read import slice_named
from .redis.connection import Arg
from .redis.sender import Group
from .store import Store
from .tasks.index import look_up
from .tasks.query import Found, look_at
from .verify.keys import open_entries

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Pause).decode


async def read_pauses(store: Store) -> list[Pause]:
    """Return all pauses that were not ended by hand; some may have expired. One round trip.

    A record that cannot be read (a later version wrote it) counts as a pause of its name: pausing by mistake does less
    harm than delivering by mistake.
    """
    [reply] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.pauses)])
    return [_read_pause(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]


async def read_pause(store: Store, scope: Scope) -> Pause | None:
    """Return the pause of exactly this scope, None if there is none in force."""
    [raw] = await store.run_one(store.keys.slot, [("HGET", store.keys.pauses, scope.text)])
    pause = None if raw is None else _read_pause(scope.text.encode(), raw)
    return pause if pause is not None and pause.lasts(await store.sample_clock()) else None


def _read_pause(name: bytes, raw: bytes) -> Pause:
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        scope = Scope.parse(name.decode(errors="replace"))
        return Pause(scope, reason="its record cannot be read; resume it, or look at it with a later version")


async def write_pause(store: Store, pause: Pause) -> None:
    """Write a pause. Nodes and workers are notified at once, and look every few seconds in any case."""
    await store.run_one(
        store.keys.slot,
        [
            ("HSET", store.keys.pauses, pause.scope.text, _encode(pause)),
            ("SPUBLISH", store.keys.cluster, "pauses"),
        ],
    )


async def write_if_none(store: Store, pause: Pause) -> bool:
    """Write a pause unless one of the same name exists: a pause that a person wrote is not overwritten.

    Return True if this pause is the stored one, also if an earlier call wrote it and its reply was lost.
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
    """Remove a pause; return False if there was none."""
    removed, _ = await store.run_one(
        store.keys.slot,
        [
            ("HDEL", store.keys.pauses, scope.text),
            ("SPUBLISH", store.keys.cluster, "pauses"),
        ],
    )
    return bool(removed)


async def clear_away(store: Store, pause: Pause) -> None:
    """Remove an expired pause, unless it was written again meanwhile."""
    call = store.scripts.call("unpause", [store.keys.pauses], [pause.scope.text, _encode(pause)])
    await store.run_one(store.keys.slot, [call])


class Failed(NamedTuple):
    """The failed head of a lane, with its current place."""

    lane: str
    head: FailedHead
    address: Address | None
    found: Found | None

    @property
    def waited_for(self) -> bool:
        return self.found is not None and waits_for(self.lane, self.found)

    @property
    def id(self) -> str:
        if self.found is not None and self.found.body is not None and self.found.body.id:
            return self.found.body.id
        return self.head.idh.hex() if self.address is None else f"{self.head.idh.hex()}~{self.address.text()}"


class _Hold(NamedTuple):
    record: HoldRecord
    behind: int


LanePlace = tuple[int, str]
"""When a lane stalled, and its name: lanes are listed in that order."""


class _Stalled(NamedTuple):
    """What its partition says about a stalled lane."""

    since_ms: int
    lane: str
    partition: int
    head: FailedHead | None
    hold: tuple[Slice, HoldRecord] | None

    @property
    def place(self) -> LanePlace:
        return self.since_ms, self.lane


async def read_lanes(
    store: Store, *, after: LanePlace = (-1, ""), limit: int | None = None
) -> tuple[list[LaneInfo], bool]:
    """Return stalled and recovering lanes, longest wait first, and whether more follow."""
    found: list[_Stalled] = []
    for p in range(len(store.keys)):
        found += [one for one in await _stalled(store, p) if one.place > after]
        found.sort(key=attrgetter("place"))
        if limit is not None:
            del found[limit + 1 :]  # keep one more, which tells that there is another page
    return await _infos(store, found[:limit]), limit is not None and len(found) > limit


async def read_lane(store: Store, lane: str) -> LaneInfo:
    partition = partition_of(lane, len(store.keys))
    known = [one for one in await _stalled(store, partition) if one.lane == lane]
    return next(iter(await _infos(store, known)), LaneInfo(lane=lane, state="flowing", partition=partition))


async def _stalled(store: Store, partition: int) -> list[_Stalled]:
    keys = store.keys.partitions[partition]
    listed = ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE")
    held, records, names = await store.run_one(keys.slot, [("HGETALL", keys.held), ("HGETALL", keys.holds), listed])
    heads = {lane: FailedHead.unpack(raw) for lane, raw in zip(held[::2], held[1::2], strict=True)}
    holds: dict[bytes, tuple[Slice, HoldRecord]] = {}
    live = set(names)
    for name, raw in zip(records[::2], records[1::2], strict=True):
        record = HoldRecord.decode(raw)
        place = slice_named(name) if name in live else None
        if record is not None and record.lane is not None and place is not None:
            holds[record.lane.encode()] = (place, record)
    found = []
    for lane in dict.fromkeys([*heads, *holds]):
        head, hold = heads.get(lane), holds.get(lane)
        times = [one for one in (head and head.since_ms, hold and hold[1].since_ms) if one]
        found.append(_Stalled(min(times, default=0), lane.decode(), partition, head, hold))
    return found


async def _infos(store: Store, stalled: Sequence[_Stalled]) -> list[LaneInfo]:
    infos: list[LaneInfo] = []
    # In portions: of each head the whole entry is read, with its payload.
    for first in range(0, len(stalled), _LOOKED_AT):
        some = stalled[first : first + _LOOKED_AT]
        heads = {(one.partition, one.lane): one.head for one in some if one.head is not None}
        failed = dict(zip(heads, await _look(store, heads), strict=True))
        holds = {(one.partition, one.lane): one.hold[0] for one in some if one.hold is not None}
        behind = await _behind(store, holds)
        for one in some:
            key = one.partition, one.lane
            hold = None if one.hold is None else _Hold(one.hold[1], behind[key])
            infos.append(_info(one, failed.get(key), hold))
    return infos


_LOOKED_AT: Final = 64


async def _look(store: Store, heads: Mapping[tuple[int, str], FailedHead]) -> list[Failed]:
    addresses = await look_up(store, [(p, head.idh) for (p, _), head in heads.items()])
    wanted = [(at, head.idh) for head, at in zip(heads.values(), addresses, strict=True) if at is not None]
    found = iter(await look_at(store, wanted))
    return [
        Failed(lane, head, at, None if at is None else next(found))
        for ((_, lane), head), at in zip(heads.items(), addresses, strict=True)
    ]


async def _behind(store: Store, places: dict[tuple[int, str], Slice]) -> dict[tuple[int, str], int]:
    groups: list[Group] = []
    for (p, _), place in places.items():
        keys = store.keys.partitions[p]
        s, f, d, x = keys.slice_keys(place.name)
        groups.append((keys.slot, [("LLEN", s), ("GET", f), ("GET", d), ("GET", x)]))
    counts = {}
    for key, result in zip(places, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        length, *bitmaps = result
        counts[key] = open_entries(length, *(bits or b"" for bits in bitmaps))[0]
    return counts


def _info(stalled: _Stalled, failed: Failed | None, hold: _Hold | None) -> LaneInfo:
    state = _state(failed, hold)
    body = failed.found.body if failed is not None and failed.found is not None else None
    record = hold.record if hold is not None else None
    behind = 0 if hold is None else hold.behind
    inside = failed is not None and failed.address is not None and failed.address.slice.is_hold
    waiting = failed is not None and failed.found is not None and failed.found.state == "pending"
    by = None if record is None else record.who or None
    return LaneInfo(
        lane=stalled.lane,
        state=state,
        partition=stalled.partition,
        since_ms=stalled.since_ms or None,
        # Tasks waiting in ordinary slices could be counted only by reading all of them.
        behind=max(0, behind - (inside and waiting)) if behind or state != "retrying" else None,
        head_id=None if failed is None else failed.id,
        head_state=None if failed is None or failed.found is None else failed.found.state,
        attempts=None if body is None else body.attempt - (1 if waiting else 0),
        error=body.errors[-1] if body is not None and body.errors else None,
        next_ms=failed.found.due_ms if failed and failed.found and waiting and not inside else None,
        cause=record.cause if record is not None and state == "held" else None,
        reason=record.reason or None if record is not None else None,
        by=by,
        who=by,
        until_ms=record.until_ms if record is not None else None,
    )


def _state(failed: Failed | None, hold: _Hold | None) -> LaneState:
    cause = hold.record.cause if hold is not None else RETRY
    inside = failed is not None and failed.address is not None and failed.address.slice.is_hold
    if cause == PARKED and inside:
        return "parked"
    if failed is not None and not inside:
        return "retrying"
    return "returning" if cause in (RETRY, PARKED) else "held"


async def failed_head(store: Store, lane: str) -> Failed | None:
    """Return the failed task a lane waits for; None if it waits for none, or for one that is over.

    The owner learns that the task is over a moment later than the caller that ended it.
    """
    keys = store.keys.partitions[partition_of(lane, len(store.keys))]
    [raw] = await store.run_one(keys.slot, [("HGET", keys.held, lane)])
    if raw is None:
        return None
    [failed] = await _look(store, {(keys.number, lane): FailedHead.unpack(raw)})
    return failed if failed.waited_for else None


async def skip_head(store: Store, failed: Failed, reason: str) -> LaneAnswer:
    """Give up the head: it becomes a dead letter, and the lane continues."""
    at, found = failed.address, failed.found
    if at is None or found is None or found.body is None:
        return "gone"
    keys = store.keys.partitions[at.partition]
    body, now_ms = found.body, await store.sample_clock()
    due_ms = body.original_due_ms if body.original_due_ms is not None else found.due_ms or 0
    dead_letter = DeadLetter.of(body, body.id or failed.head.idh.hex(), reason, now_ms, due_ms, at.pack(), sent=False)
    s, f, _, x = keys.slice_keys(at.slice.name)
    names = [keys.n, keys.slices, keys.ids, keys.dead, keys.dead_times, s, f, x]
    score = repr(score_of(at.slice.start_ms, at.r))
    args: list[Arg] = [at.slice.name, score, at.index, failed.head.idh, dead_letter.encode(), now_ms, at.pack()]
    call = store.scripts.call("lane_skip", names, args)
    status, _ = await store.run_one(keys.slot, [call, ("SPUBLISH", keys.wake, "1")])
    answer: LaneAnswer = status.decode()
    return answer
