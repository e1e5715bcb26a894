"""When a failed delivery is tried again."""

import random
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidInput

Jitter = Literal["full", "equal", "none"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: attempt n waits up to `base_ms * factor**(n - 1)`, never over `cap_ms`."""

    max_attempts: int = 6
    base_ms: int = 1_000
    factor: float = 2.0
    cap_ms: int = 300_000
    jitter: Jitter = "equal"

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidInput(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.base_ms < 1 or self.cap_ms < self.base_ms:
            raise InvalidInput(f"base_ms {self.base_ms} and cap_ms {self.cap_ms}: need 1 <= base_ms <= cap_ms")
        if self.jitter not in ("full", "equal", "none"):
            raise InvalidInput(f"jitter is {self.jitter!r}; use 'full', 'equal' or 'none'")
        if not 1.0 <= self.factor <= 100.0:
            raise InvalidInput(f"factor is {self.factor}; it must lie between 1 and 100")

    def wait_ms(self, failed_attempts: int) -> int | None:
        """How long to wait after the n-th failure; None when there is no further attempt."""
        if failed_attempts >= self.max_attempts:
            return None
        # The exponent is bounded: 2.0 ** 5000 overflows a float.
        whole = min(self.cap_ms, self.base_ms * self.factor ** min(failed_attempts - 1, 64))
        if self.jitter == "full":
            return max(1, int(random.uniform(0, whole)))
        if self.jitter == "equal":
            return max(1, int(whole / 2 + random.uniform(0, whole / 2)))
        return int(whole)
