"""Heads of ticks that came on a connection before, and were let in. Clients that keep one open send the same again and
again."""

from typing import Final

from .asgi import Headers

MOST: Final = 16
"""They differ in the length of the body and in little else."""
MAX_BYTES: Final = 1024
_END: Final = b"\r\n\r\n"


class KnownHeads:
    """Of one connection, as they were sent: the same bytes say the same, and need not be parsed again."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Headers, int]] = {}

    def learn(self, packet: bytes, headers: Headers, body: bytes) -> None:
        """What the parser made of a packet, if that was one whole request and nothing else."""
        head, _, rest = packet.partition(_END)
        if rest != body or not 0 < len(head) <= MAX_BYTES:
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[head] = headers, len(body)

    def read(self, packet: bytes) -> tuple[Headers, bytes] | None:
        """Headers and body of a packet that is one whole request with a known head."""
        if not self._known:
            return None
        head, _, body = packet.partition(_END)
        known = self._known.get(head)
        return None if known is None or known[1] != len(body) else (known[0], body)
