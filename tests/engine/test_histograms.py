"""Histograms are filled by the batch, and what comes out is what Prometheus reads."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring.engine.flight import Flight
from mainspring.engine.outcomes import Meters
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import DROPPED, EXPIRED, Body
from mainspring.model.metrics import Histogram, family, histogram, labelled, merged, render, single
from mainspring.store.codec import entry
from mainspring.store.keys import Slice

START_MS = 1_700_000_000_000


def _slice(*, lanes: bool) -> LiveSlice:
    place = Slice(1000, START_MS - START_MS % 1000)
    live = SimpleNamespace(slice=place, from_ms=place.start_ms, has_lanes=lanes, has_schedules=False)
    return cast("LiveSlice", live)


def _flights(offsets_ms: list[int]) -> list[Flight]:
    some: list[Any] = [
        SimpleNamespace(key=offset << 32 | index, row=entry(offset, 0, bytes(16), Body("log:", b"1")))
        for index, offset in enumerate(offsets_ms)
    ]
    return some


def _read(text: str) -> dict[str, Any]:
    return {one.name: one for one in text_string_to_metric_families(text)}


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("count", [1, 2, 25, 3_000])
@pytest.mark.parametrize("after_ms", [0, 3, 250, 999, 1_400, 2_500, 4_000, 90_000])
def test_a_batch_fills_the_same_buckets_as_its_tasks_one_by_one(count: int, after_ms: int, lanes: bool) -> None:
    dice = random.Random(count * 1_000 + after_ms)
    live = _slice(lanes=lanes)
    began_ms = live.from_ms + after_ms
    offsets = [dice.randrange(min(after_ms + 1, 1000)) for _ in range(count)]
    if began_ms < live.slice.end_ms and not lanes:
        offsets.sort()  # only lanes, and a slice that is overdue as a whole, leave out of order
    meters, alone = Meters(), Histogram()
    meters.began_late("kafka", live, _flights(offsets), began_ms)
    for offset in offsets:
        alone.observe((after_ms - offset) / 1000)
    found = meters.lateness["kafka"]
    assert found.counts == alone.counts
    assert found.total_s == pytest.approx(alone.total_s, rel=0.5, abs=0.002 * count)


def test_prometheus_reads_what_is_written() -> None:
    timed = Histogram()
    timed.observe(0.004, 3)
    timed.observe(1_000)
    text = render(
        [
            family("fired_total", "counter", 'by "kind"\nand \\', "kind", {"kafka": 2, 'a "b"\n\\': 3}),
            single("lag", "gauge", "seconds", 0.25),
            histogram("late_seconds", "how late", "kind", {"http": timed}),
        ]
    )
    found = _read(text)
    assert {one.labels["kind"]: one.value for one in found["fired"].samples} == {"kafka": 2, 'a "b"\n\\': 3}
    assert found["fired"].documentation == 'by "kind"\nand \\'
    assert [one.value for one in found["lag"].samples] == [0.25]
    buckets = {one.labels["le"]: one.value for one in found["late_seconds"].samples if one.name.endswith("_bucket")}
    assert (buckets["0.0025"], buckets["0.005"], buckets["300"], buckets["+Inf"]) == (0, 3, 3, 4)
    parts = {one.name: one.value for one in found["late_seconds"].samples if not one.name.endswith("_bucket")}
    assert parts == {"late_seconds_sum": pytest.approx(1_000.012), "late_seconds_count": 4}


def test_figures_of_several_processes_have_each_name_once() -> None:
    parts = [labelled([single("lag", "gauge", "seconds", value)], "process", str(value)) for value in (1, 2)]
    text = render(merged(parts))
    assert text.count("# TYPE lag gauge") == 1
    assert {one.labels["process"]: one.value for one in _read(text)["lag"].samples} == {"1": 1, "2": 2}


def test_expired_and_dropped_tasks_are_not_counted_as_given_up() -> None:
    meters = Meters()
    for reason in (EXPIRED, f"{DROPPED}: holidays", "HTTP 500"):
        meters.buried("http", reason)
    assert (meters.expired, meters.skipped, meters.dead) == ({"http": 1}, {"paused": 1}, {"http": 1})
