"""What `bench sinks` says of one kind of target."""

import msgspec


class SinkFigures(msgspec.Struct, frozen=True):
    """Medians over the rounds. `bare`: the same library, headers, payload and concurrency in a plain loop."""

    tasks: int
    tasks_per_s: float
    bare_per_s: float
    ratio: float
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0
