"""The settings by the names people type, and how each is read from a text or a TOML value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from .kafka_table import read_kafka, write_kafka
from .model.api_address import read_api_url
from .model.breaker import BreakerPolicy
from .model.command import Commands
from .model.command_table import read_commands, write_commands
from .model.lane_policy import LanePolicy
from .model.named import Targets
from .model.queue_rules import QueueRules
from .model.rate import Rate
from .model.retry_rule import Rule
from .model.retry_text import read_rules
from .model.times import delay_ms
from .sinks.kafka_options import Properties
from .target_tables import read_targets, write_targets


class Setting(NamedTuple):
    field: str
    """The field of Config it ends in."""
    read: Callable[[object], Any]

    def check(self, value: object) -> Any:
        """A value that was given in code: as it is where it is of the right kind, else read like a text or a table."""
        kinds = _KINDS[self.read]
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        return value if fits else self.read(value)

    def write(self, value: Any) -> str:
        """The text from which `read` makes this value."""
        if self.read is _seconds:
            return f"{value * 1000:.0f}ms"
        if self.read is _rules:
            return " ".join(f"{rule.when}={rule.action}" for rule in value)
        if self.read is _list:
            return ",".join(value)
        if self.read is read_targets:
            return write_targets(value)
        if self.read is read_commands:
            return write_commands(value)
        if self.read is _queue_rules:
            return json.dumps(value.tables()) if value else ""
        if self.read is read_kafka:
            return write_kafka(value)
        return f"{value}ms" if self.read is _milliseconds else str(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {value!r}")
    return value


def _api_url(value: object) -> str:
    return read_api_url(_text(value)).geturl()


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"expected a whole number, not {value!r}")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"expected a whole number, not {value!r}") from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"expected a number, not {value!r}")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"expected a number, not {value!r}") from None


def _milliseconds(value: object) -> int:
    # A bare number is refused: seconds and milliseconds are too easily mistaken for each other.
    if not isinstance(value, str):
        raise TypeError(f"expected a duration with its unit such as '5s', not {value!r}")
    return delay_ms(value, field="duration")


def _seconds(value: object) -> float:
    return _milliseconds(value) / 1000


def _list(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part for part in (part.strip() for part in value.split(",")) if part)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list of texts, not {value!r}")
    return tuple(map(_text, value))


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"expected true or false, not {value!r}")
    return str(value).lower() == "true"


def _rules(value: object) -> tuple[Rule, ...]:
    return read_rules("on", value)


def _queue_rules(value: object) -> QueueRules:
    return QueueRules.read(json.loads(value) if isinstance(value, str) else value)


def _path(value: object) -> Path:
    if value == "":
        raise ValueError("it is empty; name a path")  # it would mean the folder this runs in
    return value if isinstance(value, Path) else Path(_text(value)).expanduser()


RETRY_SETTINGS: Final = {
    "max_attempts": _whole,
    "base_ms": _milliseconds,
    "factor": _number,
    "cap_ms": _milliseconds,
    "jitter": _text,
    "max_age_ms": _milliseconds,
    "on": _rules,
}

SETTINGS: Final = {
    "redis_url": Setting("redis_url", _text),
    "api_url": Setting("api_url", _api_url),
    "api_token": Setting("api_token", _text),
    "credentials": Setting("credentials", _text),
    "namespace": Setting("namespace", _text),
    "partitions": Setting("partitions", _whole),
    "node_id": Setting("node_id", _text),
    "processes": Setting("processes", _whole),
    "roles": Setting("roles", _list),
    "concurrency": Setting("concurrency", _whole),
    "lease": Setting("lease_s", _seconds),
    "look_ahead": Setting("look_ahead", _whole),
    "look_ahead_bytes": Setting("look_ahead_bytes", _whole),
    "horizon": Setting("horizon_s", _seconds),
    "shutdown_timeout": Setting("shutdown_timeout_s", _seconds),
    "data_dir": Setting("data_dir", _path),
    "timezone": Setting("timezone", _text),
    "schedules": Setting("schedules", _path),
    "host": Setting("host", _text),
    "port": Setting("port", _whole),
    "tick_target": Setting("tick_target", _text),
    "access": Setting("access", _text),
    "api_key_file": Setting("api_key_file", _path),
    "api_tls_cert": Setting("api_tls_cert", _path),
    "api_tls_key": Setting("api_tls_key", _path),
    "api_body_bytes": Setting("api_body_bytes", _whole),
    "api_json_depth": Setting("api_json_depth", _whole),
    "api_batch_lines": Setting("api_batch_lines", _whole),
    "api_batch_bytes": Setting("api_batch_bytes", _whole),
    "api_rate": Setting("api_rate", _number),
    "api_connections": Setting("api_connections", _whole),
    "api_timeout": Setting("api_timeout_s", _seconds),
    "metrics_open": Setting("metrics_open", _switch),
    "idempotency_window": Setting("idempotency_window_s", _seconds),
    "audit_entries": Setting("audit_entries", _whole),
    "dedupe_window": Setting("dedupe_window_s", _seconds),
    "http_allow": Setting("http_allow", _list),
    "http_timeout": Setting("http_timeout_s", _seconds),
    "http_concurrency": Setting("http_concurrency", _whole),
    "http_rate": Setting("http_rate", Rate.read),
    "http_result_ttl": Setting("http_result_ttl_s", _seconds),
    "targets": Setting("targets", read_targets),
    "commands": Setting("commands", read_commands),
    "queues": Setting("queues", _text),
    "queue": Setting("queue", _queue_rules),
    "breaker": Setting("breaker", BreakerPolicy.read),
    "lane_policy": Setting("lane_policy", LanePolicy.parse),
    "catch_up_rate": Setting("catch_up_rate", Rate.read),
    "catch_up_after": Setting("catch_up_after_s", _seconds),
    "strict_queues": Setting("strict_queues", _switch),
    "worker_concurrency": Setting("worker_concurrency", _whole),
    "worker_listen": Setting("worker_listen", _text),
    "kafka_url": Setting("kafka_url", _text),
    "kafka": Setting("kafka", read_kafka),
    "kafka_create_topics": Setting("kafka_create_topics", _switch),
    "kafka_topic_partitions": Setting("kafka_topic_partitions", _whole),
    "kafka_topic_replication": Setting("kafka_topic_replication", _whole),
    "log_format": Setting("log_format", _text),
    "log_level": Setting("log_level", _text),
} | {f"retry_{name.removesuffix('_ms')}": Setting(f"retry_{name}", read) for name, read in RETRY_SETTINGS.items()}

_KINDS: Final[dict[Callable[[object], Any], tuple[type, ...]]] = {
    _text: (str,),
    _api_url: (),
    _whole: (int,),
    _number: (int, float),
    _seconds: (int, float),
    _milliseconds: (int,),
    _switch: (bool,),
    _list: (tuple,),
    _path: (Path,),
    _rules: (tuple,),
    _queue_rules: (QueueRules,),
    read_targets: (Targets,),
    read_commands: (Commands,),
    read_kafka: (Properties,),
    BreakerPolicy.read: (BreakerPolicy,),
    LanePolicy.parse: (LanePolicy,),
    Rate.read: (Rate,),
}
"""What each of them makes."""

SECRETS: Final = ("redis_url", "api_token", "kafka", "targets", "commands")
"""Settings that hold secrets: `<name>_file` names a file with the value."""
