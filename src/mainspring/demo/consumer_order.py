"""What the consumer is told. Apart from it, so that whoever writes an order needs no Kafka library."""

import msgspec


class Order(msgspec.Struct, frozen=True):
    properties: dict[str, str]
    """Of the Kafka library: how to reach the servers."""
    fetch_bytes: int
    """Asked for at one time; fewer come after some milliseconds."""
    topic: str
    ids: int
    came: str
    """The file for the numbers of ticks that came."""
