"""A few blocking commands over the unix socket: all that starting and sharing the server needs."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis

from mainspring.model.errors import EmbeddedError

_TIMEOUT_S = 2.0  # a server that is busy for longer is asked again by the caller's loop


@dataclass(frozen=True, slots=True)
class Ready:
    """The server answers."""

    pid: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The server is alive and reads its AOF."""


@dataclass(frozen=True, slots=True)
class Silent:
    """Nobody answers, or not as our server would."""

    reason: str


def probe(path: Path, password: str) -> Ready | Loading | Silent:
    """Whether the server behind the socket answers."""
    try:
        _, pong, info = ask(path, ("AUTH", password), ("PING",), ("INFO", "server"))
    except (OSError, EmbeddedError) as error:
        return Silent(str(error))
    if isinstance(pong, hiredis.ReplyError) and str(pong).startswith("LOADING"):
        return Loading()
    # Also one that answers PING with an error: with its disk full it refuses that too, and can still be read.
    if isinstance(info, bytes):
        return Ready(pid=_process_id(info))
    return Silent(f"it answers PING with {pong}")


def listen_on(path: Path, password: str, ports: Iterator[int]) -> int:
    """Let the server listen on the first of `ports` that it can have; returns that port.

    The server is asked at run time, not by its configuration: another program may take a free port
    between our look and the server's start, and then the whole start would have failed.
    """
    refusal = None
    for port in ports:
        _, refusal = ask(path, ("AUTH", password), ("CONFIG", "SET", "port", str(port)))
        if refusal == b"OK":
            return port
    raise EmbeddedError(f"the embedded server found no free port on 127.0.0.1: {refusal}")


def ask(path: Path, *commands: tuple[str, ...]) -> list[Any]:
    """Send commands on one short connection; errors of the server come back as values."""
    reader = hiredis.Reader()
    replies: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(b"".join(_packed(command) for command in commands))
        while len(replies) < len(commands):
            data = connection.recv(65536)
            if not data:
                raise EmbeddedError("the server closed the connection")
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    return replies


def _packed(command: tuple[str, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows 1-tuples only
    return packed


def _process_id(info: bytes) -> int:
    fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return int(fields["process_id"])
