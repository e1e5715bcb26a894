"""Checks of `mainspring doctor`: servers, rights, speed, data, nodes, Kafka, this machine."""

import asyncio
import contextlib
import logging
import resource
import statistics
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Final, NamedTuple

from ..cluster import report
from ..config.config import Config
from ..model.errors import MainspringError, Refused, StoreError
from ..model.text import did_you_mean
from ..model.workers import served_queues
from ..store import members
from ..store.keys import Keyspace, meta_key, slot_of
from ..store.queue_state import depths
from ..store.redis.servers import Primary, Servers, info_fields
from ..store.redis.url import safe_url
from ..store.rights import denied
from ..store.server_checks import Check, check_server
from ..store.store import Store
from ..store.verify.keys import check_keys, check_types
from ..store.verify.report import VerifyFinding

PINGS: Final = 25
SLOW_S: Final = 0.005
"""Round trip from which a server counts as slow: each tick waits for one, so tasks are that much later."""
FULL: Final = 0.8
library_log = logging.getLogger("mainspring.kafka.library")
"""The library's own messages are hidden: its answers say enough."""

ORPHANS_SHOWN: Final = 3
ROWS_SHOWN: Final = 5
KAFKA_S: Final = 5.0


class DoctorFinding(NamedTuple):
    """Where, and what."""

    where: str
    check: Check


async def checkup(config: Config, url: str, *, here: str = "this machine") -> list[DoctorFinding]:
    """Make all checks; a check that cannot be made is reported as well."""
    found: list[DoctorFinding] = []
    try:
        async with contextlib.aclosing(await Servers.connect(url, config.links)) as servers:
            for primary in servers.all():
                found += [DoctorFinding(primary.address, one) for one in await _server(config, servers, primary)]
            found += [
                DoctorFinding(f"namespace {config.namespace}", one) for one in await _namespace(config, servers, url)
            ]
    except Refused as error:
        found.append(DoctorFinding(safe_url(url), Check("answers", "error", str(error))))
    except StoreError as error:
        advice = (
            "Is it running, is the URL right, is there a firewall in between? Set --redis-url or MAINSPRING_REDIS_URL"
        )
        found.append(DoctorFinding(safe_url(url), Check("reach", "error", f"{error}. {advice}")))
    if config.kafka_url is not None:
        found.append(DoctorFinding(safe_kafka(config.kafka_url), await asyncio.to_thread(_kafka, config)))
    return [*found, *(DoctorFinding(here, one) for one in (_files(config), _packages()))]


# -- servers -------------------------------------------------------------------------------------------------


async def _server(config: Config, servers: Servers, primary: Primary) -> list[Check]:
    return [
        *await check_server(primary),
        await _latency(primary),
        await _memory(primary),
        await _rights(config, servers, primary),
    ]


async def _latency(primary: Primary) -> Check:
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await primary.pipeline([("PING",)])
        took.append(time.perf_counter() - began)
    middle, worst = statistics.median(took), max(took)
    spoken = f"a round trip takes {middle * 1000:.1f} ms, the slowest of {PINGS} {worst * 1000:.1f} ms"
    if middle < SLOW_S:
        return Check("latency", "ok", spoken)
    return Check("latency", "warning", f"{spoken}. Run nodes in the same network zone as the server")


async def _memory(primary: Primary) -> Check:
    [reply] = await primary.pipeline([("INFO", "memory")])
    if not isinstance(reply, bytes):
        return Check("memory", "unknown", f"the server refuses INFO ({reply})")
    fields = info_fields(reply)
    used, most = int(fields.get("used_memory", 0)), int(fields.get("maxmemory", 0))
    if not most:
        return Check("memory", "ok", f"{_mb(used)} in use, no maxmemory is set")
    spoken = f"{_mb(used)} of maxmemory {_mb(most)} are in use"
    if used < FULL * most:
        return Check("memory", "ok", spoken)
    return Check("memory", "warning", f"{spoken}: at the limit new tasks are refused. Raise maxmemory")


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


async def _rights(config: Config, servers: Servers, primary: Primary) -> Check:
    key = _key_of(Keyspace(config.namespace, config.partitions or 32), servers, primary)
    if key is None:
        return Check("rights", "unknown", "this server holds no partition of the namespace")
    lacking = await denied(primary, key)
    if not lacking:
        return Check("rights", "ok", "the user may do all that is needed")
    some = ", ".join(lacking[:8]) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
    message = f"the user may not use {some} on keys of this namespace. `mainspring acl` prints the line that allows it"
    return Check("rights", "error", message)


def _key_of(keyspace: Keyspace, servers: Servers, primary: Primary) -> str | None:
    """Return a key of this server: its rights can be checked only there."""
    for keys in keyspace.partitions:
        with contextlib.suppress(StoreError):
            if servers.for_slot(keys.slot) is primary:
                return keys.n
    return None


# -- data ----------------------------------------------------------------------------------------------------


async def _namespace(config: Config, servers: Servers, url: str) -> list[Check]:
    primary = servers.for_slot(slot_of(config.namespace))
    [known] = await primary.pipeline([("HGET", meta_key(config.namespace), "partitions")])
    if known is None:
        return [Check("data", "ok", "nothing is there yet; the first node or client opens the namespace")]
    try:
        store = await Store.open(url, namespace=config.namespace, partitions=config.partitions, options=config.links)
    except MainspringError as error:
        return [Check("data", "error", str(error))]
    async with contextlib.aclosing(store):
        data = Check("data", "ok", f"{len(store.keys)} partitions")
        return [data, await _orphans(store), await _nodes(store), await _workers(store)]


async def _orphans(store: Store) -> Check:
    described = [await _described(check_types(store)), await _described(check_keys(store, set()))]
    found = [one for some in described for one in some]
    if not found:
        return Check("orphans", "ok", "every key belongs to something")
    some = "; ".join(found[:ORPHANS_SHOWN]) + ("; …" if len(found) > ORPHANS_SHOWN else "")
    message = f"{len(found)} keys belong to nothing or hold the wrong thing: {some}. Run `mainspring verify`"
    return Check("orphans", "warning", message)


async def _described(findings: AsyncIterator[VerifyFinding]) -> list[str]:
    return [f"{one.where} ({one.problem})" async for one in findings]


async def _nodes(store: Store) -> Check:
    status = report(*await members.look(store))
    nodes, alone = status["nodes"], status["without_owner"]
    if not nodes:
        return Check("nodes", "warning", "no node runs: nothing fires. Start one with `mainspring serve`")
    if alone:
        message = f"{len(alone)} partitions have no owner: their tasks wait. `mainspring cluster status` says more"
        return Check("nodes", "warning", message)
    if lacking := {one["id"]: one["lacks"] for one in nodes if one["lacks"]}:
        rows = [f"node {id} cannot deliver to {':, '.join(lacking[id])}:" for id in lacking]
        advice = (
            "Such tasks are held there. Install the package it lacks, which `mainspring doctor` names on its machine"
        )
        return Check("nodes", "warning", f"{_first(rows)}. {advice}")
    return Check("nodes", "ok", f"{len(nodes)} run, {status['leader']} leads, every partition has an owner")


async def _workers(store: Store) -> Check:
    workers, found = await members.live_workers(store), await depths(store)
    served = served_queues(workers)
    alone = [(name, one) for name, one in sorted(found.items()) if one.ready + one.running and name not in served]
    if not alone:
        names = f", for queues {', '.join(served)}" if served else ""
        return Check("workers", "ok", f"{len(workers)} run{names}; every queue that has tasks is served")
    # Comparing names is slow, and there may be any number of queues.
    rows = [
        f"{name} ({_tasks(one.ready + one.running)}{did_you_mean([name], served)})" for name, one in alone[:ROWS_SHOWN]
    ]
    advice = "Start one with `mainspring worker`; `mainspring queue list` says more"
    message = f"no worker serves {_first(rows, len(alone))}. {advice}"
    return Check("workers", "warning", message)


def _first(rows: list[str], count: int | None = None) -> str:
    """Return the first of `count` rows; of all that are given if there is no count."""
    more = (len(rows) if count is None else count) - ROWS_SHOWN
    return ", ".join(rows[:ROWS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


# -- Kafka and this machine --------------------------------------------------------------------------------------


def safe_kafka(url: str) -> str:
    return url.rpartition("@")[2] if "@" in url else url


def _kafka(config: Config) -> Check:
    try:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
    except ImportError:
        return Check("kafka", "error", "the library is missing: pip install 'mainspring[kafka]'")
    from .node import kafka_options

    options = kafka_options(config)
    assert options is not None
    try:
        metadata = AdminClient({**options.for_admin()}, logger=library_log).list_topics(timeout=KAFKA_S)
    except KafkaException as error:
        advice = "Is the broker up, is kafka_url right, are the settings under [kafka] (SASL, TLS)?"
        return Check("kafka", "error", f"no broker answers: {error.args[0].str()}. {advice}")
    topic = config.tick_target.removeprefix("kafka:")
    if config.tick_target.startswith("kafka:") and topic not in metadata.topics and not config.kafka_create_topics:
        return Check("kafka", "warning", f"the topic {topic} does not exist; create it, or set kafka_create_topics")
    return Check("kafka", "ok", f"{len(metadata.brokers)} brokers, {len(metadata.topics)} topics")


def _packages() -> Check:
    """Check the packages for targets: nodes hold tasks whose package they lack."""
    lacking = {"aiohttp": "webhooks", "confluent_kafka": "Kafka"}
    for package in [package for package in lacking if find_spec(package) is not None]:
        del lacking[package]
    if not lacking:
        return Check("packages", "ok", "webhooks and Kafka can be delivered to")
    extras = {"webhooks": "http", "Kafka": "kafka"}
    some = " and ".join(f"{kind} (pip install 'mainspring[{extras[kind]}]')" for kind in lacking.values())
    message = (
        f"the package is missing for {some}: a node here holds such tasks until another node takes their partition"
    )
    return Check("packages", "warning", message)


def _files(config: Config) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = config.api_connections + config.http_concurrency + 128
    if limit >= needed:
        return Check("open files", "ok", f"{limit} may be open")
    message = f"only {limit} files may be open; {needed} may be needed at once. Raise it: ulimit -n, LimitNOFILE="
    return Check("open files", "warning", message)
