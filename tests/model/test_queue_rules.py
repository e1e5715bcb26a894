"""The lane policies of queues: how they are read, written, refused, and which of several counts."""

import pytest

from mainspring.config.config import Config
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.lane import LanePolicies, LanePolicy
from mainspring.model.queue_rules import QueueRules
from mainspring.model.retry import RetryPolicy
from mainspring.node.node import engine_options

PARK, SKIP, BLOCK = LanePolicy("park"), LanePolicy("skip"), LanePolicy("block", 600_000)


def test_the_lane_policies_of_queues_are_read_and_written_the_same() -> None:
    tables = {
        "mail": {"lane_policy": "park"},
        "orders": {"lane_policy": "block 10m", "retry": "3", "concurrency": 2},
        "other": {"retry": "3"},
    }
    rules = QueueRules.read(tables)
    assert rules.lane_policies() == {"mail": PARK, "orders": BLOCK}
    assert rules.retries() == {"orders": RetryPolicy(3), "other": RetryPolicy(3)}
    assert QueueRules.read(rules.tables()) == rules
    config = Config(queue=rules)
    assert Config.load({}, config.to_environ()).queue == rules


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("perhaps", "mail: lane_policy: 'perhaps' is not a lane policy; use one of block, skip, park"),
        ("skip 10m", "mail: lane_policy: 'skip 10m': only block has a longest time"),
        ("block 1ms", "mail: lane_policy: a lane blocks for 1 ms"),
        (3, "mail: lane_policy: expected a string such as 'block 10m', 'skip' or 'park', not 3"),
        (None, "mail: lane_policy: expected a string"),
    ],
)
def test_a_lane_policy_of_a_queue_that_makes_no_sense_is_refused(policy: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        QueueRules.read({"mail": {"lane_policy": policy}})
    assert str(caught.value).startswith(message)


def test_a_lane_policy_that_is_misspelt_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mail: lane_polcy is not a setting of a queue; .*lane_policy"):
        Config.load({}, {"MAINSPRING_QUEUE": '{"mail": {"lane_polcy": "park"}}'})


@pytest.mark.parametrize(
    ("target", "policy"),
    [
        ("target:ledger", PARK),
        ("queue:mail/send", SKIP),
        ("queue:mail", SKIP),
        ("queue:other/send", BLOCK),
        ("command:report", SKIP),
        ("command:backup", PARK),
        ("log:mail", BLOCK),
        ("target:mail", BLOCK),
        ("queue:", BLOCK),
    ],
)
def test_the_nearest_lane_policy_counts(target: str, policy: LanePolicy) -> None:
    policies = LanePolicies(BLOCK, {"target:ledger": PARK}, {"mail": SKIP, "commands": PARK}, {"report": "mail"})
    assert policies.of(target) == policy


def test_a_named_target_goes_before_a_queue_and_a_queue_before_the_node() -> None:
    policies = LanePolicies(BLOCK, {"queue:mail/send": PARK}, {"mail": SKIP})
    assert [policies.of(f"queue:{rest}") for rest in ("mail/send", "mail/read", "other")] == [PARK, SKIP, BLOCK]
    assert [policies.of_queue(queue) for queue in ("mail", "other")] == [SKIP, BLOCK]


def test_an_engine_gets_the_lane_policies_of_queues_from_the_settings() -> None:
    rules = QueueRules.read({"mail": {"lane_policy": "park"}, "other": {"retry": "3"}})
    options = engine_options(Config(queue=rules), "node")
    assert options.queue_lanes == {"mail": PARK}
