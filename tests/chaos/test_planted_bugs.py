"""Planted bugs: the checker is worth something only if it finds each of them, and nothing where there is none."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from mainspring.engine.slice import LiveSlice
from mainspring.store.scripts import _NEEDS, text_of
from mainspring.testing.history import Rule, Violation
from mainspring.testing.servers import Server, standalone
from tests.support.planted_bugs import MUTATIONS, plant, planted
from tests.support.planted_bugs.kinds import Patch, Rewrite, with_text
from tests.support.scenarios import SCENARIOS, play

PATIENCE_S = 60

CAUGHT: dict[str, tuple[str, Rule]] = {
    # begin
    "begin-without-token-check": ("stalled-owner-begins", "fenced"),
    "token-compared-by-order": ("twin-owners", "fenced"),
    "token-compared-by-epoch": ("twin-owners", "fenced"),
    "missing-token-passes": ("stalled-owner-after-a-release", "fenced"),
    "late-duplicate-writes-again": ("late-copy-of-a-tick", "books"),
    "rollback-not-noticed": ("failover-loses-a-commit", "lost"),
    "early-check-off": ("clock-an-hour-ahead", "early"),
    "client-clock": ("clock-an-hour-ahead", "early"),
    "no-incarnation-check": ("lane-in-a-recreated-slice", "lane"),
    "header-not-proven": ("failover-loses-a-put", "lost"),
    "cancelled-bits-not-returned": ("cancel-before-begin", "cancelled"),
    "lanes-begin-without-more": ("unread-row-in-a-lane", "lane"),
    "begin-without-fired-bits": ("cancel-in-flight", "cancelled"),
    # commit
    "commit-without-token-check": ("stalled-owner-commits", "fenced"),
    "commit-before-delivery": ("crash-in-a-delivery", "lost"),
    "retry-put-after-the-commit": ("node-dies-after-its-commit", "lost"),
    "retry-put-before-the-commit": ("reply-to-a-commit-is-lost", "repeated"),
    "repeated-commit-writes-again": ("reply-to-a-commit-is-lost", "books"),
    "failed-commit-forgotten": ("commit-never-sent", "lost"),
    "failed-task-done-before-its-retry-is-written": ("failure-while-commits-run-out-of-time", "lost"),
    "commit-marks-what-it-leaves": ("more-failures-than-a-commit-takes", "lost"),
    "outcome-of-a-forgotten-slice-written": ("slice-is-read-again-with-a-failure-unwritten", "books"),
    "run-kept-again-by-a-repeated-commit": ("reply-to-a-commit-is-lost", "books"),
    "run-kept-twice": ("failures", "books"),
    "run-not-kept": ("failures", "books"),
    "failed-commit-at-a-stop-swallowed": ("commit-fails-at-a-stop", "repeated"),
    "done-without-dead-letter": ("failures", "lost"),
    "done-bits-not-written": ("clean-hand-over", "repeated"),
    "retry-under-a-new-key": ("failures", "key"),
    # drop
    "drop-without-done-check": ("late-put-before-the-drop", "lost"),
    "drop-by-count-only": ("late-put-before-the-drop", "lost"),
    "drop-of-a-recreated-slice": ("recreated-slice-is-dropped", "lost"),
    "drop-without-grace": ("late-copy-of-a-put", "repeated"),
    # cancel, replace
    "cancel-after-begin": ("cancel-in-flight", "cancelled"),
    "cancel-without-mark": ("cancel-before-begin", "cancelled"),
    "bulk-cancel-without-mark": ("cancel-before-begin", "cancelled"),
    "replace-leaves-the-old": ("move-what-was-read", "superseded"),
    "replace-without-mark": ("move-what-was-read", "superseded"),
    "replace-after-begin": ("move-while-it-begins", "superseded"),
    # ownership
    "ttl-on-the-token": ("clock-of-the-server-lags", "fenced"),
    "epoch-from-the-clock": ("clock-of-the-server-lags", "fenced"),
    "lease-not-clamped": ("clock-of-the-server-lags", "late"),
    "busy-ignored": ("two-live-nodes", "repeated"),
    "release-without-token-check": ("stalled-owner-stops", "repeated"),
    "lease-not-checked-before-the-send": ("answer-after-the-lease", "fenced"),
    "one-answer-for-all-partitions-of-a-tick": ("tick-of-which-one-partition-is-fenced", "fenced"),
    "fenced-partition-keeps-the-others-back": ("tick-of-which-one-partition-is-fenced", "late"),
    "takeover-forgets-what-was-fired": ("crash-in-a-delivery", "late"),
    "lost-run-not-kept": ("stalled-owner-commits", "books"),
    "takeover-forgets-what-is-done": ("clean-hand-over", "repeated"),
    "takeover-forgets-held-lanes": ("lane-hand-over", "lane"),
    # put
    "resend-without-mark": ("put-whose-reply-is-lost", "repeated"),
    "resend-under-a-new-id": ("put-whose-reply-is-lost", "phantom"),
    "copies-not-recognised": ("put-whose-reply-is-lost", "repeated"),
    "known-id-put-again": ("repeated-request", "repeated"),
    # reading and lanes
    "old-cursor-on-a-recreated-slice": ("recreated-slice", "lost"),
    "nothing-read-again-after-a-reconnect": ("failover-nobody-hears-of", "late"),
    "lane-order-ignored": ("lane-under-way", "lane"),
    "failing-head-lets-others-pass": ("failing-head-of-a-lane", "lane"),
    # held work
    "move-without-cancel-check": ("cancel-while-tasks-are-moved", "cancelled"),
    "move-without-a-mark": ("cancel-by-the-place-a-task-was-moved-from", "cancelled"),
    "moved-after-the-commit": ("node-dies-after-a-move", "lost"),
    "moved-before-the-commit": ("reply-to-a-move-is-lost", "books"),
    "new-ones-overtake-held-work": ("arrival-while-held-work-comes-back", "lane"),
    "takeover-forgets-hold-slices": ("node-dies-while-tasks-are-held", "late"),
    "held-work-never-comes-back": ("many-behind-a-failing-head", "late"),
    # queues
    "finish-without-the-claim": ("stalled-worker-ends-its-run", "books"),
    "reclaim-without-a-new-claim": ("run-of-a-dead-worker", "repeated"),
    "handed-off-again-at-a-takeover": ("lane-at-a-worker-at-a-takeover", "repeated"),
    "lane-goes-on-at-the-hand-off": ("lane-through-workers", "lane"),
    "hand-off-without-done-bits": ("finished-work-at-a-hand-over", "repeated"),
    "no-lock-on-the-id": ("two-tasks-of-one-id", "books"),
    "queued-id-forgotten": ("id-of-a-task-that-waits-in-its-queue", "key"),
    # schedules
    "next-run-put-at-commit": ("schedule-runs-and-ends", "lost"),
    "next-run-put-without-generation-check": ("edit-while-a-run-begins", "phantom"),
    "skipped-run-not-marked": ("run-that-is-skipped", "phantom"),
    "chain-not-moved-on": ("schedule-runs-and-ends", "lost"),
    "next-run-not-put-at-begin": ("node-dies-between-begin-and-commit-of-a-run", "lost"),
    "edit-leaves-the-planned-run": ("edit-of-a-schedule-that-was-read", "phantom"),
}
"""Planted bug -> a scenario in which it shows, and the rule that has to find it there."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standalone() as started:
        yield started


async def found_in(scenario: str, server: Server) -> list[Violation]:
    async with asyncio.timeout(PATIENCE_S):
        return await play(scenario, server.url, f"t{uuid.uuid4().hex[:10]}")


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
async def test_without_a_bug_nothing_is_found(scenario: str, server: Server) -> None:
    assert await found_in(scenario, server) == []


@pytest.mark.parametrize("bug", sorted(MUTATIONS))
async def test_a_planted_bug_is_found(bug: str, server: Server) -> None:
    scenario, rule = CAUGHT[bug]
    with planted(bug) as mutation:
        found = await found_in(scenario, server)
    assert rule in {violation.rule for violation in found}, f"{mutation.bug}: nobody noticed, only {found}"


def test_there_are_enough_bugs_and_each_has_its_rule_and_scenario() -> None:
    assert len(MUTATIONS) >= 24
    assert set(CAUGHT) == set(MUTATIONS)
    assert {scenario for scenario, _ in CAUGHT.values()} <= set(SCENARIOS)
    assert len({mutation.bug for mutation in MUTATIONS.values()}) == len(MUTATIONS)


@pytest.mark.parametrize("bug", sorted(MUTATIONS))
def test_a_bug_is_gone_after_its_block(bug: str) -> None:
    before = _scripts(), LiveSlice.load_bitmaps
    with planted(bug):
        pass
    assert (_scripts(), LiveSlice.load_bitmaps) == before


def test_a_bug_in_a_text_that_has_changed_is_refused() -> None:
    with pytest.raises(LookupError, match="holds this text 0 times"):
        Rewrite("tick", "a line that nobody wrote\n", "").make()
    with pytest.raises(LookupError, match="not once"):
        Rewrite("tick", "redis.call", "").make()
    with pytest.raises(LookupError, match="LiveSlice has no such_method any more"):
        Patch(LiveSlice, "such_method", lambda old: old).make()
    with pytest.raises(LookupError, match=r"LiveSlice.load_bitmaps holds this text 0 times"):
        Patch(LiveSlice, "load_bitmaps", with_text("a line that nobody wrote", "")).make()


def test_a_process_can_be_given_a_bug_for_life() -> None:
    code = (
        "from tests.support.planted_bugs import plant; from mainspring.store.scripts import text_of;"
        " plant('early-check-off'); assert 'local early = false' in text_of('tick', False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_an_unknown_bug_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match="no planted bug is called 'nonsense'; there are: begin-without"):
        plant("nonsense")


def _scripts() -> dict[str, str]:
    return {name: text_of(name, True) for name in _NEEDS}
