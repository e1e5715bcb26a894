"""The other side of `bench peers`: a process that schedules with a peer's library, or runs its tasks.

    python -P other_side.py <file of the peer> <role>

This file imports nothing of Mainspring. Its folder must not be on the import path (hence -P), because files in it have
the names of the libraries. The first line on standard input is a JSON object with `url` and `runs`; answers on standard
output are JSON lines. When standard input closes, the process ends, with everything it started.
"""

import importlib.util
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final

RUN: Final = struct.Struct("<qq")
"""Record of one run: its number, and when it began (nanoseconds since the epoch)."""

TICK_S: Final = 0.01

WAYS: Final = ("one_by_one", "at_once", "in_bulk")
"""Methods of a peer that schedule, the slowest first."""

Note = Callable[[int], None]


def main() -> None:
    path, role = Path(sys.argv[1]), sys.argv[2]
    order = json.loads(sys.stdin.readline())
    module = load(path)
    peer = module.Peer(order["url"], noting(order["runs"]))
    say({"version": metadata.version(module.DISTRIBUTION), "ways": [way for way in WAYS if hasattr(peer, way)]})
    if role == "produce":
        produce(peer)
    else:
        threading.Thread(target=end_with_the_bench, daemon=True).start()
        os.dup2(2, 1)  # discard the libraries' output: the bench reads none, and a full pipe would block them
        getattr(peer, role)()


def load(path: Path) -> ModuleType:
    """Load a peer by its file, under a name that hides no library: some peers look up functions by module name."""
    name = f"peer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def noting(path: str) -> Note:
    """Return a function that notes a run in one small write, whole even with several processes or when killed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(number: int) -> None:
        os.write(file, RUN.pack(number, time.time_ns()))

    return note


def produce(peer: Any) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        say(steady(peer, order) if "rate" in order else at_once(peer, order))


def at_once(peer: Any, order: dict[str, Any]) -> dict[str, Any]:
    dues_ms = [order["due_ms"]] * order["tasks"]
    began = time.perf_counter()
    getattr(peer, order["way"])(order["first"], dues_ms)
    return {"seconds": time.perf_counter() - began}


def steady(peer: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Schedule at a fixed rate, each task `lead_ms` before it is due, or as soon as the library can."""
    due_ms, lead_ms, rate, tasks = order["due_ms"], order["lead_ms"], order["rate"], order["tasks"]
    done, least_ms = 0, lead_ms
    while done < tasks:
        passed_ms = time.time() * 1000 + lead_ms - due_ms
        until = min(tasks, int(passed_ms * rate / 1000) + 1)
        if until > done:
            dues_ms = [due_ms + number * 1000 // rate for number in range(done, until)]
            getattr(peer, order["way"])(order["first"] + done, dues_ms)
            least_ms = min(least_ms, dues_ms[0] - time.time() * 1000)
            done = until
        time.sleep(TICK_S)
    return {"least_lead_ms": round(least_ms)}


def end_with_the_bench() -> None:
    # Read the descriptor, not sys.stdin: a forked child closes sys.stdin and would wait for its reader's lock for ever.
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), 9)  # the bench started this process as the leader of its own group


def say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
