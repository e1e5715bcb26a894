"""What a worker can run: handlers and commands look alike to it."""

from collections.abc import Callable
from typing import Any

from ..model.queues import check_queue
from ..model.result import Output
from ..model.retry import RetryPolicy
from .context import Context


class Work:
    """One kind of task: the function, where its tasks come from, and the rules for its runs."""

    is_async = False
    obeys = False
    """It ends by itself soon after its context says `cancelled`, so its end is waited for."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        queue: str,
        target: str,
        retry: RetryPolicy | None,
        timeout_ms: int | None,
        result_ttl_ms: int,
    ) -> None:
        self.function = function
        self.name = name
        self.queue = check_queue(queue)
        self.target = target
        self.retry = retry
        """None: the worker's own policy."""
        self.timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self.result_ttl_ms = result_ttl_ms

    def read(self, context: Context) -> dict[str, Any]:
        """The arguments of a call; WrongArguments where the payload does not fit."""
        raise NotImplementedError


class Outputs(Exception):
    """Carries what a failed command wrote beside why it failed."""

    def __init__(self, reason: str, output: Output, brief: str | None = None) -> None:
        super().__init__(reason)
        self.output = output
        self.brief = brief
        """The reason without what the command wrote, for logs."""
