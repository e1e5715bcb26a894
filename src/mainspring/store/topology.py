"""Who is primary: the questions put to cluster nodes and sentinels, and how their answers are read."""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hiredis

from mainspring.model.errors import Refused, StoreError

SLOTS = 16384
# After the first answer the others get this long: long enough to hear a fresher view,
# short enough that a dead node does not hold up a failover.
_GRACE_S = 0.25

Node = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotMap:
    """One node's view of the cluster; a higher epoch is a fresher view."""

    healthy: bool
    epoch: int
    ranges: tuple[tuple[int, int, Node], ...]
    nodes: tuple[Node, ...] = ()
    """Primaries and replicas: all that can be asked who is primary."""

    @property
    def freshness(self) -> tuple[bool, int]:
        return (self.healthy, self.epoch)


def key_slot(key: bytes) -> int:
    """The cluster slot of a key or channel: crc16 of its hash tag, if it has one, else of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def read_slot_map(info: Any, slots: Any, asked: Node) -> SlotMap:
    """Reads the replies of CLUSTER INFO and CLUSTER SLOTS. INFO may be denied; SLOTS is needed."""
    if isinstance(slots, hiredis.ReplyError):
        raise Refused(f"CLUSTER SLOTS was refused: {slots}")
    fields = {} if isinstance(info, hiredis.ReplyError) else info_fields(info)
    ranges = tuple((row[0], row[1], _node(row[2], asked)) for row in slots)
    nodes = tuple(dict.fromkeys(_node(node, asked) for row in slots for node in row[2:]))
    healthy = fields.get("cluster_state", "ok") == "ok"
    return SlotMap(healthy, int(fields.get("cluster_current_epoch", "0")), ranges, nodes)


def read_redirect(error: hiredis.ReplyError, asked: Node) -> tuple[int, Node]:
    """Reads "MOVED 15891 host:port" and "ASK …": the slot and who is to be asked for it."""
    _, slot, address = str(error).split(" ")[:3]
    host, _, port = address.rpartition(":")
    # A server that does not know its own host name leaves it out: it means the one we asked.
    return int(slot), (asked[0] if host in ("", "?") else host, int(port))


def _node(row: Sequence[Any], asked: Node) -> Node:
    # A node that does not know its own host name says nothing or "?": it means the one we asked.
    host = (row[0] or b"").decode()
    return (asked[0] if host in ("", "?") else host, int(row[1]))


def read_sentinel_master(reply: Any) -> tuple[int, Node]:
    """Reads SENTINEL MASTER: (config epoch, address). A higher epoch is a later failover."""
    if isinstance(reply, hiredis.ReplyError):
        raise Refused(f"the sentinel answered: {reply}")
    fields = {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    return int(fields.get("config-epoch", "0")), (fields["ip"], int(fields["port"]))


def info_fields(reply: bytes) -> dict[str, str]:
    """Reads an INFO-like reply: lines of name:value."""
    rows = (line.partition(":") for line in reply.decode().splitlines() if line[:1] != "#")
    return {name: value for name, colon, value in rows if colon}


async def answers(questions: Sequence[Awaitable[T]]) -> tuple[list[T], list[StoreError]]:
    """Asks all at once; returns the answers that came by a short grace after the first, and the errors."""
    waiting = {asyncio.ensure_future(question) for question in questions}
    good: list[T] = []
    bad: list[StoreError] = []
    try:
        while waiting:
            timeout = _GRACE_S if good else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                error = task.exception()
                if error is None:
                    good.append(task.result())
                elif isinstance(error, StoreError):
                    bad.append(error)
                else:
                    raise error
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return good, bad
