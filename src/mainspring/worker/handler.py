"""A Python function that workers run."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ..model.errors import InvalidInput
from ..model.retry import RetryPolicy
from ..model.times import Delay, delay_ms, timeout_ms
from .arguments import CODECS, Arguments, Codec
from .context import Context
from .work import Work

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Handler(Work):
    """A function with its queue and its rules. Coroutine functions run on the loop, others in threads."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        queue: str = "default",
        name: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | None = None,
        timeout: Delay | None = None,
        result_ttl: Delay = "0s",
        codec: Codec = "json",
    ) -> None:
        called: str = name if name is not None else getattr(function, "__name__", "")
        if not _NAME.fullmatch(called):
            raise InvalidInput(f"the name of a handler is {called!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(f"handler {called!r} is a generator: nobody would walk over it; return, do not yield")
        super().__init__(
            function,
            name=called,
            queue=queue,
            target=f"queue:{queue}/{called}",
            retry=policy_of(retries, retry),
            timeout_ms=None if timeout is None else timeout_ms(timeout),
            result_ttl_ms=delay_ms(result_ttl, field="result_ttl"),
        )
        if codec not in CODECS:
            raise InvalidInput(f"codec is {codec!r}; use one of {', '.join(CODECS)}")
        self.codec: Codec = codec
        self.is_async = inspect.iscoroutinefunction(function)
        self.arguments = Arguments(function, f"{queue}/{called}")

    def read(self, context: Context) -> dict[str, Any]:
        body = context.job.body
        found = self.arguments.read(body.payload, raw=body.raw)
        if self.arguments.context_name is not None:
            found[self.arguments.context_name] = context
        return found


def policy_of(retries: int | None, retry: RetryPolicy | None) -> RetryPolicy | None:
    """`retries` alone means the usual waits, and so many further attempts."""
    if retries is None:
        return retry
    if type(retries) is not int or retries < 0:
        raise InvalidInput(f"retries is {retries!r}; give 0 or a larger whole number")
    return replace(retry or RetryPolicy(), max_attempts=retries + 1)
