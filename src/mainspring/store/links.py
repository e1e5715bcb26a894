"""The servers: one `Link` per primary, and `Links`, which knows which primary holds what.

Nothing here repeats a command. On "moved", "clusterdown" or "readonly" the caller calls `refresh()` and repeats what
is safe to repeat; on Unavailable it calls `suspect()`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hiredis

from mainspring.model.errors import InvalidInput, StoreError, Unavailable
from mainspring.store.credentials import signed
from mainspring.store.link import Link, LinkOptions, Redirect, Shared, redirect_of
from mainspring.store.subscription import Subscription
from mainspring.store.topology import (
    SLOTS,
    Node,
    SlotMap,
    answers,
    key_slot,
    read_sentinel_master,
    read_slot_map,
)
from mainspring.store.url import AnyEndpoint, ClusterEndpoint, Endpoint, SentinelEndpoint, Tls, parse_url
from mainspring.store.wire import Command, Connection

__all__ = ["Link", "LinkOptions", "Links", "Redirect", "Subscription", "redirect_of"]

# A node in trouble asks often: a failover is over in an instant. Not more often, for everybody asks then.
_LOOK_EVERY_S = 0.25


class Links:
    """All primaries: one for a standalone server or behind sentinels, several in a cluster."""

    def __init__(self, endpoint: AnyEndpoint, options: LinkOptions) -> None:
        self.cluster = isinstance(endpoint, ClusterEndpoint)
        self._endpoint = endpoint
        self._options = options
        self._primaries: dict[Node, Link] = {}
        self._former: list[Link] = []
        self._guests: dict[Node, Link] = {}
        """Nodes that a redirect named and that hold no slots, as far as is known."""
        self._known: tuple[Node, ...] = ()
        self._slots: list[Link | None] = [None] * SLOTS
        self._refreshed: Shared[None] = Shared(self._refresh)
        self._looking: asyncio.Task[None] | None = None
        self._look_again = 0.0
        self._subscriptions: set[Subscription] = set()

    @classmethod
    async def connect(cls, url: str, options: LinkOptions | None = None) -> Links:
        """Finds the primaries and reaches them, or raises the error that says why not."""
        options = options or LinkOptions()
        links = cls(_with_tls(parse_url(url), options), options)
        try:
            await links.refresh()
            await asyncio.gather(*(link.pipeline([("PING",)]) for link in links.all()))
        except BaseException:
            await links.aclose()
            raise
        return links

    def for_slot(self, slot: int) -> Link:
        link = self._slots[slot]
        if link is None:
            raise Unavailable(f"no server of the cluster holds slot {slot}", sent=False)
        return link

    def for_channel(self, channel: str) -> Link:
        return self.for_slot(key_slot(channel.encode()))

    def all(self) -> list[Link]:
        return list(self._primaries.values())

    async def refresh(self) -> None:
        """Learns again who is primary. Calls made while one runs share its result."""
        await self._refreshed()

    def suspect(self) -> None:
        """A primary could not be reached: finds out, beside the work, whether another took its place."""
        now = asyncio.get_running_loop().time()
        if isinstance(self._endpoint, Endpoint) or now < self._look_again:
            return
        self._look_again = now + _LOOK_EVERY_S
        self._looking = asyncio.create_task(self._look(), name="mainspring-look")

    def at(self, node: Node) -> Link:
        """The server with this address, which a redirect named."""
        link = self._primaries.get(node) or self._guests.get(node)
        if link is None:
            link = self._guests[node] = Link(self._base().at(*node), self._options, self)
        return link

    def learn(self, slot: int, node: Node) -> None:
        """A server says who holds a slot: it knows before the others do."""
        self._slots[slot] = self.at(node)

    def keep(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)

    async def aclose(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        self._refreshed.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for link in (*self._primaries.values(), *self._former, *self._guests.values()):
            link.close()

    async def _look(self) -> None:
        with contextlib.suppress(StoreError):
            await self.refresh()

    def _base(self) -> Endpoint:
        """User, password and TLS as every server of this URL wants them."""
        match self._endpoint:
            case ClusterEndpoint(seeds):
                return seeds[0]
            case SentinelEndpoint(primary=primary):
                return primary
            case endpoint:
                return endpoint

    async def _refresh(self) -> None:
        match self._endpoint:
            case ClusterEndpoint():
                await self._refresh_cluster(self._endpoint)
            case SentinelEndpoint():
                await self._refresh_sentinel(self._endpoint)
            case Endpoint() as endpoint:
                if not self._primaries:
                    self._adopt([(0, SLOTS - 1, (endpoint.host, endpoint.port))])

    async def _refresh_cluster(self, cluster: ClusterEndpoint) -> None:
        # Everyone known is asked, replicas too: the seeds may all be gone, and one node's view may be old.
        known = dict.fromkeys([*cluster.seeds, *(cluster.seeds[0].at(*node) for node in self._known)])
        maps, errors = await answers([self._slot_map(endpoint) for endpoint in known])
        if not maps:
            raise _none_answered("cluster node", errors)
        best = max(maps, key=lambda found: found.freshness)
        if not best.ranges:
            raise Unavailable("the cluster has no slots assigned", sent=False)
        self._known = best.nodes
        self._adopt(best.ranges)

    async def _slot_map(self, endpoint: Endpoint) -> SlotMap:
        info, slots = await self._ask(endpoint, [("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
        return read_slot_map(info, slots, (endpoint.host, endpoint.port))

    async def _refresh_sentinel(self, watch: SentinelEndpoint) -> None:
        found, errors = await answers([self._named_by(one, watch.master) for one in watch.sentinels])
        # The latest failover first; two sentinels may disagree for a moment.
        for _, node in sorted(set(found), reverse=True):
            try:
                if await self._is_primary(watch.primary.at(*node)):
                    self._adopt([(0, SLOTS - 1, node)])
                    return
                errors.append(Unavailable(f"{node[0]}:{node[1]} is not a primary", sent=False))
            except StoreError as error:
                errors.append(error)
        raise _none_answered(f"sentinel with a reachable primary {watch.master!r}", errors)

    async def _named_by(self, sentinel: Endpoint, master: str) -> tuple[int, Node]:
        # Sentinels have a login of their own, in the URL.
        return read_sentinel_master((await self._put(sentinel, [("SENTINEL", "MASTER", master)]))[0])

    async def _is_primary(self, endpoint: Endpoint) -> bool:
        role = (await self._ask(endpoint, [("ROLE",)]))[0]
        # Where ROLE is forbidden the sentinel's word must do.
        return isinstance(role, hiredis.ReplyError) or role[0] == b"master"

    async def _ask(self, endpoint: Endpoint, commands: Sequence[Command]) -> list[Any]:
        options = self._options
        known = await signed(endpoint, options.credentials, within_s=options.connect_timeout_s)
        return await self._put(known, commands)

    async def _put(self, endpoint: Endpoint, commands: Sequence[Command]) -> list[Any]:
        """Questions go over their own short connection, never behind a busy pipeline."""
        timeout_s = self._options.connect_timeout_s
        connection = await Connection.open(endpoint, connect_timeout_s=timeout_s, client_name=self._options.client_name)
        try:
            return await connection.pipeline(commands, timeout_s=timeout_s)
        finally:
            connection.close()

    def _adopt(self, ranges: Sequence[tuple[int, int, Node]]) -> None:
        old, self._primaries = self._primaries, {}
        slots: list[Link | None] = [None] * SLOTS
        base = self._base()
        for first, last, node in ranges:
            link = self._primaries.get(node) or old.pop(node, None) or self._guests.pop(node, None)
            if link is None:
                link = Link(base.at(*node) if base.path is None else base, self._options, self)
            self._primaries[node] = link
            slots[first : last + 1] = [link] * (last - first + 1)
        self._slots = slots
        # A former primary may still owe replies; it is closed once nobody waits for them.
        self._former += old.values()
        for link in [one for one in self._former if one.idle]:
            self._former.remove(link)
            link.close()


def _with_tls(endpoint: AnyEndpoint, options: LinkOptions) -> AnyEndpoint:
    """Fills TLS files that the URL leaves open from the options."""

    def filled(one: Endpoint) -> Endpoint:
        if one.tls is None:
            if options.tls_ca or options.tls_cert or options.tls_key:
                raise InvalidInput("TLS files are given, but the redis URL does not start with rediss")
            return one
        tls = Tls(one.tls.ca or options.tls_ca, one.tls.cert or options.tls_cert, one.tls.key or options.tls_key)
        return replace(one, tls=tls)

    match endpoint:
        case ClusterEndpoint():
            return ClusterEndpoint(tuple(map(filled, endpoint.seeds)))
        case SentinelEndpoint():
            sentinels = tuple(map(filled, endpoint.sentinels))
            return SentinelEndpoint(sentinels, endpoint.master, filled(endpoint.primary))
        case Endpoint():
            return filled(endpoint)


def _none_answered(what: str, errors: Sequence[StoreError]) -> Unavailable:
    reasons = "; ".join(dict.fromkeys(map(str, errors)))
    return Unavailable(f"no {what} answered: {reasons or 'none is known'}", sent=False)
