"""Which retry policy applies to a task: its own, else its target's, else the default of the node."""

from collections.abc import Mapping

from .delivery import Body
from .errors import InvalidInput
from .retry import RetryPolicy


class Policies:
    """The nearest policy wins, as a whole: what it leaves out has its default, not what a farther one says."""

    def __init__(
        self,
        default: RetryPolicy,
        by_target: Mapping[str, RetryPolicy] | None = None,
        by_queue: Mapping[str, RetryPolicy] | None = None,
    ) -> None:
        self.default = default
        self._by_target = dict(by_target or {})
        """By targets as tasks name them, `target:<name>`."""
        self._by_queue = dict(by_queue or {})

    def of(self, body: Body, nearer: RetryPolicy | None = None, queue: str | None = None) -> RetryPolicy:
        """`nearer` is what the code at hand says, the policy of a handler. A task's own goes before it."""
        if body.retry is not None:
            try:
                return RetryPolicy.parse(body.retry)
            except InvalidInput:
                # Written by a newer version, or by hand: the task is not lost for it, the next policy counts.
                pass
        if nearer is None and queue is not None:
            nearer = self._by_queue.get(queue)
        return nearer or self._by_target.get(body.target, self.default)
