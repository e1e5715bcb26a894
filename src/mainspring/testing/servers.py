"""Real servers for tests: one, a cluster, or a primary under sentinels; on free ports, gone after use.

    with standalone() as server:            # Valkey; standalone("redis") for redis-server on the PATH
        links = await Links.connect(server.url)

Every server listens on loopback only, keeps nothing on disk unless asked, and dies with the process that
started it, even when that is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from mainspring.model.errors import EmbeddedError
from mainspring.store.topology import SLOTS
from mainspring.store.url import Tls
from mainspring.testing.server_process import Kind, Server, free_port, missing, wait_until

__all__ = [
    "Cluster",
    "Kind",
    "Sentinels",
    "Server",
    "cluster",
    "missing",
    "sentinel",
    "standalone",
    "wait_until",
]

# Low, so that failovers in tests take a second or two.
_NODE_TIMEOUT_MS = 2000


def standalone(
    kind: Kind = "valkey",
    *,
    aof: bool = False,
    tls: Tls | None = None,
    password: str | None = None,
    extra_config: Mapping[str, str] | None = None,
) -> Server:
    """One running server. With `tls` (the server's files) clients need a certificate of the same CA."""
    if tls is not None and (reason := missing(kind, tls=True)):
        raise EmbeddedError(reason)
    config = dict(extra_config or {})
    if aof:
        config.setdefault("appendonly", "yes")
    if tls is not None:
        files = {"tls-ca-cert-file": tls.ca, "tls-cert-file": tls.cert, "tls-key-file": tls.key}
        config |= {"port": "0", "tls-port": str(free_port())}
        config |= {name: value for name, value in files.items() if value is not None}
    return _started(kind, config, password)


def _started(kind: Kind, config: Mapping[str, str], password: str | None = None, *, tries: int = 3) -> Server:
    server = Server(kind, config, password=password)
    try:
        return server.start()
    except EmbeddedError:
        server.close()
        if tries == 1 or "port" in config:
            raise
        return _started(kind, config, password, tries=tries - 1)  # another process took the port in between
    except BaseException:
        server.close()
        raise


class _Group:
    """Several servers that end together."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)

    @property
    def pids(self) -> list[int]:
        return [server.pid for server in self.servers if server.running]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Cluster(_Group):
    """Masters first, then their replicas, in `servers`."""

    def __init__(self, servers: Sequence[Server], masters: int) -> None:
        super().__init__(servers)
        self.masters = self.servers[:masters]
        self.replicas = self.servers[masters:]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.masters)

    def restart(self) -> None:
        for server in self.servers:
            server.restart()
        self.wait_ok()

    def wait_ok(self) -> None:
        """Until every node sees every slot served by a live master."""
        wait_until(lambda: all(map(self._sees_all, self.servers)), "all nodes see a whole cluster")

    def owner_of(self, slot: int) -> Server:
        for first, last, node, *_ in self.masters[0].call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(one for one in self.servers if one.port == node[1])
        raise EmbeddedError(f"nobody holds slot {slot}")

    def move_slot(self, slot: int, target: Server) -> None:
        """Moves a slot with its keys, the way a resharding tool does."""
        source = self.owner_of(slot)
        source_id, target_id = _id_of(source), _id_of(target)
        _ok(target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id))
        _ok(source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id))
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
            _ok(source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys))
        for server in (target, source):
            _ok(server.call("CLUSTER", "SETSLOT", slot, "NODE", target_id))

    def _sees_all(self, server: Server) -> bool:
        info = server.call("CLUSTER", "INFO").decode()
        rows = server.call("CLUSTER", "SLOTS")
        covered = sum(last - first + 1 for first, last, *_ in rows)
        known = f"cluster_known_nodes:{len(self.servers)}\r"
        return "cluster_state:ok" in info and known in info and covered == SLOTS


def cluster(masters: int = 3, replicas: int = 0, kind: Kind = "valkey") -> Cluster:
    """A cluster with the slots spread evenly; `replicas` per master."""
    count = masters * (1 + replicas)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_started(kind, _cluster_config())) for _ in range(count)]
        made = Cluster(servers, masters)
        _assign_slots(made.masters)
        _introduce(servers)
        made.wait_ok()
        for number, replica in enumerate(made.replicas):
            _follow(replica, made.masters[number % masters])
        stack.pop_all()
    return made


def _cluster_config() -> dict[str, str]:
    return {
        "cluster-enabled": "yes",
        "cluster-config-file": "nodes.conf",
        "cluster-port": str(free_port()),
        "cluster-announce-ip": "127.0.0.1",
        "cluster-node-timeout": str(_NODE_TIMEOUT_MS),
        "repl-diskless-sync-delay": "0",
    }


def _assign_slots(masters: Sequence[Server]) -> None:
    for number, master in enumerate(masters):
        first, last = SLOTS * number // len(masters), SLOTS * (number + 1) // len(masters) - 1
        _ok(master.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1))
        _ok(master.call("CLUSTER", "ADDSLOTSRANGE", first, last))


def _introduce(servers: Sequence[Server]) -> None:
    # Everyone meets everyone: gossip alone would take seconds.
    for server in servers:
        for other in servers:
            if other is not server:
                bus = other.call("CONFIG", "GET", "cluster-port")[1]
                _ok(server.call("CLUSTER", "MEET", "127.0.0.1", other.port, bus))


def _follow(replica: Server, master: Server) -> None:
    _ok(replica.call("CLUSTER", "REPLICATE", _id_of(master)))
    wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")


def _id_of(server: Server) -> str:
    return str(server.call("CLUSTER", "MYID").decode())


def _ok(reply: object) -> None:
    if isinstance(reply, Exception):
        raise EmbeddedError(f"the test server refused: {reply}")


class Sentinels(_Group):
    """One primary, one replica and three sentinels that watch them under the name `main`."""

    def __init__(self, primary: Server, replica: Server, sentinels: Sequence[Server]) -> None:
        super().__init__([primary, replica, *sentinels])
        self.primary = primary
        self.replica = replica
        self.sentinels = list(sentinels)
        self.url = "redis+sentinel://" + ",".join(f"127.0.0.1:{one.port}" for one in sentinels) + "/main"

    def wait_ok(self) -> None:
        wait_until(lambda: all(map(self._sees_all, self.sentinels)), "the sentinels know each other")

    def wait_failover(self) -> Server:
        """Until every sentinel names the replica as primary."""
        want = str(self.replica.port).encode()
        ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        wait_until(
            lambda: all(one.call(*ask)[1] == want for one in self.sentinels),
            "the sentinels promoted the replica",
        )
        return self.replica

    def _sees_all(self, server: Server) -> bool:
        row = server.call("SENTINEL", "MASTER", "main")
        fields = dict(zip(row[::2], row[1::2], strict=True))
        others, replicas = fields[b"num-other-sentinels"], fields[b"num-slaves"]
        return bool(others == b"2" and replicas == b"1" and fields[b"flags"] == b"master")


def sentinel(kind: Kind = "valkey") -> Sentinels:
    """A primary with a replica, and three sentinels that promote the replica when the primary is gone."""
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(_started(kind, {"repl-diskless-sync-delay": "0"}))
        replica = stack.enter_context(_started(kind, {"replicaof": f"127.0.0.1 {primary.port}"}))
        wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")
        watchers = [stack.enter_context(_sentinel(kind, primary.port)) for _ in range(3)]
        made = Sentinels(primary, replica, watchers)
        made.wait_ok()
        stack.pop_all()
    return made


def _sentinel(kind: Kind, primary_port: int) -> Server:
    server = Server(kind, {}, mode="--sentinel")
    try:
        server.start()
        _ok(server.call("SENTINEL", "MONITOR", "main", "127.0.0.1", primary_port, 2))
        for name, value in (("down-after-milliseconds", 1000), ("failover-timeout", 5000)):
            _ok(server.call("SENTINEL", "SET", "main", name, value))
    except BaseException:
        server.close()
        raise
    return server
