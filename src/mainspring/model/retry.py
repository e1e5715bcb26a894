"""When a failed delivery is tried again: a policy, and what it says of one failure.

How policies are written down is in `retry_text.py`, how long one task may take at worst in `worst_case.py`, which
policy applies to a task in `policies.py`.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from .errors import InvalidInput
from .outcome import Dead, Retry
from .retry_rule import Rule, rule_for
from .times import delay_ms

Jitter = str
"""`full`, `equal`, `none`, or a duration such as `500ms` of which up to all is added to each wait."""

MAX_ATTEMPTS: Final = 10_000
MAX_WAIT_MS: Final = 366 * 86_400_000
MAX_RULES: Final = 32
_WORDS: Final = ("full", "equal", "none")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: after the n-th failure wait up to `base_ms * factor**(n - 1)`, never over `cap_ms`."""

    max_attempts: int = 6
    """The first one included."""
    base_ms: int = 1_000
    factor: float = 2.0
    cap_ms: int = 300_000
    jitter: Jitter = "equal"
    max_age_ms: int | None = None
    """No attempt begins later than this after the original due time."""
    on: tuple[Rule, ...] = ()
    """What certain failures mean; of several rules that fit the narrowest counts."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise InvalidInput(f"max_attempts is {self.max_attempts}; it must be at least 1, at most {MAX_ATTEMPTS}")
        if not 1 <= self.base_ms <= self.cap_ms <= MAX_WAIT_MS:
            raise InvalidInput(
                f"base_ms {self.base_ms} and cap_ms {self.cap_ms}: need 1 <= base_ms <= cap_ms, and a year at most"
            )
        if not 1.0 <= self.factor <= 100.0:
            raise InvalidInput(f"factor is {self.factor}; it must lie between 1 and 100")
        added_ms(self.jitter)
        if self.max_age_ms is not None and not 1 <= self.max_age_ms <= MAX_WAIT_MS:
            raise InvalidInput(f"max_age_ms is {self.max_age_ms}; it must be at least 1, and a year at most")
        if len(self.on) > MAX_RULES or len({rule.when for rule in self.on}) < len(self.on):
            raise InvalidInput(f"on: at most {MAX_RULES} rules, each for something else")

    @classmethod
    def of(cls, **settings: Any) -> "RetryPolicy":
        """As settings have it: `RetryPolicy.of(max_attempts=5, base="200ms", on={"429": "retry 30s", "4xx": "dead"})`.

        `retries=5` may stand for `max_attempts=6`.
        """
        from .retry_text import read_policy

        return read_policy(settings)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "RetryPolicy":
        """From a table such as `[targets.<name>.retry]`."""
        from .retry_text import read_policy

        return read_policy(settings)

    @classmethod
    def parse(cls, text: str) -> "RetryPolicy":
        """From one line: `5 base=200ms jitter=full 429=retry:30s 4xx=dead`."""
        from .retry_text import parse_policy

        return parse_policy(text)

    def __str__(self) -> str:
        """The line from which `parse` makes this policy again; what has its default is left out."""
        from .retry_text import policy_text

        return policy_text(self)

    def backoff_ms(self, failed_attempts: int) -> int:
        """The wait after the n-th failure before jitter."""
        # The exponent is bounded: 2.0 ** 5000 overflows a float.
        return int(min(self.cap_ms, self.base_ms * self.factor ** min(failed_attempts - 1, 64)))

    def wait_ms(self, failed_attempts: int) -> int | None:
        """How long to wait after the n-th failure; None when there is no further attempt."""
        if failed_attempts >= self.max_attempts:
            return None
        whole = self.backoff_ms(failed_attempts)
        if self.jitter == "full":
            return max(1, int(random.uniform(0, whole)))
        if self.jitter == "equal":
            return max(1, int(whole / 2 + random.uniform(0, whole / 2)))
        return whole + random.randint(0, added_ms(self.jitter))

    def worst_case_ms(self, timeout_ms: int = 0) -> int:
        """How long one task may take when every attempt takes `timeout_ms` and fails, and every wait is the longest."""
        from .worst_case import worst_case

        return worst_case(self, timeout_ms).ms

    def check_against(self, interval_ms: int, timeout_ms: int = 0) -> None:
        """Refuse a policy by which a run may last longer than until the next one is due."""
        from .worst_case import check_against

        check_against(self, interval_ms, timeout_ms)


@lru_cache(maxsize=1024)
def added_ms(jitter: Jitter) -> int:
    """What jitter adds to a wait at most; refuses what is no jitter."""
    if jitter in _WORDS:
        return 0
    if jitter[:1].isdigit() and (ms := delay_ms(jitter, field="jitter")) <= MAX_WAIT_MS:
        return ms
    raise InvalidInput(f"jitter is {jitter!r}; use 'full', 'equal', 'none', or a duration to add such as '500ms'")


class Wait(NamedTuple):
    """Another attempt, so much later."""

    ms: int


class GiveUp(NamedTuple):
    """No further attempt: the task goes to the dead letters."""

    reason: str


def in_time_ms(wait_ms: int, expires_ms: int | None, now_ms: int) -> int:
    """A wait, but not beyond the moment at which the task has expired: it is recorded as such then, and those behind it
    in its lane wait no longer."""
    return wait_ms if expires_ms is None else min(wait_ms, max(0, expires_ms + 1 - now_ms))


def decide(
    policy: RetryPolicy,
    attempt: int,
    outcome: Retry | Dead,
    original_due_ms: int,
    now_ms: int,
    expires_ms: int | None = None,
) -> Wait | GiveUp:
    """What becomes of a task whose `attempt`-th attempt failed.

    A time that the target named (`Retry(after_ms=…)`) goes before the wait of a rule, and that before the policy's. An
    `untried` outcome is no failed attempt, and is not to be asked about here.
    """
    rule = rule_for(policy.on, outcome)
    if rule.dead if rule is not None else isinstance(outcome, Dead):
        return GiveUp(outcome.reason)
    wait_ms = policy.wait_ms(attempt)
    if wait_ms is None:
        return GiveUp(outcome.reason)
    if isinstance(outcome, Retry) and outcome.after_ms is not None:
        wait_ms = outcome.after_ms
    elif rule is not None and rule.wait_ms is not None:
        wait_ms = rule.wait_ms
    if policy.max_age_ms is not None and now_ms + wait_ms > original_due_ms + policy.max_age_ms:
        return GiveUp(f"{outcome.reason} (no further attempt: it would come later than max_age allows)")
    return Wait(in_time_ms(wait_ms, expires_ms, now_ms))
