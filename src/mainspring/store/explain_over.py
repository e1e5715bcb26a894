"""How a task ended, and what is known of it then."""

from typing import Final

from ..model.dead import DeadLetter
from ..model.explain import UNKNOWN, Code, Explanation, span
from ..model.outcome import DROPPED, EXPIRED, EXPIRED_RUNNING
from .dead import Kept
from .ended import how_it_ended
from .find import Located, Reference
from .store import Store


async def over(store: Store, task_id: str, reference: Reference, located: Located | None) -> Explanation:
    now_ms = await store.sample_clock()
    state, kept = await how_it_ended(store, reference, located)
    if kept is not None:
        return _dead(task_id, now_ms, kept)
    body = None if located is None else located.entry.body
    code, text = _ENDS.get(state, _ENDS["unknown"])
    if state == "finished" and reference.address is None:
        # A cancelled task leaves no mark in the index.
        code, text = _ENDS["done"]
    return Explanation(
        id=task_id,
        code=code,
        text=text,
        state=state,
        now_ms=now_ms,
        due_ms=None if located is None else located.entry.due_ms,
        partition=None if located is None else located.address.partition,
        target=None if body is None else body.target,
        lane=None if body is None else body.lane,
        attempt=None if body is None else body.attempt,
        errors=() if body is None else body.errors,
    )


_ENDS: Final[dict[str, tuple[Code, str]]] = {
    "done": ("done", "It was delivered."),
    "finished": ("finished", "It is over and its slice is gone: it was delivered, unless it was cancelled before."),
    "cancelled": ("cancelled", "It was cancelled and will not fire."),
    "replaced": ("replaced", "It was moved many times since this id was given out; ask with the id of the last move."),
    "dead": ("dead", "It was given up; its dead letter has been replayed or dropped in this very moment."),
    "unknown": ("unknown", UNKNOWN),
}


def _dead(task_id: str, now_ms: int, kept: Kept) -> Explanation:
    letter = kept.letter
    code, text = _how_it_died(letter, now_ms)
    return Explanation(
        id=task_id,
        code=code,
        text=text,
        state="dead",
        now_ms=now_ms,
        due_ms=letter.due_ms,
        partition=kept.place[1],
        target=letter.target or None,
        lane=letter.lane,
        attempt=letter.attempts,
        errors=letter.errors,
        reason=letter.reason,
        died_ms=letter.died_ms,
    )


def _how_it_died(letter: DeadLetter, now_ms: int) -> tuple[Code, str]:
    ago = f"{span(max(0, now_ms - letter.died_ms))} ago"
    if letter.reason == EXPIRED_RUNNING:
        return "expired", f"A worker was running it when it expired, {ago}; replay it to run it once more."
    if letter.reason == EXPIRED:
        return (
            "expired",
            f"It was not delivered in time and was recorded as expired {ago}; replay it to deliver it late.",
        )
    if letter.reason.startswith(DROPPED):
        return "dead", f"It was {letter.reason}, {ago}; replay it to deliver it all the same."
    after = f"after {letter.attempts} attempt{'s' if letter.attempts != 1 else ''}"
    return "dead", f"It was given up {ago} {after}: {letter.reason}; when the cause is gone, replay it."
