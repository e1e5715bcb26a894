"""An owner by hand: sends single commands of the protocol, also late, twice, or under an old token."""

from typing import Any

from mainspring.store.codec import header
from mainspring.store.keys import Address, Slice
from mainspring.store.owner import fire, leases
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.store import Store


class HandOwner:
    """Owns one partition and acts only on request."""

    def __init__(self, store: Store, partition: int, token: bytes) -> None:
        self.store = store
        self.partition = partition
        self.token = token
        self.seq = 0
        self.whole = False
        """Write bitmaps whole, as an owner does while they are small, and not by range."""
        self.keys = store.keys.partitions[partition]

    @classmethod
    async def acquire(
        cls, store: Store, partition: int = 0, *, owner: str = "hand", lease_ms: int = 5_000
    ) -> "HandOwner":
        [answer] = await leases.acquire(store, [partition], owner=owner, nonce=owner, lease_ms=lease_ms)
        assert isinstance(answer, leases.Acquired), answer
        return cls(store, partition, answer.token)

    async def raw(self, *command: Any) -> Any:
        """One plain command on this partition's server."""
        [reply] = await self.store.run_one(self.keys.slot, [command])
        return reply

    async def incarnation(self, place: Slice) -> float:
        score = await self.raw("ZSCORE", self.keys.slices, place.name)
        assert score is not None, f"there is no slice {place.name}"
        return float(score)

    async def rows(self, place: Slice) -> list[bytes]:
        rows: list[bytes] = await self.raw("LRANGE", self.keys.entries(place.name), 0, -1)
        return rows

    async def bits(self, which: str, place: Slice) -> list[int]:
        """Indexes of the bits that are set in f, d or x of a slice."""
        name = dict(zip("sfdx", self.keys.slice_keys(place.name), strict=True))[which]
        raw = await self.raw("GET", name) or b""
        return [i for i in range(len(raw) * 8) if raw[i >> 3] & (0x80 >> (i & 7))]

    async def touch(self, place: Slice, *, begin: list[int] | None = None, done: list[int] | None = None) -> fire.Touch:
        """The call of an owner that has read the whole slice."""
        rows = await self.rows(place)
        f, d = bitmap(begin or []), bitmap(done or [])
        at = fire.WHOLE if self.whole else 0
        g, keys = repr(await self.incarnation(place)), self.keys.slice_keys(place.name)
        return fire.Touch(place.name, keys, g, len(rows) - 1, header(rows[-1]), at, f, at, d)

    async def known(self, place: Slice, cursor: int) -> fire.Known:
        g = repr(await self.incarnation(place))
        return fire.Known(place.name, self.keys.entries(place.name), g, cursor)

    async def section(
        self,
        place: Slice,
        *,
        begin: list[int] | None = None,
        done: list[int] | None = None,
        max_due_ms: int | None = None,
        known: list[fire.Known] | None = None,
        seq: int | None = None,
    ) -> fire.Section:
        touch = await self.touch(place, begin=begin, done=done)
        due_ms = max_due_ms if max_due_ms is not None else self.store.clock.now_ms() if begin else None
        number = self.seq + 1 if seq is None else seq
        return fire.Section(self.partition, self.token, number, due_ms, len(done or []), [touch], known or [])

    async def tick(self, section: fire.Section) -> fire.TickReply:
        [answer] = await fire.tick(self.store, [section])
        assert isinstance(answer, fire.TickReply), answer
        if answer.status == "ok":
            self.seq = max(self.seq, section.seq)
        return answer

    async def begin(self, place: Slice, indexes: list[int], **rest: Any) -> fire.TickReply:
        return await self.tick(await self.section(place, begin=indexes, **rest))

    async def finish(self, place: Slice, indexes: list[int]) -> fire.TickReply:
        return await self.tick(await self.section(place, done=indexes))

    async def drop(self, place: Slice, *, g: float | None = None) -> fire.WriteStatus:
        found = g if g is not None else await self.incarnation(place)
        [status] = await fire.drop(self.store, [fire.FinishedSlice(self.partition, self.token, place, found)])
        assert isinstance(status, str), status
        return status

    def command(self, section: fire.Section) -> RedisCommand:
        """The call as it goes over the wire, to be sent again later."""
        [command] = fire._tick_group(self.store, [section])[1]
        return command


def bitmap(indexes: list[int]) -> bytes:
    raw = bytearray(max(indexes, default=-1) // 8 + 1)
    for index in indexes:
        raw[index >> 3] |= 0x80 >> (index & 7)
    return bytes(raw)


def address_of(task_id: str) -> Address:
    """The address in a generated id."""
    return Address.parse(task_id.partition("~")[2])


def handing_off(partition: int, token: bytes, touch: fire.Touch, queues: dict[str, list[bytes]]) -> fire.Commit:
    """The second call of an owner: it hands these records off, and nothing else."""
    return fire.Commit(partition, token, 2, 0, 0, [touch], [], [], [], queues=queues)
