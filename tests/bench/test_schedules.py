"""`bench schedules` measures what it says, and all of it ran."""

from mainspring.bench.environment import ServerChoice
from mainspring.bench.schedules import next_us, schedules


async def test_schedules_are_added_and_all_run_in_their_second() -> None:
    found = await schedules(ServerChoice(), 300, lambda *_: None, idle_s=0.2)
    assert found.sound, found
    assert (found.delivered, found.doubled, found.unplanned) == (300, 0, 0)
    assert found.add_per_s > 0
    assert found.burst_s > 0
    assert 100 < found.bytes_per_schedule < 2_000


def test_the_mean_time_of_a_next_run_is_known() -> None:
    assert next_us(rounds=2) > 0
