"""Reasons why no live worker can run a task."""

import pytest

from mainspring.model.workers import WorkerInfo, why_no_worker

MANY = WorkerInfo(id="w", queues={f"q{n}": 1 for n in range(11)})
MAIL = WorkerInfo(id="m", queues={"mail": 1}, targets=("queue:mail/send", "command:backup"))


@pytest.mark.parametrize(
    ("target", "queue", "workers", "text"),
    [
        ("queue:mail/send", None, [MAIL, MANY], None),
        ("command:backup", None, [MAIL], None),
        ("command:backup", "commands", [MAIL], "no worker serves queue commands, only mail"),
        ("command:x", None, [MAIL], "no worker knows command:x"),
        ("queue:mail/send", None, [], "no worker is running; start one: mainspring worker"),
        ("https://example.com/", None, [], None),
        ("queue:mial/send", None, [MAIL], "no worker serves queue mial, only mail; did you mean mail?"),
        ("queue:zzz/send", None, [MANY], "no worker serves queue zzz, only q0, q1, q10, q2, q3, q4, q5, q6 and 3 more"),
    ],
)
def test_the_reason_names_the_queue_and_those_that_are_served(
    target: str, queue: str | None, workers: list[WorkerInfo], text: str | None
) -> None:
    assert why_no_worker(target, queue, workers, lambda _: True) == text


def test_names_that_the_caller_may_not_learn_are_left_out_and_change_no_reason() -> None:
    assert why_no_worker("queue:mial/send", None, [MAIL], lambda _: False) == "no worker serves queue mial"
    assert (
        why_no_worker("queue:mail/snd", None, [MAIL], lambda _: False) == "no worker of queue mail knows queue:mail/snd"
    )
    assert why_no_worker("queue:mail/send", None, [MAIL], lambda _: False) is None
