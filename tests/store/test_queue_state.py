"""Queues: their names, places in them, and the word of workers, byte for byte."""

import json
from typing import Any

import pytest

from mainspring.model.delivery import DONE, Dead, Done, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.job import JobCancelled
from mainspring.model.run import Verdict
from mainspring.model.targets.names import check_queue, queue_of
from mainspring.store.job_queue import decode_ack, encode_ack
from mainspring.store.keys import Address, Keyspace, Slice
from mainspring.store.queue_state import Depth, Queued
from tests.support.paths import ROOT

VECTORS = json.loads((ROOT / "docs" / "wire-vectors.json").read_text())["queues"]


@pytest.mark.parametrize("name", ["mail", "a", "A.b_c-9", "x" * 64])
def test_names_of_queues(name: str) -> None:
    assert check_queue(name) == name
    assert queue_of(f"queue:{name}/send") == name
    assert queue_of(f"queue:{name}") == name


@pytest.mark.parametrize("name", ["", "a b", "ä", "a:b", "x" * 65, "a\n", None, 7])
def test_an_invalid_name_of_a_queue_is_refused(name: object) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 64 of"):
        check_queue(name)


def test_commands_have_a_queue_unless_they_are_given_another() -> None:
    assert queue_of("command:backup") == "commands"
    assert queue_of("command:backup", {"report": "reports"}) == "commands"
    assert queue_of("command:report", {"report": "reports"}) == "reports"
    with pytest.raises(InvalidInput):
        queue_of("command:report", {"report": "no queue"})


def test_keys_are_spelled_as_documented() -> None:
    keys = Keyspace("main", 1).partitions[0]
    spelled = {
        "stream": keys.queue("mail"),
        "queued": keys.queued,
        "queues": keys.queues,
        "acks": keys.acks,
        "work": keys.work,
        "result": keys.result(bytes(range(16))),
    }
    assert spelled == VECTORS["keys"]


@pytest.mark.parametrize("vector", VECTORS["places"], ids=lambda one: one["about"])
def test_places_are_read_as_documented(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["hex"])
    place = Queued.parse(raw)
    address = Address(0, Slice(1000, 1_800_000_000_000), 7, 3)
    assert place.raw == raw
    assert Address.unpack(0, place.address) == address
    assert (place.entry, place.queue) == (vector["entry"].encode(), vector["queue"])
    assert (place.worker, place.since_ms) == (vector["worker"], vector["since_ms"])
    assert place.cancelling == vector["cancelling"]


@pytest.mark.parametrize(
    ("outcome", "raw", "verdict", "traceback"),
    [
        (DONE, b"d", Verdict("done"), ""),
        (JobCancelled(), b"c", Verdict("cancelled", "cancelled while it ran"), ""),
        (Retry("busy", after_ms=500), b"r\x94\xa4busy\xcd\x01\xf4\xc2\xa0", Verdict("retry", "busy", 500), ""),
        (
            Retry("not yet", after_ms=1, untried=True),
            b"r\x94\xa7not yet\x01\xc3\xa0",
            Verdict("retry", "not yet", 1, counted=False),
            "",
        ),
        (Dead("never"), b"x\x94\xa5never\xc0\xc2\xa0", Verdict("dead", "never"), ""),
        (Dead("never", traceback="line 1"), b"x\x94\xa5never\xc0\xc2\xa6line 1", Verdict("dead", "never"), "line 1"),
    ],
)
def test_an_owner_reads_the_verdict_that_a_worker_wrote(
    outcome: Done | Retry | Dead | JobCancelled, raw: bytes, verdict: Verdict, traceback: str
) -> None:
    assert encode_ack(outcome) == raw
    assert decode_ack(raw) == (verdict, traceback)


def test_an_unreadable_answer_of_a_worker_ends_the_task_and_is_shown() -> None:
    verdict, _ = decode_ack(b"?what")
    assert verdict.end == "dead"
    assert "?what" in verdict.reason


def test_depths_add_up() -> None:
    assert Depth(1, 2, 30).plus(Depth(3, 4, 20)) == Depth(4, 6, 20)
    assert Depth(1, 2).plus(Depth(0, 0, 5)) == Depth(1, 2, 5)
    assert Depth().plus(Depth()) == Depth()
