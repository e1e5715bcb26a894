"""Others change the same task at the same time: each attempt fails for another's success."""

import asyncio
import random
import time
from typing import Final

from ..model.errors import Conflict

CONTEST_S: Final = 30.0
"""How long a call goes on at least."""

_FIRST_BREAK_S: Final = 0.002
_LONGEST_BREAK_S: Final = 0.1


class Contest:
    """Breaks of random length let one of them through after the other."""

    def __init__(self, about: str, wait_s: float = 0.0) -> None:
        self._about = about
        self._deadline = time.monotonic() + max(wait_s, CONTEST_S)
        self._break_s = 0.0

    async def lost(self) -> None:
        """Before the next attempt; Conflict when there have been too many."""
        if time.monotonic() >= self._deadline:
            raise Conflict(f"{self._about} keeps changing; try again")
        await asyncio.sleep(random.uniform(0, self._break_s))
        self._break_s = min(_LONGEST_BREAK_S, self._break_s * 2 or _FIRST_BREAK_S)
