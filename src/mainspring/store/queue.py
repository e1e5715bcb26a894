"""Queues as workers see them: take work, keep it, end it, put it back. See docs/queues.md.

jobs = await queue.take(store, worker, {partition: {"mail": 10}})
answers = await queue.finish(store, [End(job, DONE) for job in jobs])
"""

from .queue_end import Answer, finish
from .queue_state import Depth, depths
from .queue_take import Asks, Beaten, Died, beat, give_back, left_behind, reclaim, take

__all__ = [
    "Answer",
    "Asks",
    "Beaten",
    "Depth",
    "Died",
    "beat",
    "depths",
    "finish",
    "give_back",
    "left_behind",
    "reclaim",
    "take",
]
