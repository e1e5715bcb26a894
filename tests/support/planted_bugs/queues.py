"""Planted bugs between owners and workers: hand-offs, claims, and the word that a lane waits for."""

from typing import Any, Final

from mainspring.engine.dispatcher import WorkerAcks
from mainspring.engine.partition import CommitCall

from .kinds import Mutation, Patch, Rewrite


def _at_once(settle: Any) -> Any:
    def settle_all(self: WorkerAcks, call: CommitCall, answers: dict[int, bytes]) -> None:
        settle(self, call, answers)
        for flight in [flight for groups in call.handed.values() for group in groups for flight in group.flights]:
            if call.partition.waits_for_workers:
                self._ended(call.partition, flight.address, None, b"d")

    return settle_all


QUEUES: Final = (
    Mutation(
        "finish-without-the-claim",
        "whoever has run a task may end it, also one whose lease was over long ago",
        (Rewrite("queue_finish", "    else out[#out + 1] = i end\n", "    end\n"),),
    ),
    Mutation(
        "reclaim-without-a-new-claim",
        "what is taken over keeps the claim of the worker that was silent",
        (Rewrite("queue_reclaim", "spread(places, #places, 'HSET', queued)\n", ""),),
    ),
    Mutation(
        "handed-off-again-at-a-takeover",
        "a new owner adds tasks of lanes to their queue although they are there",
        (Rewrite("commit", "HMGET', KEYS[queue_key + 1], unpack(idhs)", "HMGET', KEYS[2], unpack(idhs)"),),
    ),
    Mutation(
        "lane-goes-on-at-the-hand-off",
        "a task of a lane is done when it is in its queue, not when its worker says so",
        (Patch(WorkerAcks, "handed_off", _at_once),),
    ),
    Mutation(
        "hand-off-without-done-bits",
        "a task that was handed off stays open in its slice",
        (
            Rewrite(
                "commit",
                "  if ARGV[at + 5] == '-1' then redis.call('SET', KEYS[10",
                "  if tasks > 0 then at = 0 elseif ARGV[at + 5] == '-1' then redis.call('SET', KEYS[10",
            ),
        ),
    ),
    Mutation(
        "no-lock-on-the-id",
        "a task is handed off while another one of its id is in a queue",
        (Rewrite("commit", "      elseif in_queues[i] or seen[idh] then\n", "      elseif seen[idh] then\n"),),
    ),
    Mutation(
        "queued-id-forgotten",
        "the id of a task that waits in its queue is forgotten when the dedupe window has passed",
        (Rewrite("sweep", "    if not in_queue and not same_incarnation(", "    if not same_incarnation("),),
    ),
)
