"""How the embedded server's memory is laid out, so that a put costs the same however many tasks are pending.

The wheel's server uses the C library's malloc. That keeps freed pieces of up to 1 KiB at hand by size, and takes all
others from lists over the whole heap, whose neighbours it has to look at: with millions of pending tasks each of
these looks goes to memory that no cache holds. So the nodes of lists stay under 1 KiB, and many pieces are kept at
hand. Figures are in docs/decisions/0013-what-grows-with-pending-tasks.md.
"""

import os
from typing import Final

LISTS: Final = {"list-max-listpack-size": "12"}
"""Entries in a node of a list: of the size that most tasks have, so many make up less than 1 KiB."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_KEPT: Final = "glibc.malloc.tcache_count"


def environ() -> dict[str, str]:
    """The environment for the server. What the user says of malloc stands."""
    own = os.environ.get(_TUNABLES, "")
    if _KEPT in own:
        return dict(os.environ)
    return {**os.environ, _TUNABLES: ":".join(filter(None, (own, f"{_KEPT}=60000")))}
