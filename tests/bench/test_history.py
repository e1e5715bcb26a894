"""`bench history` measures what it says."""

from mainspring.bench.environment import ServerChoice
from mainspring.bench.history import history


async def test_the_memory_of_runs_and_the_time_to_find_them_are_measured() -> None:
    found = await history(ServerChoice(), 20_000, 500, 1, lambda *_: None)
    assert found.sound, found
    assert 20 < found.bytes_per_run < 100
    assert found.bytes_per_run < found.bytes_per_lone_run < 400
    assert 0 < found.last_50_of_schedule_ms_p50 <= found.last_50_of_schedule_ms_p99
    assert found.ping_ms_p99 > 0
    assert found.failures_of_24h_ms > 0
    assert {"webhooks", "workers"} <= found.fire_ratio_with_history.keys()
    assert found.cpu_ratio_with_history.keys() == found.fire_ratio_with_history.keys()
    assert all(ratio > 0 for ratio in found.fire_ratio_with_history.values())
