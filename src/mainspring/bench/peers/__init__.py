"""`bench peers`: the same load through Mainspring and through other Python task queues, one after the other.

bench        all of them in one run: the rows
stage        one of them: producer, consumer, what is measured in which order
runs         the file in which every run leaves its number and its time, and what follows from it
other_side   what runs in those processes; it stands alone, because the environment of the peers has nothing of ours
homes        the Python that has the peers: this one, or an environment of their own in the cache folder
<peer>       one peer each

A peer is a file with the name of its `DISTRIBUTION` and a class:

    class Peer:
        def __init__(self, url: str, note: Callable[[int], None]) -> None: ...
        def schedule(self, first: int, dues_ms: Sequence[int]) -> None:
            "Tasks number `first` and up, the fastest way there is. Each calls `note` with its number when it runs."
        def consume(self) -> None:
            "Run tasks, with the settings that suit this load best, until the process is ended."
"""
