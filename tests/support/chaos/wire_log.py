"""Writes of owners as the servers answered them: read off the wire, even if the reply never reached the node."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import hiredis

from mainspring.model.clock import ServerClock
from mainspring.store.keys import Keyspace
from mainspring.store.owner.fire import COUNTS, OCCURRENCE_ARGS
from mainspring.store.scripts import Scripts, text_of

_OWNERS_SCRIPTS: Final = ("acquire", "renew", "release", "tick", "commit", "drop")
_BEGIN_OR_SETTLE: Final = ("tick", "commit")
_ONE_SMALL: Final = (1, 0, 0, 0, 0, 0, 0)
_PUSHES: Final = frozenset({b"SSUBSCRIBE", b"SUBSCRIBE", b"PSUBSCRIBE", b"MONITOR"})


class Write(NamedTuple):
    """One write of an owner to one partition. `seq` is 0 where the call has no number."""

    at_us: int
    partition: int
    token: str
    what: str
    seq: int
    settled: int
    """Deliveries that are no longer under way: finished, or waiting for their retry."""


class Claim(NamedTuple):
    """The writes of a call, if the server agrees."""

    key: bytes
    token: str
    seq: int
    settled: int


class Call(NamedTuple):
    """A script call of an owner on its way."""

    what: str
    claims: list[Claim]


class Witness:
    """Knows every write that a server confirmed to an owner, by partition, token and number."""

    def __init__(self, keys: Keyspace, tell: Callable[[Write], None]) -> None:
        self._tell = tell
        self._partitions = {name.encode(): one.number for one in keys.partitions for name in (one.own, one.fence)}
        self._scripts = {_sha(name): name for name in _OWNERS_SCRIPTS}
        self._texts = {text_of(name, False).encode(): name for name in _OWNERS_SCRIPTS}
        self._numbered: dict[tuple[int, str, int], int] = {}

    def begun_at(self, partition: int, token: str, seq: int) -> int:
        """When the server took this numbered call; KeyError if no server ever did."""
        return self._numbered[partition, token, seq]

    def read(self, command: list[bytes]) -> Call | None:
        """The owner's script call in this command, if it is one."""
        known = {b"EVALSHA": self._scripts, b"EVAL": self._texts}.get(command[0].upper(), {})
        name = known.get(command[1]) if len(command) > 1 else None
        if name is None:
            return None
        count = int(command[2])
        return Call(name, _claims(name, command[3 : 3 + count], command[3 + count :]))

    def answered(self, call: Call, reply: Any) -> None:
        """Report the writes of a call that took effect, by the server's answer."""
        if not isinstance(reply, list):
            return  # an error: nothing was written
        at_us, statuses = reply[0], reply[1:]
        for claim, status in zip(call.claims, statuses, strict=False):
            word = status[0] if isinstance(status, list) else status
            if word != b"ok":
                continue
            token = reply[2].decode() if call.what == "acquire" else claim.token
            self._note(Write(at_us, self._partitions[claim.key], token, call.what, claim.seq, claim.settled))

    def _note(self, write: Write) -> None:
        if write.seq:
            # A call whose reply was lost is sent again and answered again; it took effect the first time.
            numbered = (write.partition, write.token, write.seq)
            if numbered in self._numbered:
                return
            self._numbered[numbered] = write.at_us
        self._tell(write)


class Wire:
    """Both directions of one connection, seen by the witness."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._commands = hiredis.Reader()
        self._replies = hiredis.Reader(notEnoughData=...)
        self._asked: deque[Call | None] = deque()
        self._deaf = False
        """Replies of a subscription follow no command."""

    def sent(self, data: bytes) -> bool:
        """These bytes go to the server. True when a write of an owner ends in them."""
        self._commands.feed(data)
        seen = False
        while (command := self._commands.gets()) is not False:
            call = self._witness.read(command)
            seen = seen or (call is not None and call.what in _BEGIN_OR_SETTLE)
            self._deaf = self._deaf or command[0].upper() in _PUSHES
            self._asked.append(call)
        return seen

    def heard(self, data: bytes) -> None:
        """These bytes came from the server."""
        if self._deaf:
            return
        self._replies.feed(data)
        while (reply := self._replies.gets()) is not ...:
            call = self._asked.popleft()
            if call is not None:
                self._witness.answered(call, reply)


def _sha(name: str) -> bytes:
    return str(Scripts(ServerClock()).call(name, [], [])[1]).encode()


def _claims(name: str, keys: list[bytes], args: list[bytes]) -> list[Claim]:
    match name:
        case "acquire":
            return [Claim(keys[0], "", 0, 0)]
        case "renew":
            return [Claim(key, token.decode(), 0, 0) for key, token in zip(keys, args[1:], strict=False)]
        case "tick":
            return _sections(keys, args)
        case "commit":
            return [Claim(keys[0], args[0].decode(), int(args[1]), int(args[2]) + int(args[6]))]
        case "release" if args[0].startswith(b"."):
            return []  # of an acquire whose answer was lost: the caller never knew its whole token
        case _:  # release, drop
            return [Claim(keys[0], args[0].decode(), 0, 0)]


def _sections(keys: list[bytes], args: list[bytes]) -> list[Claim]:
    """The sections of a tick; tick.lua says how they are laid out."""
    claims, at = [], 3
    for section in range(int(args[0])):
        token, _, seq = args[at + 1].rpartition(b":")
        counts = args[at + 2]
        small, large, commits, proofs, known, finished, occurrences = COUNTS.unpack(counts) if counts else _ONE_SMALL
        claims.append(Claim(keys[section], token.decode(), int(seq), finished))
        at += 3 + small + large * 2 + commits * 2 + proofs * 4 + (known * 3 + 1 if known else 0)
        if occurrences:
            at += 2 + int(args[at]) * 3 + occurrences * OCCURRENCE_ARGS
    return claims
