"""How to reach Kafka: servers, properties of the client library, and whether to create missing topics."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..model.errors import InvalidInput

_FILE: Final = "_file"
_SECRET: Final = re.compile(r"password|secret|token|pem|oauthbearer\.config|jaas")
_SERVER: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")

OURS: Final = {
    "bootstrap.servers": "it comes from kafka_url",
    "metadata.broker.list": "the servers come from kafka_url",
    "enable.idempotence": "it is always on",
    "acks": "it is always 'all'",
    "request.required.acks": "it is always 'all'",
    "delivery.report.only.error": "failures are reported, and what was delivered is known without",
    "transactional.id": "messages are not sent in transactions",
}
"""Properties that the delivery guarantees depend on: users cannot set them."""

DEFAULTS: Final = {
    "client.id": "mainspring",
    "linger.ms": "1",  # tasks leave at their millisecond, and a burst still fills its batches
    "socket.nagle.disable": "true",
    "socket.keepalive.enable": "true",
    "queue.buffering.max.messages": "100000",
    "queue.buffering.max.kbytes": "262144",
    # How long tasks are held for an unavailable broker; afterwards they wait on the server, not in memory.
    "message.timeout.ms": "30000",
}
"""Defaults that a settings file may change."""


def parse_servers(url: str) -> str:
    """Return `kafka://a:9092,b:9092` (the scheme is optional) in the form that the library expects."""
    servers = url.removeprefix("kafka://").rstrip("/")
    if "@" in servers:
        raise InvalidInput(
            "kafka_url holds a user or password; give them in [kafka] as sasl.username, sasl.password_file"
        )
    for server in servers.split(","):
        matched = _SERVER.fullmatch(server.strip())
        if matched is None or int(matched["port"] or 1) not in range(1, 65536):
            raise InvalidInput(f"kafka_url names {server[:80]!r}; write kafka://host:9092, several with commas between")
    return servers


class Properties(Mapping[str, str]):
    """Settings of librdkafka by their own names. Nested tables are joined by dots; `<name>_file` names a file that
    holds the value. Secrets are masked when shown."""

    def __init__(self, given: Mapping[str, object] | None = None) -> None:
        self._values: dict[str, str] = {}
        for name, value in _flat(given or {}):
            self._add(name, value)

    def _add(self, name: str, value: object) -> None:
        text = _text(name, value)
        if name.endswith(_FILE):
            name, text = name.removesuffix(_FILE), _read(name, text)
        if name in OURS:
            raise InvalidInput(f"[kafka] {name} cannot be set: {OURS[name]}")
        if name in self._values:
            raise InvalidInput(f"[kafka] {name} is given twice, as itself and as {name}{_FILE}; keep one")
        self._values[name] = text

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        shown = {name: "***" if _SECRET.search(name) else value for name, value in self._values.items()}
        return f"Properties({shown})"


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Options of a Kafka sink."""

    url: str
    properties: Properties = field(default_factory=Properties)
    create_topics: bool = False
    topics: tuple[str, ...] = ()
    """Topics in the settings; with `create_topics` they are created at start."""
    partitions: int | None = None
    """Partitions of a created topic; None means the broker's default."""
    replication: int | None = None

    def for_library(self) -> dict[str, str]:
        """Return all properties for the library. Ours come last: no setting can undo the delivery guarantees."""
        ours = {"bootstrap.servers": parse_servers(self.url), "enable.idempotence": "true", "acks": "all"}
        return {**DEFAULTS, **self.properties, **ours}

    def for_admin(self) -> dict[str, str]:
        """Only what says how to reach the servers: the rest is of producers, and the library would grumble."""
        reaching = ("bootstrap.", "client.", "security.", "sasl.", "ssl.", "socket.", "broker.", "enable.ssl", "https.")
        return {name: value for name, value in self.for_library().items() if name.startswith(reaching)}


def _flat(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise InvalidInput(f"[kafka] {name} is of type {type(value).__name__}; give a text, a number or true/false")
    return str(value)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"[kafka] {name}: cannot read {path}: {error}") from None
