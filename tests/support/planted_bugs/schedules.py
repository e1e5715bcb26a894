"""Planted bugs in the chains of schedules."""

from typing import Final

from .kinds import Mutation, Rewrite


def _occurrence(name: str, bug: str, old: str, new: str) -> Mutation:
    return Mutation(name, bug, (Rewrite("_occurrence", old, new),))


SCHEDULES: Final = (
    Mutation(
        "next-run-put-at-commit",
        "the following occurrence is put when something is committed, not when one begins",
        (
            Rewrite(
                "tick",
                "if status == nil and occurrences > 0 then",
                "if status == nil and occurrences > 0 and commits > 0 then",
            ),
        ),
    ),
    _occurrence(
        "next-run-put-without-generation-check",
        "begin puts the following occurrence whatever has become of the schedule since",
        "    if claims[i] == ARGV[at + 2] then\n",
        "    if claims[i] ~= '' then\n",
    ),
    _occurrence(
        "skipped-run-not-marked",
        "an occurrence that is left out is counted, but its mark is not set: it is delivered",
        "skipped = skipped + 1 - redis.call('SETBIT', KEYS[key + 4 + places + x], index, 1)",
        "skipped = skipped + 1",
    ),
    _occurrence(
        "chain-not-moved-on",
        "the following occurrence is put, but the schedule still says that the old one is next",
        "  in_parts(moved, function(low, high) redis.call('HSET', next_key, unpack(moved, low, high)) end)\n",
        "",
    ),
    _occurrence(
        "next-run-not-put-at-begin",
        "begin moves the chain on and forgets to put the following occurrence: a call of its own does that, later",
        "    if not known[i - low + 1] then\n",
        "    if known[i - low + 1] then\n",
    ),
    Mutation(
        "edit-leaves-the-planned-run",
        "an edit does not mark the planned occurrence as cancelled: an owner that has read it begins it",
        (Rewrite("schedule_put", "  redis.call('SETBIT', KEYS[10], old_index, 1)\n", ""),),
    ),
)
