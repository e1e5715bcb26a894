"""`/v1/cluster`: the nodes, who leads, who owns what."""

from typing import Final

import msgspec

from ..cluster.report import report
from ..store import members
from .asgi import Answer, answer
from .call import Call
from .routes import Route


class ClusterNode(msgspec.Struct):
    id: str
    leader: bool
    order: int
    host: str
    pid: int
    roles: list[str]
    version: str
    concurrency: int
    started_ms: int
    leaving: bool
    lease_left_ms: int
    partitions: list[int]
    planned: list[int]
    look_ahead: int
    in_flight: int
    lag_ms: int
    delivered: int


class Cluster(msgspec.Struct):
    """`leader` is empty when nobody leads; `without_owner` and `moving` are partitions."""

    leader: str
    term: int
    plan: int
    partitions: int
    without_owner: list[int]
    moving: list[int]
    nodes: list[ClusterNode]


async def get_cluster(call: Call) -> Answer:
    return answer(report(*await members.look(call.client.store)))


ROUTE: Final = Route("GET", "/v1/cluster", get_cluster, "read", "The nodes and what they own.", answers={200: Cluster})
