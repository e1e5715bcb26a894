"""Many nodes, one namespace: membership, the leader, and the plan of who owns which partition.

The oldest registered node leads. The leader decides which node should own which partition and writes the plan with a
version, so of two nodes that both believe they lead only one succeeds. The plan is advice: the fencing token of a
partition's owner keeps a task from being finished twice, not the plan. So two leaders do no harm, and losing the leader
stops nothing: owners continue as long as they can renew their leases.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from .model.clock import steady_s
from .model.errors import ConfigError, StoreError
from .roles import Loop
from .store import members
from .store.members import About, ClusterView, Holding, Identity, Member, NodeIdTaken
from .store.redis.servers import Subscription
from .store.store import Store

log = logging.getLogger("mainspring.cluster")


# Assignment of partitions: even by weight, with few moves when a node joins or leaves. Every node has a number of seats
# by its weight and keeps what it owns up to that number. The rest goes to the node with a free seat that ranks highest
# for the partition (rendezvous hashing: each pair of node and partition has a fixed rank, so every node that plans from
# the same state makes the same plan).


def assign(current: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    """Return the new owner of each partition. `current` names the present owner, or "" if there is none."""
    if not weights:
        return list(current)
    seats = _seats(current, weights)
    owners = [""] * len(current)
    for node in sorted(weights):
        held = [number for number, owner in enumerate(current) if owner == node]
        for number in sorted(held, key=lambda one: _rank(node, one), reverse=True)[: seats[node]]:
            owners[number] = node
            seats[node] -= 1
    for number, owner in enumerate(owners):
        if not owner:
            node = max((one for one in weights if seats[one]), key=lambda one: (_rank(one, number), one))
            owners[number] = node
            seats[node] -= 1
    return owners


def _seats(current: Sequence[str], weights: Mapping[str, int]) -> dict[str, int]:
    """Return how many partitions each node gets: its share rounded down, and one more for those with the largest rest.

    Where the rests are equal the extra seats go to nodes that would otherwise have to give a partition away.
    """
    total = sum(weights.values())
    seats = {node: len(current) * weight // total for node, weight in weights.items()}
    rests = {node: len(current) * weight % total for node, weight in weights.items()}
    over = {node: current.count(node) > seats[node] for node in weights}
    extra = len(current) - sum(seats.values())
    for node in sorted(weights, key=lambda one: (-rests[one], not over[one], one))[:extra]:
        seats[node] += 1
    return seats


def _rank(node: str, partition: int) -> bytes:
    return blake2b(f"{partition}/{node}".encode(), digest_size=8).digest()


BEATS_A_LEASE: Final = 3
"""Heartbeats per lease, so that one lost beat does not cost the membership."""

JOIN_WAIT_LEASES: Final = 1.5
"""Most leases that a node waits for its own id to become free after a crash."""


class Membership:
    """A node's membership. `follow` receives the partitions planned for the node, and those that others wait for."""

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
        # Use short timeouts and let the next step repeat a failed call: a stop must not wait for it, and a hanging beat
        # would cost the membership.
        self._urgent_store = store.urgent(timeout_s=max(1.0, lease_s / 2))
        self._who = Identity(node, secrets.token_hex(8), int(lease_s * 1000))
        self.lease_s = lease_s
        self._describe = describe
        self._follow = follow
        self._leads_until = 0.0
        self._plans_from = 0.0
        self._leaving = False
        self._waiting: tuple[int, ...] = ()
        self.view: ClusterView | None = None
        self.order = 0

    @property
    def id(self) -> str:
        return self._who.id

    @property
    def leads(self) -> bool:
        """Whether this node leads. A disconnected leader steps down by itself, before its lease ends on the server."""
        return steady_s() < self._leads_until

    # -- joining -----------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Register. Wait for the lease of a crashed predecessor to end; a live one is an error."""
        other = await self.join()
        if other is None:
            return
        log.warning("node id %s is taken; waiting for the lease of its last holder to end", self.id)
        left_ms = other.left_ms
        deadline = steady_s() + JOIN_WAIT_LEASES * max(self.lease_s, left_ms / 1000)
        while other is not None:
            if other.left_ms > left_ms or steady_s() > deadline:
                raise self._refusal(other)
            left_ms = other.left_ms
            await asyncio.sleep(min(self.lease_s / 10, left_ms / 1000))
            other = await self.join()

    async def join(self) -> NodeIdTaken | None:
        """Register; return the present holder if the id is taken."""
        answer = await members.join(self._store, self._who, self._describe())
        if isinstance(answer, NodeIdTaken):
            return answer
        self.order = answer
        log.info("node %s joined as number %d", self.id, answer)
        await members.announce(self._store)
        return None

    def _refusal(self, other: NodeIdTaken) -> ConfigError:
        """Return the error for an id that another live node has."""
        return ConfigError(
            f"node id {self.id!r} is in use by process {other.about.pid} on {other.about.host}; give this node another"
            " --node-id, or leave it out and one is generated"
        )

    # -- beating -----------------------------------------------------------------------------------------

    async def step(self) -> float:
        asked_at, about = steady_s(), self._describe()
        await self._urgent_store.keep_format()
        view = await members.beat(self._urgent_store, self._who, about, leaving=self._leaving)
        if view is None:
            return await self._come_back()
        if about.waiting and about.waiting != self._waiting:
            await members.announce(self._urgent_store)  # wake the present owners at once, not at their next beat
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
        # A successor must notice at once when a lease ends, not a third of a lease later.
        others = (one.left_ms / 1000 + 0.005 for one in view.members.values() if one.id != self.id)
        return min(self.lease_s / BEATS_A_LEASE, *others, self.lease_s)

    async def _plan(self, view: ClusterView) -> ClusterView | None:
        """Write a new plan if the nodes have changed; return None if another leader was faster."""
        weights = {one.id: max(1, one.about.concurrency) for one in view.members.values() if not one.leaving}
        owners = tuple(assign(view.owners, weights))
        if owners == view.owners:
            return view
        if not self.leads or not await members.write_plan(self._urgent_store, self._who, view, owners):
            return None
        moved = sum(old != new for old, new in zip(view.owners, owners, strict=True))
        log.info("plan %d: %d nodes, %d partitions move", view.version + 1, len(weights), moved)
        return view._replace(version=view.version + 1, owners=owners)

    def _take(self, view: ClusterView) -> None:
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
        """Join again after losing the lease: this node is now the newest."""
        self._leads_until = 0.0
        if self._leaving:
            return self.lease_s
        log.warning("node %s was out of contact for longer than its lease; joining again", self.id)
        # The server may have been down, and then all nodes were: a plan without the others would move everything,
        # twice.
        self._plans_from = steady_s() + self.lease_s / 2
        if (other := await self.join()) is not None:
            raise self._refusal(other)
        return 0.0

    # -- leaving -----------------------------------------------------------------------------------------

    async def withdraw(self) -> None:
        """Begin to leave: do not lead, and be left out of the plan."""
        self._leaving = True
        self._leads_until = 0.0
        try:
            await members.beat(self._urgent_store, self._who, self._describe(), leaving=True)
            await members.announce(self._urgent_store)
        except StoreError as error:
            log.warning("could not announce the stop to the other nodes (%s); they notice when the lease ends", error)

    async def leave(self) -> None:
        try:
            await members.leave(self._urgent_store, self._who)
        except StoreError as error:
            log.warning("node %s could not unregister (%s); its lease will expire", self.id, error)


class Seat:
    """A node's place in the cluster. Started before the engine, so that the plan is known; stopped after it."""

    def __init__(self, store: Store, membership: Membership, called: Callable[[], None]) -> None:
        self._store = store
        self._called = called
        self._subscription: Subscription | None = None
        self.joined = False
        """True if registered, or perhaps registered because the reply was lost. Then `stop` unregisters."""
        self.membership = membership
        # After a failure, retry within the lease: a short outage must not cost the membership.
        self.loop = Loop("membership", membership.step, max_backoff_s=min(2.0, membership.lease_s / 4))

    @property
    def view(self) -> ClusterView | None:
        """The cluster as of the last heartbeat."""
        return self.membership.view

    async def start(self) -> None:
        """Join the cluster. Raise ConfigError if a live node has the same id."""
        self.joined = True
        try:
            await self.membership.enter()
        except ConfigError:
            self.joined = False  # another has the id
            raise
        while await self.membership.step() == 0.0:
            pass
        self._subscription = await self._store.servers.all()[0].subscribe(
            [self._store.keys.cluster], on_message=lambda *_: self._wake(), on_connect=self._wake
        )
        self.loop.start()

    async def withdraw(self) -> None:
        """Tell the others that this node leaves; it stays registered until `stop`."""
        await self.membership.withdraw()

    async def stop(self) -> None:
        await self.loop.stop()
        if self._subscription is not None:
            await self._subscription.close()
        await self.membership.leave()

    def _wake(self) -> None:
        """Handle a change: a node joined or left, a plan was written, or a partition was released."""
        self.loop.wake()
        self._called()


def holder(holding: Holding) -> str:
    """Return the node that holds a partition; empty if none does."""
    return holding.owner.rpartition("/")[0]


def report(view: ClusterView, holdings: list[Holding]) -> dict[str, Any]:
    return {
        "leader": view.leader,
        "term": view.term,
        "plan": view.version,
        "partitions": len(holdings),
        "without_owner": [number for number, one in enumerate(holdings) if not one.owner],
        "moving": [
            number
            for number, (planned, one) in enumerate(zip(view.owners, holdings, strict=True))
            if planned != holder(one)
        ],
        "nodes": [node_report(one, view, holdings) for one in oldest_first(view)],
    }


def oldest_first(view: ClusterView) -> list[Member]:
    return sorted(view.members.values(), key=lambda one: one.order)


def node_report(member: Member, view: ClusterView, holdings: list[Holding]) -> dict[str, Any]:
    about = member.about
    return {
        "id": member.id,
        "leader": member.id == view.leader,
        "order": member.order,
        "host": about.host,
        "pid": about.pid,
        "roles": about.roles,
        "version": about.version,
        "concurrency": about.concurrency,
        "started_ms": about.started_ms,
        "leaving": member.leaving,
        "lease_left_ms": member.left_ms,
        "partitions": [number for number, one in enumerate(holdings) if holder(one) == member.id],
        "planned": [number for number, node in enumerate(view.owners) if node == member.id],
        "look_ahead": about.look_ahead,
        "in_flight": about.in_flight,
        "lag_ms": about.lag_ms,
        "delivered": about.delivered,
        "lacks": about.lacks,
    }
