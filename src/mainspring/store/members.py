"""The nodes of a namespace, their leader, the plan of partition owners; and the workers."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ..model.errors import StoreError
from ..model.workers import WorkerInfo
from .redis.connection import Arg, RedisCommand
from .redis.sender import Group
from .store import Store

log = logging.getLogger("mainspring.cluster")


class About(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Facts that a node reports with every heartbeat."""

    host: str = ""
    pid: int = 0
    roles: tuple[str, ...] = ()
    version: str = ""
    concurrency: int = 1
    """Most tasks in flight: the node's weight in the plan."""
    started_ms: int = 0
    owned: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    """Partitions that the plan gives to this node but another still owns."""
    look_ahead: int = 0
    in_flight: int = 0
    lag_ms: int = 0
    """How long the earliest waiting task is overdue."""
    delivered: int = 0
    catch_up: str = ""
    """Rate at which the node releases overdue tasks, if it is limited: `8/s`."""
    catch_up_after_ms: int = 0
    """Tasks overdue by more than this are released at that rate."""
    lacks: tuple[str, ...] = ()
    """Schemes of targets that the node cannot deliver to because a package is missing."""
    http_reach: tuple[str, ...] | None = None
    """What its webhooks may reach besides public addresses; None if the node does not report it."""


class Member(NamedTuple):
    """A live node as other nodes see it."""

    id: str
    order: int
    left_ms: int
    leaving: bool
    about: About


class NodeIdTaken(NamedTuple):
    """Another process has this node id."""

    left_ms: int
    about: About


class ClusterView(NamedTuple):
    """The cluster at one moment."""

    now_us: int
    leader: str
    term: int
    members: dict[str, Member]
    version: int
    """Version of the plan; 0 if there is none yet."""
    owners: tuple[str, ...]
    """By partition."""


class Identity(NamedTuple):
    """One process with its node id. The nonce tells it from a later process with the same id."""

    id: str
    nonce: str
    lease_ms: int


_about = msgspec.json.Decoder(About)
_worker = msgspec.json.Decoder(WorkerInfo)
_owners = msgspec.json.Decoder(dict[str, list[int]])
_MEMBER: Final = re.compile(rb"(\d+):([^:]*):(\d+):([01]):(.*)", re.DOTALL)
"""A member's record, in the form that _member.lua parses."""


async def join(store: Store, who: Identity, about: About) -> int | NodeIdTaken:
    """Register a node. Return its number among all nodes ever registered, or the process that has the id."""
    keys = store.keys
    args: list[Arg] = [who.id, who.nonce, who.lease_ms, msgspec.json.encode(about)]
    reply = await _call(store, "join", [keys.nodes, keys.beats, keys.meta], args)
    store.clock.sample(reply[0])
    return int(reply[2]) if reply[1] == b"ok" else NodeIdTaken(reply[2], _about_of(reply[3]))


async def beat(store: Store, who: Identity, about: About, *, leaving: bool = False) -> ClusterView | None:
    """Send a heartbeat and return the cluster's state; None if the node is no longer registered."""
    keys = store.keys
    args: list[Arg] = [who.id, who.nonce, who.lease_ms, int(leaving), msgspec.json.encode(about)]
    call = store.scripts.call("beat", [keys.nodes, keys.beats, keys.leader], args)
    reply, plan = await store.run_one(keys.slot, [call, ("HMGET", keys.plan, "version", "owners")])
    store.clock.sample(reply[0])
    if reply[1] != b"ok":
        return None
    return _view(reply[0], reply[2], reply[3], reply[4], plan, len(keys))


async def leave(store: Store, who: Identity) -> None:
    keys = store.keys
    await _call(store, "leave", [keys.nodes, keys.beats], [who.id, who.nonce])
    await announce(store)


async def write_plan(store: Store, who: Identity, view: ClusterView, owners: Sequence[str]) -> bool:
    """Replace the plan in `view`; return False if that is not the latest one, or if another node leads."""
    held: dict[str, list[int]] = {}
    for number, node in enumerate(owners):
        held.setdefault(node, []).append(number)
    keys = store.keys
    args: list[Arg] = [who.id, who.nonce, view.term, view.version, msgspec.json.encode(held)]
    written: bool = await _call(store, "plan", [keys.leader, keys.plan], args) == b"ok"
    if written:
        await announce(store)
    return written


async def announce(store: Store) -> bool:
    """Notify all nodes of a change, so that they need not wait for their next heartbeat.

    A hint only: if it fails, the change is still stored, and nodes notice it a little later.
    """
    try:
        await store.run_one(store.keys.slot, [("SPUBLISH", store.keys.cluster, "1")])
    except StoreError as error:
        log.info("could not notify the other nodes (%s); they will notice with their next heartbeat", error)
        return False
    return True


class Holding(NamedTuple):
    """Ownership of a partition."""

    owner: str
    """`<node>/<process>`; empty if there is none."""
    left_ms: int


async def look(store: Store) -> tuple[ClusterView, list[Holding]]:
    """Return the cluster's state for a caller that is not a member."""
    view = await look_at_nodes(store)
    return view, await holdings(store, view.now_us // 1000)


async def look_at_nodes(store: Store) -> ClusterView:
    """Return the live nodes, the leader and the plan for a caller that is not a member."""
    keys = store.keys
    questions: list[RedisCommand] = [
        ("HGETALL", keys.nodes),
        ("ZRANGE", keys.beats, "0", "-1", "WITHSCORES"),
        ("HMGET", keys.leader, "id", "nonce", "term"),
        ("HMGET", keys.plan, "version", "owners"),
    ]
    now_ms = await store.sample_clock()
    nodes, beats, lead, plan = await store.run_one(keys.slot, questions)
    ends = {beats[i]: float(beats[i + 1]) for i in range(0, len(beats), 2)}
    rows: list[bytes | int] = []
    leader = b""
    for i in range(0, len(nodes), 2):
        member = _MEMBER.fullmatch(nodes[i + 1])
        left_ms = int(ends.get(nodes[i], 0)) - now_ms
        if member is not None and left_ms > 0:
            order, nonce, _, leaving, record = member.groups()
            rows += [nodes[i], int(order), left_ms, int(leaving), record]
            if (nodes[i], nonce) == (lead[0], lead[1]) and leaving == b"0":
                leader = nodes[i]
    return _view(now_ms * 1000, leader, _whole(lead[2]), rows, plan, len(keys))


async def holdings(store: Store, now_ms: int) -> list[Holding]:
    groups: list[Group] = [
        (one.slot, [("HMGET", one.own, "owner", "token", "lease_end_ms")]) for one in store.keys.partitions
    ]
    found = []
    for [[owner, token, lease_end]] in await store.run_all(groups):
        left_ms = int(float(lease_end or 0)) - now_ms
        found.append(Holding(owner.decode(), left_ms) if token and left_ms > 0 else Holding("", 0))
    return found


# -- workers -------------------------------------------------------------------------------------------------


async def worker_beat(store: Store, key: str, about: WorkerInfo) -> None:
    """Record a worker's heartbeat. `key` tells it from other workers with the same id."""
    keys = store.keys
    await _call(
        store, "worker_beat", [keys.workers, keys.worker_times], [key, about.lease_ms, msgspec.json.encode(about)]
    )


async def worker_leave(store: Store, key: str) -> None:
    await _call(store, "worker_leave", [store.keys.workers, store.keys.worker_times], [key])


async def live_workers(store: Store) -> list[WorkerInfo]:
    """Return the workers whose leases have not expired, by id."""
    now_ms = await store.sample_clock()
    keys = store.keys
    questions: list[RedisCommand] = [
        ("ZRANGE", keys.worker_times, f"({now_ms}", "+inf", "BYSCORE", "WITHSCORES"),
        ("HGETALL", keys.workers),
    ]
    times, flat = await store.run_one(keys.slot, questions)
    records: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    found = []
    for key, lease_end in zip(times[::2], times[1::2], strict=True):
        try:
            about = _worker.decode(records.get(key, b""))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # written by a later version, or the worker has just left
        found.append(msgspec.structs.replace(about, seen_ms=int(float(lease_end)) - about.lease_ms))
    return sorted(found, key=lambda one: (one.id, one.started_ms, one.pid))


def _view(
    now_us: int, leader: bytes, term: int, rows: Sequence[bytes | int], plan: Sequence[bytes | None], partitions: int
) -> ClusterView:
    members = {}
    for id_, order, left_ms, leaving, record in zip(*(iter(rows),) * 5, strict=True):
        assert isinstance(id_, bytes)
        assert isinstance(record, bytes)
        name = id_.decode(errors="replace")
        members[name] = Member(name, int(order), int(left_ms), bool(leaving), _about_of(record))
    version, raw = plan
    owners = [""] * partitions
    for node, numbers in _owners_of(raw or b"{}").items():
        for number in numbers:
            if 0 <= number < partitions:
                owners[number] = node
    return ClusterView(now_us, leader.decode(errors="replace"), term, members, _whole(version), tuple(owners))


def _about_of(record: bytes) -> About:
    """Return what a node reports. An unreadable report (a later version, a bug) must not break the other nodes."""
    try:
        return _about.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return About()


def _owners_of(raw: bytes) -> Mapping[str, list[int]]:
    """Return the owners in a plan. Treat an unreadable plan as missing: the leader writes another."""
    try:
        return _owners.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _whole(raw: bytes | None) -> int:
    """Return a version or term; anything that is not a number counts as 0, as in the scripts."""
    return int(raw) if raw and raw.isdigit() else 0


async def _call(store: Store, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
    [reply] = await store.run_one(store.keys.slot, [store.scripts.call(name, keys, args)])
    return reply
