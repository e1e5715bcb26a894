"""Replays dead letters: each becomes a task again in the same step of the server in which its letter goes."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..model.dead import DeadLetter, Replayed
from ..model.delivery import Body
from ..model.errors import Conflict, StoreError, Unavailable
from ..model.ids import GENERATED
from .dead import Kept
from .index import look_up_packed
from .intake import Intake
from .keys import ADDRESS_BYTES, Address, Slice, address_prefix
from .named import Patience
from .put import WAKE_MS, Widths, fresh_score
from .query import look_at
from .queue_state import find_queued
from .store import Group, Store
from .wire import Arg, Command

_TRIES: Final = 8
_DAMAGED: Final = (
    "its entry cannot be read, so nobody knows what to deliver; look at its bytes, put the task anew, drop it"
)
_LIVE: Final = "a task with this id is pending or under way; cancel it, or wait until it is over"
_GONE: Final = "somebody else replayed or dropped it, or its task died once more since it was read"


class _Wish(NamedTuple):
    """A letter with the entry it shall become: both are settled before the first attempt."""

    number: int
    kept: Kept
    slice: Slice
    row: bytes
    due_ms: int


class _Attempt:
    """What is known of one replay so far."""

    def __init__(self, wish: _Wish, indexed: bytes) -> None:
        self.wish = wish
        self.first_indexed = self.indexed = indexed
        """The address that the index held when the letter was read; the one it holds as far as we know."""
        self.unsure = False
        """A call was sent and its reply lost."""
        self.tries = 0


class Replayer:
    """Puts letters back among the tasks, some at a time."""

    def __init__(self, store: Store, intake: Intake, widths: Widths, *, wait_s: float = 0.0) -> None:
        self._store = store
        self._intake = intake
        self._widths = widths
        self._wait_s = wait_s

    async def replay(self, letters: Sequence[Kept], dues_ms: Sequence[int], *, new_key: bool = False) -> list[Replayed]:
        """One answer per letter, in order. A caller bounds how many: all of a partition go in one call."""
        answers: list[Replayed | None] = [_if_damaged(kept.letter) for kept in letters]
        now_ms = self._store.clock.now_ms()
        wishes = [
            self._wish(i, kept, due_ms, now_ms, new_key)
            for i, (kept, due_ms) in enumerate(zip(letters, dues_ms, strict=True))
            if answers[i] is None
        ]
        for number, answer in await self._fulfil(wishes, now_ms):
            answers[number] = answer
        return [answer for answer in answers if answer is not None]

    async def rehearse(self, letters: Sequence[Kept], dues_ms: Sequence[int]) -> list[Replayed]:
        """What `replay` would answer now; nothing is written."""
        wanted = [(kept.place[1], kept.place[2]) for kept in letters]
        raws = await look_up_packed(self._store, wanted)
        known = [
            (i, (Address.unpack(letters[i].place[1], raw), letters[i].place[2]))
            for i, raw in enumerate(raws)
            if raw is not None
        ]
        found = await look_at(self._store, [one for _, one in known]) if known else []
        live = {i for (i, _), entry in zip(known, found, strict=True) if entry.state in ("pending", "fired")}
        live |= {i for i, place in enumerate(await find_queued(self._store, wanted)) if place is not None}
        answers = []
        for i, (kept, due_ms) in enumerate(zip(letters, dues_ms, strict=True)):
            conflict = Replayed(kept.letter.id, "conflict", None, _LIVE) if i in live else None
            answers.append(_if_damaged(kept.letter) or conflict or Replayed(kept.letter.id, "replayed", due_ms))
        return answers

    def _wish(self, number: int, kept: Kept, due_ms: int, now_ms: int, new_key: bool) -> _Wish:
        letter, (_, partition, idh) = kept.letter, kept.place
        body = Body(
            letter.target,
            letter.payload,
            None if GENERATED.fullmatch(letter.id) else letter.id,
            letter.lane,
            original_due_ms=None if new_key else letter.due_ms,
            raw=letter.raw,
            retry=letter.retry,
            timeout_ms=letter.timeout_ms,
        )
        place, row = self._intake.encode(body, idh, partition, due_ms, now_ms, indexed=True)
        return _Wish(number, kept, place, row, due_ms)

    async def _fulfil(self, wishes: list[_Wish], now_ms: int) -> list[tuple[int, Replayed]]:
        raws = await look_up_packed(self._store, [(one.kept.place[1], one.kept.place[2]) for one in wishes])
        todo = [_Attempt(wish, raw or b"") for wish, raw in zip(wishes, raws, strict=True)]
        patience = Patience(self._store, self._wait_s)
        answers: list[tuple[int, Replayed]] = []
        while todo:
            by_partition: dict[int, list[_Attempt]] = {}
            for attempt in todo:
                by_partition.setdefault(attempt.wish.kept.place[1], []).append(attempt)
            groups = [_call(self._store, p, attempts, now_ms) for p, attempts in by_partition.items()]
            todo, failure = [], None
            for attempts, result in zip(by_partition.values(), await self._store.run(groups), strict=True):
                if isinstance(result, StoreError):
                    failure = result
                    todo += attempts
                    _doubt(attempts, result)
                    continue
                todo += self._learn(attempts, result[0], answers)
            if failure is not None:
                await patience.after(failure)
        return answers

    def _learn(
        self, attempts: list[_Attempt], reply: list[bytes | int], answers: list[tuple[int, Replayed]]
    ) -> list[_Attempt]:
        """Take the answers in; return what is to be tried again."""
        again = []
        for attempt, status, answer in zip(attempts, reply[::2], reply[1::2], strict=True):
            wish = attempt.wish
            replayed = Replayed(wish.kept.letter.id, "replayed", wish.due_ms)
            if status == b"ok":
                assert isinstance(answer, int)
                self._widths.saw(wish.kept.place[1], wish.slice, answer + 1)
                answers.append((wish.number, replayed))
            elif status == b"live":
                answers.append((wish.number, Replayed(replayed.id, "conflict", None, _LIVE)))
            elif status == b"changed":
                assert isinstance(answer, bytes)
                attempt.indexed, attempt.tries = answer, attempt.tries + 1
                if attempt.tries == _TRIES:
                    raise Conflict(f"id {replayed.id!r} keeps changing; try again")
                again.append(attempt)
            elif attempt.unsure and answer != attempt.first_indexed:
                # The letter is gone and its id leads elsewhere than before: our call was done, its reply was lost.
                answers.append((wish.number, replayed))
            else:
                answers.append((wish.number, Replayed(replayed.id, "gone", None, _GONE)))
        return again


def _if_damaged(letter: DeadLetter) -> Replayed | None:
    return Replayed(letter.id, "damaged", None, _DAMAGED) if letter.damaged else None


def _doubt(attempts: list[_Attempt], failure: StoreError) -> None:
    for attempt in attempts:
        attempt.unsure = attempt.unsure or (isinstance(failure, Unavailable) and failure.sent)


def _handle_of(attempt: _Attempt) -> bytes:
    """The address by which handles may know it: where it died, if it has no id of its caller's."""
    letter = attempt.wish.kept.letter
    if GENERATED.fullmatch(letter.id) is None:
        return b""
    return attempt.indexed or (letter.place if len(letter.place) == ADDRESS_BYTES else b"")


def _call(store: Store, partition: int, attempts: list[_Attempt], now_ms: int) -> Group:
    keys = store.keys.partitions[partition]
    places = list(dict.fromkeys(attempt.wish.slice for attempt in attempts))
    handles = [_handle_of(attempt) for attempt in attempts]
    stood = [attempt.indexed or handle for attempt, handle in zip(attempts, handles, strict=True)]
    known = [Address.unpack(partition, address).slice if address else None for address in stood]
    olds = list(dict.fromkeys(place for place in known if place is not None))
    names = [keys.n, keys.slices, keys.ids, keys.dead, keys.dead_times, keys.queued]
    names += (keys.entries(one.name) for one in places)
    for old in olds:
        s, _, d, x = keys.slice_keys(old.name)
        names += (s, d, x)
    args: list[Arg] = [len(places), len(olds), len(attempts)]
    for place in places:
        args += (place.name, fresh_score(place), address_prefix(place))
    args += (old.name for old in olds)
    for attempt, handle, old_place in zip(attempts, handles, known, strict=True):
        wish = attempt.wish
        died_ms, _, idh = wish.kept.place
        number = 0 if old_place is None else olds.index(old_place) + 1
        args += (idh, died_ms, places.index(wish.slice) + 1, wish.row, attempt.indexed, number, handle)
    commands: list[Command] = [store.scripts.call("dead_replay", names, args)]
    if any(attempt.wish.due_ms < now_ms + WAKE_MS for attempt in attempts):
        commands.append(("SPUBLISH", keys.wake, "1"))
    return keys.slot, commands
