"""A seed plans the whole run, and a run with too few faults counts for nothing."""

from collections import Counter

import pytest

from tests.support.chaos.profile import PROFILES, plan
from tests.support.chaos.run import too_few


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_seed_plans_the_same_faults_and_another_one_others(name: str) -> None:
    profile = PROFILES[name]
    assert plan(profile, 7) == plan(profile, 7)
    assert plan(profile, 7) != plan(profile, 8)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("seconds", [None, 10.0, 90.0])
def test_every_plan_has_at_least_the_faults_that_are_asked_for_in_order_of_time(
    name: str, seconds: float | None
) -> None:
    profile = PROFILES[name]
    planned = plan(profile, 7, seconds)
    counts = Counter(one.kind for one in planned)
    assert too_few(profile, counts) == []
    assert [one.at_s for one in planned] == sorted(one.at_s for one in planned)
    assert all(0 <= one.at_s < (seconds or profile.seconds) for one in planned)


def test_a_run_with_too_few_faults_of_one_kind_is_invalid() -> None:
    profile = PROFILES["standalone"]
    enough = dict(profile.faults)
    assert too_few(profile, enough) == []
    [line] = too_few(profile, enough | {"kill server": 1})
    assert "invalid run: kill server took effect 1 times, 2 are needed" in line


def test_all_faults_of_the_issue_are_in_the_plans() -> None:
    planned = {kind for profile in PROFILES.values() for kind in profile.faults}
    assert planned >= {
        "kill node", "stop node", "kill leader", "kill stopping node", "restart node", "extra node", "clock jump",
        "reset", "dropped reply", "delayed command", "blackhole", "partition", "kill server", "slow server",
        "script flush", "slot migration", "promotion",
    }  # fmt: skip
