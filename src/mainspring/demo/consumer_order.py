"""What the consumer is told. Apart from it, so that whoever writes an order needs no Kafka library."""

import msgspec


class Order(msgspec.Struct, frozen=True):
    properties: dict[str, str]
    """Of the Kafka library: how to reach the servers."""
    fetch_bytes: int
    """Asked for at one time; fewer come after some milliseconds."""
    topic: str
    ids: int
    within_ms: int
    """How far ahead of their posts ticks are due: for so long their rate rises at the start, and falls at the end."""
    came: str
    """The file for the numbers of ticks that came."""
