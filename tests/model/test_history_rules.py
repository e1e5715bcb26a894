"""Which runs the history keeps: the nearest rule counts."""

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.run import HistoryRules, RunEnd, RunRecord


def record(target: str, end: RunEnd = "done", **more: object) -> RunRecord:
    return RunRecord(bytes(16), end, 1, 0, 0, 0, target, "node", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["https://example.com/", "queue:mail/send", "command:backup"])
def test_all_runs_of_webhooks_handlers_and_commands_are_kept(target: str) -> None:
    assert HistoryRules().keeps(record(target))


@pytest.mark.parametrize("target", ["kafka:ticks", "log:", "spool:orders"])
def test_only_failures_of_other_tasks_are_kept(target: str) -> None:
    rules = HistoryRules()
    assert not rules.keeps(record(target))
    assert rules.keeps(record(target, "dead"))


def test_all_runs_of_a_schedule_are_kept_for_every_target() -> None:
    run = record("kafka:ticks", "skipped", id="nightly@2026-11-19T00:00:00Z", planned_ms=1)
    assert HistoryRules().keeps(run)


def test_a_named_target_is_treated_like_its_address() -> None:
    rules = HistoryRules(schemes={"orders": "https", "events": "kafka"})
    assert rules.keeps(record("target:orders"))
    assert not rules.keeps(record("target:events"))


def test_the_nearest_rule_counts() -> None:
    rules = HistoryRules.read("schedule:nightly=off, queue:mail=failures, target:orders=off, kafka:=all")
    assert rules.keeps(record("kafka:ticks"))
    assert not rules.keeps(record("target:orders", "dead"))
    assert not rules.keeps(record("queue:mail/send", queue="mail"))
    assert rules.keeps(record("queue:mail/send", "dead", queue="mail"))
    assert not rules.keeps(record("queue:mail/send", "dead", queue="mail", id="nightly@x", planned_ms=1))


def test_a_text_and_a_table_give_the_same_rules() -> None:
    assert HistoryRules.read({"queue:mail": "off"}) == HistoryRules.read("queue:mail=off")
    assert HistoryRules.read(str(HistoryRules.read("queue:mail=off,kafka:=all"))).rules == {
        "queue:mail": "off",
        "kafka:": "all",
    }


@pytest.mark.parametrize(
    "wrong", ["mail=off", "schedule:=off", "queue:mail=sometimes", "queue:mail", 3, {"queue:mail": 1}]
)
def test_a_rule_that_nothing_could_match_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput):
        HistoryRules.read(wrong)
