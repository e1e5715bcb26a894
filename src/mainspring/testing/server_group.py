"""Several server processes that belong together: started on free ports, ended together, cut off from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from mainspring.model.errors import EmbeddedError
from mainspring.testing.server_process import Kind, Server

# Replicas log in as a user of their own, so that they, and nobody else, can be cut off.
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
    """From now on no replica hears of a write of this primary; clients and other nodes notice nothing.

    For servers of `cluster` and `sentinel`. What a replica that is cut off is promoted with is an old state.
    """
    ok(primary.call("ACL", "SETUSER", _REPLICA, "off"))
    ok(primary.call("CLIENT", "KILL", "USER", _REPLICA))


def caught_up(primary: Server, replica: Server) -> bool:
    """Has the replica everything that was written so far?"""
    have = replica.info("replication")
    return have.get("master_link_status") == "up" and int(have["slave_repl_offset"]) >= int(
        primary.info("replication")["master_repl_offset"]
    )


class Group:
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
