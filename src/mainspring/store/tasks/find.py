"""Find a task by its id: through the address in a generated id, or through the index."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from ...model.dead_letter import dead_place
from ...model.errors import Ambiguous, Conflict, InvalidInput, NotFound, StoreError
from ...model.ids import GENERATED, IDH_BYTES, bare_idh, check_name, idh_in_lane, idh_of
from ...model.task import BulkCancelOutcome, State
from ..codec import decode
from ..keys import R_UNIT, WIDTHS_MS, Address, partition_of
from ..queue_state import Queued, cancel_queued, find_queued, read_record
from ..redis.sender import Group
from ..store import Store
from .cancel import Cancel, CancelStatus, cancel, last_cancelled, note
from .encode import Intake
from .index import (
    IDS_IN_LANES,
    ConflictBackoff,
    IdInLane,
    IdRow,
    is_noted,
    look_up,
    look_up_packed,
    note_lanes,
    noted_lanes,
    replace,
)
from .query import Found, look_at

_MOVES_FOLLOWED = 64
"""Most moves followed from mark to mark. The index is asked first, so a live task takes few steps."""
_PORTION = 8_192
"""Tasks looked up and cancelled together: what the server has just looked up is still in its caches."""

_ASKED_AT_ONCE = 65_536
"""Ids times partitions asked in one step, so that a bulk cancel needs bounded memory."""

Wanted = tuple[int, bytes, bool]
"""The likeliest partition of an id, the id's hash, and whether it may be in another partition."""

IndexPlaces = list[tuple["Spot", bytes]]
"""What the index holds: packed addresses."""


class Spot(NamedTuple):
    """A partition and a hash under which a task may be known."""

    partition: int
    idh: bytes
    lane: str | None = None
    """The lane of the task if its hash says it."""


class Reference(NamedTuple):
    """The places where the task of an id can be."""

    task_id: str | None
    """The caller's id; None for a generated one."""
    idh: bytes
    """The hash of the id alone: tasks without a lane have it, runs of schedules, and tasks of earlier versions."""
    home: int
    """The likeliest partition."""
    elsewhere: bool
    """True if the task may be in another partition: its lane decides."""
    address: Address | None
    lane: str | None = None
    """The lane that the task must have, "" for none; None if any lane matches."""
    noted: tuple[str, ...] = ()
    """Lanes in which the id was put: tasks there have a hash of their own."""

    @classmethod
    def parse(cls, id: str, lane: str | None, partitions: int) -> "Reference":
        """Parse a caller's id and lane, and refuse invalid ones. The lane "" means tasks without a lane."""
        task_id, lane = check_name(id, "id"), lane if lane is None or lane == "" else check_name(lane, "lane")
        match = GENERATED.fullmatch(task_id)
        if match is None:
            return cls(task_id, idh_of(task_id), partition_of(lane or task_id, partitions), lane is None, None, lane)
        idh = bytes.fromhex(match[1])
        address = Address.parse(match[2])
        known = address.partition < partitions and address.slice.width_ms in WIDTHS_MS
        if not known or address.slice.start_ms >= 1 << 48 or address.r >= R_UNIT or address.index >= 1 << 31:
            raise InvalidInput(f"id {task_id!r} does not belong to this namespace")
        return cls(None, idh, address.partition, False, address)

    def fits(self, lane: str | None) -> bool:
        """Return whether a task of this lane matches."""
        return self.lane is None or self.lane == (lane or "")

    @property
    def has_own_hash(self) -> bool:
        """Whether the task was put in the named lane. A task stored under the hash of the id alone, without a lane, is
        then another task."""
        return bool(self.lane and self.noted)

    def spots(self, partitions: int) -> list[Spot]:
        """Return the places where a matching task can be, the likeliest first."""
        every = [self.home, *(p for p in range(partitions) if self.elsewhere and p != self.home)]
        lanes = self.noted if self.lane is None else (self.lane,) if self.lane and self.task_id is not None else ()
        in_lanes = [Spot(partition_of(lane, partitions), idh_in_lane(self.idh, lane), lane) for lane in lanes]
        return [*in_lanes, *(Spot(p, self.idh) for p in every)]

    def spots_of_records(self, partitions: int) -> list[Spot]:
        """Return the same for records that do not say their lane: results, and cancelled ids."""
        return [spot for spot in self.spots(partitions) if spot.lane is not None or not self.has_own_hash]

    def as_generated(self) -> "Reference | None":
        """Return the same text read as a generated id without its mark; None if it cannot be one."""
        idh = None if self.task_id is None else bare_idh(self.task_id)
        return None if idh is None else Reference(None, idh, 0, True, None)


async def resolve(store: Store, id: str, lane: str | None) -> Reference:
    """Return what an id refers to. 32 hex digits are a caller's id, unless only a task with a generated id matches."""
    reference = Reference.parse(id, lane, len(store.keys))
    if reference.task_id is not None and reference.lane is None:
        [lanes] = await noted_lanes(store, [(reference.home, reference.idh)])
        reference = reference._replace(noted=tuple(lanes))
    elif reference.task_id is not None and reference.lane:
        noted = await is_noted(store, reference.task_id, reference.lane)
        reference = reference._replace(noted=(reference.lane,) if noted else ())
    generated = reference.as_generated()
    if generated is None or reference.noted:
        return reference
    if await look_up_packed(store, [(reference.home, reference.idh)]) != [None]:
        return reference
    idh = generated.idh
    groups: list[Group] = []
    for keys in store.keys.partitions:
        hashes = (keys.ids, keys.dead, keys.queued)
        groups.append((keys.slot, [*(("HEXISTS", one, idh) for one in hashes), ("EXISTS", keys.result(idh))]))
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        if any(result):
            return generated
    return reference


class Located(NamedTuple):
    address: Address
    indexed: bool
    entry: Found
    idh: bytes


class Finder:
    """Follows ids, moves and retries to the current place of a task."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, reference: Reference) -> Located | None:
        """Return the place and state of a task; None for an unknown id. Ambiguous if several lanes have it."""
        located = await self._find(reference)
        if located is None or (located.entry.body is None and located.idh != reference.idh):
            return located
        body = located.entry.body
        fits = reference.fits(body.lane) if body is not None else not reference.has_own_hash
        return located if fits else None

    async def _find(self, reference: Reference) -> Located | None:
        located = await self._locate(reference)
        if located is not None and located.entry.state == "dead" and reference.task_id is not None:
            located = await self._unless_another_died(located)
        if located is None or located.entry.state not in ("fired", "done", "finished"):
            return located
        # The slice counts a task as over once it is handed off to workers; a task of a lane stays fired there.
        [place] = await find_queued(self._store, [(located.address.partition, located.idh)])
        if place is None or not (reference.task_id is None or place.address == located.address.pack()):
            return located
        return located._replace(entry=await self._in_queue(located, place))

    async def _unless_another_died(self, located: Located) -> Located:
        """Return `located`, or the current task if a dead letter belongs to an earlier task that had the same id."""
        keys = self._store.keys.partitions[located.address.partition]
        [record] = await self._store.run_one(keys.slot, [("HGET", keys.dead, located.idh)])
        if record is None or dead_place(record) in (b"", located.address.pack()):
            return located
        state: State = "done" if located.entry.body is not None else "finished"
        return located._replace(entry=located.entry._replace(state=state))

    async def _in_queue(self, located: Located, place: Queued) -> Found:
        entry = located.entry._replace(state="queued" if place.worker is None else "running", queued=place)
        if entry.body is not None:
            return entry
        row = await read_record(self._store, located.address.partition, place)
        if row is None:
            return located.entry  # it has just ended
        from_ms = Address.unpack(located.address.partition, place.address).slice.from_ms
        body = decode(row)
        due_ms = from_ms + int.from_bytes(row[:4], "big") if body.due_ms is None else body.due_ms
        return entry._replace(body=body, due_ms=due_ms)

    async def _locate(self, reference: Reference) -> Located | None:
        address, idh, indexed = reference.address, reference.idh, False
        if address is None:
            place = await self._index_one(reference)
            if place is None:
                return None
            (partition, idh, _), packed = place
            address, indexed = Address.unpack(partition, packed), True
        for _ in range(_MOVES_FOLLOWED):
            [entry] = await look_at(self._store, [(address, idh)])
            following = entry.moved_to
            if not indexed and (following is not None or entry.state in ("finished", "done")):
                # A task that was placed elsewhere has registered that place, unless it was cancelled there.
                indexed = True
                [known] = await look_up(self._store, [(address.partition, idh)])
                following = known if known is not None and known != address else following
            if following is None:
                return Located(address, indexed, entry, idh)
            address = following
        return None

    async def _index_one(self, reference: Reference) -> tuple[Spot, bytes] | None:
        found = await self._known(reference.spots(len(self._store.keys)))
        if len(found) > 1 and reference.lane is None:
            raise Ambiguous(reference.task_id or reference.idh.hex(), await self._lanes_of(found))
        return found[0] if found else None

    async def _known(self, spots: list[Spot]) -> IndexPlaces:
        raws = await look_up_packed(self._store, [(spot.partition, spot.idh) for spot in spots])
        return [(spot, raw) for spot, raw in zip(spots, raws, strict=True) if raw is not None]

    async def _lanes_of(self, found: IndexPlaces) -> list[str]:
        """The lanes of tasks with one id. One under the hash of the id alone does not say its lane once it is gone: the
        empty lane leads to it."""
        lanes = {spot.lane for spot, _ in found if spot.lane is not None}
        alone = [spot for spot, _ in found if spot.lane is None]
        all_located = [await self.find(Reference(None, one.idh, one.partition, False, None)) for one in alone]
        bodies = [located.entry.body for located in all_located if located is not None]
        return sorted(lanes | {"" if body is None else body.lane or "" for body in bodies})

    async def _index_packed(self, wanted: list[Wanted], lane: str | None) -> list[IndexPlaces]:
        """Return the places in which each id is known, in the named lane. Without one all lanes count; an id that is in
        none of those noted, nor at home, is looked for in all partitions: runs of schedules may be in lanes."""
        partitions = len(self._store.keys)
        found: list[IndexPlaces] = [[] for _ in wanted]
        if lane:
            spots = [(i, Spot(home, idh_in_lane(idh, lane), lane)) for i, (home, idh, _) in enumerate(wanted)]
            await self._ask(found, spots)
        elif lane is None:
            await self._ask(found, await self._noted_spots(wanted))
        if len(wanted) == 1 and wanted[0][2]:
            [(_, idh, _)] = wanted
            await self._ask(found, [(0, Spot(p, idh)) for p in range(partitions)])
            return found
        homes = [(i, Spot(home, idh)) for i, (home, idh, _) in enumerate(wanted) if not (lane and found[i])]
        await self._ask(found, homes)
        others: list[tuple[int, Spot]] = []
        for i, (home, idh, elsewhere) in enumerate(wanted):
            if elsewhere and not found[i]:
                others += [(i, Spot(p, idh)) for p in range(partitions) if p != home]
            if len(others) >= _ASKED_AT_ONCE:
                await self._ask(found, others)
                others = []
        await self._ask(found, others)
        return found

    async def _ask(self, found: list[IndexPlaces], questions: list[tuple[int, Spot]]) -> None:
        """Look up pairs of an id's number and a place where it may be known."""
        raws = await look_up_packed(self._store, [(spot.partition, spot.idh) for _, spot in questions])
        for (i, spot), raw in zip(questions, raws, strict=True):
            if raw is not None:
                found[i].append((spot, raw))

    async def _noted_spots(self, wanted: list[Wanted]) -> list[tuple[int, Spot]]:
        """Where tasks in lanes may be. Only partitions where a lane was ever noted are asked id by id."""
        homes = sorted({home for home, _, elsewhere in wanted if elsewhere})
        every = self._store.keys.partitions
        marks = await self._store.run([(every[p].slot, [("HGET", every[p].n, IDS_IN_LANES)]) for p in homes])
        noted: set[int] = set()
        for p, mark in zip(homes, marks, strict=True):
            if isinstance(mark, StoreError):
                raise mark
            noted |= {p} if mark[0] is not None else set()
        some = [i for i, (home, _, elsewhere) in enumerate(wanted) if elsewhere and home in noted]
        lanes_of_each = await noted_lanes(self._store, [wanted[i][:2] for i in some]) if some else []
        return [
            (i, Spot(partition_of(lane, len(every)), idh_in_lane(wanted[i][1], lane), lane))
            for i, lanes in zip(some, lanes_of_each, strict=True)
            for lane in lanes
        ]

    async def cancel(self, references: Iterable[Reference]) -> list[BulkCancelOutcome]:
        """Cancel; return an outcome for each id, in order. All name the same lane, or none.

        An id that no caller gave may be a generated id without its mark.
        """
        outcomes: list[BulkCancelOutcome] = []
        lane: str | None = None
        bare: dict[int, Reference] = {}
        placed: list[tuple[int, Cancel]] = []
        unplaced: dict[int, Unplaced] = {}
        for i, one in enumerate(references):
            outcomes.append("unknown")
            if one.address is not None:
                placed.append((i, Cancel(one.address.partition, one.address.pack(), one.idh, False)))
            else:
                lane = one.lane
                unplaced.setdefault(one.home, Unplaced()).add(i, one)
                if (generated := one.as_generated()) is not None:
                    bare[i] = generated
        await self._cancel_placed(placed, outcomes)
        gone = [(i, (one.partition, one.idh, False)) for i, one in placed if outcomes[i] == "unknown"]
        await self._recall_cancelled(gone, outcomes)
        for numbers, wanted in _portions(unplaced):
            found = await self._index_packed(wanted, lane)
            known: list[tuple[int, Cancel]] = []
            alone: list[tuple[int, Cancel]] = []
            for i, places in zip(numbers, found, strict=True):
                if len(places) > 1:
                    outcomes[i] = "ambiguous"
                    continue
                for (p, idh, its_lane), raw in places:
                    (known if lane == its_lane or lane is None else alone).append((i, Cancel(p, raw, idh, True)))
            await self._cancel_placed(known if lane is None else known + await self._in_lane(alone, lane), outcomes)
            unknown = [(i, one) for i, one in zip(numbers, wanted, strict=True) if outcomes[i] == "unknown"]
            await self._recall_cancelled(unknown, outcomes, lane)
        again = [i for i in bare if outcomes[i] == "unknown"]
        for i, outcome in zip(again, await self.cancel(bare[i] for i in again) if again else (), strict=True):
            outcomes[i] = outcome
        return outcomes

    async def _in_lane(self, known: list[tuple[int, Cancel]], lane: str) -> list[tuple[int, Cancel]]:
        """Return the cancels whose tasks have the lane, as far as visible: lanes of one partition share its index."""
        places = [(Address.unpack(one.partition, one.at), one.idh) for _, one in known]
        fitting: list[tuple[int, Cancel]] = []
        for (i, one), entry in zip(known, await look_at(self._store, places), strict=True):
            if entry.body is not None:
                fits = (entry.body.lane or "") == lane
            else:  # it may be in a queue
                fits = await self.find(Reference(None, one.idh, one.partition, False, None, lane)) is not None
            if fits:
                fitting.append((i, one))
        return fitting

    async def _recall_cancelled(
        self, unknown: list[tuple[int, Wanted]], outcomes: list[BulkCancelOutcome], lane: str | None = ""
    ) -> None:
        """Answer "cancelled" again for ids cancelled recently: the index forgets those at once."""
        every = any(elsewhere for _, (_, _, elsewhere) in unknown)
        asked = range(len(self._store.keys)) if every else {home for _, (home, _, _) in unknown}
        off_ms = await last_cancelled(self._store, asked) if unknown else {}
        if not off_ms:
            return
        hashes: dict[int, list[bytes]] = {i: [idh] for i, (_, idh, _) in unknown}
        if lane is None:
            for number, spot in await self._noted_spots([one for _, one in unknown]):
                hashes[unknown[number][0]].append(spot.idh)
        for i, idhs in hashes.items():
            for idh in [*idhs, *([idh_in_lane(idhs[0], lane)] if lane else [])]:
                if idh in off_ms and not await self._died_after(idh, off_ms[idh], asked):
                    outcomes[i] = "cancelled"

    async def _died_after(self, idh: bytes, off_ms: int, partitions: Iterable[int]) -> bool:
        """Return whether a later task with the same id has died: then the id refers to that one."""
        every = [self._store.keys.partitions[p] for p in partitions]
        results = await self._store.run([(keys.slot, [("ZSCORE", keys.dead_times, idh)]) for keys in every])
        for result in results:
            if isinstance(result, StoreError):
                raise result
            if result[0] is not None and float(result[0]) > off_ms:
                return True
        return False

    async def _cancel_placed(self, todo: list[tuple[int, Cancel]], outcomes: list[BulkCancelOutcome]) -> None:
        for _ in range(_MOVES_FOLLOWED):
            if not todo:
                break
            todo = await self._cancel_round(todo, outcomes)

    async def _cancel_round(
        self, todo: list[tuple[int, Cancel]], outcomes: list[BulkCancelOutcome]
    ) -> list[tuple[int, Cancel]]:
        again: list[tuple[int, Cancel]] = []
        missed: list[tuple[int, Cancel, CancelStatus | Address]] = []
        answers = await cancel(self._store, [one for _, one in todo])
        for (i, one), answer in zip(todo, answers, strict=True):
            if answer == "cancelled":
                outcomes[i] = "cancelled"
            elif isinstance(answer, StoreError):
                raise answer
            else:
                missed.append((i, one, answer))
        known = await look_up_packed(self._store, [(one.partition, one.idh) for _, one, _ in missed])
        over: list[tuple[int, Cancel]] = []
        for (i, one, answer), raw in zip(missed, known, strict=True):
            if raw is not None and raw != one.at:
                again.append((i, Cancel(one.partition, raw, one.idh, True)))  # retried, or its slice was compacted
            elif isinstance(answer, Address):
                again.append((i, Cancel(one.partition, answer.pack(), one.idh, True)))  # cancelled there, or over
            else:
                outcomes[i] = "too late" if answer == "too late" or raw is not None else "unknown"
                over.append((i, one))
        await self._cancel_queued(over, outcomes)
        return again

    async def _cancel_queued(self, todo: list[tuple[int, Cancel]], outcomes: list[BulkCancelOutcome]) -> None:
        """Cancel or stop those tasks that are in queues or running."""
        places = await find_queued(self._store, [(one.partition, one.idh) for _, one in todo])
        for (i, one), place in zip(todo, places, strict=True):
            if place is not None and (place.address == one.at or not one.indexed):
                outcome = await cancel_queued(self._store, one.partition, one.idh, place)
                outcomes[i] = "too late" if outcome == "gone" else outcome
                if outcome == "cancelled" and one.indexed:
                    await note(self._store, [(one.partition, one.idh)])

    async def move(
        self, reference: Reference, intake: Intake, due_ms: int, now_ms: int, *, expired: bool = False
    ) -> Address:
        """Move a pending task to another place; the old place points to the new one. With `expired`, also move a task
        that will have expired by then: it is recorded as expired there."""
        backoff, left = ConflictBackoff("cannot be moved: it"), None
        while True:
            located = await self.find(reference)
            if located is None:
                raise NotFound("there is no such task")
            address, entry, idh = located.address, located.entry, located.idh
            if entry.state != "pending" or entry.body is None:
                raise Conflict(f"cannot be moved: the task is {entry.state}")
            if not expired and entry.body.expires_ms is not None and due_ms > entry.body.expires_ms:
                raise InvalidInput(f"cannot be moved: the task expires before that time ({entry.body.expires_ms} ms)")
            # Keep an existing original due time: a retry keeps its idempotency key.
            body = msgspec.structs.replace(entry.body, due_ms=None)
            place, row = intake.encode(body, idh, address.partition, due_ms, now_ms, indexed=True)
            if body.id is not None and body.lane is not None and idh != idh_of(body.id):
                [failure] = await note_lanes(self._store, [IdInLane(body.id, body.lane, due_ms)], now_ms)
                if failure is not None:
                    raise failure
            [expected] = await look_up(self._store, [(address.partition, idh)])
            result = await replace(
                self._store,
                IdRow(idh, place, row, due_ms),
                partition=address.partition,
                expected=expected,
                old=address,
                now_ms=now_ms,
            )
            if result.status == "ok" and result.address is not None:
                return result.address
            # "gone": it was moved, or its slice was compacted, since it was found. The next lookup finds it elsewhere.
            gone = result.status == "gone"
            if (gone and address == left) or not (gone or result.status == "changed"):
                raise Conflict(f"cannot be moved: {result.status}")
            left = address if gone else None
            await backoff.wait()


class Unplaced:
    """Ids to look up in one partition; 21 bytes each, because there may be a million."""

    def __init__(self) -> None:
        self._numbers = array("I")
        self._idhs = bytearray()
        self._elsewhere = bytearray()

    def add(self, number: int, reference: Reference) -> None:
        self._numbers.append(number)
        self._idhs += reference.idh
        self._elsewhere.append(reference.elsewhere)

    def wanted(self, home: int) -> tuple[list[int], list[Wanted]]:
        idhs = bytes(self._idhs)
        cut = range(0, len(idhs), IDH_BYTES)
        wanted = [(home, idhs[at : at + IDH_BYTES], bool(flag)) for at, flag in zip(cut, self._elsewhere, strict=True)]
        return self._numbers.tolist(), wanted


def _portions(unplaced: dict[int, Unplaced]) -> Iterator[tuple[list[int], list[Wanted]]]:
    """Group whole partitions: then most of a slice is cancelled at once."""
    numbers: list[int] = []
    wanted: list[Wanted] = []
    for home, some in unplaced.items():
        more, of_it = some.wanted(home)
        numbers += more
        wanted += of_it
        if len(numbers) >= _PORTION:
            yield numbers, wanted
            numbers, wanted = [], []
    if numbers:
        yield numbers, wanted
