"""What a run came to, for people and for programs."""

from collections.abc import Iterator, Mapping

import msgspec

from .profile import Kind, Profile


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. It passed when `failures` is empty."""

    profile: str
    seed: int
    seconds: float
    lease_s: float
    faults: dict[str, int]
    """How often each fault took effect."""
    wanted: dict[str, int]
    tasks: int
    recurring: int = 0
    """Planned runs of schedules."""
    missing: int = 0
    """Of these, how many never ran."""
    doubled: int = 0
    """Of these, how many ran more than once; the rule `repeated` finds those that had no fault to excuse it."""
    unsure: int
    """Puts, moves and replaces whose answer was lost."""
    deliveries: int
    duplicates: int
    """Attempts that were delivered more than once."""
    violations: dict[str, int]
    unpromised: int
    """Tasks lost at a durability that did not promise to keep them through what happened."""
    partitions: str
    """How networks were parted: by the kernel, or by proxies and why; empty where none was."""
    drained_s: float | None
    """From healing, when all was due, until all was delivered; None: it never was."""
    slowest_s: float | None
    """The longest that a delivery took after healing, of what was due then; None: one never came."""
    stalled_s: float
    """So much of that the machine stood still, as measured: it comes on top of the two leases allowed."""
    takeovers: int
    stalls: int
    """Times when the machine itself gave a process no time for a third of a lease."""
    failures: list[str]
    histories: str
    """The folder with the history and the logs."""

    @property
    def valid(self) -> bool:
        """Enough faults took effect for the result to mean something."""
        return all(self.faults.get(kind, 0) >= count for kind, count in self.wanted.items())

    def lines(self) -> Iterator[str]:
        yield f"chaos {self.profile}, seed {self.seed}: {'FAILED' if self.failures else 'passed'}"
        faults = ", ".join(f"{self.faults.get(kind, 0)} {kind}" for kind in sorted(self.wanted))
        yield f"  faults      {sum(self.faults.values())} in {self.seconds:g} s: {faults}"
        if self.partitions:
            yield f"  network     partitions {self.partitions}"
        yield f"  tasks       {self.tasks}, of which {self.unsure} were never answered"
        yield f"  schedules   {self.recurring} planned runs, {self.missing} missing, {self.doubled} doubled by faults"
        yield f"  deliveries  {self.deliveries}, duplicates {self.duplicates}, changes of owner {self.takeovers}"
        broken = ", ".join(f"{count} {rule}" for rule, count in sorted(self.violations.items())) or "none"
        yield f"  violations  {broken}; lost without a promise: {self.unpromised}"
        drained = "never" if self.drained_s is None else f"{self.drained_s:.2f} s"
        yield f"  drained     {drained} after healing (lease {self.lease_s:g} s); {self.stalls} stalls of the machine"
        slowest = "never came" if self.slowest_s is None else f"took {self.slowest_s:.2f} s"
        allowed = f"{2 * self.lease_s:g} s allowed and {self.stalled_s:.2f} s of measured stalls"
        yield f"  slowest     delivery {slowest}; {allowed}"
        for failure in self.failures:
            yield f"  FAILURE     {failure}"
        if self.failures:
            yield f"  histories   {self.histories}"
            yield f"  again       python -m mainspring.testing.chaos --profile {self.profile} --seed {self.seed}"


def too_few(profile: Profile, done: Mapping[Kind, int]) -> list[str]:
    """Why a run proves nothing, if it does not."""
    return [
        f"invalid run: {kind} took effect {done.get(kind, 0)} times, {count} are needed"
        for kind, count in profile.faults.items()
        if done.get(kind, 0) < count
    ]
