"""The kinds of server that the data path is tested on."""

from typing import Final

from mainspring.testing.servers import Server, ServerCluster

KINDS: Final = ("valkey", "redis", "cluster")
"""Valkey as embedded, Debian's Redis 7.0, and a cluster of three masters."""

PARTITIONS: Final = 4
"""Few, so that tasks of one test meet; more than the masters of the cluster, so that every master has some."""

Fleet = Server | ServerCluster


def masters_of(fleet: Fleet) -> list[Server]:
    return fleet.masters if isinstance(fleet, ServerCluster) else [fleet]
