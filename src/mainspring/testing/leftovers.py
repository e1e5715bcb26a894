"""What a test leaves behind on a server, and clearing it away."""

from collections.abc import Iterator

from .server_process import Server


def all_keys(server: Server) -> Iterator[bytes]:
    cursor: bytes = b"0"
    while True:
        cursor, keys = server.call("SCAN", cursor, "COUNT", 1000)
        yield from keys
        if cursor == b"0":
            return


def belongs_to(key: bytes, namespace: str) -> bool:
    """Every key of a namespace starts with its hash tag."""
    return key.startswith((b"{%b:" % namespace.encode(), b"{%b}" % namespace.encode()))


def delete_namespace(server: Server, namespace: str) -> None:
    # One by one: in a cluster keys of several slots cannot go in one command.
    server.calls([("UNLINK", key) for key in {key for key in all_keys(server) if belongs_to(key, namespace)}])
