"""Routes for operators: API keys, cluster, doctor, audit trail, queues, targets, probes and metrics."""

import socket
from dataclasses import replace
from typing import Any, Final

import msgspec

from ..cluster import report
from ..model.access import ApiKey, KeyOrder, KeyShown, make_key, new_token
from ..model.audit import MASK, AuditPage, bare
from ..model.metrics import render
from ..model.notice import Beat, Expected, check_beat
from ..model.targets.names import BEAT
from ..model.workers import QueueInfo, QueuePage, WorkerInfo
from ..node.doctor import checkup
from ..node.metrics import everything
from ..store import members
from ..store.access import add_key, list_keys, new_key_id, read_audit, revoke_key
from ..store.notices import Notices
from .asgi import Answer, Problem, answer, not_ready
from .auth import OPEN, check_target
from .routes import Call, Route, no_such


class KeyList(msgspec.Struct):
    keys: list[KeyShown]


class KeyMade(KeyShown, frozen=True, kw_only=True):
    """`key` is its text, which only this response contains."""

    key: str


class KeyRevoked(msgspec.Struct):
    id: str
    name: str
    outcome: str = "revoked"


async def list_api_keys(call: Call) -> Answer:
    call.check_unbound()
    return answer(KeyList([KeyShown.of(one) for one in await list_keys(call.client.store)]))


async def add_api_key(call: Call) -> Answer:
    _check_shown(call)
    _check_not_repeatable(call)
    store, token = call.client.store, new_token()
    made = make_key(call.body, key_id=new_key_id(), token=token, now_ms=store.clock.now_ms())
    _check_grant(call, made)
    await add_key(store, made)
    call.app.authenticator.ring.forget()
    shown = KeyShown.of(made).fields
    await call.audit("key.add", made.id, after=shown)
    return answer(KeyMade(**shown, key=token), 201)


async def revoke_api_key(call: Call) -> Answer:
    _check_shown(call)
    key_id = call.params["id"]
    gone = await revoke_key(call.client.store, key_id)
    if gone is None:
        raise no_such("key", key_id)
    call.app.authenticator.ring.forget()
    await call.audit("key.revoke", key_id, before=KeyShown.of(gone).fields)
    return answer(KeyRevoked(gone.id, gone.name))


def _check_shown(call: Call) -> None:
    """Refuse if the API is open on this machine: a key made here would also be valid on the other nodes."""
    call.check_unbound()
    if call.key is OPEN:
        raise Problem(
            "forbidden",
            "keys are made and revoked with an admin's key, or by `mainspring key` at the server itself"
            " (--redis-url or --data-dir)",
        )


def _check_not_repeatable(call: Call) -> None:
    """Refuse an Idempotency-Key: to repeat the response, the key's text would have to be stored."""
    if b"idempotency-key" in call.headers:
        raise Problem(
            "invalid",
            "Idempotency-Key: making a key cannot be repeated, because its text is not stored; leave the header out."
            " If a response is lost, find the key in GET /v1/keys, revoke it and make another",
        )


def _check_grant(call: Call, made: ApiKey) -> None:
    """Refuse to let a limited key make one with fewer limits."""
    giver = call.key
    if giver.expires_ms is not None and (made.expires_ms is None or made.expires_ms > giver.expires_ms):
        raise _more("lasts longer than this one; give it `expires`")
    for namespace in made.namespaces:
        own = namespace in (call.namespace, call.node.config.namespace)
        if not own and not giver.reaches(namespace):
            raise _more(f"may use the namespace {namespace[:80]!r}, which this one may not")
    limit, asked = (call.node.config.api_rate if one.rate is None else one.rate for one in (giver, made))
    if limit and not 0 < asked <= limit:
        raise _more(f"may send more than this key's {limit:g} requests a second; give it `rate`")
    quota, wanted = (call.app.quotas.of(one) for one in (giver, made))
    if wanted.tasks > quota.tasks:
        raise _more(f"may have more than this key's {quota.tasks:,} tasks pending; give it `max_pending`")
    if wanted.payload_bytes > quota.payload_bytes:
        raise _more(f"may have more than this key's {quota.payload_bytes:,} bytes pending; give it `max_bytes`")


def _more(what: str) -> Problem:
    return Problem("forbidden", f"this key cannot make one that {what}")


KEY_ROUTES: Final = (
    Route("GET", "/v1/keys", list_api_keys, "admin", "List API keys, oldest first, without their texts.",
          answers={200: KeyList}),
    Route("POST", "/v1/keys", add_api_key, "admin",
          "Make an API key; its text is in this answer only. An Idempotency-Key is refused.",
          body=KeyOrder, answers={201: KeyMade}, problems=("too-large", "content-type", "out-of-memory")),
    Route("DELETE", "/v1/keys/{id}", revoke_api_key, "admin", "Revoke an API key.",
          answers={200: KeyRevoked}),
)  # fmt: skip


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
    lacks: list[str]
    """Schemes of targets that it cannot deliver to because a package is missing."""


class Cluster(msgspec.Struct):
    """`leader` is empty if no node leads; `without_owner` and `moving` are partitions."""

    leader: str
    term: int
    plan: int
    partitions: int
    without_owner: list[int]
    moving: list[int]
    nodes: list[ClusterNode]


async def get_cluster(call: Call) -> Answer:
    return answer(report(*await members.look(call.client.store)))


CLUSTER_ROUTE: Final = Route(
    "GET", "/v1/cluster", get_cluster, "read", "Show the nodes and the partitions they own.", answers={200: Cluster}
)


class Checked(msgspec.Struct):
    """`server` is its address; `status` is ok, warning, error, or unknown if the server does not allow the check."""

    server: str
    name: str
    status: str
    message: str


class Checkup(msgspec.Struct):
    checks: list[Checked]


async def get_doctor(call: Call) -> Answer:
    call.check_unbound()
    url, config = call.node.server_url, call.node.config
    if url is None:
        raise not_ready("the node is starting or stopping")
    if call.namespace != config.namespace:
        config = replace(config, namespace=call.namespace, partitions=None)
    async with call.app.examining:  # a checkup reads all keys of the namespace: run one at a time
        found = await checkup(config, url, here=f"node on {socket.gethostname()}")
    return answer(Checkup([Checked(one.where, one.check.name, one.check.status, one.check.message) for one in found]))


DOCTOR_ROUTE: Final = Route(
    "GET", "/v1/doctor", get_doctor, "admin", "Check servers, rights, speed, clocks, data, nodes and Kafka.",
    answers={200: Checkup},
)  # fmt: skip


class AuditQuery(msgspec.Struct, frozen=True):
    limit: int = 50
    cursor: str | None = None


async def list_audit(call: Call) -> Answer:
    call.check_unbound()
    return answer(await read_audit(call.client.store, limit=call.query.limit, cursor=call.query.cursor))


AUDIT_ROUTE: Final = Route(
    "GET", "/v1/audit", list_audit, "admin", "List the audit trail, newest first.", query=AuditQuery,
    answers={200: AuditPage},
)  # fmt: skip


class ListQueues(msgspec.Struct, frozen=True):
    limit: int = 1000
    cursor: str | None = None


class WorkerList(msgspec.Struct):
    workers: list[WorkerInfo]


async def list_queues(call: Call) -> Answer:
    query: ListQueues = call.query
    if not 1 <= query.limit <= 1000:
        raise Problem("invalid", f"limit is {query.limit}; it must lie between 1 and 1000")
    page = await call.client.queue_page(limit=query.limit, cursor=query.cursor, allowed=call.key.targets)
    return answer(page)


async def get_queue(call: Call) -> Answer:
    name = call.params["name"]
    found = await call.client.queue(name, allowed=call.key.targets)
    if found is None:
        raise no_such("queue", name)
    return answer(found)


async def list_workers(call: Call) -> Answer:
    call.check_unbound()  # it names machines, and the queues of other tenants
    return answer(WorkerList(await call.client.workers()))


QUEUE_ROUTES: Final = (
    Route("GET", "/v1/queues", list_queues, "read", "List queues: how long they are, and which workers serve them.",
          query=ListQueues, answers={200: QueuePage}),
    Route("GET", "/v1/queues/{name}", get_queue, "read", "Show one queue.", answers={200: QueueInfo}),
    Route("GET", "/v1/workers", list_workers, "read", "List live workers and the queues they serve.",
          answers={200: WorkerList}),
)  # fmt: skip


_SHOWN: Final = frozenset({
    "address", "ca_file", "concurrency", "gone_disables", "method", "rate", "response_bytes", "result_ttl",
    "retry", "timeout", "url", "lane_policy",
})  # fmt: skip
"""Settings of a target that contain no secret; all others are masked."""


class TargetList(msgspec.Struct):
    """Settings of each target by name, secrets masked."""

    targets: dict[str, dict[str, Any]]


async def list_targets(call: Call) -> Answer:
    return answer(TargetList(_seen(call)))


async def get_target(call: Call) -> Answer:
    name = call.params["name"]
    seen = _seen(call)
    if name not in seen:
        raise no_such("target", name)
    return answer(seen[name])


def _seen(call: Call) -> dict[str, dict[str, Any]]:
    tables = call.node.config.targets.tables()
    return {name: masked(table) for name, table in tables.items() if call.key.sees(f"target:{name}")}


def masked(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _shown(name, value) for name, value in table.items()}


def _shown(name: str, value: Any) -> Any:
    if name in ("url", "address"):
        return bare(str(value))
    if name in _SHOWN:
        return value
    if isinstance(value, dict):
        return dict.fromkeys(value, MASK)
    return MASK


TARGET_ROUTES: Final = (
    Route("GET", "/v1/targets", list_targets, "read", "List named targets.", answers={200: TargetList}),
    Route(
        "GET", "/v1/targets/{name}", get_target, "read", "Show one named target.", answers={200: dict[str, Any]},
        problems=("not-found",),
    ),
)  # fmt: skip


_WELL: Final = Answer(200, b'{"status":"ok"}')


# -- beats -----------------------------------------------------------------------------------------------------


class NewBeat(msgspec.Struct, forbid_unknown_fields=True):
    """When the next beats are expected; needed once."""

    every: str | None = None
    cron: str | None = None
    timezone: str | None = None
    grace: str | None = None


class ShownBeat(msgspec.Struct):
    """A job that others run. At `deadline_ms` it is missed, unless it has reported again."""

    name: str
    timezone: str
    grace: str
    deadline_ms: int
    last_ms: int | None
    every: str | None = None
    cron: str | None = None

    @classmethod
    def of(cls, beat: Beat) -> "ShownBeat":
        return cls(**beat.as_dict())


class BeatList(msgspec.Struct):
    beats: list[ShownBeat]


class BeatRemoved(msgspec.Struct):
    name: str
    outcome: str = "removed"


async def post_beat(call: Call) -> Answer:
    name, wanted = check_beat(call.params["name"]), call.body
    check_target(call.key, f"{BEAT}:{name}")
    if not call.key.may("operate"):
        given = Expected.make(**msgspec.structs.asdict(wanted))
        known = await Notices(call.client.store).read_beat(name)
        if given is not None and known is not None and given != known.expected:
            raise Problem(
                "forbidden",
                f"the beat {name!r} is expected at other times, and a key with the role {call.key.role} cannot change"
                " them: leave them out, or use a key with the right 'operate'",
            )
    beat = await call.client.beat(name, **msgspec.structs.asdict(wanted))
    return answer(ShownBeat.of(beat))


async def list_beats(call: Call) -> Answer:
    seen = [one for one in await call.client.beats() if call.key.sees(f"{BEAT}:{one.name}")]
    return answer(BeatList([ShownBeat.of(one) for one in seen]))


async def remove_beat(call: Call) -> Answer:
    name = check_beat(call.params["name"])
    check_target(call.key, f"{BEAT}:{name}")
    config = call.node.config
    if name in config.beats and call.client.store.keys.namespace == config.namespace:
        raise Problem("conflict", f"the settings of nodes expect the beat {name!r}; remove [beats.{name}] from them")
    if not await call.client.remove_beat(name):
        raise no_such("beat", name)
    await call.audit("beat.remove", name)
    return answer(BeatRemoved(name))


BEAT_ROUTES: Final = (
    Route("GET", "/v1/beats", list_beats, "read", "List the watched beats.", answers={200: BeatList}),
    Route(
        "POST", "/v1/beats/{name}", post_beat, "submit",
        "Report that a job of another program has succeeded, and when the next beat is expected.",
        body=NewBeat, answers={200: ShownBeat}, problems=("not-found", "conflict", "content-type", "out-of-memory"),
    ),
    Route(
        "DELETE", "/v1/beats/{name}", remove_beat, "operate", "Stop watching a beat.",
        answers={200: BeatRemoved}, problems=("not-found", "conflict"),
    ),
)  # fmt: skip


class Well(msgspec.Struct):
    status: str


async def livez(call: Call) -> Answer:
    """Answer as long as the process runs."""
    del call
    return _WELL


async def readyz(call: Call) -> Answer:
    if not call.node.ready:
        raise not_ready("the node is starting or stopping")
    if (outage := await call.node.outage()) is not None:
        raise not_ready(outage)
    return _WELL


async def healthy(call: Call) -> Answer:
    if not call.node.ready:
        raise not_ready("the node is starting or stopping")
    if not call.node.healthy:
        raise not_ready("the server does not answer, or an error is blocking the engine; see the log")
    return _WELL


PROBE_ROUTES: Final = (
    Route("GET", "/livez", livez, None, "Say whether the process answers.", answers={200: Well}),
    Route(
        "GET",
        "/readyz",
        readyz,
        None,
        "Say whether the node is started and the server takes writes now.",
        answers={200: Well},
    ),
    Route("GET", "/healthy", healthy, None, "Say whether every role's last step went well.", answers={200: Well}),
)


TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


async def get_metrics(call: Call) -> Answer:
    call.check_unbound()  # the metrics name queues, including those of other tenants
    return Answer(200, render(await everything(call.node)).encode(), TEXT)


METRICS_ROUTE: Final = Route(
    "GET", "/metrics", get_metrics, "read", "Metrics for Prometheus.", answers={200: None}, media=("text/plain",),
    open_by="metrics_open",
)  # fmt: skip
