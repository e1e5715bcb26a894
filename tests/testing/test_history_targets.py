"""The checker with records of targets: the word of the store is not enough, and neither is silence."""

from mainspring.testing.history import BegunEvent, History, Rule, check

DUE_MS = 1_000_000
DUE_US = DUE_MS * 1000
LONG_US = DUE_US + 60_000_000


def broken(history: History) -> list[Rule]:
    return [violation.rule for violation in check(history)]


def told(*tasks: str) -> History:
    """A history in which these tasks reached their target."""
    history = History()
    for task in tasks:
        history.accepted(task, DUE_MS, DUE_US - 1_000)
        history.begun(task, history.key(task, DUE_MS), 1, DUE_US, partition=0, token="1.a")
        history.finished(task, history.key(task, DUE_MS), 1, "done", DUE_US + 10, partition=0, token="")
    return history


def test_a_task_that_is_done_for_the_store_and_never_reached_its_target_is_lost() -> None:
    history = told("a")
    history.accepted("b", DUE_MS, DUE_US - 1_000)
    for task in "ab":
        history.left(task, "done", LONG_US)
    [violation] = check(history)
    assert (violation.rule, violation.task) == ("lost", "b")
    assert "no target had it" in violation.message


def test_a_task_that_died_without_a_dead_letter_is_lost() -> None:
    history = told("a")
    history.accepted("b", DUE_MS, DUE_US - 1_000)
    history.finished("b", history.key("b", DUE_MS), 1, "dead", DUE_US, partition=0, token="")
    history.left("b", "finished", LONG_US)
    assert broken(history) == ["lost"]


def test_a_dead_letter_is_what_is_left_of_a_task_that_died() -> None:
    history = told("a")
    history.accepted("b", DUE_MS, DUE_US - 1_000)
    history.finished("b", history.key("b", DUE_MS), 1, "dead", DUE_US, partition=0, token="")
    history.left("b", "dead", LONG_US)
    assert check(history) == []


def test_a_task_that_still_waits_long_after_all_was_well_is_late() -> None:
    history = told("a")
    history.accepted("b", DUE_MS, DUE_US - 1_000)
    history.left("b", "fired", LONG_US)
    assert check(history) == []
    history.healed(DUE_US, 10_000_000)
    assert broken(history) == ["late"]


def test_a_task_whose_time_has_not_come_is_not_late() -> None:
    history = told("a")
    history.healed(DUE_US, 10_000_000)
    history.accepted("b", DUE_MS + 3_600_000, DUE_US)
    history.left("b", "pending", LONG_US)
    assert check(history) == []


def test_a_delivery_sent_after_the_next_owner_has_written_is_found() -> None:
    history = told("a")
    history.wrote(DUE_US + 100, "tick", partition=0, token="2.b")
    assert check(history) == []
    [begun] = [event for event in history.events if isinstance(event, BegunEvent)]
    history.events.remove(begun)
    fields = (begun.at_us, begun.task, begun.key, begun.attempt, begun.partition, begun.token, begun.node)
    history.events.append(BegunEvent(*fields, sent_us=DUE_US + 50))
    assert check(history) == []
    history.events[-1] = BegunEvent(*fields, sent_us=DUE_US + 150)
    assert broken(history) == ["fenced"]
