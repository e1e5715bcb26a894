"""What becomes of a lane whose head fails."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from .errors import InvalidInput
from .queues import queue_named
from .times import delay_ms

OnFailure = Literal["block", "skip", "park"]
CHOICES: Final = ("block", "skip", "park")
MAX_BLOCK_MS: Final = 3_600_000
_LONGEST_MS: Final = 366 * 86_400_000


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """`block`: the lane waits for the head's retries, up to `max_block_ms`, and is parked then. `skip`: it goes on, and
    the head is tried again among those that follow. `park`: it stands still, head first, until somebody acts."""

    on_failure: OnFailure = "block"
    max_block_ms: int = MAX_BLOCK_MS

    def __post_init__(self) -> None:
        if self.on_failure not in CHOICES:
            raise InvalidInput(f"{self.on_failure!r} is no policy of a lane; use one of {', '.join(CHOICES)}")
        if not 1_000 <= self.max_block_ms <= _LONGEST_MS:
            raise InvalidInput(f"a lane blocks for {self.max_block_ms} ms; it must lie between 1s and 366 days")

    @classmethod
    def parse(cls, text: object) -> "LanePolicy":
        """`block`, `block 10m`, `skip` or `park`."""
        if not isinstance(text, str):
            raise InvalidInput(f"expected a text such as 'block 10m', 'skip' or 'park', not {text!r}")
        word, _, longest = text.strip().partition(" ")
        if longest and word != "block":
            raise InvalidInput(f"{text!r}: only block has a longest time, as in 'block 10m'")
        block_ms = delay_ms(longest, field="the longest time of block") if longest else MAX_BLOCK_MS
        return cls(cast("OnFailure", word), block_ms)

    def __str__(self) -> str:
        return f"block {self.max_block_ms}ms" if self.on_failure == "block" else self.on_failure


def read_lane_policy(table: Mapping[str, Any]) -> LanePolicy | None:
    """The setting `lane_policy` of a named target or a queue; None where it has none."""
    if "lane_policy" not in table:
        return None
    try:
        return LanePolicy.parse(table["lane_policy"])
    except InvalidInput as error:
        raise InvalidInput(f"lane_policy: {error}") from None


class LanePolicies:
    """Which policy applies: that of the head's target, else that of its queue, else the node's."""

    def __init__(
        self,
        default: LanePolicy,
        by_target: Mapping[str, LanePolicy] | None = None,
        by_queue: Mapping[str, LanePolicy] | None = None,
        command_queues: Mapping[str, str] | None = None,
    ) -> None:
        self.default = default
        self._by_target = dict(by_target or {})
        """By targets as tasks name them, `target:<name>`."""
        self._by_queue = dict(by_queue or {})
        self._command_queues = dict(command_queues or {})

    def of(self, target: str) -> LanePolicy:
        if target in self._by_target:
            return self._by_target[target]
        queue = queue_named(target, self._command_queues)
        return self.default if queue is None else self.of_queue(queue)

    def of_queue(self, queue: str) -> LanePolicy:
        """For workers: they know the queue that a job came from, and named targets do not lead to them."""
        return self._by_queue.get(queue, self.default)
