"""How the chain of a schedule moves on: pure rules, at given instants."""

from datetime import timedelta
from typing import cast

import msgspec
import pytest

from mainspring.engine.flight import Flight
from mainspring.engine.occurrences import OccurrencePlan
from mainspring.model.errors import InvalidInput
from mainspring.model.schedule.chain import (
    NOT_RUN_KEPT,
    ChainMemory,
    ChainState,
    NotRun,
    PastRun,
    after_begin,
    after_loss,
    after_misfire,
    first_of,
    from_here,
    link_to,
    moved_by_end,
)
from mainspring.model.schedule.definition import (
    Definition,
    SchedulePause,
    changes,
    check_definition,
    pack_definition,
    unpack_definition,
)
from mainspring.model.schedule.input import define
from mainspring.model.schedule.view import span_text, view_of, written

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000


def minutely(**fields: object) -> Definition:
    definition = define("job", every="1m", target="log:", **fields)
    return msgspec.structs.replace(definition, anchor_ms=NOW_MS)


def at(minute: float) -> int:
    return NOW_MS + round(minute * MINUTE_MS)


def test_a_link_and_a_definition_survive_being_packed() -> None:
    definition = minutely(cron="0 2 * * *", timezone="Europe/Paris", payload={"a": 1}, retry="3", max_runs=7)
    assert unpack_definition(pack_definition(definition)) == definition
    state = ChainMemory(
        b"x" * 16, 1, 2, 3, {"missed": 4}, (NotRun(1, 2, 3, "missed"),), (PastRun(1, 2, None, "done"),), ((1, 2),)
    )
    link = link_to(definition, at(1), state)
    assert ChainState.unpack(link.pack()) == link
    assert link.pack()[:12] == link.claim


def test_a_begin_counts_the_run_and_leads_to_the_next() -> None:
    definition = minutely()
    next_ms, state = after_begin(definition, link_to(definition, at(1), ChainMemory()), at(1))
    assert next_ms == at(2)
    assert (state.runs, state.last_ms, state.last_is_over) == (1, at(1), False)
    assert state.with_run(PastRun(at(1), at(1), at(1.5), "done")).last_is_over


def test_a_plan_made_by_a_clock_that_had_jumped_is_made_again() -> None:
    definition = minutely()
    plan = OccurrencePlan.of(definition, link_to(definition, at(1), ChainMemory()), at(61))
    asked_only_of_what_is_skipped = cast("Flight", None)
    planted = plan.to_write(asked_only_of_what_is_skipped, at(1))
    assert planted.slice is not None
    assert planted.slice.start_ms == at(2)
    assert ChainState.unpack(planted.value).state.began_ms == at(1)


def test_the_last_of_max_runs_has_no_next() -> None:
    definition = minutely(max_runs=2)
    next_ms, state = after_begin(definition, link_to(definition, at(1), ChainMemory(runs=0)), at(1))
    assert next_ms == at(2)
    assert after_begin(definition, link_to(definition, at(2), state), at(2))[0] is None


@pytest.mark.parametrize(
    ("rule", "next_minute", "missed"),
    [("coalesce", 10, 9), ("skip", 10, 9), ("all(3)", 8, 7), ("all(50)", None, 0)],
)
def test_ten_missed_runs_follow_the_misfire_rule(rule: str, next_minute: int | None, missed: int) -> None:
    definition = minutely(misfire=rule)
    moved = after_misfire(definition, link_to(definition, at(1), ChainMemory()), at(10.5))
    if next_minute is None:
        assert moved is None
        return
    assert moved is not None
    assert (moved[0], moved[1].not_run) == (at(next_minute), {"missed": missed})


def test_the_newest_of_very_many_is_found_without_a_walk() -> None:
    definition = msgspec.structs.replace(define("job", cron="* * * * * *", target="log:"))
    year_ms = 365 * 86_400_000
    assert definition.slots.newest(NOW_MS, NOW_MS + year_ms + 500) == NOW_MS + year_ms
    assert definition.slots.newest(NOW_MS + 1, NOW_MS + 999) is None


def test_stretches_without_a_run_between_are_one() -> None:
    state = ChainMemory()
    for minute in range(5):
        state = state.without(NotRun(at(minute), at(minute), 1, "overlap"))
    assert [(one.count, one.from_ms, one.to_ms) for one in state.recent] == [(5, at(0), at(4))]
    for runs in range(30):
        state = msgspec.structs.replace(state, runs=runs).without(NotRun(runs, runs, 1, "missed"))
    assert len(state.recent) == NOT_RUN_KEPT
    assert state.not_run == {"overlap": 5, "missed": 30}


def test_a_full_buffer_leaves_out_what_came_too_late_to_wait() -> None:
    """Runs 2 to 9 came while 1 went on; three may wait."""
    definition = minutely(overlap="buffer_all(3)")
    link = link_to(definition, at(2), ChainMemory(runs=1))
    ran = [2]
    next_ms, state = after_begin(definition, link, at(9.5), waited=True)
    while next_ms is not None and next_ms < at(12):
        ran.append((next_ms - NOW_MS) // MINUTE_MS)
        next_ms, state = after_begin(definition, link_to(definition, next_ms, state), max(at(9.5), next_ms))
    assert ran == [2, 3, 4, 10, 11]
    assert state.not_run == {"overlap": 5}


def test_a_fixed_delay_moves_what_was_planned_too_early() -> None:
    definition = define("job", after_end="1m", target="log:")
    state = ChainMemory(b"x" * 16, at(1), at(1), 1, history=(PastRun(at(1), at(1), at(5), "done"),))
    assert moved_by_end(definition, link_to(definition, at(2), state)) == at(6)
    assert moved_by_end(definition, link_to(definition, at(6), state)) is None


def test_an_edit_of_an_overdue_schedule_does_not_forget_what_was_missed() -> None:
    old = minutely()
    link = link_to(old, at(1), ChainMemory(runs=3))
    new = msgspec.structs.replace(old, payload=b"1", generation=2)
    assert first_of(new, old, link, at(5.5))[0] == at(5)
    assert first_of(new, old, link, at(5.5))[1].not_run == {"missed": 4}
    other = msgspec.structs.replace(new, specs=("@every 7m",))
    assert first_of(other, old, link, at(5.5))[0] == at(7)
    assert from_here(old, at(1), at(1.5), ChainMemory()) == (at(2), ChainMemory())


def test_an_edit_does_not_bring_back_what_found_the_buffer_full() -> None:
    """Run 2 goes, 3 and 4 wait, 5 to 9 are left out; then somebody edits the payload."""
    old = minutely(overlap="buffer_all(3)", misfire="all")
    next_ms, state = after_begin(old, link_to(old, at(2), ChainMemory(runs=1)), at(9.5), waited=True)
    new = msgspec.structs.replace(old, payload=b"1", generation=2)
    next_ms, state = first_of(new, old, link_to(old, next_ms, state), at(9.5))
    ran = []
    while next_ms is not None and next_ms < at(12):
        ran.append((next_ms - NOW_MS) // MINUTE_MS)
        next_ms, state = after_begin(new, link_to(new, next_ms, state), max(at(9.5), next_ms))
    assert ran == [3, 4, 10, 11]
    assert state.not_run == {"overlap": 5}


def test_a_time_that_was_called_off_stays_so_as_long_as_the_times_are_the_same() -> None:
    old = minutely()
    next_ms, state = after_loss(old, link_to(old, at(5), ChainMemory(runs=4)), at(4.5), "cancelled")
    assert next_ms == at(6)
    link = link_to(old, next_ms, state)
    new = msgspec.structs.replace(old, payload=b"1", generation=2)
    assert first_of(new, old, link, at(4.6)) == (at(6), state)
    for pause in (
        SchedulePause(at(4.6), until_ms=at(4.8)),
        SchedulePause(at(4.6), "hold", at(4.8)),
        SchedulePause(at(4.6), "hold", at(5.5)),
    ):
        paused = msgspec.structs.replace(old, paused=pause, generation=2)
        assert first_of(paused, old, link, at(4.6))[0] == at(6)
    other = msgspec.structs.replace(new, specs=("@every 30s",))
    assert first_of(other, old, link, at(4.6))[0] == at(5), "it means other times now"
    assert after_begin(old, link, at(6))[1].cuts == (), "nothing comes to it any more"


def test_a_time_that_was_called_off_is_counted_once() -> None:
    old = msgspec.structs.replace(minutely(), paused=SchedulePause(at(0.5)))
    state = ChainMemory().called_off(at(2), "cancelled")
    new = msgspec.structs.replace(old, paused=None, generation=2)
    next_ms, state = first_of(new, old, link_to(old, None, state), at(5.5))
    assert (next_ms, state.not_run) == (at(6), {"cancelled": 1, "paused": 4})
    state = ChainMemory().called_off(at(5), "cancelled")
    missed = after_misfire(minutely(), link_to(minutely(), at(1), state), at(5.5))
    assert missed is not None
    assert (missed[0], missed[1].not_run) == (at(4), {"cancelled": 1, "missed": 3})


def test_a_pause_without_an_end_plans_nothing() -> None:
    definition = msgspec.structs.replace(minutely(), paused=SchedulePause(at(0)))
    assert first_of(definition, None, None, at(1)) == (None, ChainMemory())
    ends = msgspec.structs.replace(minutely(), paused=SchedulePause(at(0), until_ms=at(5.5)))
    assert first_of(ends, None, None, at(1))[0] == at(6)
    held = msgspec.structs.replace(minutely(), paused=SchedulePause(at(0), "hold", at(5.5)))
    assert first_of(held, None, None, at(1))[0] == at(5)
    assert held.due_ms(at(5)) == at(5.5)


def test_a_definition_reads_as_it_was_written() -> None:
    definition = minutely(timezone="Europe/Paris", payload={"a": 1}, jitter="20s", timeout="1500ms", overlap="allow")
    assert written(definition) == {
        "every": ["1m"], "timezone": "Europe/Paris", "target": "log:", "payload": {"a": 1}, "timeout": "1500ms",
        "jitter": "20s", "overlap": "allow",
    }  # fmt: skip
    assert [span_text(ms) for ms in (1, 1_000, 90_000, 3_600_000, 172_800_000)] == ["1ms", "1s", "90s", "1h", "2d"]
    assert view_of(definition, None, NOW_MS).as_dict()["state"] == "finished"


def test_changes_leave_out_author_and_time() -> None:
    old = minutely()
    new = msgspec.structs.replace(old, by="ann", note="why", at_ms=1, generation=2, zone="Europe/Paris")
    assert changes(old, new) == {"zone": ("UTC", "Europe/Paris")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "log:"}, "says nothing about its times"),
        ({"every": "1m"}, "has no target"),
        ({"every": "1m", "target": "nowhere"}, "no known scheme"),
        ({"every": "1m", "target": "log:", "overlap": "skip(3)"}, "overlap"),
        ({"every": "1m", "target": "log:", "misfire": "all(0)"}, "between 1 and 1000"),
        ({"every": "1m", "target": "log:", "max_runs": 0}, "max_runs"),
        ({"every": "1m", "target": "log:", "timezone": "Mars"}, "time zone database"),
        ({"cron": "* * * * *", "exclude": "* * * * *", "target": "log:"}, "its exclusions leave none of its runs"),
        ({"every": "1m", "target": "log:", "payload": object()}, "JSON"),
        ({"cron": 5, "target": "log:"}, "cron is of type int"),
        ({"cron": ["* * * * *", None], "target": "log:"}, "cron is of type NoneType"),
        ({"every": "1m", "target": 5}, "target is of type int"),
        ({"every": "1m", "target": "log:", "max_runs": True}, "max_runs is of type bool"),
        ({"every": 5, "target": "log:"}, "every is of type int"),
        ({"every": 0, "target": "log:"}, "every is of type int"),
        ({"cron": "@daily", "every": timedelta(0), "target": "log:"}, "interval is 0 ms"),
    ],
)
def test_nonsense_is_refused_in_words(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_definition(define("job", **fields), NOW_MS)
