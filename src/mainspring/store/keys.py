"""Every key name and the arithmetic of partitions, slices and addresses. See docs/wire-format.md."""

import re
from binascii import crc_hqx
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from ..model.errors import InvalidInput

SLOTS: Final = 16384
SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
HOLD_MS: Final = 1 << 32
"""Width used in the names of hold slices: any four-byte offset fits into one."""

WIDTHS_MS: Final = (HOUR_MS, SECOND_MS, 50, 1, HOLD_MS)
"""Widths of slices from coarse to fine, then hold slices. Writers choose freely; the owner merges all widths."""

HOLDS_FROM_S: Final = 1 << 32
"""Hold slices are listed among the live slices from this score on, beyond any due time."""

_HOLD_BACK_MS: Final = 24 * 24 * HOUR_MS
"""How long before the start of its hold a task may have been due and still keep its place in the order."""

R_UNIT: Final = 1 << 20
"""A slice's incarnation is a random fraction in this many steps, stored behind the decimal point of its score."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_PAIRS: Final = tuple(first + second for first in _DIGITS for second in _DIGITS)


def check_namespace(namespace: object) -> str:
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise InvalidInput(f"namespace {namespace!r}: use 1 to 64 of A-Z a-z 0-9 _ -")
    return namespace


def slot_of(tag: str) -> int:
    return crc_hqx(tag.encode(), 0) % SLOTS


@lru_cache(maxsize=1024)
def tags(namespace: str, partitions: int) -> tuple[str, ...]:
    """Return one hash tag per partition, chosen so that partition p falls near the start of the p-th stripe of slots.

    Plain `ns:p` tags scatter: of 32 partitions, one of three servers may get 15 and another 6. Even anywhere within
    their stripes, one of five servers may get 8 of 32 and another 5, because server borders cut through stripes.
    """
    found = []
    for p in range(partitions):
        low, end = p * SLOTS // partitions, (p + 1) * SLOTS // partitions
        high = low + max((end - low) // 8, min(end - low, 32))
        salt = 0
        while not low <= slot_of(f"{namespace}:{p}.{salt}") < high:
            salt += 1
        found.append(f"{namespace}:{p}.{salt}")
    return tuple(found)


def partition_of(name: str, partitions: int) -> int:
    """Return the partition of a lane, or of an id if there is no lane."""
    return crc_hqx(name.encode(), 0) % partitions


class Slice(NamedTuple):
    """One span of time in one partition."""

    width_ms: int
    start_ms: int

    @property
    def name(self) -> str:
        return _name_of(self)

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.width_ms

    @classmethod
    def held_since(cls, since_ms: int) -> "Slice":
        """Return the hold slice for tasks held since this time."""
        return cls(HOLD_MS, HOLDS_FROM_S * 1000 + since_ms)

    @property
    def is_hold(self) -> bool:
        return self.width_ms == HOLD_MS

    @property
    def since_ms(self) -> int:
        """Start of the slice; for a hold slice, when the hold began."""
        return self.start_ms - HOLDS_FROM_S * 1000 if self.is_hold else self.start_ms

    @property
    def from_ms(self) -> int:
        """Time from which the offsets of its entries count."""
        return self.since_ms - _HOLD_BACK_MS if self.is_hold else self.start_ms

    @property
    def over_ms(self) -> int:
        """When the slice may be dropped: a hold slice once it is done, because only the owner writes to it."""
        return 0 if self.is_hold else self.end_ms

    @property
    def is_well_formed(self) -> bool:
        """Return whether a slice can have this width and start."""
        if self.is_hold:
            return 0 <= self.start_ms // 1000 - HOLDS_FROM_S < HOLDS_FROM_S
        return self.width_ms in WIDTHS_MS and self.start_ms % self.width_ms == 0 and 0 <= self.start_ms < 1 << 48

    @classmethod
    def at(cls, due_ms: int, width_ms: int) -> "Slice":
        return cls(width_ms, due_ms - due_ms % width_ms)

    @classmethod
    def parse(cls, name: bytes | str) -> "Slice":
        width, _, start = (name.decode() if isinstance(name, bytes) else name).partition(".")
        return cls(int(width), int(start))


@lru_cache(maxsize=4096)
def _name_of(place: Slice) -> str:
    return f"{place.width_ms}.{place.start_ms}"


def score_of(start_ms: int, r: int) -> float:
    """Return the score of a slice; exact in a double: 33 bits of seconds and 20 of incarnation."""
    return start_ms // 1000 + r / R_UNIT


def r_of(score: float) -> int:
    return int((score - int(score)) * R_UNIT)


ADDRESS_BYTES: Final = 14
"""Length of a packed address."""


class Address(NamedTuple):
    """Place of an entry. Only a hint: the server verifies incarnation and header before it acts on it."""

    partition: int
    slice: Slice
    r: int
    index: int  # type: ignore[assignment]

    def pack(self) -> bytes:
        """Return the 14 bytes that the index stores; the partition is known from the key."""
        return address_prefix(self.slice) + self.r.to_bytes(3, "big") + self.index.to_bytes(4, "big")

    @classmethod
    def unpack(cls, partition: int, raw: bytes) -> "Address":
        place = Slice(WIDTHS_MS[raw[0]], int.from_bytes(raw[1:7], "big"))
        return cls(partition, place, int.from_bytes(raw[7:10], "big"), int.from_bytes(raw[10:14], "big"))

    def text(self) -> str:
        numbers = (self.partition, self.slice.width_ms, self.slice.start_ms, self.r, self.index)
        return ".".join(map(base36, numbers))

    @classmethod
    def parse(cls, text: str) -> "Address":
        partition, width, start, r, index = (int(piece, 36) for piece in text.split("."))
        return cls(partition, Slice(width, start), r, index)

    @property
    def score(self) -> float:
        return score_of(self.slice.start_ms, self.r)


@lru_cache(maxsize=4096)
def address_prefix(place: Slice) -> bytes:
    return bytes((WIDTHS_MS.index(place.width_ms),)) + place.start_ms.to_bytes(6, "big")


def base36(n: int) -> str:
    digits = ""
    while n >= len(_PAIRS):
        n, rest = divmod(n, len(_PAIRS))
        digits = _PAIRS[rest] + digits
    return (_DIGITS[n] if n < len(_DIGITS) else _PAIRS[n]) + digits


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The keys of one partition; all share its hash tag."""

    namespace: str
    number: int
    tag: str
    slot: int
    slices: str
    own: str
    fence: str
    n: str
    dead: str
    dead_times: str
    held: str
    ids: str
    wake: str
    queued: str
    acks: str
    queues: str
    work: str
    holds: str
    sched: str
    next: str
    off: str
    runs_n: str
    runs: str
    failed_runs: str
    run_details: str
    run_rings: str

    @classmethod
    def make(cls, namespace: str, number: int, tag: str) -> "PartitionKeys":
        names = (
            "slices", "own", "fence", "n", "dead", "dead:t", "held", "ids", "wake",
            "queued", "acks", "queues", "work", "holds", "sched", "next", "off",
            "runs:n", "runs", "runs:failed", "runs:details", "runs:ring",
        )  # fmt: skip
        return cls(namespace, number, tag, slot_of(tag), *(f"{{{tag}}}:{name}" for name in names))

    def rollup(self, width_ms: int, at_ms: int) -> str:
        """Key of the counts of runs in the minute or hour of this time; it expires."""
        return f"{{{self.tag}}}:runs:{'m' if width_ms == MINUTE_MS else 'h'}:{at_ms // width_ms}"

    def run_log(self, idh: bytes) -> str:
        """Key of the stream with the lines of a running job; it expires."""
        return f"{{{self.tag}}}:log:{idh.hex()}"

    def answer(self, hashed: str) -> str:
        """Key of the stored answer to a request with an Idempotency-Key."""
        return f"{{{self.tag}}}:idem:{hashed}"

    def entries(self, name: str) -> str:
        return f"{{{self.tag}}}:s:{name}"

    def queue(self, name: str) -> str:
        """Key of the stream with one queue's jobs in this partition."""
        return f"{{{self.tag}}}:q:{name}"

    def lanes_of(self, idh: bytes) -> str:
        """The lanes in which an id was put; in the partition that the id has without a lane."""
        return f"{{{self.tag}}}:lanes:{idh.hex()}"

    def result(self, idh: bytes) -> str:
        """Key of the result of a task's run; it expires."""
        return f"{{{self.tag}}}:r:{idh.hex()}"

    def revisions(self, name: str) -> str:
        """Key of former definitions of one schedule."""
        return f"{{{self.tag}}}:rev:{name}"

    def once(self, idh: bytes, original_due_ms: int) -> str:
        """Key of the mark and answer of a handler that runs once per task; it expires."""
        return f"{{{self.tag}}}:once:{idh.hex()}.{original_due_ms}"

    def slice_keys(self, name: str) -> tuple[str, str, str, str]:
        """Keys of a slice: entries, fired, done, cancelled."""
        head = "{" + self.tag + "}:"
        return f"{head}s:{name}", f"{head}f:{name}", f"{head}d:{name}", f"{head}x:{name}"


class Keyspace:
    """All keys of one namespace."""

    def __init__(self, namespace: str, partitions: int) -> None:
        self.namespace = check_namespace(namespace)
        if not 1 <= partitions <= 4096:
            raise InvalidInput(f"partitions is {partitions}; it must lie between 1 and 4096")
        self.partitions = tuple(
            PartitionKeys.make(namespace, p, tag) for p, tag in enumerate(tags(namespace, partitions))
        )
        self.slot = slot_of(namespace)
        """Slot of the keys that belong to no partition."""
        self.meta, self.nodes, self.beats, self.leader, self.plan, self.cluster, self.pauses = (
            f"{{{namespace}}}:{name}" for name in ("meta", "nodes", "beats", "leader", "plan", "cluster", "pauses")
        )

        self.access, self.audit, self.task_audit, self.workers, self.worker_times = (
            f"{{{namespace}}}:{name}" for name in ("access", "audit", "audit:tasks", "workers", "workers:t")
        )
        self.notes, self.watched = (f"{{{namespace}}}:{name}" for name in ("notes", "watched"))

    def limit(self, name: str) -> str:
        """Key of a rate or slot count that all nodes share; `name` is a target, a queue, or `catch-up`."""
        return f"{{{self.namespace}}}:limit:{name}"

    def box(self, channel: str) -> str:
        """Key of the notices of a channel that wait for their digest."""
        return f"{{{self.namespace}}}:box:{channel}"

    def box_seen(self, channel: str) -> str:
        """Key of the ids of notices that the box of a channel has had."""
        return f"{{{self.namespace}}}:box-seen:{channel}"

    def quota(self, key_id: str) -> str:
        """Key of the counts of an API key's pending tasks and bytes."""
        return f"{{{self.namespace}}}:quota:{key_id}"

    def __len__(self) -> int:
        return len(self.partitions)


def meta_key(namespace: str) -> str:
    return f"{{{namespace}}}:meta"
