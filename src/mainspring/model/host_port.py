"""An address to listen on, as people write it: `127.0.0.1:9100`, `[::1]:9100`."""

from typing import NamedTuple

from .errors import InvalidInput


class HostPort(NamedTuple):
    host: str
    port: int
    """0: any that is free."""

    @classmethod
    def parse(cls, text: str) -> "HostPort":
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidInput(f"{text!r} is no address to listen on; write host:port, e.g. 127.0.0.1:9100")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise InvalidInput(f"{text!r} is no address to listen on; an IPv6 address stands in brackets: [::1]:9100")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
