"""What became of everything that was accepted, put together from the events of a history, in order."""

from .events import Accepted, Begun, Cancelled, Event, Finished

Clash = tuple[Accepted, str]
"""An acceptance whose key another task has, and how to say so."""


class Life:
    """Everything that is known of one acceptance."""

    __slots__ = (
        "accepted", "again", "begins", "cancelled", "died", "done_us", "doubted", "failed_us", "retried", "superseded"
    )  # fmt: skip

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.again: list[int] = []
        """When the same id was accepted for the same time once more, after it had ended."""
        self.begins: list[Begun] = []
        self.retried: set[int] = set()
        self.failed_us = 0
        """When its last attempt before it was done had failed."""
        self.done_us: int | None = None
        self.died = False
        self.cancelled: int | None = None
        self.superseded: Accepted | None = None
        self.doubted = False
        """A call that would have ended it was never answered."""

    def anew_since(self, at_us: int) -> bool:
        return bool(self.again) and self.again[-1] >= at_us

    @property
    def ended(self) -> bool:
        """By its delivery, by its caller, or nobody can say."""
        return self.done_us is not None or self.doubted or self.cancelled is not None


Lives = dict[str, Life]


def lives_of(events: list[Event]) -> tuple[Lives, list[Clash]]:
    """By key, what became of each acceptance; and those whose key belongs to another task."""
    lives: Lives = {}
    found: list[Clash] = []
    for event in events:
        if isinstance(event, Accepted):
            life = lives.get(event.key)
            if life is None:
                lives[event.key] = Life(event)
            elif life.accepted.task != event.task:
                text = f"shares its key {event.key} with {life.accepted.task}"
                found.append((event, text))
            else:
                life.again.append(event.at_us)
    for event in events:
        if isinstance(event, Accepted):
            former = lives.get(event.instead) if event.instead not in (None, event.key) else None
            if former is not None and event.sure:
                former.superseded = event
            elif former is not None:
                former.doubted = True
        elif isinstance(event, (Begun, Finished, Cancelled)) and event.key in lives:
            _add(lives[event.key], event)
    return lives, found


def _add(life: Life, event: Begun | Finished | Cancelled) -> None:
    match event:
        case Begun():
            life.begins.append(event)
        case Finished(ending="retry"):
            life.retried.add(event.attempt)
            if life.done_us is None:
                life.failed_us = event.at_us
        case Finished(ending=ending):
            life.done_us, life.died = life.done_us or event.at_us, ending == "dead"
        case Cancelled(answer="cancelled") if life.cancelled is None:
            life.cancelled = event.at_us
        case Cancelled(answer="unsure"):
            life.doubted = True
