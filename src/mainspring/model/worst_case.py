"""How long one task may take at worst: every attempt runs into its timeout, every wait is the longest."""

from itertools import groupby
from typing import NamedTuple

from .errors import InvalidInput
from .retry import RetryPolicy, added_ms


class WorstCase(NamedTuple):
    ms: int
    text: str
    """The sum, written out."""


def worst_case(policy: RetryPolicy, timeout_ms: int = 0) -> WorstCase:
    """`timeout_ms` is how long an attempt takes at most; 0 leaves the attempts out and sums up the waits.

    A time that a target names (`Retry-After`) is not known before: it can make a run longer, up to `max_age`.
    """
    if timeout_ms < 0:
        raise InvalidInput(f"the timeout is {timeout_ms} ms; it must not be negative")
    retries = policy.max_attempts - 1
    longest_rule_ms = max((rule.wait_ms or 0 for rule in policy.on), default=0)
    added = added_ms(policy.jitter)
    # A rule's wait has no jitter: whichever is longer counts.
    waits = [policy.backoff_ms(failed) for failed in range(1, policy.max_attempts)]
    plain = [wait if wait + added >= longest_rule_ms else longest_rule_ms for wait in waits]
    jittered = sum(wait + added >= longest_rule_ms for wait in waits) if added else 0
    total = policy.max_attempts * timeout_ms + sum(plain) + jittered * added
    terms = [_times(policy.max_attempts, timeout_ms)] if timeout_ms else []
    terms += [_times(len(list(run)), wait) for wait, run in groupby(plain)]
    if jittered:
        terms.append(_times(jittered, added))
    if policy.max_age_ms is not None and retries and policy.max_age_ms + timeout_ms < total:
        # No attempt begins later than that.
        total = policy.max_age_ms + timeout_ms
        terms = [f"max_age {policy.max_age_ms:,} ms", *([_times(1, timeout_ms)] if timeout_ms else [])]
    return WorstCase(total, f"{' + '.join(terms) or '0 ms'} = {total:,} ms")


def check_against(policy: RetryPolicy, interval_ms: int, timeout_ms: int = 0) -> None:
    """Refuse a policy by which a run may last longer than until the next one is due."""
    worst = worst_case(policy, timeout_ms)
    if worst.ms > interval_ms:
        sooner = "give a shorter timeout, " if timeout_ms else ""
        raise InvalidInput(
            f"one run may take {worst.text} with its retries, and the next is due after {interval_ms:,} ms;"
            f" {sooner}retry less, wait less, or run less often"
        )


def _times(count: int, ms: int) -> str:
    return f"{count} x {ms:,} ms" if count > 1 else f"{ms:,} ms"
