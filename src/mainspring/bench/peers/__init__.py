"""`bench peers`: the same load through Mainspring and through other Python task queues, one after the other.

`bench` runs and measures each queue. `other_side` runs in the peers' processes and imports nothing of Mainspring,
because their environment does not have it.

A peer is a file that contains the name of its `DISTRIBUTION` and a class:

    class Peer:
        def __init__(self, url: str, note: Callable[[int], None]) -> None: ...
        def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
                "Schedule tasks number `first` and up, one call after the other. A task calls `note` with its number."
        def consume(self) -> None:
                "Run tasks, with the settings that suit this load best, until the process is ended."

A library that can do it has `at_once` too, with 50 calls under way, and `in_bulk`, many tasks in one call.
"""
