"""How long work may keep an event loop before others have their turn."""

import time
from typing import Final

SHARE: Final = 0.25
"""Of the time that the others take: who steps aside after every millisecond on a loop whose turns take fifty falls
behind, though all wait for its work."""
LONGEST_S: Final = 0.01


class Stint:
    """Long work in short pieces: `least_s` at a time, longer where the turns of the others are.

    stint.begin()
    for piece in work:
        if stint.over:
            stint.step_aside()
            await asyncio.sleep(0)
            stint.begin()
        ...
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = self._length_s = least_s
        self._until = 0.0
        self._aside_at: float | None = None

    def begin(self) -> None:
        now = time.monotonic()
        if self._aside_at is not None:
            self._length_s = min(max(self._least_s, (now - self._aside_at) * SHARE), LONGEST_S)
            self._aside_at = None
        self._until = now + self._length_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    def step_aside(self) -> None:
        """Others have the loop from now until the next `begin`."""
        self._aside_at = time.monotonic()
