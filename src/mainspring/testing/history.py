"""The proof that what happened was allowed to happen.

    history = History("main")
    history.accepted("order-42", due_ms, at_us, lane="user-7")
    history.begun("order-42", delivery.idempotency_key, 1, at_us, partition=3, token=token)
    …
    assert check(history) == []

`events` says what each event means and whose clock it carries.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from .events import (
    UNSURE,
    Accepted,
    Begun,
    Cancelled,
    Ending,
    Event,
    Fault,
    Finished,
    Healed,
    History,
    Left,
    Stall,
    Wrote,
)
from .fault_windows import Faults
from .lane_rule import lanes_broken
from .lives import Life, Lives, lives_of
from .promptness import Wait, waits

__all__ = [
    "UNSURE",
    "Accepted",
    "Begun",
    "Cancelled",
    "Ending",
    "Event",
    "Fault",
    "Finished",
    "Healed",
    "History",
    "Left",
    "Rule",
    "Stall",
    "Violation",
    "Wrote",
    "check",
    "slowest",
    "unpromised",
]

Rule = Literal[
    "early", "late", "lost", "phantom", "cancelled", "superseded", "expired", "fenced",
    "lane", "repeated", "excess", "key", "books",
]  # fmt: skip


class Violation(NamedTuple):
    """An invariant that did not hold."""

    rule: Rule
    task: str
    at_us: int
    message: str


# At one instant: what ends comes before what begins, and what was accepted then need not be known to it.
_ORDER: Final[dict[type, int]] = {
    Finished: 0, Cancelled: 1, Begun: 2, Accepted: 3, Wrote: 4, Fault: 5, Healed: 6, Stall: 7, Left: 8
}  # fmt: skip


def check(history: History) -> list[Violation]:
    """Every way in which the history breaks an invariant of DESIGN; empty for a good one."""
    events = _in_order(history)
    lives, clashes = lives_of(events)
    found = [Violation("key", event.task, event.at_us, text) for event, text in clashes]
    faults = Faults(events)
    found += _phantoms(events, lives)
    for key, life in lives.items():
        found += _out_of_time(life)
        found += _after_the_end(life, faults)
        found += _repeats(key, life, faults)
    found += _excess(events, lives, faults)
    found += (lost for lost, promised in _lost(events, lives, faults) if promised)
    found += _late(waits(events, lives, faults))
    found += _fenced(events, faults)
    found += _sent_too_late(events)
    found += _lanes(events, lives, faults)
    return found


def unpromised(history: History) -> list[Violation]:
    """Tasks that are gone, at a durability that does not protect from what happened. Reported, not hidden."""
    events = _in_order(history)
    lives, _ = lives_of(events)
    return [lost for lost, promised in _lost(events, lives, Faults(events)) if not promised]


def slowest(history: History) -> Wait | None:
    """Of all that was due after healing, what took longest to be delivered; what never was comes first."""
    events = _in_order(history)
    lives, _ = lives_of(events)
    return max(waits(events, lives, Faults(events)), key=lambda wait: wait.rank, default=None)


def _in_order(history: History) -> list[Event]:
    return sorted(history.events, key=lambda event: (event.at_us, _ORDER[type(event)]))


def _phantoms(events: list[Event], lives: Lives) -> Iterator[Violation]:
    """Delivered, but nobody put it; or put by somebody, and delivered with a key of another."""
    tasks = {life.accepted.task for life in lives.values()}
    for event in events:
        if not isinstance(event, Begun):
            continue
        life = lives.get(event.key)
        if event.task not in tasks:
            yield Violation("phantom", event.task, event.at_us, "was delivered and never accepted")
        elif life is None or life.accepted.task != event.task:
            yield Violation("key", event.task, event.at_us, f"was delivered with the key {event.key}")


def _out_of_time(life: Life) -> Iterator[Violation]:
    due_us, expires_ms = life.accepted.due_ms * 1000, life.accepted.expires_ms
    for begun in life.begins:
        if begun.at_us < due_us:
            text = f"began {due_us - begun.at_us} us before its time"
            yield Violation("early", begun.task, begun.at_us, text)
        if expires_ms is not None and begun.at_us // 1000 > expires_ms:
            text = f"began {begun.at_us // 1000 - expires_ms} ms after it had expired"
            yield Violation("expired", begun.task, begun.at_us, text)


def _after_the_end(life: Life, faults: Faults) -> Iterator[Violation]:
    """Begun although it was cancelled or replaced. Attempts that failed before that are in order."""
    superseded_us = life.superseded.at_us if life.superseded is not None else None
    ends: tuple[tuple[Rule, int | None], ...] = (("cancelled", life.cancelled), ("superseded", superseded_us))
    for rule, ended_us in ends:
        if ended_us is None or life.accepted.twice or life.anew_since(ended_us) or faults.lossy(ended_us, ended_us):
            continue
        for begun in life.begins:
            if begun.at_us > ended_us or begun.attempt not in life.retried:
                text = f"began at {begun.at_us} us, attempt {begun.attempt}; the answer came at {ended_us} us"
                yield Violation(rule, begun.task, begun.at_us, text)


def _repeats(key: str, life: Life, faults: Faults) -> Iterator[Violation]:
    """The same attempt twice, or one after success: only where something failed in between for who had it first."""
    for former, begun in zip(life.begins, life.begins[1:], strict=False):
        failed = begun.attempt > former.attempt and former.attempt in life.retried
        if failed or life.accepted.twice or life.anew_since(former.at_us):
            continue
        # Of workers the late one may be the one that failed: it stood still before it began.
        failing = (former.node,) if begun.token else (former.node, begun.node)
        if not any(faults.between(former.at_us, begun.at_us, node) for node in failing):
            text = f"{key}: attempt {begun.attempt} after attempt {former.attempt} with no fault in between"
            yield Violation("repeated", begun.task, begun.at_us, text)


_Reign = tuple[int, str]
"""Partition and token: one owner's time."""


def _excess(events: list[Event], lives: Lives, faults: Faults) -> Iterator[Violation]:
    """Of what an owner delivered, only what it had not settled on the server may be delivered again."""
    settled: Counter[_Reign] = Counter()
    for event in events:
        if isinstance(event, Wrote):
            settled[event.partition, event.token] += event.settled
    if not settled:
        return  # nobody wrote down what the servers were told
    delivered: Counter[_Reign] = Counter()
    repeated: defaultdict[_Reign, list[Begun]] = defaultdict(list)
    for life in lives.values():
        before: dict[int, Begun] = {}
        for begun in life.begins:
            former = before.get(begun.attempt)
            before[begun.attempt] = begun
            delivered[begun.partition, begun.token] += 1
            if former is None or life.accepted.twice or life.anew_since(former.at_us):
                continue
            if not faults.lossy(former.at_us, begun.at_us):
                repeated[former.partition, former.token].append(begun)
    for reign, again in repeated.items():
        in_flight = delivered[reign] - settled[reign]
        if len(again) > in_flight:
            text = (
                f"partition {reign[0]}: {len(again)} delivered again after {reign[1]} had at most {in_flight} under way"
            )
            yield Violation("excess", again[-1].task, again[-1].at_us, text)


_ALIVE: Final = frozenset(
    {"pending", "fired", "queued", "running", "done", "cancelled", "replaced", "dead", "finished"}
)
_SAID_DONE: Final = frozenset({"done", "finished"})


def _lost(events: list[Event], lives: Lives, faults: Faults) -> Iterator[tuple[Violation, bool]]:
    """What is gone, and whether it was promised not to be."""
    left = {event.task: event.state for event in events if isinstance(event, Left)}
    # Where targets tell what they got, the store's word that a task is done is not enough.
    told = any(isinstance(event, Finished) and not event.token for event in events)
    alive = _ALIVE - _SAID_DONE if told else _ALIVE
    lived = Counter(life.accepted.task for life in lives.values())
    for life in lives.values():
        accepted, state, next_ = life.accepted, left.get(life.accepted.task), life.superseded
        # A move that the servers forgot leaves the task where it was.
        replaced = next_ is not None and (lives[next_.key].ended or not faults.lossy(next_.at_us, next_.at_us))
        if accepted.sure and not life.ended and not replaced and state not in alive:
            heard = "never heard of" if state not in _SAID_DONE else f"{state} for the store, but no target had it"
            text = f"due {accepted.due_ms} ms, level {accepted.level}, and {heard}"
            yield Violation("lost", accepted.task, accepted.at_us, text), not faults.forgave(accepted)
        elif life.died and state in _SAID_DONE and lived[accepted.task] == 1 and not life.again:
            yield Violation("lost", accepted.task, accepted.at_us, "died, and left no dead letter"), True


def _late(waited: Iterator[Wait]) -> Iterator[Violation]:
    """Not delivered in good time although everything had been in order for long enough."""
    for wait in waited:
        if wait.spent_us is None or wait.spent_us > wait.allowed_us:
            how = "never" if wait.spent_us is None else f"{(wait.spent_us - wait.allowed_us) // 1000} ms too late"
            text = f"due {wait.accepted.due_ms} ms, delivered {how}"
            yield Violation("late", wait.accepted.task, wait.since_us + wait.allowed_us, text)


def _fenced(events: list[Event], faults: Faults) -> Iterator[Violation]:
    """Epochs of the writes of a partition only grow, and one epoch is one owner."""
    newest: dict[int, tuple[int, str, int]] = {}
    for event in events:
        if not isinstance(event, (Begun, Finished, Wrote)) or not event.token:
            continue
        epoch = _epoch(event.token)
        highest, token, since_us = newest.get(event.partition, (-1, "", 0))
        if epoch > highest:
            newest[event.partition] = (epoch, event.token, event.at_us)
        elif event.token != token and event.at_us > since_us and not faults.lossy(since_us, event.at_us):
            text = f"partition {event.partition}: a write of {event.token} while {token} has it"
            task = event.what if isinstance(event, Wrote) else event.task
            yield Violation("fenced", task, event.at_us, text)


def _sent_too_late(events: list[Event]) -> Iterator[Violation]:
    """Handed to a target by an owner after its successor had written: it did not look at its lease any more."""
    since: dict[_Reign, int] = {}
    for event in events:
        if isinstance(event, (Begun, Wrote)) and event.token:
            since.setdefault((event.partition, event.token), event.at_us)
    for event in events:
        if not isinstance(event, Begun) or not event.sent_us:
            continue
        for (partition, token), since_us in since.items():
            if partition == event.partition and _epoch(token) > _epoch(event.token) and since_us < event.sent_us:
                text = f"partition {partition}: sent under {event.token} at {event.sent_us} us, {token} had it by then"
                yield Violation("fenced", event.task, event.sent_us, text)
                break


def _epoch(token: str) -> int:
    return int(token.partition(".")[0])


def _lanes(events: list[Event], lives: Lives, faults: Faults) -> Iterator[Violation]:
    """A failing head is still the head; what the servers forgot holds up nobody."""
    first = {key: life.accepted for key, life in lives.items()}
    for begun, text in lanes_broken(events, first, faults.forgave):
        yield Violation("lane", begun.task, begun.at_us, text)
