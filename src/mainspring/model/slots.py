"""The planned times of one schedule, one after the other, with short memory: many schedules ask the same question."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from .cron import Cron
from .day_plan import Spec
from .interval import AfterEnd, Every
from .recurrence import Recurrence, spec
from .times import delay_ms
from .zone import zone
from .zoned_cron import count_in_zone

if TYPE_CHECKING:
    from .schedule import Definition

EVERY: Final = "@every"
AFTER_END: Final = "@after-end"
COUNTED_AT_MOST: Final = 100_000
_ANSWERS_KEPT: Final = 8
_UNKNOWN: Final = -1
_FIRST_STEP_MS: Final = 60_000
_FURTHEST_MS: Final = 50 * 366 * 86_400_000


def read_spec(text: str, name: str, anchor_ms: int | None) -> Spec:
    """A cron line, an alias, `@every 30s` (counted from the anchor) or `@after-end 30s`."""
    if text.strip()[: len(AFTER_END)].lower() == AFTER_END:
        return AfterEnd(delay_ms(text.strip()[len(AFTER_END) :].strip(), field=AFTER_END))
    read = spec(text, name)
    return Every(read.interval_ms, anchor_ms) if isinstance(read, Every) else read


class Slots:
    """What a recurrence says, and its last answers."""

    __slots__ = ("_answers", "one_by_one", "recurrence")

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self.one_by_one = all(isinstance(one, AfterEnd) for one in recurrence.specs)
        """By a delay alone: one time is planned, and no other before that run is over."""
        self._answers: dict[int, int | None] = {}

    def after(self, after_ms: int) -> int | None:
        """The first planned time strictly later."""
        answers = self._answers
        found = answers.get(after_ms, _UNKNOWN)
        if found == _UNKNOWN:
            # Kept apart from what is remembered: a preview in another thread may ask, and clear it, meanwhile.
            found = self.recurrence.next_after(after_ms)
            if len(answers) >= _ANSWERS_KEPT:
                answers.clear()
            answers[after_ms] = found
        return found

    def newest(self, from_ms: int, until_ms: int) -> int | None:
        """The last planned time in [from_ms, until_ms]; found from the end, for there may be a great many."""
        step_ms = _FIRST_STEP_MS
        while step_ms < _FURTHEST_MS:
            start_ms = max(from_ms - 1, until_ms - step_ms)
            found = self.recurrence.next_after(start_ms)
            if found is not None and found <= until_ms:
                while (later := self.recurrence.next_after(found)) is not None and later <= until_ms:
                    found = later
                return found
            if start_ms < from_ms:
                return None
            step_ms *= 4
        return None

    def last(self, count: int, from_ms: int, until_ms: int) -> int | None:
        """The first of the last `count` planned times in [from_ms, until_ms]."""
        step_ms = _FIRST_STEP_MS
        while True:  # from the end, for there may be a great many
            start_ms = max(from_ms, until_ms - step_ms)
            found = self.recurrence.between(start_ms, until_ms + 1, COUNTED_AT_MOST)
            if len(found) >= count or start_ms <= from_ms:
                return found[-count:][0] if found else None
            step_ms *= 4

    def count(self, from_ms: int, until_ms: int) -> int:
        """How many planned times lie in [from_ms, until_ms]: of one spec without exclusions by arithmetic.

        Of others one by one, and no more than COUNTED_AT_MOST."""
        recurrence = self.recurrence
        only = recurrence.specs[0] if len(recurrence.specs) == 1 and not recurrence.exclude else None
        last_ms = until_ms if recurrence.end_ms is None else min(until_ms, recurrence.end_ms)
        if isinstance(only, Every):
            first = recurrence.next_after(from_ms - 1)
            return 0 if first is None or first > last_ms else (last_ms - first) // only.interval_ms + 1
        if isinstance(only, Cron):
            first_ms = from_ms if recurrence.start_ms is None else max(from_ms, recurrence.start_ms)
            from_s, end_s = -(-first_ms // 1000), last_ms // 1000 + 1
            return count_in_zone(only, zone(recurrence.zone), from_s, end_s, recurrence.gap, recurrence.overlap)
        counted, most = 0, 1 if self.one_by_one else COUNTED_AT_MOST
        at_ms = recurrence.next_after(from_ms - 1)
        while at_ms is not None and at_ms <= until_ms and counted < most:
            counted += 1
            at_ms = recurrence.next_after(at_ms)
        return counted


def slots_of(definition: "Definition") -> Slots:
    """Schedules that say the same share one: at midnight all of them ask for the same next day."""
    named = anchored = False
    for text in definition.specs:
        named = named or "H" in text or "h" in text
        anchored = anchored or "@e" in text or "@E" in text
    for text in definition.exclude:
        named = named or "H" in text or "h" in text
    anchor_ms = definition.anchor_ms if definition.start_ms is None else definition.start_ms
    return _slots(
        definition.name if named else "", definition.specs, definition.zone, definition.gap, definition.dst_overlap,
        definition.exclude, definition.start_ms, definition.end_ms, anchor_ms if anchored else None,
    )  # fmt: skip


@lru_cache(maxsize=20_000)
def _slots(
    name: str, specs: tuple[str, ...], zone: str, gap: str, overlap: str, exclude: tuple[str, ...],
    start_ms: int | None, end_ms: int | None, anchor_ms: int | None,
) -> Slots:  # fmt: skip
    return Slots(
        Recurrence.parse(
            [read_spec(text, name, anchor_ms) for text in specs], name=name, zone=zone, exclude=exclude,
            start_ms=start_ms, end_ms=end_ms,
            gap=gap, overlap=overlap,  # type: ignore[arg-type]  # Recurrence checks both
        )
    )  # fmt: skip
