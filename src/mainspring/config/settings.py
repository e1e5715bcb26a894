"""Settings by the names people type, how each is read, and where it comes from: flags, environment, file."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..model.errors import ConfigError, InvalidInput
from ..model.flow import BreakerPolicy, Rate
from ..model.lane import LanePolicy
from ..model.notice import Beats, Channels
from ..model.queue_rules import QueueRules
from ..model.retry import RetryRule, read_rules
from ..model.run import HistoryRules
from ..model.targets.command import Commands, read_commands, write_commands
from ..model.targets.named import Targets
from ..model.targets.url import parse_web_url, read_api_url
from ..model.times import delay_ms
from ..sinks.kafka_options import Properties


def read_secret(path: object) -> str:
    """Return the content of a file without the space around it; InvalidInput says what is wrong and what to do."""
    if not isinstance(path, str):
        raise InvalidInput(f"expected the name of a file, not {path!r}")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror}; write the secret there, readable for us, or name another file"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput(f"cannot read {path}: it is no text in UTF-8; write the secret into it as text") from None
    except (ValueError, RuntimeError) as error:  # an impossible file name, or the home of an unknown user
        raise InvalidInput(f"cannot read {path!r}: {error}; name another file") from None
    if not text:
        raise InvalidInput(f"the file {path} is empty; write the secret into it, or do not name it")
    return text


def _table(value: object) -> object:
    """Return a table as it is, and what a text, as in the environment, holds as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"expected a table, or one as JSON in a text: {error}") from None


def read_kafka(value: object) -> Properties:
    """Read a table, or JSON in a text: `MAINSPRING_KAFKA='{"security.protocol": "SASL_SSL"}'`."""
    value = _table(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of settings, not {type(value).__name__}")
    return Properties(value)


def write_kafka(properties: Properties) -> str:
    return msgspec.json.encode(dict(properties)).decode() if properties else ""


_FILE: Final = "_file"
_KEPT: Final = frozenset({"ca_file"})
"""Settings whose value is the name of a file, not its content."""


def read_targets(value: object) -> Targets:
    """Read every `[targets.<name>]`, or the same as one JSON text."""
    return Targets.read(_with_secrets(value))


def _with_secrets(value: object) -> object:
    given = _table(value)
    return {n: _table_with_secrets(n, table) for n, table in given.items()} if isinstance(given, Mapping) else given


def _table_with_secrets(where: str, table: object) -> object:
    """Return a table in which the names of files are replaced by their contents, at every depth."""
    if not isinstance(table, Mapping):
        return table
    found: dict[str, Any] = {}
    for name, value in table.items():
        plain = name.removesuffix(_FILE)
        if plain == name or name in _KEPT:
            found[name] = _table_with_secrets(f"{where}.{name}", value)
        elif plain in table:
            raise InvalidInput(f"{where}: {plain} and {name} are both set; keep one")
        else:
            text = _secret(f"{where}.{name}", value)
            found[plain] = text.split() if plain == "secrets" else text
    return found


def _secret(where: str, path: object) -> str:
    try:
        return read_secret(path)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def read_channels(value: object) -> Channels:
    """Read every `[notify.<name>]`, or the same as one JSON text."""
    return Channels.read(_with_secrets(value))


def _beats(value: object) -> Beats:
    return Beats.read(_table(value))


class Setting(NamedTuple):
    field: str
    """The field of Config it ends in."""
    read: Callable[[object], Any]

    def check(self, value: object) -> Any:
        """Read a value that was given in code: keep one of the right type, read others as a text or a table."""
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
        if self.read is read_commands:
            return write_commands(value)
        if self.read in (read_targets, read_channels, _beats, _queue_rules):
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


def _web_url(value: object) -> str:
    parse_web_url(url := _text(value))
    return url


def _rules(value: object) -> tuple[RetryRule, ...]:
    return read_rules("on", value)


def _queue_rules(value: object) -> QueueRules:
    return QueueRules.read(_table(value))


def _path(value: object) -> Path:
    if value == "":
        raise ValueError("it is empty; name a path")  # it would mean the current folder
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
    "embedded_memory_bytes": Setting("embedded_memory_bytes", _whole),
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
    "api_batch_errors": Setting("api_batch_errors", _whole),
    "api_rate": Setting("api_rate", _number),
    "api_pending_tasks": Setting("api_pending_tasks", _whole),
    "api_pending_bytes": Setting("api_pending_bytes", _whole),
    "api_hosts": Setting("api_hosts", _list),
    "api_connections": Setting("api_connections", _whole),
    "api_timeout": Setting("api_timeout_s", _seconds),
    "metrics_open": Setting("metrics_open", _switch),
    "idempotency_window": Setting("idempotency_window_s", _seconds),
    "audit_entries": Setting("audit_entries", _whole),
    "dedupe_window": Setting("dedupe_window_s", _seconds),
    "max_payload_bytes": Setting("max_payload_bytes", _whole),
    "history": Setting("history", HistoryRules.read),
    "history_target": Setting("history_target", _text),
    "history_bytes": Setting("history_bytes", _whole),
    "history_details_bytes": Setting("history_details_bytes", _whole),
    "history_details_keep": Setting("history_details_keep_s", _seconds),
    "dead_letters_max_age": Setting("dead_letters_max_age_s", _seconds),
    "dead_letters_max": Setting("dead_letters_max", _whole),
    "http_allow": Setting("http_allow", _list),
    "http_timeout": Setting("http_timeout_s", _seconds),
    "max_timeout": Setting("max_timeout_s", _seconds),
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
    "notify": Setting("notify", read_channels),
    "beats": Setting("beats", _beats),
    "watchdog_url": Setting("watchdog_url", _web_url),
    "kafka_url": Setting("kafka_url", _text),
    "kafka": Setting("kafka", read_kafka),
    "kafka_create_topics": Setting("kafka_create_topics", _switch),
    "kafka_topic_partitions": Setting("kafka_topic_partitions", _whole),
    "kafka_topic_replication": Setting("kafka_topic_replication", _whole),
    "log_format": Setting("log_format", _text),
    "log_level": Setting("log_level", _text),
    "log_redact": Setting("log_redact", _switch),
} | {f"retry_{name.removesuffix('_ms')}": Setting(f"retry_{name}", read) for name, read in RETRY_SETTINGS.items()}

_KINDS: Final[dict[Callable[[object], Any], tuple[type, ...]]] = {
    _text: (str,),
    _web_url: (),
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
    read_channels: (Channels,),
    _beats: (Beats,),
    read_kafka: (Properties,),
    BreakerPolicy.read: (BreakerPolicy,),
    LanePolicy.parse: (LanePolicy,),
    HistoryRules.read: (HistoryRules,),
    Rate.read: (Rate,),
}
"""What each of them makes."""

SECRETS: Final = ("redis_url", "api_token", "kafka", "targets", "commands", "notify", "watchdog_url")
"""Settings that hold secrets: `<name>_file` names a file with the value."""


PREFIX: Final = "MAINSPRING_"
FILE: Final = "mainspring.toml"
_IN_A_FILE: Final = "_file"
_HEADER: Final = re.compile(r"\s*\[+\s*[\"']?([A-Za-z0-9_-]+)")
_KEY: Final = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*[.=]")


class Given(NamedTuple):
    """The value of a setting, and its source."""

    value: Any
    where: str
    """`flag --port`, `environment MAINSPRING_PORT`, `mainspring.toml line 3`."""
    found: bool = False
    """True if it comes from the mainspring.toml of the current folder, which another user may have put there."""


class _RawSetting(NamedTuple):
    """A value as a source gives it, before it is parsed."""

    value: object
    label: str
    """The name in errors."""
    where: str


def read_sources(flags: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Given]:
    """Merge the sources; a flag that is None was not given. Unknown names are errors, never ignored."""
    given = {name: value for name, value in flags.items() if value is not None}
    file = given.pop("config", None) or environ.get(PREFIX + "CONFIG")
    options = {
        name: _RawSetting(value, f"option --{_dashed(name)}", f"flag --{_dashed(name)}")
        for name, value in given.items()
    }
    from_file = _read(_from_file(file), lambda name: name)
    merged = {
        **{name: one._replace(found=not file) for name, one in from_file.items()},
        **_read(_from_environ(environ), lambda name: PREFIX + name.upper()),
        **_read(options, _dashed),
    }
    check_address(merged, "redis_url", "credentials")
    check_address(merged, "kafka_url", "kafka")
    return merged


def check_address(given: Mapping[str, Given], address: str, secret: str) -> None:
    """Refuse to send a secret to an address that was not given for it.

    A token in the environment is for the server its owner works with, not for any that the settings of a folder name.
    """
    to, sent = given.get(address), given.get(secret)
    if to is None or sent is None or not to.found or sent.found:
        return
    raise ConfigError(
        f"{address} is from {to.where}, and {secret} from {sent.where}: a secret is sent only to the address that it"
        f" was given for. If you trust the file, name it with --config {FILE}; otherwise give the address with"
        f" {'--kafka-url' if address == 'kafka_url' else '--url'} or {PREFIX}{address.upper()}"
    )


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _read(raw: Mapping[str, _RawSetting], typed: Any) -> dict[str, Given]:
    """Parse the values of one source; `typed` spells a setting's name as in that source."""
    found: dict[str, Given] = {}
    for name, (value, label, where) in raw.items():
        setting = SETTINGS.get(name)
        if setting is None:
            close = get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {typed(close[0])}?" if close else ""
            raise ConfigError(f"{label} is not a setting{hint}")
        try:
            found[name] = Given(setting.read(value), where)
        except (InvalidInput, ValueError, TypeError) as error:
            raise ConfigError(f"{label}: {error}") from None
    return found


# -- the file ---------------------------------------------------------------------------------------------------


def _from_file(named: object) -> dict[str, _RawSetting]:
    path = Path(str(named)) if named else Path(FILE)
    if not named and not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    retry = values.pop("retry", {})
    if not isinstance(retry, dict):
        raise ConfigError(f"{path}: retry is a table; write [retry] and its settings below")
    flat = values | {f"retry_{name}": value for name, value in retry.items()}
    places = _places(text)
    raw = {
        name: _RawSetting(value, f"{path}: {name}", f"{path} {places.get(name, '')}".strip())
        for name, value in flat.items()
    }
    return _settings_with_secrets(raw)


def _places(text: str) -> dict[str, str]:
    """Return the line of every setting, for error messages; tomllib does not report it."""
    found: dict[str, str] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1]
            found.setdefault(table, f"[{table}] line {number}")
        elif key := _KEY.match(line):
            name = key[1] if not table else f"retry_{key[1]}" if table == "retry" else ""
            found.setdefault(name, f"line {number}")
    return found


# -- the environment ----------------------------------------------------------------------------------------------


def _from_environ(environ: Mapping[str, str]) -> dict[str, _RawSetting]:
    raw = {
        name.removeprefix(PREFIX).lower(): _RawSetting(value, name, f"environment {name}")
        for name, value in environ.items()
        if name.startswith(PREFIX) and value and not _set_by_platform(name, value)
    }
    raw.pop("config", None)
    raw = _settings_with_secrets(raw)
    if url := environ.get("REDIS_URL"):
        raw.setdefault("redis_url", _RawSetting(url, "REDIS_URL", "environment REDIS_URL"))
    return raw


def _set_by_platform(name: str, value: str) -> bool:
    """True for variables that are no settings: Kubernetes sets some for a service "mainspring", workers others."""
    return name.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_", PREFIX + "TASK_")) or (
        name == PREFIX + "PORT" and value.startswith("tcp://")
    )


def _settings_with_secrets(raw: Mapping[str, _RawSetting]) -> dict[str, _RawSetting]:
    """Read secrets from their own files: `redis_url_file` names one."""
    found = dict(raw)
    for name in SECRETS:
        file = found.pop(name + _IN_A_FILE, None)
        if file is None:
            continue
        if name in found:
            raise ConfigError(f"{found[name].label} and {file.label} are both set; keep one")
        try:
            found[name] = _RawSetting(read_secret(file.value), file.label, f"{file.where} ({file.value})")
        except InvalidInput as error:
            raise ConfigError(f"{file.label}: {error}") from None
    return found
