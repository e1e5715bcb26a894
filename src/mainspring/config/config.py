"""One frozen Config. A value comes from the flags, else MAINSPRING_*, else mainspring.toml, else the defaults."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from ..model.delivery import ErrorHandler
from ..model.errors import ConfigError, InvalidInput
from ..model.flow import BreakerPolicy, Rate
from ..model.lane import LanePolicy
from ..model.limits import MAX_PENDING, MAX_PENDING_BYTES
from ..model.notice import Beats, Channels
from ..model.queue_rules import QueueRules, parse_queues
from ..model.retry import RetryPolicy
from ..model.run import HistoryRules
from ..model.shared_settings import (
    DEDUPE_WINDOW,
    HISTORY_BYTES,
    HISTORY_DETAILS_BYTES,
    HISTORY_DETAILS_KEEP,
    LARGEST_HISTORY_BYTES,
    LARGEST_PAYLOAD_BYTES,
    LONGEST_WINDOW_MS,
    MAX_PAYLOAD,
    lane_policy_of,
)
from ..model.targets.command import Commands
from ..model.targets.named import Targets
from ..model.targets.names import check_target, shown_target
from ..model.targets.url import LOOPBACK, AllowList, HostPort
from ..model.targets.webhook import MAX_RESULT_TTL_S, MAX_TIMEOUT_S, TIMEOUT_S, Webhook, is_web
from ..sinks.kafka_options import Properties, parse_servers
from ..store.keys import check_namespace
from ..store.redis.url import CredentialProvider, parse_url, provider_of, safe_url
from .settings import PREFIX, RETRY_SETTINGS, SETTINGS, Given, read_sources

_NODE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")

if TYPE_CHECKING:
    from ..store.redis.servers import LinkOptions

LogFormat = Literal["auto", "human", "json"]
Access = Literal["auto", "keys", "open"]
ROLES: Final = ("scheduler", "api")
"""Roles that a node may have."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one node runs. Every value is checked here, wherever it came from."""

    redis_url: str | None = field(default=None, repr=False)
    """The server: redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://. None: embedded."""
    api_url: str | None = None
    """A node's HTTP API: commands then call it instead of the server. Nodes do not look at it."""
    api_token: str | None = field(default=None, repr=False)
    """The API key that commands send there."""
    api_namespace: str | None = None
    """The namespace that commands ask it for: `namespace` where that is given, else None, which means its node's."""
    credentials: CredentialProvider | str | None = field(default=None, repr=False)
    """Asked for (user, password) at every connect; `module:function` names one. For tokens of managed servers."""
    namespace: str = "main"
    """Tasks and schedules of other namespaces are apart. 1 to 64 of A-Z a-z 0-9 _ -."""
    partitions: int | None = None
    """None takes the count the namespace has, or 32 when it is new."""
    node_id: str | None = None
    """None generates one; a second live node with the same id is refused."""
    processes: int = 1
    """Node processes of `mainspring serve`; more than one run under a supervisor."""
    roles: tuple[str, ...] = ROLES
    """Roles of `mainspring serve`: `scheduler` owns partitions and fires tasks, `api` accepts requests."""
    concurrency: int = 100_000
    """Tasks in flight at most; a node's weight among the others."""
    lease_s: float = 5.0
    """Seconds after which others take over the work of a node or worker that has died."""
    look_ahead: int = 200_000
    """Tasks held in memory at most."""
    look_ahead_bytes: int = 256 * 1024 * 1024
    """Approximate bound on their memory: fewer are held if they are large."""
    horizon_s: float = 5.0
    """How long before its due time a task is read."""
    shutdown_timeout_s: float = 25.0
    """Seconds that a stop waits for running work; the rest is cancelled, and runs again elsewhere."""
    data_dir: Path | None = None
    """Folder of the embedded server; None is the user's state folder."""
    embedded_memory_bytes: int | None = None
    """`maxmemory` of the embedded server; None is half of what the machine or control group has, 0 no limit."""
    timezone: str = "UTC"
    """Time zone of schedules that name none."""
    schedules: Path | None = None
    """A file of schedules that the node applies: at its start, and whenever the file changes."""
    host: str = "127.0.0.1"
    """Address on which the API listens."""
    port: int = 8000
    """Port of the API; 0 takes any that is free."""
    tick_target: str = ""
    """Where ticks go; empty is topic `ticks` where there is a Kafka, else the log."""
    access: Access = "auto"
    """Access to the API: `keys` (callers with a key), `open` (everybody), `auto` (open on loopback, else keys)."""
    api_key_file: Path | None = None
    """A file with API keys, one a line; each is an administrator's."""
    api_tls_cert: Path | None = None
    """PEM file with the certificate of the API; with `api_tls_key`. None: no TLS."""
    api_tls_key: Path | None = None
    """PEM file with its key."""
    api_body_bytes: int = 128 * 1024
    """Largest body of a request, batches apart."""
    api_json_depth: int = 64
    """How deeply the JSON of a request may be nested."""
    api_batch_lines: int = 100_000
    """Tasks of one request to /v1/tasks:batch."""
    api_batch_bytes: int = 64 * 1024 * 1024
    """Largest body of such a request."""
    api_batch_errors: int = 1_000
    """Wrong lines of a batch after which the rest is not read."""
    api_rate: float = 0.0
    """Requests a second of one client to this node, all its processes together; 0 is no limit."""
    api_pending_tasks: int = 10_000_000
    """Tasks of one API key in one namespace that may be pending; 0 is no limit."""
    api_pending_bytes: int = 4 * 1024 * 1024 * 1024
    """Bytes of their payloads; 0 is no limit."""
    api_connections: int = 4_096
    """Connections that the API keeps open at a time."""
    api_timeout_s: float = 20.0
    """For a request to arrive, and for its answer to be taken: slower clients are cut."""
    api_hosts: tuple[str, ...] = ()
    """Host names under which the API may be called without a key, besides loopback."""
    metrics_open: bool = False
    """Whether /metrics needs no key."""
    idempotency_window_s: float = 86_400.0
    """How long the answer to a request with an Idempotency-Key is kept."""
    audit_entries: int = 10_000
    """Changes the audit trail keeps."""
    dedupe_window_s: float | None = None
    """How long a finished id is known. None is what the namespace says, one hour for a new one."""
    max_payload_bytes: int | None = None
    """The largest payload. None is what the namespace says, 64 KiB for a new one."""
    history: HistoryRules = field(default_factory=HistoryRules)
    """Which runs the history keeps: `all`, `failures` or `off`, by schedule, queue, named target or scheme."""
    history_target: str | None = None
    """Where every record of the history is forwarded, with the id of the run; None: nowhere."""
    history_bytes: int | None = None
    """Memory of the history of runs. None is what the namespace says, 256 MiB for a new one; 0 keeps none."""
    history_details_bytes: int | None = None
    """Memory of the details of runs. None is what the namespace says, 64 MiB for a new one; 0 keeps none."""
    history_details_keep_s: float | None = None
    """How long details are kept. None is what the namespace says, 7 days for a new one."""
    dead_letters_max_age_s: float = 90 * 86_400.0
    """Older dead letters are dropped; 0 keeps them."""
    dead_letters_max: int = 1_000_000
    """Dead letters of a namespace; beyond it the oldest are dropped, by partition. 0 is no limit."""
    http_allow: tuple[str, ...] = ()
    """Networks, addresses and names that webhooks may reach although they are not public."""
    http_timeout_s: float = TIMEOUT_S
    """Seconds one webhook may take, where neither its task nor its target says."""
    max_timeout_s: float = MAX_TIMEOUT_S
    """The longest timeout of a webhook, whatever its task says: a request may hold a connection, or a stop, so long."""
    http_concurrency: int = 64
    """Requests to one host at a time."""
    http_rate: Rate | None = None
    """Requests a second of this node to one host, where its target says nothing."""
    http_result_ttl_s: float = 3600.0
    """How long the answers to successful webhooks are kept with their runs; 0 keeps none."""
    kafka_url: str | None = None
    """Where `kafka:` targets are: kafka://host:9092, several with commas."""
    kafka: Properties = field(default_factory=Properties)
    """Further settings of the Kafka library, by its own names: SASL, TLS and the like."""
    kafka_create_topics: bool = False
    """Whether topics that are missing are created."""
    kafka_topic_partitions: int | None = None
    """Partitions of topics that are created; None takes the broker's default."""
    kafka_topic_replication: int | None = None
    """Replicas of topics that are created; None takes the broker's default."""
    targets: Targets = field(default_factory=Targets)
    """The named targets, used as `target:<name>`."""
    commands: Commands = field(default_factory=Commands)
    """Programs that `command:<name>` may start, and nothing else."""
    queues: str = ""
    """Queues that a worker serves, with weights: `mail:3,reports:1`. Empty: those of its handlers."""
    strict_queues: bool = False
    """The order of the queues is their priority, and weights do not count."""
    worker_concurrency: int = 64
    """Jobs that a worker runs at a time."""
    worker_listen: str | None = None
    """Where a worker answers /livez, /readyz and /metrics: host:port. None: nowhere."""
    queue: QueueRules = field(default_factory=QueueRules)
    """Limits, retries and lane policies of queues, `[queue.<name>]`."""
    notify: Channels = field(default_factory=Channels)
    """Channels of notices, `[notify.<name>]`: where they go, and which."""
    beats: Beats = field(default_factory=Beats)
    """When beats of other programs' jobs are expected, `[beats.<name>]`."""
    watchdog_url: str | None = field(default=None, repr=False)
    """Called every minute while tasks go out, so that another service notices when they do not."""
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    """Default for receivers that have none of their own."""
    catch_up_rate: Rate | None = None
    """Rate limit for overdue tasks over all nodes; None means no limit."""
    catch_up_after_s: float = 10.0
    """Seconds after its due time from which a task counts as overdue."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """The default retry policy: a RetryPolicy, or a line such as "5 base=1s"."""
    lane_policy: LanePolicy = field(default_factory=LanePolicy)
    """The default for a lane whose head fails; its target or queue may have a policy of their own."""
    error_handler: ErrorHandler | None = field(default=None, repr=False, compare=False)
    """Called with every failed delivery; None logs them. Only in code: no flag, variable or file sets it."""
    log_format: LogFormat = "auto"
    """`human`, `json`, or `auto`: human on a terminal, else JSON. Only for the command line."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`. Only for the command line."""
    log_redact: bool = False
    """Whether failures are logged without what receivers, handlers and commands wrote."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if not self.tick_target:
            object.__setattr__(self, "tick_target", "log:" if self.kafka_url is None else "kafka:ticks")
        self._check_forms()
        self._check_roles()
        if self.node_id is not None and not _NODE_ID.fullmatch(self.node_id):
            raise ConfigError(f"node_id is {self.node_id!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must lie between {low} and {high}")
        if self.embedded_memory_bytes is not None and 0 < self.embedded_memory_bytes < _LEAST_MEMORY_BYTES:
            raise ConfigError(
                f"embedded_memory_bytes is {self.embedded_memory_bytes}; give at least {_LEAST_MEMORY_BYTES}, or 0 for"
                " no limit"
            )
        if (self.api_tls_cert is None) != (self.api_tls_key is None):
            raise ConfigError("api_tls_cert and api_tls_key go together; only one of them is set")
        chosen = {"log_format": self.log_format, "log_level": self.log_level, "access": self.access}
        for name, word in chosen.items():
            if word not in _CHOICES[name]:
                raise ConfigError(f"{name} is {word!r}; use one of {', '.join(_CHOICES[name])}")

        self._check_timeouts()

    def _check_timeouts(self) -> None:
        webhooks = {name: spec for name, spec in self.targets.items() if isinstance(spec, Webhook)}
        longest = {"http_timeout": self.http_timeout_s}
        longest |= {f"timeout of [targets.{name}]": spec.timeout_s or 0.0 for name, spec in webhooks.items()}
        for name, timeout_s in longest.items():
            if timeout_s > self.max_timeout_s:
                raise ConfigError(f"{name} is {timeout_s:g} s, and max_timeout {self.max_timeout_s:g} s; change one")

    def check_timeout(self, target: str, timeout_ms: int | None) -> None:
        """Refuse a task for a webhook whose timeout is longer than any node would wait."""
        if timeout_ms is None or timeout_ms <= self.max_timeout_s * 1000:
            return
        spec = self.targets.get(target.partition(":")[2]) if target.startswith("target:") else None
        if is_web(target if spec is None else spec.address):
            raise InvalidInput(
                f"timeout is {timeout_ms / 1000:,.15g} s;"
                f" a webhook may take {self.max_timeout_s:g} s here at most (max_timeout)"
            )

    def _check_kinds(self) -> None:
        """Accept a text or a table, as in a file, for values given in code; refuse anything else."""
        for setting in SETTINGS.values():
            name = setting.field
            value = getattr(self, name, None)
            if (value is None and name not in _NEVER_NONE) or (name == "credentials" and callable(value)):
                continue
            try:
                object.__setattr__(self, name, setting.check(value))
            except (InvalidInput, ValueError, TypeError) as error:
                raise ConfigError(f"{name}: {error}") from None
        object.__setattr__(self, "retry", _retry(self.retry))
        handler: object = self.error_handler
        if handler is not None and not callable(handler):
            raise ConfigError(f"error_handler is of type {type(handler).__name__}; give a function")

    def _check_forms(self) -> None:
        try:
            if self.redis_url is not None:
                parse_url(self.redis_url)
            check_namespace(self.namespace)
            check_target(self.tick_target)
            if self.history_target is not None:
                check_target(self.history_target)
            _check_zone(self.timezone)
            AllowList.parse(self.http_allow)
            parse_queues(self.queues or "any")
            if self.kafka_url is not None:
                parse_servers(self.kafka_url)
            if self.worker_listen is not None:
                HostPort.parse(self.worker_listen)
        except InvalidInput as error:
            raise ConfigError(str(error)) from None

    def _check_roles(self) -> None:
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown or not self.roles:
            wrong = f"names {unknown[0]!r}" if unknown else "is empty"
            raise ConfigError(f"roles {wrong}; give one or both of {', '.join(ROLES)}")
        object.__setattr__(self, "roles", tuple(role for role in ROLES if role in self.roles))

    @property
    def links(self) -> "LinkOptions":
        """How connections to the server are made."""
        from ..store.redis.servers import LinkOptions  # here: reading settings needs no sockets

        # The embedded server has a password of its own.
        return LinkOptions(credentials=None if self.redis_url is None else provider_of(self.credentials))

    @property
    def shared(self) -> dict[str, str]:
        """Return the shared settings that are set here, on which all users of the namespace must agree."""
        said = {lane_policy_of(queue): str(policy) for queue, policy in self.queue.lane_policies().items()}
        if self.dedupe_window_s is not None:
            said[DEDUPE_WINDOW] = f"{round(self.dedupe_window_s * 1000)}ms"
        if self.max_payload_bytes is not None:
            said[MAX_PAYLOAD] = str(self.max_payload_bytes)
        if self.history_bytes is not None:
            said[HISTORY_BYTES] = str(self.history_bytes)
        if self.history_details_bytes is not None:
            said[HISTORY_DETAILS_BYTES] = str(self.history_details_bytes)
        if self.history_details_keep_s is not None:
            said[HISTORY_DETAILS_KEEP] = f"{round(self.history_details_keep_s * 1000)}ms"
        return said

    @property
    def history_rules(self) -> HistoryRules:
        """The rules of the history, for a process that knows the named targets."""
        addresses = {name: getattr(spec, "address", "https:") for name, spec in self.targets.items()}
        return HistoryRules(self.history.rules, {name: one.partition(":")[0] for name, one in addresses.items()})

    @property
    def needs_keys(self) -> bool:
        """Whether callers of the API must have a key."""
        return self.access == "keys" or (self.access == "auto" and not is_loopback(self.host))

    @property
    def http_reach(self) -> tuple[str, ...]:
        """Addresses that webhooks may reach besides public ones; loopback too if only this machine reaches the node.

        If callers need keys, they are not trusted like the machine's own users and cannot reach loopback.
        """
        local = self.redis_url is None and is_loopback(self.host) and not self.needs_keys
        return (*self.http_allow, *LOOPBACK) if local else self.http_allow

    def __repr__(self) -> str:
        url = safe_url(self.redis_url) if self.redis_url else None
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        shown["tick_target"] = shown_target(self.tick_target)
        return f"Config(redis_url={url!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def load(cls, flags: Mapping[str, object], environ: Mapping[str, str]) -> Self:
        """Merge the sources; a flag that is None was not given. Unknown names are errors, never ignored."""
        return cls.of(read_sources(flags, environ))

    @classmethod
    def of(cls, given: Mapping[str, Given]) -> Self:
        """Make a Config from the values of the sources; all else has its default."""
        merged = {SETTINGS[name].field: one.value for name, one in given.items()}
        retry = {name: merged.pop(f"retry_{name}") for name in RETRY_SETTINGS if f"retry_{name}" in merged}
        try:
            if retry:
                merged["retry"] = RetryPolicy(**retry)
        except InvalidInput as error:
            raise ConfigError(f"retry: {error}") from None
        return cls(**merged)

    def to_environ(self) -> dict[str, str]:
        """The environment from which `load` makes this config again, whatever file or flags it came from."""
        values = ((name, setting, self.value_of(setting.field)) for name, setting in SETTINGS.items())
        shown = {PREFIX + name.upper(): setting.write(value) for name, setting, value in values if value is not None}
        if callable(self.credentials):
            del shown[PREFIX + "CREDENTIALS"]  # a function of this process: no text can name it
        # A settings file in the working folder must not mix in, nor one that is put there later.
        return shown | {PREFIX + "CONFIG": os.devnull}

    def value_of(self, field: str) -> Any:
        """Return values by the name of the setting; those of the retry policy begin with `retry_`."""
        return getattr(self.retry, field.removeprefix("retry_")) if field.startswith("retry_") else getattr(self, field)


def _retry(policy: object) -> RetryPolicy:
    try:
        if isinstance(policy, str):
            return RetryPolicy.parse(policy)
        if isinstance(policy, Mapping):
            return RetryPolicy.read(policy)
    except InvalidInput as error:
        raise ConfigError(f"retry: {error}") from None
    if not isinstance(policy, RetryPolicy):
        raise ConfigError(
            f"retry is of type {type(policy).__name__}; give a RetryPolicy, a line like '5 base=1s', or a table"
        )
    return policy


def _check_zone(name: str) -> None:
    if name != "UTC":
        from ..model.schedule.zone import zone

        zone(name)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_LEAST_MEMORY_BYTES: Final = 16 * 1024 * 1024
"""An empty server takes a few MiB: with less it would refuse the first task."""

_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("partitions", 1, 4096),
    ("processes", 1, 256),
    ("lease_s", 0.5, 300),
    ("concurrency", 1, 10_000_000),
    ("worker_concurrency", 1, 10_000),
    ("look_ahead", 100, 100_000_000),
    ("look_ahead_bytes", 1024 * 1024, 2**40),
    ("horizon_s", 0.1, 300),
    ("shutdown_timeout_s", 0, 3600),
    ("port", 0, 65535),
    ("embedded_memory_bytes", 0, 2**50),
    ("catch_up_after_s", 1, 86400),
    ("dedupe_window_s", 0, LONGEST_WINDOW_MS / 1000),
    ("max_payload_bytes", 1, LARGEST_PAYLOAD_BYTES),
    ("history_bytes", 0, LARGEST_HISTORY_BYTES),
    ("history_details_bytes", 0, LARGEST_HISTORY_BYTES),
    ("history_details_keep_s", 1, LONGEST_WINDOW_MS / 1000),
    ("dead_letters_max_age_s", 0, 100 * 366 * 86400),
    ("dead_letters_max", 0, 10**12),
    ("kafka_topic_partitions", 1, 100_000),
    ("kafka_topic_replication", 1, 100),
    ("http_timeout_s", 0.001, 600),
    ("max_timeout_s", 0.001, 86_400),
    ("http_concurrency", 1, 10_000),
    ("http_result_ttl_s", 0, MAX_RESULT_TTL_S),
    ("api_body_bytes", 1024, 64 * 1024 * 1024),
    ("api_json_depth", 1, 500),
    ("api_batch_lines", 1, 10_000_000),
    ("api_batch_errors", 1, 10_000_000),
    ("api_batch_bytes", 1024, 16 * 1024 * 1024 * 1024),
    ("api_rate", 0, 10_000_000),
    ("api_pending_tasks", 0, MAX_PENDING),
    ("api_pending_bytes", 0, MAX_PENDING_BYTES),
    ("api_connections", 1, 1_000_000),
    ("api_timeout_s", 0.1, 3600),
    ("idempotency_window_s", 1, 366 * 86400),
    ("audit_entries", 1, 100_000_000),
)
_NEVER_NONE: Final = frozenset(one.name for one in fields(Config) if one.default is not None)
_CHOICES: Final = {
    "log_format": ("auto", "human", "json"),
    "log_level": ("debug", "info", "warning", "error"),
    "access": ("auto", "keys", "open"),
}
