"""How the embedded server's memory is laid out, so that a put costs the same however many tasks are pending.

The wheel's server uses the C library's malloc. That keeps freed pieces of up to 1 KiB at hand by size, and takes all
others from lists over the whole heap, whose neighbours it has to look at: with millions of pending tasks each of
these looks goes to memory that no cache holds. jemalloc, which the servers of the distributions are built with, does
not. Where the machine has it the embedded server uses it too; where it has not, the nodes of lists stay under 1 KiB,
and many pieces are kept at hand. Figures are in docs/decisions/0013-what-grows-with-pending-tasks.md.
"""

import os
from functools import cache
from pathlib import Path
from typing import Final

_SMALL_NODES: Final = {"list-max-listpack-size": "12"}
"""Entries in a node of a list: of the size that most tasks have, so many make up less than 1 KiB."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_KEPT: Final = "glibc.malloc.tcache_count"
_PRELOADED: Final = "LD_PRELOAD"
_PLACES: Final = ("lib/*-linux-gnu", "lib64", "lib", "local/lib")


def settings() -> dict[str, str]:
    """What belongs into the server's configuration."""
    return {} if "jemalloc" in environ().get(_PRELOADED, "") else dict(_SMALL_NODES)


def environ() -> dict[str, str]:
    """The environment for the server. What the user says of malloc, or of what is loaded, stands."""
    own, said = dict(os.environ), os.environ.get(_TUNABLES, "")
    if _KEPT in said or _PRELOADED in own:
        return own
    library = jemalloc()
    if library is not None:
        return {**own, _PRELOADED: library}
    return {**own, _TUNABLES: ":".join(filter(None, (said, f"{_KEPT}=60000")))}


@cache
def jemalloc() -> str | None:
    """The library, where the machine has it: Debian's redis-server brings it."""
    found = (str(path) for place in _PLACES for path in Path("/usr").glob(f"{place}/libjemalloc.so.2"))
    return next(found, None)
