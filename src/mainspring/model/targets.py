"""Where a task goes."""

from functools import lru_cache
from typing import Final

from .errors import InvalidInput
from .limits import MAX_NAME_BYTES
from .queues import queue_of
from .weburl import parse_web_url

SCHEMES: Final = frozenset({"kafka", "http", "https", "queue", "command", "log", "null", "target"})
_NEEDS_REST: Final = SCHEMES - {"log", "null"}


def check_target(target: object) -> str:
    """Return the target's scheme, or refuse it with the reason."""
    if not isinstance(target, str):
        raise InvalidInput(f"target is a {type(target).__name__}; give a text such as 'kafka:ticks'")
    return _scheme_of(target)


@lru_cache(maxsize=4096)
def _scheme_of(target: str) -> str:
    scheme, colon, rest = target.partition(":")
    if not colon or scheme not in SCHEMES:
        known = ", ".join(sorted(f"{name}:" for name in SCHEMES))
        raise InvalidInput(f"target {target[:80]!r} has no known scheme; it must start with one of {known}")
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        raise InvalidInput("target is not valid Unicode (a lone surrogate); give plain text") from None
    if size > MAX_NAME_BYTES and scheme not in ("http", "https"):
        raise InvalidInput(f"target is longer than {MAX_NAME_BYTES} bytes")
    if len(target) > 8192:
        raise InvalidInput("target is longer than 8192 characters")
    if scheme in _NEEDS_REST and not rest.strip("/"):
        raise InvalidInput(f"target {target!r} names nothing after '{scheme}:'")
    if scheme in ("http", "https"):
        parse_web_url(target)
    if scheme == "queue":
        queue_of(target)
    return scheme


@lru_cache(maxsize=4096)
def receiver_of(target: str) -> str:
    """Who has to cope with the task: the host of a webhook, the queue of a handler, else the target itself."""
    scheme, _, rest = target.partition(":")
    if scheme in ("http", "https"):
        try:
            url = parse_web_url(target)
        except InvalidInput:
            return target[:80]
        return f"{url.scheme}://{url.authority}"
    return f"queue:{rest.partition('/')[0]}" if scheme == "queue" else target


def shown_target(target: str) -> str:
    """For logs: the query of a web address often holds keys."""
    return target.partition("?")[0] + "?…" if target.startswith("http") and "?" in target else target
