"""Small shifts that keep schedules from starting all at once. Pure: every node computes the same, a restart too.

A run keeps its planned time as its identity; only the moment of its start moves."""

import hashlib

from .errors import InvalidInput


def jitter_ms(name: str, planned_ms: int, width_ms: int) -> int:
    """A delay in [0, width_ms), another one for every run of a schedule."""
    return _place(f"{name}@{planned_ms}", width_ms)


def spread_ms(name: str, width_ms: int) -> int:
    """A delay in [0, width_ms), the same for every run of a schedule: its runs stay evenly apart."""
    return _place(name, width_ms)


def _place(seed: str, width_ms: int) -> int:
    if width_ms < 0:
        raise InvalidInput(f"the width is {width_ms} ms; it must not be negative")
    if width_ms == 0:
        return 0
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big") % width_ms
