"""The queues a worker serves, and the weights with which it does."""

import re
from typing import Final

from .errors import InvalidInput
from .queues import check_queue

MOST_WEIGHT: Final = 1_000
_PART: Final = re.compile(r"([^:]+)(?::(.*))?", re.DOTALL)


def parse_queues(text: str) -> dict[str, int]:
    """`mail:3,reports:1`: names in order of priority, with weights (1 where none is given)."""
    found: dict[str, int] = {}
    for part in (part.strip() for part in text.split(",")):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidInput(f"queues {text!r}: a name is missing; write mail:3,reports:1")
        name = check_queue(match[1].strip())
        weight = match[2]
        if weight is not None and not (weight.isascii() and weight.isdigit() and 1 <= int(weight) <= MOST_WEIGHT):
            raise InvalidInput(
                f"queues: the weight of {name} is {weight!r}; give a whole number from 1 to {MOST_WEIGHT}"
            )
        if name in found:
            raise InvalidInput(f"queues: {name} is named twice")
        found[name] = int(weight or 1)
    return found
