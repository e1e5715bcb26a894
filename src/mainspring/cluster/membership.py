"""One node among the others: it says that it lives, leads when that falls to it, and follows the plan.

The first node to register leads; when it goes, the next oldest. The leader decides which node shall own which
partition and writes that down by version, so of two who believe to lead only one is heard. The plan is advice: what
keeps a task from being finished twice is the token of a partition's owner, not the plan. So two leaders do no harm, and
losing the leader stops nothing; owners go on while they can renew.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from ..model.clock import steady_s
from ..model.errors import ConfigError, StoreError
from ..store import members
from ..store.members import About, Identity, Taken, View
from ..store.store import Store
from .assignment import assign

log = logging.getLogger("mainspring.cluster")

BEATS_A_LEASE: Final = 3
"""One lost beat must not cost the membership."""

MOST_PATIENCE: Final = 1.5
"""So many leases a node waits for its own configured id to fall free after a crash."""


class Membership:
    """A node's place in the cluster. `follow` is told what the plan gives to it, and what others wait for."""

    def __init__(
        self,
        store: Store,
        node: str,
        *,
        lease_s: float,
        describe: Callable[[], About],
        follow: Callable[[set[int], set[int]], None],
    ) -> None:
        self._store = store
        # One that does not answer, or not now, is asked again by the next step: a stop must not wait for it, and
        # a beat that hangs would cost the membership.
        self._hurried = store.hurried(timeout_s=max(1.0, lease_s / 2))
        self._who = Identity(node, secrets.token_hex(8), int(lease_s * 1000))
        self.lease_s = lease_s
        self._describe = describe
        self._follow = follow
        self._leads_until = 0.0
        self._plans_from = 0.0
        self._leaving = False
        self._waiting: tuple[int, ...] = ()
        self.view: View | None = None
        self.order = 0

    @property
    def id(self) -> str:
        return self._who.id

    @property
    def leads(self) -> bool:
        """A leader that is cut off steps down by itself, before its lease is over on the server."""
        return steady_s() < self._leads_until

    # -- coming ------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Register. A predecessor that crashed is waited for until its lease is over; a live one is an error."""
        other = await self.join()
        if other is None:
            return
        log.warning("node id %s is taken; waiting for the lease of its last holder to end", self.id)
        left_ms = other.left_ms
        deadline = steady_s() + MOST_PATIENCE * max(self.lease_s, left_ms / 1000)
        while other is not None:
            if other.left_ms > left_ms or steady_s() > deadline:
                raise self._refusal(other)
            left_ms = other.left_ms
            await asyncio.sleep(min(self.lease_s / 10, left_ms / 1000))
            other = await self.join()

    async def join(self) -> Taken | None:
        """Register; the answer says who has the id, if somebody has."""
        answer = await members.join(self._store, self._who, self._describe())
        if isinstance(answer, Taken):
            return answer
        self.order = answer
        log.info("node %s joined as number %d", self.id, answer)
        await members.announce(self._store)
        return None

    def _refusal(self, other: Taken) -> ConfigError:
        """Two live nodes must not share an id."""
        return ConfigError(
            f"node id {self.id!r} is in use by process {other.about.pid} on {other.about.host}; give this node another"
            " --node-id, or leave it out and one is generated"
        )

    # -- living ------------------------------------------------------------------------------------------

    async def step(self) -> float:
        asked_at, about = steady_s(), self._describe()
        view = await members.beat(self._hurried, self._who, about, leaving=self._leaving)
        if view is None:
            return await self._come_back()
        if about.waiting and about.waiting != self._waiting:
            await members.announce(self._hurried)  # whoever holds these shall not learn of it a third of a lease later
        self._waiting = about.waiting
        led, leads = self.leads, view.leader == self.id and not self._leaving
        self._leads_until = asked_at + self.lease_s if leads else 0.0
        if leads and not led:
            log.info("node %s leads (term %d)", self.id, view.term)
        if leads and asked_at >= self._plans_from:
            planned = await self._plan(view)
            if planned is None:
                return 0.0
            view = planned
        self._take(view)
        # Whoever is next must notice at once when a lease ends, not a third of a lease later.
        others = (one.left_ms / 1000 + 0.005 for one in view.members.values() if one.id != self.id)
        return min(self.lease_s / BEATS_A_LEASE, *others, self.lease_s)

    async def _plan(self, view: View) -> View | None:
        """Plan anew if the nodes are not those of the plan; None when another leader was faster."""
        weights = {one.id: max(1, one.about.concurrency) for one in view.members.values() if not one.leaving}
        owners = tuple(assign(view.owners, weights))
        if owners == view.owners:
            return view
        if not self.leads or not await members.write_plan(self._hurried, self._who, view, owners):
            return None
        moved = sum(old != new for old, new in zip(view.owners, owners, strict=True))
        log.info("plan %d: %d nodes, %d partitions move", view.version + 1, len(weights), moved)
        return view._replace(version=view.version + 1, owners=owners)

    def _take(self, view: View) -> None:
        self.view = view
        if self._leaving:
            return
        mine, asked = set(), set()
        for number, node in enumerate(view.owners):
            if node == self.id:
                mine.add(number)
            elif (other := view.members.get(node)) is not None and number in other.about.waiting:
                asked.add(number)
        self._follow(mine, asked)

    async def _come_back(self) -> float:
        """This node was away for longer than its lease: it starts at the end of the line."""
        self._leads_until = 0.0
        if self._leaving:
            return self.lease_s
        log.warning("node %s was away for longer than its lease; joining again", self.id)
        # The server may have been away, and then so were all: a plan without them would move everything, twice.
        self._plans_from = steady_s() + self.lease_s / 2
        if (other := await self.join()) is not None:
            raise self._refusal(other)
        return 0.0

    # -- going -------------------------------------------------------------------------------------------

    async def withdraw(self) -> None:
        """Begin to leave: lead no more, be planned for nothing more."""
        self._leaving = True
        self._leads_until = 0.0
        try:
            await members.beat(self._hurried, self._who, self._describe(), leaving=True)
            await members.announce(self._hurried)
        except StoreError as error:
            log.warning("the other nodes could not be told of the stop (%s); they notice by the lease", error)

    async def leave(self) -> None:
        try:
            await members.leave(self._hurried, self._who)
        except StoreError as error:
            log.warning("node %s could not sign off (%s); its lease runs out", self.id, error)
