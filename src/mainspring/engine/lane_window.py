"""How much of a lane's hold slice is in memory: tasks leave it one at a time, and a head may be under way for hours."""

from .live import LiveSlice
from .partition import Partition


def _places(partition: Partition, live: LiveSlice) -> list[int]:
    """Places in time of what was read of this hold slice and waits in its lane."""
    hold = partition.held_work.holds.by_place.get(live.slice)
    return [] if hold is None or hold.lane is None else partition.lanes.places_of(hold.lane, live)


def has_plenty(partition: Partition, live: LiveSlice) -> bool:
    """Enough that may leave of this slice waits in its lane: no more has to be read yet."""
    hold = partition.held_work.holds.by_place.get(live.slice)
    if hold is None:
        return False
    barrier_ms = hold.barrier_ms()
    return sum(place_ms < barrier_ms for place_ms in _places(partition, live)) > live.kept // 4


def trim(partition: Partition, live: LiveSlice, most: int) -> None:
    """Of a hold slice that was just read keep no more than this in memory, with what waits in the lane."""
    waiting = _places(partition, live)
    room = max(0, most - len(waiting))
    if live.waiting > room:
        # Of those that come before all that wait some must stay, whatever the room: one of them is the next.
        first = not waiting or (live.next_due_ms() or 0) <= min(waiting)
        live.trim(most // 2 + 1 if first else room)
