"""The checker: every broken promise is found, and a good history passes."""

import time
from pathlib import Path

import msgspec
import pytest

from mainspring.testing.history import (
    UNSURE,
    AcceptedEvent,
    BegunEvent,
    FaultEvent,
    History,
    Rule,
    check,
    slowest,
    unpromised,
)

DUE_MS = 1_000_000
DUE_US = DUE_MS * 1000
OWNER = "100.aa"


class Story(History):
    """A history told in few words: times count from the due time, in microseconds."""

    def put(self, task: str, *, due: int = 0, at: int = -1000, lane: str | None = None, sure: bool = True) -> None:
        self.accepted(task, DUE_MS + due, DUE_US + at, lane=lane, sure=sure)

    def put_pair(self) -> None:
        """Two tasks of one lane, one due after the other."""
        self.put("first", lane="l")
        self.put("second", due=1, lane="l")

    def begin(
        self,
        task: str,
        *,
        due: int = 0,
        at: int = 10,
        attempt: int = 1,
        token: str = OWNER,
        key: str = "",
        node: str = "",
    ) -> None:
        key = key or self.key(task, DUE_MS + due)
        self.begun(task, key, attempt, DUE_US + at, partition=3, token=token, node=node)

    def end(
        self, task: str, *, due: int = 0, at: int = 20, attempt: int = 1, token: str = OWNER, ending: str = "done"
    ) -> None:
        key = self.key(task, DUE_MS + due)
        assert ending in ("done", "retry", "dead")
        self.finished(task, key, attempt, ending, DUE_US + at, partition=3, token=token)  # type: ignore[arg-type]

    def two_owners(self, first: str, second: str, *, ended_by: str) -> None:
        """The first of two tasks runs under one token, the second under another; one of them ends."""
        for task in "ab":
            self.put(task)
        self.begin("a", at=10, token=first)
        self.end("a", at=11, token=first)
        self.begin("b", at=12, token=second)
        self.end("b", at=13, token=ended_by)

    def cancel(self, task: str, *, at: int, answer: str = "cancelled") -> None:
        self.cancelled(task, DUE_MS, answer, DUE_US + at)


@pytest.fixture
def story() -> Story:
    return Story("main")


def broken(history: History) -> list[Rule]:
    return [violation.rule for violation in check(history)]


def test_a_task_that_is_delivered_at_its_time_is_in_order(story: Story) -> None:
    story.put("a")
    story.begin("a", at=0)
    story.end("a")
    assert check(story) == []


def test_an_empty_history_is_in_order(story: Story) -> None:
    assert check(story) == []


# -- never early ---------------------------------------------------------------------------------------------


def test_a_begin_one_microsecond_before_the_due_time_is_early(story: Story) -> None:
    story.put("a")
    story.begin("a", at=-1)
    story.end("a")
    [violation] = check(story)
    assert violation.rule == "early"
    assert "1 us before" in violation.message


def test_a_rescheduled_task_must_wait_for_its_new_time(story: Story) -> None:
    story.put("a")
    story.rescheduled("a", DUE_MS, DUE_MS + 500, DUE_US - 500)
    story.begin("a", due=500, at=400_000)
    story.end("a", due=500, at=400_010)
    assert broken(story) == ["early"]


# -- nothing lost --------------------------------------------------------------------------------------------


def test_a_task_without_an_end_is_lost(story: Story) -> None:
    story.put("a")
    assert broken(story) == ["lost"]


def test_a_task_that_began_and_never_ended_is_lost_unless_the_store_still_has_it(story: Story) -> None:
    story.put("a")
    story.begin("a")
    assert broken(story) == ["lost"]
    story.left("a", "fired", DUE_US + 100)
    assert check(story) == []


@pytest.mark.parametrize("state", ["pending", "fired", "done", "cancelled", "replaced", "dead", "finished"])
def test_a_task_the_store_still_knows_is_not_lost(story: Story, state: str) -> None:
    story.put("a")
    story.left("a", state, DUE_US + 100)
    assert check(story) == []


def test_a_task_the_store_does_not_know_is_lost(story: Story) -> None:
    story.put("a")
    story.left("a", "unknown", DUE_US + 100)
    assert broken(story) == ["lost"]


def test_a_put_that_was_never_answered_may_have_come_to_nothing(story: Story) -> None:
    story.put("a", sure=False)
    assert check(story) == []


def test_a_put_that_was_never_answered_may_have_happened(story: Story) -> None:
    story.put("a", sure=False)
    story.begin("a")
    story.end("a")
    assert check(story) == []


def test_a_task_that_was_replaced_need_not_be_delivered(story: Story) -> None:
    story.put("a")
    story.replaced("a", DUE_MS, DUE_MS + 1, DUE_US - 10)
    story.begin("a", due=1, at=1000)
    story.end("a", due=1, at=1010)
    assert check(story) == []


def test_a_dead_letter_is_an_end(story: Story) -> None:
    story.put("a")
    story.begin("a")
    story.end("a", ending="dead")
    assert check(story) == []


# -- no phantom, one key -------------------------------------------------------------------------------------


def test_a_delivery_of_something_never_put_is_a_phantom(story: Story) -> None:
    story.begin("a")
    assert broken(story) == ["phantom"]


def test_a_delivery_with_another_key_than_its_own_is_found(story: Story) -> None:
    story.put("a")
    story.begin("a", key="main/a/999")
    story.end("a")
    assert broken(story) == ["key"]


def test_two_tasks_with_one_key_are_found() -> None:
    history = Story("main")
    history.put("a")
    history.events += [type(event)(event.at_us, "b", event.key, DUE_MS) for event in history.events]  # type: ignore[union-attr,call-arg,arg-type]
    history.begin("a")
    history.end("a")
    assert broken(history) == ["key"]


def test_ids_that_need_escaping_do_not_share_a_key(story: Story) -> None:
    for task in ("a/1", "a%2F1", "ä", "a\n"):
        story.put(task)
        story.begin(task)
        story.end(task)
    assert check(story) == []


# -- cancelled means cancelled -------------------------------------------------------------------------------


def test_a_delivery_after_the_answer_cancelled_is_found(story: Story) -> None:
    story.put("a")
    story.cancel("a", at=-5)
    story.begin("a")
    story.end("a")
    assert broken(story) == ["cancelled"]


def test_a_task_that_had_begun_cannot_be_cancelled_as_well(story: Story) -> None:
    story.put("a")
    story.begin("a", at=1)
    story.cancel("a", at=2)
    story.end("a", at=3)
    assert broken(story) == ["cancelled"]


def test_the_answer_too_late_promises_nothing(story: Story) -> None:
    story.put("a")
    story.begin("a", at=1)
    story.cancel("a", at=2, answer="too late")
    story.end("a", at=3)
    assert check(story) == []


def test_a_failed_task_may_be_cancelled_before_its_next_attempt(story: Story) -> None:
    story.put("a")
    story.begin("a")
    story.end("a", ending="retry")
    story.cancel("a", at=30)
    assert check(story) == []


def test_an_id_that_was_cancelled_may_be_put_again_for_the_same_time(story: Story) -> None:
    story.put("a")
    story.cancel("a", at=-5)
    story.put("a", at=-4)
    story.begin("a")
    story.end("a")
    assert check(story) == []


def test_a_delivery_at_the_old_time_after_a_reschedule_is_found(story: Story) -> None:
    story.put("a")
    story.rescheduled("a", DUE_MS, DUE_MS + 500, DUE_US - 500)
    story.begin("a")
    story.begin("a", due=500, at=500_000)
    story.end("a", due=500, at=500_010)
    assert broken(story) == ["superseded"]


# -- one owner -----------------------------------------------------------------------------------------------


def test_a_write_of_a_former_owner_is_found(story: Story) -> None:
    story.two_owners("200.bb", "100.aa", ended_by="200.bb")
    assert broken(story) == ["fenced"]


def test_two_owners_with_the_same_epoch_are_found(story: Story) -> None:
    story.two_owners("100.aa", "100.bb", ended_by="100.bb")
    assert broken(story) == ["fenced", "fenced"]


def test_a_write_that_took_effect_for_a_former_owner_is_found_though_no_task_shows_it(story: Story) -> None:
    story.wrote(DUE_US + 1, "acquire", partition=3, token="100.aa")
    story.wrote(DUE_US + 2, "acquire", partition=3, token="200.bb")
    story.wrote(DUE_US + 3, "renew", partition=4, token="100.aa")
    assert check(story) == []
    story.wrote(DUE_US + 4, "drop", partition=3, token="100.aa")
    [violation] = check(story)
    assert (violation.rule, violation.task) == ("fenced", "drop")


def test_an_end_that_only_the_target_knows_is_no_write(story: Story) -> None:
    """A node that hung in the middle of a delivery finishes it when it wakes up."""
    story.put("a")
    story.begin("a", at=10)
    story.fault(DUE_US + 11, DUE_US + 30, "stopped")
    story.begin("a", at=20, token="200.bb")
    story.end("a", at=25, token="")
    story.end("a", at=30, token="")
    assert check(story) == []


def test_a_new_owner_may_continue_where_the_former_one_stopped(story: Story) -> None:
    for task in "ab":
        story.put(task)
    story.begin("a", at=10)
    story.end("a", at=11)
    story.begin("b", at=12, token="200.bb")
    story.end("b", at=13, token="200.bb")
    assert check(story) == []


# -- lanes ---------------------------------------------------------------------------------------------------


def test_a_lane_in_due_order_one_at_a_time_is_in_order(story: Story) -> None:
    for i, task in enumerate("abc"):
        story.put(task, due=i, lane="l")
    for i, task in enumerate("abc"):
        story.begin(task, due=i, at=5000 + i * 10)
        story.end(task, due=i, at=5000 + i * 10 + 10)  # the next begins in the same instant
    assert check(story) == []


def test_a_later_task_of_a_lane_that_overtakes_is_found(story: Story) -> None:
    story.put_pair()
    story.begin("second", due=1, at=5000)
    story.end("second", due=1, at=5010)
    story.begin("first", at=5020)
    story.end("first", at=5030)
    assert broken(story) == ["lane"]


def test_a_task_accepted_after_the_later_one_began_was_not_overtaken(story: Story) -> None:
    story.put("second", due=1, lane="l")
    story.begin("second", due=1, at=5000)
    story.put("first", lane="l", at=5001)
    story.end("second", due=1, at=5010)
    story.begin("first", at=5020)
    story.end("first", at=5030)
    assert check(story) == []


@pytest.mark.parametrize(("due", "rules"), [(3, []), (9, ["lane"])])
def test_a_task_that_is_overdue_when_it_is_put_counts_from_then(story: Story, due: int, rules: list[str]) -> None:
    story.put("late", lane="l", at=5000)
    story.put("other", due=due, lane="l")
    story.begin("other", due=due, at=20_000)
    story.end("other", due=due, at=20_010)
    story.begin("late", at=20_020)
    story.end("late", at=20_030)
    assert broken(story) == rules


def test_two_of_a_lane_under_way_at_once_are_found(story: Story) -> None:
    story.put_pair()
    story.begin("first", at=5000)
    story.begin("second", due=1, at=5005)
    story.end("first", at=5010)
    story.end("second", due=1, at=5010)
    assert broken(story) == ["lane", "lane"]  # at once, and before its turn was over


def test_a_failing_head_holds_up_its_lane(story: Story) -> None:
    story.put_pair()
    story.begin("first", at=5000)
    story.end("first", at=5010, ending="retry")
    story.begin("second", due=1, at=5020)
    story.end("second", due=1, at=5030)
    story.begin("first", at=6000, attempt=2)
    story.end("first", at=6010, attempt=2)
    assert broken(story) == ["lane"]


def test_two_workers_in_one_lane_at_once_are_found(story: Story) -> None:
    story.put_pair()
    story.begin("first", at=1_000, token="", node="w1")
    story.begin("second", due=1, at=2_000, token="", node="w2")
    story.end("first", at=3_000, token="")
    story.end("second", due=1, at=3_500, token="")
    assert "lane" in broken(story)


@pytest.mark.parametrize(("queued", "rules"), [(400, []), (800, ["lane"])])
def test_a_task_put_after_another_one_entered_the_queue_waits_behind_it(
    story: Story, queued: int, rules: list[Rule]
) -> None:
    story.put("second", due=1, lane="l")
    story.put("first", lane="l", at=500)
    key = story.key("second", DUE_MS + 1)
    run = BegunEvent(DUE_US + 2_000, "second", key, 1, 0, "", "w1", queued_us=DUE_US + queued)
    story.events.append(run)
    story.end("second", due=1, at=3_000, token="")
    story.begin("first", at=4_000, token="", node="w1")
    story.end("first", at=5_000, token="")
    assert broken(story) == rules


@pytest.mark.parametrize(("stopped", "rules"), [("w1", []), ("w3", ["repeated"])])
def test_a_suspended_worker_may_begin_late_what_another_has_ended(
    story: Story, stopped: str, rules: list[Rule]
) -> None:
    story.put_pair()
    story.fault(DUE_US + 100, DUE_US + 5_000, node=stopped)
    story.begin("first", at=1_000, token="", node="w2")
    story.end("first", at=2_000, token="")
    story.begin("second", due=1, at=3_000, token="", node="w2")
    story.begin("first", at=4_000, token="", node="w1")
    story.end("second", due=1, at=4_500, token="")
    story.end("first", at=5_000, token="")
    assert broken(story) == rules


@pytest.mark.parametrize(("stopped", "rules"), [("w1", []), ("w3", ["repeated"])])
def test_a_run_that_a_worker_begins_late_and_never_ends_holds_up_no_lane(
    story: Story, stopped: str, rules: list[Rule]
) -> None:
    story.put_pair()
    story.fault(DUE_US + 100, DUE_US + 5_000, node=stopped)
    story.begin("first", at=1_000, token="", node="w2")
    story.end("first", at=2_000, token="")
    story.begin("first", at=2_500, token="", node="w1")  # the lane has nothing under way, and continues
    story.begin("second", due=1, at=3_000, token="", node="w2")
    story.end("second", due=1, at=4_500, token="")
    assert broken(story) == rules


def test_two_workers_in_one_lane_are_found_when_one_tries_again_what_has_failed(story: Story) -> None:
    story.put_pair()
    story.begin("first", at=1_000, token="", node="w1")
    story.end("first", at=1_500, token="", ending="retry")
    story.begin("first", at=2_000, attempt=2, token="", node="w1")
    story.begin("second", due=1, at=2_500, token="", node="w2")
    story.end("first", at=3_000, attempt=2, token="")
    story.end("second", due=1, at=3_500, token="")
    assert "lane" in broken(story)


def test_a_failing_head_does_not_hold_up_other_lanes(story: Story) -> None:
    story.put("first", lane="l")
    story.put("other", due=1, lane="m")
    story.put("none", due=1)
    story.begin("first", at=5000)
    story.end("first", at=5010, ending="retry")
    for task in ("other", "none"):
        story.begin(task, due=1, at=5020)
        story.end(task, due=1, at=5030)
    story.begin("first", at=6000, attempt=2)
    story.end("first", at=6010, attempt=2)
    assert check(story) == []


def test_a_cancelled_head_frees_its_lane(story: Story) -> None:
    story.put_pair()
    story.cancel("first", at=-10)
    story.begin("second", due=1, at=5020)
    story.end("second", due=1, at=5030)
    assert check(story) == []


def test_a_repeated_head_goes_before_what_came_meanwhile(story: Story) -> None:
    """Tasks that a former owner had begun go out first, even if an earlier one was put since."""
    story.put("second", due=1, lane="l")
    story.begin("second", due=1, at=5000)
    story.put("first", lane="l", at=5001)
    story.fault(DUE_US + 5002, DUE_US + 5003)
    story.begin("second", due=1, at=5010, token="200.bb")
    story.end("second", due=1, at=5020, token="200.bb")
    story.begin("first", at=5030, token="200.bb")
    story.end("first", at=5040, token="200.bb")
    assert check(story) == []


def test_an_acceptance_that_was_answered_after_the_end_holds_up_no_lane(story: Story) -> None:
    story.put("first", lane="l", at=5020)
    story.begin("first", at=5000)
    story.end("first", at=5010)
    story.put("second", due=1, lane="l")
    story.begin("second", due=1, at=5030)
    story.end("second", due=1, at=5040)
    assert check(story) == []


def test_a_head_that_was_moved_is_gone_before_its_caller_gets_an_answer(story: Story) -> None:
    story.put_pair()
    story.begin("second", due=1, at=5020)
    story.end("second", due=1, at=5030)
    old, new = (story.key("first", DUE_MS + due) for due in (0, 9))
    answered = AcceptedEvent(DUE_US + 5040, "first", new, DUE_MS + 9, "l", instead=old, asked_us=DUE_US + 5021)
    story.events.append(answered)
    story.begin("first", due=9, at=9_000)
    story.end("first", due=9, at=9_010)
    assert broken(story) == ["lane"]  # asked for only after the other one began
    story.events[story.events.index(answered)] = msgspec.structs.replace(answered, asked_us=DUE_US + 5019)
    assert check(story) == []


def test_a_possibly_cancelled_task_of_a_lane_holds_up_no_other(story: Story) -> None:
    story.put_pair()
    story.cancel("first", at=-10, answer=UNSURE)
    story.begin("second", due=1, at=5020)
    story.end("second", due=1, at=5030)
    assert check(story) == []


# -- repeats -------------------------------------------------------------------------------------------------


def test_a_task_delivered_twice_with_no_fault_is_found(story: Story) -> None:
    story.put("a")
    story.begin("a", at=10)
    story.begin("a", at=50)
    story.end("a", at=60)
    assert broken(story) == ["repeated"]


def test_a_task_delivered_again_around_a_fault_is_in_order(story: Story) -> None:
    story.put("a")
    story.begin("a", at=10)
    story.fault(DUE_US + 20, DUE_US + 40, "the node was killed")
    story.begin("a", at=50, token="200.bb")
    story.end("a", at=60, token="200.bb")
    assert check(story) == []


def test_a_fault_long_before_is_no_excuse(story: Story) -> None:
    story.fault(DUE_US - 1000, DUE_US - 900)
    story.fault(DUE_US + 1000, DUE_US + 1100)
    story.put("a")
    story.begin("a", at=10)
    story.begin("a", at=50)
    story.end("a", at=60)
    assert broken(story) == ["repeated"]


def test_a_failed_delivery_is_tried_again(story: Story) -> None:
    story.put("a")
    for attempt in (1, 2, 3):
        story.begin("a", at=100 * attempt, attempt=attempt)
        story.end("a", at=100 * attempt + 1, attempt=attempt, ending="retry" if attempt < 3 else "done")
    assert check(story) == []


def test_a_next_attempt_after_success_is_found(story: Story) -> None:
    story.put("a")
    story.begin("a", at=10)
    story.end("a", at=20)
    story.begin("a", at=50, attempt=2)
    story.end("a", at=60, attempt=2)
    assert broken(story) == ["repeated"]


def test_the_fault_of_another_node_is_no_excuse(story: Story) -> None:
    story.put("a")
    story.begin("a", at=10, node="n1")
    story.fault(DUE_US + 20, DUE_US + 40, "n2 was killed", node="n2")
    story.begin("a", at=50, token="200.bb", node="n3")
    story.end("a", at=60, token="200.bb")
    assert broken(story) == ["repeated"]
    story.fault(DUE_US + 20, DUE_US + 40, "n1 was killed", node="n1")
    assert check(story) == []


def test_only_what_was_under_way_may_come_again(story: Story) -> None:
    """Three were delivered by the first owner and two of them settled on the server: one may come again."""
    story.fault(DUE_US + 15, DUE_US + 20, "killed")
    for task in "abc":
        story.put(task)
        story.begin(task, at=10)
        story.end(task, at=12, token="")
    story.wrote(DUE_US + 14, "tick", partition=3, token=OWNER, settled=2)
    story.begin("a", at=50, token="200.bb")
    assert check(story) == []
    story.begin("b", at=50, token="200.bb")
    [violation] = check(story)
    assert violation.rule == "excess"
    assert "2 delivered again after 100.aa had at most 1 in flight" in violation.message


def test_a_task_put_twice_may_be_delivered_twice(story: Story) -> None:
    """An old copy of a put arrived when its slice was gone."""
    story.events.append(AcceptedEvent(DUE_US - 10, "a", story.key("a", DUE_MS), DUE_MS, twice=True))
    story.begin("a", at=10)
    story.end("a", at=20, token="")
    story.wrote(DUE_US + 14, "tick", partition=3, token=OWNER, settled=1)
    story.begin("a", at=50)
    story.end("a", at=60, token="")
    assert check(story) == []


# -- in good time --------------------------------------------------------------------------------------------


def late(history: History) -> list[str]:
    return [one.task for one in check(history) if one.rule == "late"]


def test_due_tasks_must_be_delivered_soon_after_healing(story: Story) -> None:
    story.put("a")
    story.put("b", due=5000)
    story.healed(DUE_US + 1000, within_us=2000)
    story.begin("a", at=900)  # before: only its delivery counts
    story.end("a", at=3000)
    story.begin("b", due=5000, at=5_001_000)
    story.end("b", due=5000, at=5_002_000)
    assert broken(story) == []
    story.healed(DUE_US + 1001, within_us=1998)
    assert late(story) == ["a", "b"]


def test_after_a_failed_attempt_the_time_counts_again(story: Story) -> None:
    story.put("a")
    story.healed(DUE_US, within_us=2000)
    story.begin("a", at=1000)
    story.end("a", at=1500, ending="retry")
    story.begin("a", at=3000, attempt=2)
    story.end("a", at=3500, attempt=2)
    assert broken(story) == []
    story.healed(DUE_US, within_us=1999)
    assert late(story) == ["a"]


def test_behind_a_failing_head_of_its_lane_the_time_counts_again(story: Story) -> None:
    for task, lane in (("head", "x"), ("next", "x"), ("other", "y")):
        story.put(task, lane=lane)
    story.healed(DUE_US, within_us=2000)
    story.begin("head", at=1000)
    story.end("head", at=1500, ending="retry")
    story.begin("head", at=3000, attempt=2)
    story.end("head", at=3100, attempt=2)
    for task in ("next", "other"):
        story.begin(task, at=3200)
        story.end(task, at=3500)
    assert late(story) == ["other"]
    story.healed(DUE_US, within_us=1999)
    assert late(story) == ["next", "other"]


def test_measured_stalls_and_nothing_else_lengthen_what_is_allowed(story: Story) -> None:
    story.put("a")
    story.healed(DUE_US, within_us=2000)
    story.begin("a", at=2100)
    story.end("a", at=2500)
    story.stalled(DUE_US - 300, DUE_US + 100)  # 100 of it after healing
    story.stalled(DUE_US + 1000, DUE_US + 1300)
    story.stalled(DUE_US + 1100, DUE_US + 1399)  # the same one, seen by another: 99 more
    story.stalled(DUE_US + 2600, DUE_US + 9000)  # the task had been delivered
    assert late(story) == ["a"], "one microsecond too late"
    story.stalled(DUE_US + 1399, DUE_US + 1400)
    assert broken(story) == []


def test_the_slowest_delivery_after_healing_is_known(story: Story) -> None:
    assert slowest(story) is None
    for task, at in (("a", 500), ("b", 900), ("c", 700)):
        story.put(task)
        story.begin(task, at=at - 1)
        story.end(task, at=at)
    story.healed(DUE_US, within_us=2000)
    story.stalled(DUE_US + 800, DUE_US + 1000)
    last = slowest(story)
    assert last is not None
    assert (last.accepted.task, last.spent_us, last.stalled_us) == ("b", 900, 100)
    story.put("never")
    last = slowest(story)
    assert last is not None
    assert (last.accepted.task, last.spent_us) == ("never", None)


@pytest.mark.parametrize("state", ["pending", "fired", "queued", "running"])
def test_a_task_that_waits_long_after_healing_is_late(story: Story, state: str) -> None:
    """With workers too: a task in a queue that is never emptied is not delivered."""
    story.put("a")
    story.healed(DUE_US, within_us=2000)
    story.left("a", state, DUE_US + 2000)
    assert late(story) == [], "it has this long"
    story.left("a", state, DUE_US + 2001)
    assert late(story) == ["a"]


def test_a_task_never_delivered_after_healing_is_late_and_lost(story: Story) -> None:
    story.put("a")
    story.put("gone")
    story.cancel("gone", at=-5)
    story.healed(DUE_US, within_us=10)
    assert broken(story) == ["lost", "late"]


def test_a_task_that_begins_after_it_expired_is_found(story: Story) -> None:
    story.events.append(AcceptedEvent(DUE_US - 10, "a", story.key("a", DUE_MS), DUE_MS, expires_ms=DUE_MS + 5))
    story.begin("a", at=5_999)
    story.end("a", at=6_000)
    assert check(story) == []
    story.begin("a", at=6_000)
    assert "expired" in broken(story)


# -- answers that were lost ----------------------------------------------------------------------------------


def test_a_cancel_that_was_never_answered_may_have_happened_or_not(story: Story) -> None:
    story.put("a")
    story.cancel("a", at=-5, answer=UNSURE)
    assert check(story) == []
    story.begin("a")
    story.end("a")
    assert check(story) == []


def test_a_move_that_was_never_answered_may_have_happened_or_not(story: Story) -> None:
    story.put("a")
    story.replaced("a", DUE_MS, DUE_MS + 1, DUE_US - 10, sure=False)
    assert check(story) == []
    story.begin("a")
    story.end("a")
    assert check(story) == []


# -- servers that forget -------------------------------------------------------------------------------------


def forgetful(level: str) -> Story:
    story = Story("main")
    story.events.append(AcceptedEvent(DUE_US - 10, "a", story.key("a", DUE_MS), DUE_MS, level=level))
    story.fault(DUE_US - 20, DUE_US, "promotion", loses=True)
    return story


def test_losses_in_a_promotion_at_the_level_of_the_server_are_reported_apart() -> None:
    story = forgetful("server")
    assert check(story) == []
    assert [one.task for one in unpromised(story)] == ["a"]


def test_tasks_confirmed_by_replicas_must_not_be_lost_in_a_promotion() -> None:
    story = forgetful("replicas=1")
    assert broken(story) == ["lost"]
    assert unpromised(story) == []


def test_a_fault_that_loses_nothing_excuses_no_loss(story: Story) -> None:
    story.fault(DUE_US - 2000, DUE_US, "server killed")
    story.put("a")
    assert broken(story) == ["lost"]


def test_a_cancel_that_the_servers_forgot_is_excused_and_any_other_is_not() -> None:
    story = forgetful("replicas=1")
    story.cancel("a", at=-5)
    story.begin("a")
    story.end("a")
    assert check(story) == []
    story.events = [event for event in story.events if not isinstance(event, FaultEvent)]
    assert broken(story) == ["cancelled"]


def test_a_confirmed_task_whose_move_was_forgotten_must_be_where_it_was() -> None:
    story = forgetful("replicas=1")
    story.replaced("a", DUE_MS, DUE_MS + 1, DUE_US - 5)
    assert broken(story) == ["lost"]
    story.begin("a")
    story.end("a")
    assert check(story) == []


# -- several processes ---------------------------------------------------------------------------------------


def test_histories_of_several_processes_are_one(tmp_path: Path) -> None:
    client, node = Story("main"), Story("main")
    client.put("a")
    client.fault(1, 2, "test")
    client.cancel("a", at=15, answer="too late")
    node.begin("a")
    node.end("a")
    node.left("a", "done", DUE_US + 30)
    client.save(tmp_path / "client.jsonl")
    node.save(tmp_path / "node.jsonl")
    merged = History.load(tmp_path / "node.jsonl", tmp_path / "client.jsonl")
    assert sorted(map(repr, merged.events)) == sorted(map(repr, client.events + node.events))
    assert FaultEvent(1, 2, "test") in merged.events
    assert check(merged) == []
    assert broken(client) == ["lost"]
    assert check(History("main").merge(client, node)) == []


def test_checking_takes_microseconds_an_event() -> None:
    story = Story("main")
    for i in range(60_000):
        task = f"t{i}"
        story.put(task, due=i % 1000, lane=f"l{i}" if i % 2 else None)
        story.begin(task, due=i % 1000, at=2_000_000 + i)
        story.end(task, due=i % 1000, at=2_000_000 + i)
    started = time.process_time()
    assert check(story) == []
    assert time.process_time() - started < 180_000 * 20e-6
