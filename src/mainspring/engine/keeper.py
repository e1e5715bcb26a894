"""Partition leases: acquires the partitions planned for this node, renews their leases, and hands them over."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from ..model.clock import steady_s
from ..model.errors import StoreError, Unavailable
from ..store import members
from ..store.owner import holds, leases
from ..store.store import Store
from .flow import Flow
from .partition import Partition

log = logging.getLogger("mainspring.engine")

CLOSING_POLL_S: Final = 0.01
"""Interval at which a partition that is being handed over is checked for unfinished deliveries."""

LONGEST_OPEN: Final = 64
"""Most leases between two attempts to close a partition in which something is always in flight."""


class Keeper:
    """Owns the partitions it wants and can get. Each node has one keeper.

    By default it wants all partitions. In a cluster `follow` sets those that the plan gives to this node, and its
    partitions that another node waits for.
    """

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        *,
        node: str,
        lease_s: float,
        changed: Callable[[], None],
        flow: Flow,
    ) -> None:
        self._store = store
        self._owned = owned
        self._flow = flow
        self._changed = changed
        # Unique per process: a second one with the same configured name must not pass for this one.
        self.owner = f"{node}/{secrets.token_hex(4)}"
        self.lease_s = lease_s
        self.wanted: set[int] = set(range(len(store.keys)))
        self.waiting: set[int] = set()
        """Partitions that are wanted, but owned by another node."""
        self._asked: set[int] = set()
        """Partitions that are owned, but planned for a node that waits for them."""
        self._closing = False
        self._leaving = False
        self._renew_at = 0.0
        self._spare_at = inf
        """Set by the first step: the start may have waited long for a node id, and planned owners go first."""
        self._failed = False
        self._asking: asyncio.Future[list[leases.AcquireAnswer]] | None = None
        self._unused: dict[int, bytes] = {}
        """Tokens that this node has on the server and does not fire with: to be released."""
        self.takeovers = 0
        self.fenced = 0

    def follow(self, wanted: Iterable[int], asked: Iterable[int]) -> None:
        """Set the partitions that this node should own from now on, and those to hand over."""
        self.wanted, self._asked = set(wanted), set(asked)
        self.waiting &= self.wanted
        reopened = [one for number, one in self._owned.items() if one.closing and number not in self._asked]
        for partition in reopened:
            partition.closing_since = inf
        if reopened:
            self._changed()  # wake the dispatcher: nothing could begin there before

    @property
    def is_due(self) -> bool:
        """True if the leases have to be renewed now."""
        return steady_s() >= self._renew_at

    async def step(self) -> float:
        now = steady_s()
        failure = None
        if now >= self._renew_at or not self._closing:
            failure = await self._renew() or await self._look_back()
            # Renew at a third of the lease, so that one lost renewal does not cost the partitions.
            self._renew_at = now + self.lease_s / 3
        failure = await self._give_back() or failure
        self._closing = await self._hand_over()
        left_s, failed = await self._acquire(self.wanted)
        failure = failure or failed
        if self._is_time_for_spare(failure):
            failure = await self._take_spare() or failure
        if failure is not None:
            raise failure  # only now: an unavailable server must not affect the partitions of other servers
        wait_s = CLOSING_POLL_S if self._closing or self._unused else min(self._renew_at - steady_s(), left_s)
        return max(0.001, wait_s)

    # -- leases ----------------------------------------------------------------------------------------

    async def _renew(self) -> StoreError | None:
        """Renew all leases; return the failure, if any."""
        tokens = {number: partition.token for number, partition in self._owned.items()}
        if not tokens:
            return None
        asked_at = steady_s()
        answers = await leases.renew(self._store, tokens, lease_ms=int(self.lease_s * 1000))
        failure = None
        for number, answer in answers.items():
            partition = self._owned.get(number)
            if partition is None or partition.token != tokens[number]:
                continue
            if isinstance(answer, StoreError):
                failure = answer
                if not partition.holds_lease:
                    self.lose(partition, "its lease ran out while the server did not answer")
            elif answer:
                partition.lease_until = asked_at + self.lease_s
            else:
                self.lose(partition, "fenced")
        return failure

    async def _look_back(self) -> StoreError | None:
        """Check that the server still knows the calls it has answered: an idle partition has no tick that would show
        it."""
        owned = dict(self._owned)
        numbers = {number: partition.seq for number, partition in owned.items()}
        tokens = {number: partition.token for number, partition in owned.items()}
        failure = None
        for number, last in (await leases.last_calls(self._store, tokens)).items():
            if isinstance(last, StoreError):
                failure = last
            elif last < numbers[number] and self._owned.get(number) is owned[number]:
                self.lose(owned[number], "rolledback" if last >= 0 else "fenced")
        return failure

    async def _acquire(self, numbers: Iterable[int], *, free_s: float = 0.0) -> tuple[float, StoreError | None]:
        """Try to acquire these; return the seconds until the next try is worthwhile, and the failure, if any."""
        missing = sorted(set(numbers) - self._owned.keys() - self._unused.keys())
        if not missing:
            return self.lease_s, None
        asked_at = steady_s()
        # Shielded: grants to a node that is just being stopped must be known, so that they are released.
        self._asking = asyncio.ensure_future(self._ask(missing, free_s))
        answers = await asyncio.shield(self._asking)
        left_s, failure = self.lease_s, None
        waiting_before = set(self.waiting)
        for number, answer in zip(missing, answers, strict=True):
            if isinstance(answer, leases.Busy):
                self.waiting |= {number} & self.wanted
                left_s = min(left_s, answer.left_ms / 1000)
                continue
            # Also if its server is unreachable: no node should give up a partition that this node cannot take.
            self.waiting.discard(number)
            if isinstance(answer, leases.Acquired):
                failure = await self._take(number, answer.token, asked_at) or failure
            else:
                failure = answer
        if self.waiting != waiting_before or any(isinstance(one, leases.Acquired) for one in answers):
            self._changed()
        return max(left_s, 0.01), failure

    async def _ask(self, numbers: list[int], free_s: float) -> list[leases.AcquireAnswer]:
        lease_ms, free_ms = int(self.lease_s * 1000), int(free_s * 1000)
        nonce = secrets.token_hex(4)
        answers = await leases.acquire(
            self._store, numbers, owner=self.owner, nonce=nonce, lease_ms=lease_ms, free_ms=free_ms
        )
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, leases.Acquired):
                self._unused[number] = answer.token
            elif isinstance(answer, Unavailable) and answer.sent:
                self._unused[number] = leases.token_granted_to(nonce)  # if it was granted: the answer is lost
        return answers

    async def _take(self, number: int, token: bytes, asked_at: float) -> StoreError | None:
        """Begin to use a partition that was granted. One that cannot be read is released by the next step."""
        partition = Partition(self._store.keys.partitions[number], token, asked_at + self.lease_s, self._flow)
        try:
            partition.inherit(await holds.inherit(self._store, number))
        except StoreError as error:
            return error
        self._owned[number] = partition
        self._unused.pop(number, None)
        self.takeovers += 1
        return None

    def _is_time_for_spare(self, failure: StoreError | None) -> bool:
        healed, self._failed = self._failed and failure is None, failure is not None
        if self._spare_at == inf or healed:
            # Former and planned owners come back now as well.
            self._spare_at = steady_s() + self.lease_s
        return not self._leaving and steady_s() >= self._spare_at

    async def _take_spare(self) -> StoreError | None:
        """Take partitions that had no owner for two leases: the planned owner may be unable to take them."""
        self._spare_at = steady_s() + self.lease_s
        others = set(range(len(self._store.keys))) - self.wanted
        before = self.takeovers
        _, failure = await self._acquire(others, free_s=2 * self.lease_s)
        if self.takeovers > before:
            log.warning("took %d partitions that had no owner for two leases", self.takeovers - before)
        return failure

    # -- handing over --------------------------------------------------------------------------------------

    async def _hand_over(self) -> bool:
        """Hand over partitions that others wait for, once everything begun there is finished. Return True if some
        remain."""
        now = steady_s()
        closing = []
        # A leaving node hands over everything, also grants after the stop began: nothing fires here any more.
        for number in set(self._owned) if self._leaving else self._asked & self._owned.keys():
            partition = self._owned[number]
            if partition.closing_since == inf and (now >= partition.open_until or self._leaving):
                partition.closing_since = now
            if partition.closing:
                closing.append(partition)
        drained = [partition for partition in closing if partition.drained]
        if drained:
            await self._give(drained)
        for partition in closing:
            # A slow delivery is in flight: tasks that come due meanwhile must not wait for it. Try again later.
            late = now > partition.closing_since + self.lease_s and not self._leaving
            if late and not partition.drained:
                # Back off: a partition with slow deliveries in flight must not be closed repeatedly for nothing.
                partition.closed_in_vain += 1
                leases = min(2 ** (partition.closed_in_vain - 1), LONGEST_OPEN)
                partition.closing_since, partition.open_until = inf, now + leases * self.lease_s
                log.info("partition %d is not handed over yet: tasks are still in flight", partition.number)
                self._changed()
        return len(closing) > len(drained)

    async def _give(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            self._forget(partition)
            self._unused[partition.number] = partition.token
        await self._give_back()
        self._changed()

    async def _give_back(self) -> StoreError | None:
        """Release unused partitions; return the failure, if any. The next step repeats calls that were not answered."""
        tokens, failure = dict(self._unused), None
        for number, answer in (await leases.release(self._store, tokens)).items():
            if isinstance(answer, StoreError):
                failure = answer
            elif self._unused.get(number) == tokens[number]:
                del self._unused[number]
        if tokens and len(self._unused) < len(tokens):
            await members.announce(self._store)
        return failure

    def close(self) -> None:
        """Stop wanting partitions, and hand all over as they drain, for a clean stop."""
        self._leaving = True
        self.follow((), self._owned)

    def lose(self, partition: Partition, why: str) -> None:
        """Forget everything about a partition; its next owner continues from the state on the server."""
        self._forget(partition)
        self.fenced += why == "fenced"
        log.warning("partition %d given up: %s", partition.number, why)
        self._changed()

    def _forget(self, partition: Partition) -> None:
        if self._owned.get(partition.number) is partition:
            del self._owned[partition.number]
        partition.give_up()

    async def release(self) -> None:
        """Release at once all remaining partitions, and those granted while the loop was being stopped."""
        self._leaving, self.wanted = True, set()
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._owned or self._unused:
            await self._give(list(self._owned.values()))
        if self._unused:
            log.warning("%d partitions could not be released; they become free with their leases", len(self._unused))
