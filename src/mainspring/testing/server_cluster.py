"""A real cluster for tests: slots that move, replicas that take over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from mainspring.model.errors import EmbeddedError
from mainspring.store.topology import SLOTS
from mainspring.testing.server_group import REPLICATION, Group, ok, started
from mainspring.testing.server_process import Kind, Server, wait_until

# Low, so that failovers in tests take a second or two.
_NODE_TIMEOUT_MS = 2000


class Cluster(Group):
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
        """Who says of itself that it holds the slot: the others hear of it later."""
        for server in self.servers:
            if server.running:
                for first, last, node, *_ in server.call("CLUSTER", "SLOTS"):
                    if first <= slot <= last and node[1] == server.port:
                        return server
        raise EmbeddedError(f"nobody holds slot {slot}")

    def replica_of(self, master: Server) -> Server:
        """A replica that follows this master."""
        want = str(master.port)
        return next(one for one in self.servers if one.running and one.info("replication").get("master_port") == want)

    def move_slot(self, slot: int, target: Server) -> None:
        """Moves a slot with its keys, the way a resharding tool does."""
        move = self.begin_move(slot, target)
        while move.step(100):
            pass
        move.finish()

    def begin_move(self, slot: int, target: Server) -> SlotMove:
        """A move in steps: what a resharding looks like in the middle of it."""
        return SlotMove(self, slot, self.owner_of(slot), target)

    def move_at_once(self, slot: int, target: Server) -> None:
        """Moves a slot the way of Valkey 9: copied beside the work, handed over in one instant."""
        source = self.owner_of(slot)
        ask = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", _id_of(target))
        # Refused while the cluster has not settled after the last change.
        wait_until(lambda: not isinstance(source.call(*ask), Exception), f"the move of slot {slot} begins")
        wait_until(lambda: self.owner_of(slot) is target, f"slot {slot} is moved")

    def promote(self, replica: Server) -> None:
        """A planned failover: the replica takes over without losing anything."""

        def is_master() -> bool:
            # Asked again and again: a vote among nodes that hardly know each other yet comes to nothing.
            if replica.call("ROLE")[0] != b"master":
                replica.call("CLUSTER", "FAILOVER")
                return False
            return True

        wait_until(is_master, "the replica is promoted", timeout_s=60)
        self.wait_promoted(replica)

    def wait_promoted(self, replica: Server) -> None:
        """Until a replica is master and every live node has heard of it."""
        wait_until(
            lambda: replica.call("ROLE")[0] == b"master" and all(self._knows(one, replica) for one in self.servers),
            "the replica took over",
            timeout_s=60,
        )

    def _knows(self, server: Server, master: Server) -> bool:
        if not server.running:
            return True
        if "cluster_state:ok" not in server.call("CLUSTER", "INFO").decode():
            return False
        return any(node[1] == master.port for _, _, node, *_ in server.call("CLUSTER", "SLOTS"))

    def _sees_all(self, server: Server) -> bool:
        info = server.call("CLUSTER", "INFO").decode()
        rows = server.call("CLUSTER", "SLOTS")
        covered = sum(last - first + 1 for first, last, *_ in rows)
        known = f"cluster_known_nodes:{len(self.servers)}\r"
        return "cluster_state:ok" in info and known in info and covered == SLOTS


class SlotMove:
    """A slot on its way, key by key."""

    def __init__(self, nodes: Cluster, slot: int, source: Server, target: Server) -> None:
        self.slot, self.source, self.target = slot, source, target
        self._nodes = nodes
        ok(target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", _id_of(source)))
        ok(source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", _id_of(target)))

    def step(self, keys: int = 1) -> int:
        """Moves some keys; returns how many are left."""
        names = self.source.call("CLUSTER", "GETKEYSINSLOT", self.slot, keys)
        if names:
            self.take(*names)
        return int(self.source.call("CLUSTER", "COUNTKEYSINSLOT", self.slot))

    def take(self, *keys: bytes | str) -> None:
        """Moves these keys."""
        ok(self.source.call("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys))

    def left(self) -> set[bytes]:
        """Keys that are still where they were."""
        return set(self.source.call("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000))

    def finish(self) -> None:
        """Tells everybody who has the slot now; the one who has it first."""
        target_id = _id_of(self.target)
        others = [one for one in self._nodes.masters if one is not self.target and one.running]
        for server in (self.target, *others):
            ok(server.call("CLUSTER", "SETSLOT", self.slot, "NODE", target_id))


def cluster(
    masters: int = 3, replicas: int = 0, kind: Kind = "valkey", *, extra_config: Mapping[str, str] | None = None
) -> Cluster:
    """A cluster with the slots spread evenly; `replicas` per master."""
    count = masters * (1 + replicas)
    # Where nobody can take over, one that a loaded machine holds up must not be taken for lost.
    patient = {} if replicas else {"cluster-node-timeout": "15000"}
    config = {**patient, **(extra_config or {})}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(kind, {**_cluster_config(), **config})) for _ in range(count)]
        made = Cluster(servers, masters)
        _assign_slots(made.masters)
        _introduce(servers)
        # A new master refuses work for two seconds: time in which replicas can copy it.
        for number, replica in enumerate(made.replicas):
            _follow(replica, made.masters[number % masters])
        made.wait_ok()
        wait_until(lambda: all(map(_has_copied, made.replicas)), "the replicas follow")
        # Who has not heard whose replica one is does not vote for it, and a takeover comes to nothing.
        wait_until(lambda: all(_knows_replicas(one, replicas) for one in servers), "all know who follows whom")
        stack.pop_all()
    return made


def _cluster_config() -> dict[str, str]:
    return {
        "cluster-enabled": "yes",
        "cluster-config-file": "nodes.conf",
        "cluster-announce-ip": "127.0.0.1",
        "cluster-node-timeout": str(_NODE_TIMEOUT_MS),
        "repl-diskless-sync-delay": "0",
        **REPLICATION,
    }


def _assign_slots(masters: Sequence[Server]) -> None:
    for number, master in enumerate(masters):
        first, last = SLOTS * number // len(masters), SLOTS * (number + 1) // len(masters) - 1
        ok(master.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1))
        ok(master.call("CLUSTER", "ADDSLOTSRANGE", first, last))


def _introduce(servers: Sequence[Server]) -> None:
    # Everyone meets everyone: gossip alone would take seconds.
    for server in servers:
        for other in servers:
            if other is not server:
                bus = other.call("CONFIG", "GET", "cluster-port")[1]
                ok(server.call("CLUSTER", "MEET", "127.0.0.1", other.port, bus))


def _follow(replica: Server, master: Server) -> None:
    """Asked again until the replica has heard of its master."""
    ask = ("CLUSTER", "REPLICATE", _id_of(master))
    wait_until(lambda: replica.call(*ask) == b"OK", "the replica knows its master")


def _has_copied(replica: Server) -> bool:
    return replica.info("replication").get("master_link_status") == "up"


def _knows_replicas(server: Server, replicas: int) -> bool:
    return all(len(nodes) == 1 + replicas for _, _, *nodes in server.call("CLUSTER", "SLOTS"))


def _id_of(server: Server) -> str:
    return str(server.call("CLUSTER", "MYID").decode())
