"""`python -m tests.support.chaos`: one run by profile and seed, or run after run for some minutes."""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ..planted_bugs import MUTATIONS
from .profile import PROFILES, plan
from .run import Report, run


def main() -> int:
    options = _options()
    names = options.profile or list(PROFILES)
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    deadline = time.monotonic() + 60 * options.minutes
    failed = 0
    while True:
        for name in names:
            report = _one(name, seed, options)
            _say(msgspec.json.encode(report).decode() if options.json else "\n".join(report.lines()))
            failed += bool(report.failures)
        seed += 1
        if time.monotonic() >= deadline:
            return 1 if failed else 0


def _one(name: str, seed: int, options: argparse.Namespace) -> Report:
    profile = PROFILES[name]
    if options.plan:
        _say("\n".join(map(str, plan(profile, seed, options.seconds))))
    folder = options.keep / f"{name}-{seed}" if options.keep else Path(tempfile.mkdtemp(prefix="chaos-"))
    return run(profile, seed, folder, options.seconds, tuple(options.bug))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument("--profile", action="append", choices=PROFILES, help="which runs; all without it")
    parser.add_argument("--seed", type=int, help="of the first run; each further round takes the next")
    parser.add_argument("--seconds", type=float, help="length of the faults of one run")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with further seeds for so long")
    parser.add_argument("--keep", type=Path, help="folder for histories and logs")
    parser.add_argument("--bug", action="append", default=[], choices=MUTATIONS, help="plant it in every node")
    parser.add_argument("--plan", action="store_true", help="print the planned faults first")
    parser.add_argument("--json", action="store_true", help="print reports as JSON, one a line")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
