"""Keeps the partitions: acquires them, renews their leases, gives them back."""

import logging
import secrets
from collections.abc import Callable

from ..model.clock import steady_s
from ..model.errors import StoreError
from ..store import ownership, read
from ..store.store import Store
from .partition import Partition

log = logging.getLogger("mainspring.engine")


class Keeper:
    """Owns every partition it can get. One node, one keeper."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        *,
        node: str,
        lease_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._owned = owned
        self._changed = changed
        # Unique per process: a second one with the same configured name must not pass for this one.
        self.owner = f"{node}/{secrets.token_hex(4)}"
        self.lease_s = lease_s
        self.wanted: set[int] = set(range(len(store.keys)))
        self.takeovers = 0
        self.fenced = 0

    async def step(self) -> float:
        await self._renew()
        left_s = await self._acquire()
        # At a third of the lease: one lost renewal must not cost the partitions.
        return min(self.lease_s / 3, left_s)

    async def _renew(self) -> None:
        tokens = {number: partition.token for number, partition in self._owned.items()}
        if not tokens:
            return
        asked_at = steady_s()
        answers = await ownership.renew(self._store, tokens, lease_ms=int(self.lease_s * 1000))
        failure = None
        for number, answer in answers.items():
            partition = self._owned.get(number)
            if partition is None or partition.token != tokens[number]:
                continue
            if isinstance(answer, StoreError):
                failure = answer
                if steady_s() >= partition.lease_until:
                    self.lose(partition, "its lease ran out while the server did not answer")
            elif answer:
                partition.lease_until = asked_at + self.lease_s
            else:
                self.lose(partition, "fenced")
        if failure is not None:
            raise failure

    async def _acquire(self) -> float:
        missing = sorted(self.wanted - self._owned.keys())
        if not missing:
            return self.lease_s
        asked_at = steady_s()
        answers = await ownership.acquire(
            self._store,
            missing,
            owner=self.owner,
            nonce=secrets.token_hex(4),
            lease_ms=int(self.lease_s * 1000),
        )
        left_s, failure = self.lease_s, None
        for number, answer in zip(missing, answers, strict=True):
            match answer:
                case ownership.Acquired(token):
                    await self._take(number, token, asked_at)
                case ownership.Busy(_, left_ms):
                    left_s = min(left_s, left_ms / 1000)
                case _:
                    failure = answer
        self._changed()
        if isinstance(failure, StoreError):
            raise failure
        return max(left_s, 0.01)

    async def _take(self, number: int, token: bytes, asked_at: float) -> None:
        keys = self._store.keys.partitions[number]
        partition = Partition(keys, token, asked_at + self.lease_s)
        for lane, idh in (await read.held_lanes(self._store, number)).items():
            partition.lanes.hold(lane, idh)
        self._owned[number] = partition
        self.takeovers += 1

    def lose(self, partition: Partition, why: str) -> None:
        """Forget everything about a partition; its next owner goes on from what the server has."""
        if self._owned.get(partition.number) is partition:
            del self._owned[partition.number]
        for live in partition.slices.values():
            live.forgotten = True
        self.fenced += why == "fenced"
        log.warning("partition %d given up: %s", partition.number, why)
        self._changed()

    async def release(self) -> None:
        """Hand everything back at once."""
        tokens = {number: partition.token for number, partition in self._owned.items()}
        self._owned.clear()
        self.wanted = set()
        if tokens:
            await ownership.release(self._store, tokens)
