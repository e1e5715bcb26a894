"""Real servers for tests: one, a cluster, or a primary under sentinels; on free ports, gone after use.

    with standalone() as server:            # Valkey; standalone("redis") for redis-server on the PATH
        links = await Links.connect(server.url)

Every server listens on loopback only, keeps nothing on disk unless asked, and dies with the process that
started it, even when that is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from mainspring.model.errors import EmbeddedError
from mainspring.store.url import Tls
from mainspring.testing.server_cluster import Cluster, SlotMove, cluster
from mainspring.testing.server_group import REPLICATION, Group, caught_up, cut_off_replicas, ok, started
from mainspring.testing.server_process import Kind, Server, free_port, missing, wait_until

__all__ = [
    "Cluster",
    "Kind",
    "Sentinels",
    "Server",
    "SlotMove",
    "caught_up",
    "cluster",
    "cut_off_replicas",
    "missing",
    "sentinel",
    "standalone",
    "wait_until",
]


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
    return started(kind, config, password)


class Sentinels(Group):
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
            timeout_s=90,  # one that was held up for two seconds does nothing for the next thirty
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
        config = {"repl-diskless-sync-delay": "0", **REPLICATION}
        primary = stack.enter_context(started(kind, config))
        replica = stack.enter_context(started(kind, {**config, "replicaof": f"127.0.0.1 {primary.port}"}))
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
        ok(server.call("SENTINEL", "MONITOR", "main", "127.0.0.1", primary_port, 2))
        for name, value in (("down-after-milliseconds", 1000), ("failover-timeout", 5000)):
            ok(server.call("SENTINEL", "SET", "main", name, value))
        # One that a loaded machine has held up for two seconds would not act for thirty.
        ok(server.call("SENTINEL", "DEBUG", "tilt-trigger", 60_000))
    except BaseException:
        server.close()
        raise
    return server
