"""The servers of a run, and the roads that lead to them."""

import asyncio
from typing import Any, Final, Protocol

from mainspring.store.keys import Keyspace
from mainspring.testing.servers import Server, ServerCluster, cluster, ok, standalone, wait_until

from .network import Cable, Proxy, Road, Weather
from .profile import Profile
from .wire_log import Witness

_REPLICATED: Final = {"repl-diskless-sync-delay": "0"}


class Stage(Protocol):
    """A set of servers."""

    namespace: str

    @property
    def direct_url(self) -> str:
        """Past all proxies."""
        ...

    async def road(self, name: str, cable: Cable | None = None) -> Road: ...

    def url(self, road: Road) -> str: ...

    @property
    def servers(self) -> list[Server]:
        """The servers that clients may use now."""
        ...

    async def aclose(self) -> None: ...


class _Base:
    def __init__(self, profile: Profile, keys: Keyspace, witness: Witness) -> None:
        self.profile = profile
        self.namespace = keys.namespace
        self.keys = keys
        self._witness = witness


class Standalone(_Base):
    """One server that keeps everything on disk."""

    def __init__(self, profile: Profile, keys: Keyspace, witness: Witness) -> None:
        super().__init__(profile, keys, witness)
        self.server = standalone(extra_config=profile.server_config)

    @property
    def direct_url(self) -> str:
        return self.server.url

    @property
    def servers(self) -> list[Server]:
        return [self.server]

    async def road(self, name: str, cable: Cable | None = None) -> Road:
        upstreams = {"server": lambda: self.server.port}
        return await Road(name, upstreams, self._witness, translate=False, cable=cable).start()

    def url(self, road: Road) -> str:
        return f"redis://{road.addresses[0]}"

    async def aclose(self) -> None:
        await asyncio.to_thread(self.server.close)


class Clustered(_Base):
    """Three masters with a replica each."""

    def __init__(self, profile: Profile, keys: Keyspace, witness: Witness) -> None:
        super().__init__(profile, keys, witness)
        self.cluster: ServerCluster = cluster(3, 1, extra_config=profile.server_config)

    @property
    def direct_url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.cluster.servers)

    @property
    def servers(self) -> list[Server]:
        return [one for one in self.cluster.servers if one.running and _is_master(one)]

    async def road(self, name: str, cable: Cable | None = None) -> Road:
        upstreams = {str(one.port): _port_of(one) for one in self.cluster.servers}
        return await Road(name, upstreams, self._witness, translate=True, cable=cable).start()

    def url(self, road: Road) -> str:
        return "redis+cluster://" + ",".join(road.addresses)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.cluster.close)


class Pair(_Base):
    """A primary and its replica behind one address, as behind a virtual address that moves."""

    def __init__(self, profile: Profile, keys: Keyspace, witness: Witness) -> None:
        super().__init__(profile, keys, witness)
        self.primary = standalone(extra_config=_REPLICATED | profile.server_config)
        self.replica = standalone(extra_config=_REPLICATED | profile.server_config)
        self.link_weather = Weather()
        self._link: Proxy | None = None
        self._clear: Proxy | None = None
        """A connection to the present primary that no fault ever hits."""

    async def open(self) -> None:
        """The replica follows through a proxy of its own, so that it can be left behind."""
        self._link = Proxy(lambda: ("127.0.0.1", self.primary.port), self.link_weather)
        await self._link.start()
        self._clear = Proxy(lambda: ("127.0.0.1", self.primary.port), Weather())
        await self._clear.start()
        await self.follow()

    async def follow(self) -> None:
        """The replica follows the primary and has everything it has."""
        assert self._link is not None
        ok(self.replica.call("REPLICAOF", "127.0.0.1", self._link.port))
        await asyncio.to_thread(wait_until, self._follows, "the replica follows", timeout_s=30.0)

    def _follows(self) -> bool:
        return self.replica.info("replication").get("master_link_status") == "up"

    @property
    def direct_url(self) -> str:
        assert self._clear is not None
        return f"redis://127.0.0.1:{self._clear.port}"

    @property
    def servers(self) -> list[Server]:
        return [self.primary]

    async def road(self, name: str, cable: Cable | None = None) -> Road:
        upstreams = {"primary": lambda: self.primary.port}
        return await Road(name, upstreams, self._witness, translate=False, cable=cable).start()

    def url(self, road: Road) -> str:
        return f"redis://{road.addresses[0]}"

    async def promote(self) -> None:
        """The primary dies; the replica takes its place with what it has; the dead one comes back empty behind it."""
        assert self._link is not None
        await asyncio.to_thread(self.primary.kill)
        self._link.cut()
        ok(self.replica.call("REPLICAOF", "NO", "ONE"))
        self.primary, self.replica = self.replica, self.primary
        self.link_weather.clear()
        await asyncio.to_thread(self.replica.start)
        await self.follow()

    async def aclose(self) -> None:
        for proxy in (self._link, self._clear):
            if proxy is not None:
                await proxy.aclose()
        for server in (self.primary, self.replica):
            await asyncio.to_thread(server.close)


def _is_master(server: Server) -> bool:
    role: Any = server.call("ROLE")
    return bool(role[0] == b"master")


def _port_of(server: Server) -> Any:
    return lambda: server.port
