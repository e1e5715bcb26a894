"""Planted bugs: the checker must find each of them, or it proves nothing.

    with planted("begin-without-token-check"):
        …                                # run, record, check: a violation has to be found

A process plants one for the rest of its life with `plant(name)`. Each breaks one rule of docs/internals/protocol.md in
one place: `scripts` on the server, `engine` in the owner and in the client, `holds` in how work is held back, `queues`
between owners and workers, `schedules` in the chains of schedules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .engine import ENGINE
from .holds import HOLDS
from .kinds import Mutation
from .queues import QUEUES
from .schedules import SCHEDULES
from .scripts import SCRIPTS

MUTATIONS: Final[dict[str, Mutation]] = {
    mutation.name: mutation for mutation in (*SCRIPTS, *ENGINE, *HOLDS, *QUEUES, *SCHEDULES)
}


@contextmanager
def planted(name: str) -> Iterator[Mutation]:
    """Within the block this bug is in the code of this process."""
    mutation = MUTATIONS[name]
    made = []
    try:
        for change in mutation.changes:
            change.make()
            made.append(change)
        yield mutation
    finally:
        for change in reversed(made):
            change.take_back()


def plant(name: str) -> None:
    """Put this bug into the code of this process, for good. A store that knows scripts by their hash needs it too."""
    if name not in MUTATIONS:
        raise LookupError(f"no planted bug is called {name!r}; there are: {', '.join(sorted(MUTATIONS))}")
    for change in MUTATIONS[name].changes:
        change.make()
