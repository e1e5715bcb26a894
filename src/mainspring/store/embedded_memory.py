"""How the embedded server's memory is laid out, so that a put costs the same however many tasks are pending.

The wheel's server uses the C library's malloc. Its pieces lie all over a heap of hundreds of megabytes, and each look
at one goes through the tables of small pages; on large pages it does not. Beside that, malloc is quick with the pieces
that it keeps at hand by size: some thousands of each, for more would only be memory that nobody uses. Figures are in
docs/decisions/0013-what-grows-with-pending-tasks.md.
"""

import os
from typing import Final

from mainspring.store.embedded_binary import of_wheel

_TUNABLES: Final = "GLIBC_TUNABLES"
_OURS: Final = {"glibc.malloc.tcache_count": "8000", "glibc.malloc.hugetlb": "1"}
_AT_ONCE: Final = {"LD_BIND_NOW": "1"}
"""glibc 2.36 learns with a byte that it never set whether the kernel has large pages. The byte is what resolving names
on first use left on the stack; with all names resolved at the start it is zero, and what it learns is right."""


def settings(program: str) -> dict[str, str]:
    """What the server's configuration says of memory. Programs with an allocator of their own are left as they are."""
    return {"disable-thp": "no"} if of_wheel(program) else {}


def environ() -> dict[str, str]:
    """The environment for the server. What the user says of malloc stands."""
    said = os.environ.get(_TUNABLES, "")
    ours = [f"{name}={value}" for name, value in _OURS.items() if f"{name}=" not in said]
    return {**os.environ, **_AT_ONCE, _TUNABLES: ":".join(filter(None, (said, *ours)))}
