"""What a spec may plan on one of its days: by the minute the seconds, as bits."""

from functools import lru_cache
from math import gcd
from typing import Final, NamedTuple

from .cron import DAY_S, Cron
from .interval import AfterEnd, Every

Spec = Cron | Every | AfterEnd

_DAY_MS: Final = DAY_S * 1000
_WHOLE: Final = (1 << 60) - 1
_PLANS_KEPT: Final = 64


class DayPlan(NamedTuple):
    minutes: tuple[int, ...]
    """Of each minute of the day the seconds."""
    seconds: int
    """Of all minutes together."""


def day_plan(spec: Spec, start_ms: int | None, offset_s: int) -> DayPlan:
    """On the wall clock of this offset; `start_ms` is what an interval counts from, where it has no anchor."""
    if isinstance(spec, Cron):
        return _of_line(spec.hours, spec.minutes, spec.seconds)
    if isinstance(spec, AfterEnd):
        return _of_raster(1, 0)
    # Over all days together an interval falls on the raster that it has in common with the day.
    raster_ms = gcd(spec.interval_ms, _DAY_MS)
    return _of_raster(raster_ms, (spec.counts_from_ms(start_ms) + offset_s * 1000) % raster_ms)


@lru_cache(maxsize=_PLANS_KEPT)
def _of_line(hours: int, minutes: int, seconds: int) -> DayPlan:
    every = [(hour, minute) for hour in range(24) for minute in range(60)]
    return DayPlan(tuple(seconds if hours >> h & 1 and minutes >> m & 1 else 0 for h, m in every), seconds)


@lru_cache(maxsize=_PLANS_KEPT)
def _of_raster(raster_ms: int, first_ms: int) -> DayPlan:
    if raster_ms <= 1000:
        return DayPlan((_WHOLE,) * 1440, _WHOLE)
    minutes, together = [0] * 1440, 0
    for at_ms in range(first_ms, _DAY_MS, raster_ms):
        minute, second = divmod(at_ms // 1000, 60)
        minutes[minute] |= 1 << second
        together |= 1 << second
    return DayPlan(tuple(minutes), together)
