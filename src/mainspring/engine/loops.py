"""The loops of an engine's roles, made before the roles so that each role can wake the others."""

from collections.abc import Iterator

from ..roles import Loop


class Loops:
    """One loop for each role. A loop gets its step when it is started; until then `wake` has no effect."""

    def __init__(self, lease_s: float = 5.0) -> None:
        # Retry soon after a failure: it may concern one server of many, and the others have work.
        self.keep = Loop("keeper", max_backoff_s=min(2.0, lease_s / 4))
        self.read = Loop("lookahead", max_backoff_s=0.25)
        self.fire = Loop("dispatcher", max_backoff_s=0.05)
        self.plan = Loop("planner", max_backoff_s=0.5)
        self.sweep = Loop("sweeper")
        self.pause = Loop("pauses", max_backoff_s=0.5)
        self.permit = Loop("permits", max_backoff_s=0.5)
        self.notify = Loop("notifier")

    def __iter__(self) -> Iterator[Loop]:
        return iter((self.keep, self.read, self.fire, self.plan, self.sweep, self.pause, self.permit, self.notify))
