"""What stands in the sorted set of live slices, as far as it can be slices.

A strange member, written by hand or by another program, is passed over and told of once. `mainspring verify` finds it
as well, and removes it on request.
"""

import logging
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from .keys import PartitionKeys, Slice

log = logging.getLogger("mainspring.store")


class Listed(NamedTuple):
    """A slice as the sorted set shows it."""

    slice: Slice
    g: float


class Stranger(NamedTuple):
    """A member that is no slice."""

    name: bytes
    score: float


def slice_named(name: bytes) -> Slice | None:
    """The slice of that name; None for what no slice is called."""
    try:
        place = Slice.parse(name)
    except ValueError:
        return None
    return place if place.name.encode() == name and place.is_well_formed else None


def slices_in(keys: PartitionKeys, reply: list[bytes]) -> list[Listed]:
    """Of members with their scores those that are slices."""
    return sorted_out(keys, reply)[0]


def sorted_out(keys: PartitionKeys, reply: list[bytes]) -> tuple[list[Listed], list[Stranger]]:
    """Slices, and what is none."""
    slices: list[Listed] = []
    strangers: list[Stranger] = []
    for i in range(0, len(reply), 2):
        name, score = reply[i], float(reply[i + 1])
        place = slice_named(name)
        if place is not None and isfinite(score):
            slices.append(Listed(place, score))
        else:
            _tell(keys.slices, name)
            strangers.append(Stranger(name, score))
    return slices, strangers


@lru_cache(maxsize=1024)
def _tell(key: str, name: bytes) -> None:
    """Once each: this is met with every listing."""
    shown = name[:64].decode("utf-8", "backslashreplace")
    log.error("%s holds '%s', which is no slice and is passed over; `mainspring verify` can remove it", key, shown)
