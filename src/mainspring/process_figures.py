"""What every process of ours tells: its calls of the server, and what the kernel says of it."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .model.metrics import Family, histogram, single
from .store.store import Store

_STARTED_S: Final = time.time()


def store_calls(store: Store) -> Family:
    latencies = {link.address: link.latency for link in store.links.all()}
    return histogram("mainspring_store_seconds", "From a call of the server to its last reply.", "server", latencies)


def process_figures() -> Iterator[Family]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    text = "User and system CPU time."
    yield single("process_cpu_seconds_total", "counter", text, used.ru_utime + used.ru_stime)
    yield single("process_start_time_seconds", "gauge", "When the process started, in Unix time.", _STARTED_S)
    yield single("process_max_fds", "gauge", "Files it may open.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError):  # not on every system
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield single("process_resident_memory_bytes", "gauge", "Memory in use.", pages * os.sysconf("SC_PAGE_SIZE"))
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            yield single("process_open_fds", "gauge", "Files that are open.", len(os.listdir(folder)))  # noqa: PTH208
            break
