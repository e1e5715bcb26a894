"""`/metrics`: collected on request, from the node's state and the counters on the server."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from .. import __version__
from ..engine.engine import Engine
from ..model.errors import StoreError
from ..model.metrics import Family, Sample, family, histogram, single
from ..model.run import HistoryState
from ..model.workers import WorkerInfo, served_queues
from ..store.members import live_workers
from ..store.queue_state import Depth, depths
from ..store.runs import history_state
from ..store.store import Store
from .node import Node
from .process import process_figures, store_calls

STORE_TIMEOUT_S: Final = 2.0
"""Longest wait of a scrape for the server: the node's own metrics are useful without it."""

MOST_QUEUES: Final = 100
"""Queues with series of their own: programs may use any number of names."""
OTHER_QUEUES: Final = "(other)"
"""Label of all further queues; no queue can have this name."""

_STORE_UP: Final = ("mainspring_store_up", "gauge", "1 if the server answered the requests of this scrape, else 0.")
_COUNTERS: Final = {
    "accepted": "Tasks accepted: puts, replayed dead letters and runs of schedules.",
    "done": "Tasks delivered by a sink or completed by a worker.",
    "cancelled": "Tasks cancelled, including skipped runs of schedules.",
    "replaced": "Tasks replaced by another with the same id, including rescheduled tasks.",
    "retried": "Failed attempts that are tried again, on nodes and workers.",
    "dead": "Tasks that became dead letters, on nodes and workers, including expired tasks.",
}
_SETTLED: Final = ("done", "cancelled", "replaced", "dead", "queued")


async def everything(node: Node) -> list[Family]:
    """Return the metrics of this process, or of all processes that share its port."""
    return await collect(node) if node.process_metrics is None else await node.process_metrics.collect_all()


async def collect(node: Node) -> list[Family]:
    """Return all metrics; those the server does not deliver in time are left out, and `mainspring_store_up` is 0."""
    client = node.client if node.ready else None
    found = [
        single(
            "mainspring_ready", "gauge", "1 if the node has started and is not stopping, else 0.", client is not None
        )
    ]
    if client is not None and node.engine is not None:
        found += _engine(node, node.engine)
        found += await _server_metrics(node.engine)
    elif client is not None:
        found += [_healthy(node), store_calls(client.store), single(*_STORE_UP, await node.outage() is None)]
    return [*found, *process_figures()]


# -- metrics of the node -----------------------------------------------------------------------------------


def _engine(node: Node, engine: Engine) -> Iterator[Family]:
    yield from _tasks(engine)
    yield from _ownership(node, engine)
    yield from _partitions(engine)
    yield _healthy(node)
    yield store_calls(engine.store)


def _healthy(node: Node) -> Family:
    return single("mainspring_healthy", "gauge", "1 if the last step of every role succeeded, else 0.", node.healthy)


def _tasks(engine: Engine) -> Iterator[Family]:
    meters = engine.deliveries.meters
    counted = {
        "fired": ("Tasks handed to a sink or a queue.", meters.fired),
        "delivered": ("Tasks delivered by a sink.", meters.delivered),
        "failed": ("Failed deliveries by this node that are tried again.", meters.retried),
        "buried": ("Tasks that this node gave up as dead letters.", meters.dead),
        "expired": ("Tasks that expired before they were delivered.", meters.expired),
    }
    for name, (text, counts) in counted.items():
        yield family(f"mainspring_{name}_total", "counter", text, "kind", counts)
    skipped: Counter[str] = Counter({"overlap": 0, "missed": 0, "paused": 0})
    skipped.update(engine.planner.not_run)
    skipped.update(meters.skipped)
    yield family(
        "mainspring_skipped_total",
        "counter",
        "Runs of schedules and tasks that were skipped, by reason.",
        "reason",
        skipped,
    )
    text = "Dead letters dropped by the limits on age and number."
    dropped = engine.sweeper.dead_letters_dropped
    yield family("mainspring_dead_letters_dropped_total", "counter", text, "reason", dropped)
    timed = {
        "lateness": ("Seconds from the due time (or the put, if later) to the start of the delivery.", meters.lateness),
        "delivery": ("Seconds from the start of a delivery to its success, for each task.", meters.delivery),
        "sink": ("Seconds per call of a sink; one call may deliver many tasks.", meters.sink),
    }
    for name, (text, histograms) in timed.items():
        yield histogram(f"mainspring_{name}_seconds", text, "kind", histograms)


def _ownership(node: Node, engine: Engine) -> Iterator[Family]:
    keeper = engine.keeper
    labels = (("namespace", engine.store.keys.namespace), ("node", engine.options.node), ("version", __version__))
    yield Family("mainspring_node_info", "gauge", "Namespace, id and version of this node.", (Sample(labels, 1),))
    leads = node.seat is not None and node.seat.membership.leads
    breakers = sum(one.breaker is not None and one.breaker.state != "closed" for one in engine.flow.bounded)
    now = {
        "leader": ("1 on the leader, the node that assigns partitions, else 0.", leads),
        "partitions": ("Partitions of the namespace.", len(engine.store.keys)),
        "partitions_owned": ("Partitions that this node owns.", len(engine.owned)),
        "partitions_waited_for": (
            "Partitions planned for this node that another node still owns.",
            len(keeper.waiting),
        ),
        "in_flight": ("Tasks handed to sinks that have not answered yet.", engine.deliveries.in_flight),
        "look_ahead": ("Tasks held in memory until they are due.", engine.lookahead.held),
        "look_ahead_limit": ("Limit on the tasks held in memory.", engine.lookahead.limit),
        "breakers_open": ("Receivers whose circuit breaker is not closed, because they kept failing.", breakers),
    }
    for name, (text, value) in now.items():
        yield single(f"mainspring_{name}", "gauge", text, value)
    yield single("mainspring_takeovers_total", "counter", "Partitions acquired.", keeper.takeovers)
    fenced = "Writes refused by the server because another node owns the partition."
    yield single("mainspring_fenced_total", "counter", fenced, keeper.fenced)


def _partitions(engine: Engine) -> Iterator[Family]:
    now_ms = engine.store.clock.now_ms()
    held, out, overdue = {}, {}, {}
    for number, one in engine.owned.items():
        held[str(number)] = one.rows
        out[str(number)] = one.out
        soonest = one.soonest_ms
        overdue[str(number)] = max(0.0, now_ms - soonest) / 1000 if soonest < inf else 0.0
    text = "Seconds that the earliest waiting task is overdue, without tasks held by a pause or a breaker."
    yield family("mainspring_partition_overdue_seconds", "gauge", text, "partition", overdue)
    yield family(
        "mainspring_partition_look_ahead", "gauge", "Tasks held in memory until they are due.", "partition", held
    )
    yield family("mainspring_partition_in_flight", "gauge", "Tasks fired and not finished.", "partition", out)


# -- metrics from the server -------------------------------------------------------------------------------


async def _server_metrics(engine: Engine) -> list[Family]:
    owned = sorted(engine.owned)
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            counters_by_partition = await _read_counters(engine.store, owned)
            queues = await depths(engine.store, owned)
            workers = await live_workers(engine.store)
            history = await history_state(engine.store, owned)
    except (StoreError, TimeoutError):
        return [single(*_STORE_UP, 0)]
    counters = _counter_metrics(engine, counters_by_partition)
    return [single(*_STORE_UP, 1), *counters, *_queues(engine, queues, workers), *_history(history)]


def _history(state: HistoryState) -> Iterator[Family]:
    kept = {"runs": state.bytes, "details": state.details_bytes}
    yield family("mainspring_history_bytes", "gauge", "Memory of the history, in this node's partitions.", "kind", kept)
    oldest = {"runs": state.oldest_ms, "failures": state.oldest_failed_ms, "details": state.oldest_details_ms}
    text = "Time since which the history is complete in this node's partitions; 0 if nothing was dropped yet."
    seconds = {kind: ms / 1000 for kind, ms in oldest.items()}
    yield family("mainspring_history_oldest_timestamp_seconds", "gauge", text, "kind", seconds)
    runs = {"written": state.written, "dropped": state.dropped}
    text = "Runs that were added to the history, and runs that could not be."
    yield family("mainspring_history_runs_total", "counter", text, "outcome", runs)


async def _read_counters(store: Store, owned: list[int]) -> dict[int, dict[str, int]]:
    """Return the counters of these partitions."""
    names = dict.fromkeys([*_COUNTERS, *_SETTLED])
    keys = [store.keys.partitions[number] for number in owned]
    found = {}
    results = await store.run([(one.slot, [("HMGET", one.n, *names)]) for one in keys])
    for number, result in zip(owned, results, strict=True):
        if isinstance(result, StoreError):
            raise result
        found[number] = dict(zip(names, (int(value or 0) for value in result[0]), strict=True))
    return found


def _counter_metrics(engine: Engine, counters_by_partition: dict[int, dict[str, int]]) -> Iterator[Family]:
    for name, text in _COUNTERS.items():
        counts = {str(number): counters[name] for number, counters in counters_by_partition.items()}
        yield family(f"mainspring_{name}_total", "counter", text, "partition", counts)
    pending = {}
    for number, counters in counters_by_partition.items():
        partition = engine.owned.get(number)
        out = partition.out if partition is not None else 0
        # Read a moment after the counters: a task that began in between must not make it negative.
        pending[str(number)] = max(0, counters["accepted"] - sum(counters[name] for name in _SETTLED) - out)
    yield family(
        "mainspring_partition_pending", "gauge", "Tasks that are not due yet or not fired yet.", "partition", pending
    )


def largest(found: dict[str, Depth]) -> dict[str, Depth]:
    """Return the largest queues, and all others as one."""
    order = sorted(found.items(), key=lambda one: (-one[1].ready - one[1].running, one[0]))
    shown = dict(order[:MOST_QUEUES])
    for _, depth in order[MOST_QUEUES:]:
        shown[OTHER_QUEUES] = shown.get(OTHER_QUEUES, Depth()).plus(depth)
    return shown


def _queues(engine: Engine, found: dict[str, Depth], workers: Sequence[WorkerInfo]) -> Iterator[Family]:
    now_ms = engine.store.clock.now_ms()
    found = largest({name: Depth() for name in served_queues(workers)} | found)
    ready = {name: one.ready for name, one in found.items()}
    running = {name: one.running for name, one in found.items()}
    oldest = {name: max(0, now_ms - (one.oldest_ms or now_ms)) / 1000 for name, one in found.items()}
    text = "Tasks waiting for a worker, in the partitions of this node."
    yield family("mainspring_queue_ready", "gauge", text, "queue", ready)
    yield family("mainspring_queue_running", "gauge", "Tasks taken by workers and not finished.", "queue", running)
    text = "Seconds that the oldest task of a queue has been waiting for a worker."
    yield family("mainspring_queue_oldest_seconds", "gauge", text, "queue", oldest)
    serving = {name: sum(one.serves(name) for one in workers) for name in found if name != OTHER_QUEUES}
    yield family("mainspring_queue_workers", "gauge", "Live workers that serve the queue.", "queue", serving)
