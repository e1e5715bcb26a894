"""Pauses and lane policies as values: what they mean and what is refused."""

import msgspec
import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.lane import LanePolicies, LanePolicy, Pause, Pauses, Scope
from mainspring.model.targets.named import Targets


def pauses(*scopes: str, now_ms: int = 0) -> Pauses:
    return Pauses([Pause(Scope.parse(text)) for text in scopes], now_ms, {"report": "reports"})


@pytest.mark.parametrize(
    ("scope", "target", "lane", "held"),
    [
        ("all", "kafka:a", None, True),
        ("target kafka:a", "kafka:a", None, True),
        ("target kafka:a", "kafka:ab", None, False),
        ("target kafka:*", "kafka:ab", None, True),
        ("target kafka:*", "log:", None, False),
        ("target https://x.example/*", "https://x.example/a", None, True),
        ("target target:ledger", "target:ledger", None, True),
        ("queue mail", "queue:mail/send", None, True),
        ("queue mail", "queue:mailing/send", None, False),
        ("queue commands", "command:backup", None, True),
        ("queue commands", "command:report", None, False),
        ("queue reports", "command:report", None, True),
        ("queue mail", "queue:no queue/send", None, False),
        ("lane a", "log:", "a", True),
        ("lane a", "log:", "ab", False),
        ("lane a", "log:", None, False),
    ],
)
def test_a_pause_holds_the_tasks_of_its_scope(scope: str, target: str, lane: str | None, held: bool) -> None:
    known = pauses(scope)
    for _ in range(2):  # the answer for a target is remembered
        assert (known.of_task(target, lane) is not None) is held


def test_a_queue_is_paused_by_its_name_or_with_everything() -> None:
    assert pauses("queue mail").of_queue("mail")
    assert not pauses("queue mail").of_queue("other")
    assert pauses("all").of_queue("other")
    assert not pauses("target log:").of_queue("mail")


def test_a_pause_that_is_over_by_time_holds_up_nothing() -> None:
    pause = Pause(Scope(), until_ms=1_000)
    assert Pauses([pause], 999)
    assert not Pauses([pause], 1_000)


def test_the_author_of_a_pause_is_stored_under_its_old_name() -> None:
    pause = Pause(Scope(), by="ops")
    assert msgspec.to_builtins(pause)["who"] == pause.by == pause.who == "ops"
    with pytest.raises(InvalidInput, match="by has more than 500 characters"):
        Pause(Scope(), by="x" * 501).check()


def test_a_pause_of_a_queue_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidInput, match="queue 'a b': use 1 to 64 of"):
        Pause(Scope.of(queue="a b")).check()
    assert Pause(Scope.of(queue="mail")).check().scope.name == "mail"


@pytest.mark.parametrize("text", ["", "all x", "target", "target nothing", "schedule x", "lane ", "queue " + "x" * 300])
def test_a_scope_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        Scope.parse(text)


@pytest.mark.parametrize("text", ["all", "target kafka:a", "queue mail", "lane user 42"])
def test_a_scope_is_written_as_it_is_read(text: str) -> None:
    assert Scope.parse(text).text == text


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("block", LanePolicy("block", 3_600_000)),
        ("block 10m", LanePolicy("block", 600_000)),
        ("skip", LanePolicy("skip")),
        (" park ", LanePolicy("park")),
    ],
)
def test_a_lane_policy_is_read_and_written(text: str, policy: LanePolicy) -> None:
    assert LanePolicy.parse(text) == policy
    assert LanePolicy.parse(str(policy)) == policy


@pytest.mark.parametrize("wrong", ["", "stop", "skip 10m", "block 10", "block 1ms", "block 400d", 7, None])
def test_a_lane_policy_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput):
        LanePolicy.parse(wrong)


def test_a_target_s_own_policy_goes_first() -> None:
    targets = Targets.read({"a": {"address": "log:", "lane_policy": "park"}, "b": {"address": "log:"}})
    policies = LanePolicies(LanePolicy("skip"), targets.lane_policies())
    assert [policies.of(f"target:{name}").on_failure for name in "ab"] == ["park", "skip"]
    assert Targets.read(targets.tables())["a"] == targets["a"]
    with pytest.raises(InvalidInput, match="a: lane_policy: "):
        Targets.read({"a": {"address": "log:", "lane_policy": "perhaps"}})
