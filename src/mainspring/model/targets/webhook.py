"""A webhook: address, request settings and credentials; as an object and as a table of settings."""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from ..errors import InvalidInput
from ..flow import BreakerPolicy, Limit, Rate
from ..lane import LanePolicy
from ..retry import RetryPolicy
from ..text import check_known
from ..times import delay_ms
from .url import WebUrl, parse_web_url

NEEDS: Final = "webhooks need the package aiohttp on this node: pip install 'mainspring[http]'"
METHODS: Final = ("POST", "PUT", "PATCH", "DELETE", "GET", "HEAD")
BODILESS: Final = frozenset({"GET", "HEAD"})
SECRET_PREFIX: Final = "whsec_"
RESPONSE_BYTES: Final = 4 * 1024
MAX_RESPONSE_BYTES: Final = 64 * 1024
MAX_RESULT_TTL_S: Final = 366 * 86_400
TIMEOUT_S: Final = 15.0
"""Seconds to wait for an answer, if neither the task nor its target nor the settings give a timeout."""
MAX_TIMEOUT_S: Final = 600.0
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?|")
_OURS: Final = frozenset(
    {
        "connection", "content-length", "expect", "host", "idempotency-key", "keep-alive", "te", "trailer",
        "transfer-encoding", "upgrade", "webhook-id", "webhook-signature", "webhook-timestamp",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Basic:
    """Basic authentication with user and password."""

    user: str
    password: str

    def __post_init__(self) -> None:
        if not self.user or ":" in self.user:
            raise InvalidInput("auth: the user is empty or holds a colon, which HTTP cannot carry")

    @property
    def header(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def __repr__(self) -> str:
        return f"Basic(user={self.user!r}, password='***')"


@dataclass(frozen=True, slots=True, repr=False)
class Bearer:
    """Bearer authentication with a token."""

    token: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise InvalidInput("auth: the bearer token is empty or holds spaces or characters beyond ASCII")

    @property
    def header(self) -> str:
        return f"Bearer {self.token}"

    def __repr__(self) -> str:
        return "Bearer('***')"


@dataclass(frozen=True, slots=True, repr=False)
class Webhook:
    """The settings of a delivery over HTTP. None leaves a choice to the node's settings."""

    url: str
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float | None = None
    auth: Basic | Bearer | None = None
    ca_file: str | None = None
    """The authority that signed the server's certificate; None means those that the system trusts."""
    secrets: tuple[str, ...] = ()
    """Secrets that each sign; give the new one beside the old one while receivers change over."""
    response_bytes: int = RESPONSE_BYTES
    """Bytes to keep of an answer's body."""
    result_ttl_s: float | None = None
    """How long the answer to a successful call is kept with the run."""
    gone_disables: bool = False
    """After 410 Gone no node sends to the target any more, until it is resumed."""
    concurrency: int | None = None
    """Concurrent requests. The limits of the host, which all its targets share, apply as well."""
    rate: Rate | float | str | None = None
    """Requests per second, as a number or as in settings: `100/s burst 50`. Stored as a `Rate`."""
    retry: RetryPolicy | None = None
    breaker: BreakerPolicy | None = None
    lane_policy: LanePolicy | None = None

    def __post_init__(self) -> None:
        parsed = parse_web_url(self.url)
        if self.method not in METHODS:
            raise InvalidInput(f"method is {self.method!r}; use one of {', '.join(METHODS)}")
        _check_headers(self.headers, with_auth=self.auth is not None)
        if self.ca_file is not None and (parsed.scheme != "https" or not PurePath(self.ca_file).name):
            raise InvalidInput(f"ca_file is {self.ca_file!r}; give a file name, for an https:// address only")
        for secret in self.secrets:
            secret_key(secret)
        for name, value, low, high in (
            ("timeout", self.timeout_s, 0.001, MAX_TIMEOUT_S),
            ("response_bytes", self.response_bytes, 0, MAX_RESPONSE_BYTES),
            ("result_ttl", self.result_ttl_s, 0, MAX_RESULT_TTL_S),
            ("concurrency", self.concurrency, 1, 10_000),
        ):
            if value is not None and not low <= value <= high:
                raise InvalidInput(f"{name} is {value}; it must lie between {low} and {high}")
        if self.rate is not None:
            object.__setattr__(self, "rate", Rate.read(self.rate))

    @property
    def limit(self) -> Limit:
        """The target's own limit, over all nodes together."""
        return Limit(None if self.rate is None else Rate.read(self.rate), self.concurrency)

    @property
    def address(self) -> str:
        """The target behind the name."""
        return self.url

    @property
    def parsed(self) -> WebUrl:
        return parse_web_url(self.url)

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self.headers)
        return (
            f"Webhook({self.method} {self.parsed.shown}, headers=[{names}], auth={self.auth!r}, "
            f"secrets={len(self.secrets)}, timeout_s={self.timeout_s}, ca_file={self.ca_file!r})"
        )


def is_web(target: str) -> bool:
    return target.startswith(("http:", "https:"))


def secret_key(secret: str) -> bytes:
    """Return the signing key; errors never repeat the secret."""
    if not secret.startswith(SECRET_PREFIX):
        raise InvalidInput(f"a signing secret must start with '{SECRET_PREFIX}', followed by base64")
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"a signing secret is not base64 after '{SECRET_PREFIX}'") from None
    if not 24 <= len(key) <= 64:
        raise InvalidInput(f"a signing secret has {len(key)} bytes; the specification requires 24 to 64")
    return key


def _check_headers(headers: tuple[tuple[str, str], ...], *, with_auth: bool) -> None:
    seen: set[str] = set()
    for name, value in headers:
        low = name.lower()
        if not _TOKEN.fullmatch(name):
            raise InvalidInput(f"headers: {name!r} is not a valid header name")
        if low in _OURS or low.startswith("mainspring-"):
            raise InvalidInput(f"headers: {name} is set by Mainspring itself; leave it out")
        if low == "authorization" and with_auth:
            raise InvalidInput("headers: Authorization is given, and auth too; keep one")
        if low in seen:
            raise InvalidInput(f"headers: {name} is given twice")
        if not _VALUE.fullmatch(value):
            raise InvalidInput(f"headers: the value of {name} must be printable ASCII, without spaces at its ends")
        seen.add(low)


def read_webhook(table: Mapping[str, object]) -> Webhook:
    """Return the webhook that a table describes; errors name wrong or unknown settings."""
    check_known(table, _FIELDS, "a webhook")
    fields = {}
    for name, value in table.items():
        field, read = _FIELDS[name]
        fields[field] = read(name, value)
    return Webhook(**fields)


def webhook_table(hook: Webhook) -> dict[str, Any]:
    """Return the table from which `read_webhook` makes this webhook again."""
    table: dict[str, Any] = {"url": hook.url, "method": hook.method, "gone_disables": hook.gone_disables}
    if hook.headers:
        table["headers"] = dict(hook.headers)
    if hook.timeout_s is not None:
        table["timeout"] = f"{round(hook.timeout_s * 1000)}ms"
    if isinstance(hook.auth, Basic):
        table["auth"] = {"user": hook.auth.user, "password": hook.auth.password}
    elif hook.auth is not None:
        table["auth"] = {"bearer": hook.auth.token}
    if hook.secrets:
        table["secrets"] = list(hook.secrets)
    if hook.response_bytes != RESPONSE_BYTES:
        table["response_bytes"] = hook.response_bytes
    if hook.result_ttl_s is not None:
        table["result_ttl"] = f"{round(hook.result_ttl_s * 1000)}ms"
    rest = {
        "ca_file": hook.ca_file,
        "concurrency": hook.concurrency,
        "rate": None if hook.rate is None else str(hook.rate),
    }
    return table | {name: value for name, value in rest.items() if value is not None}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected a string, not {type(value).__name__}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: expected true or false, not {value!r}")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name}: expected a whole number, not {value!r}")
    return value


def _rate(name: str, value: object) -> Rate:
    del name  # Rate.read names the setting itself
    return Rate.read(value)


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected a duration with its unit such as '5s', not {value!r}")
    return delay_ms(value, field=name) / 1000


def _headers(name: str, value: object) -> tuple[tuple[str, str], ...]:
    return tuple((key, _text(f"{name}.{key}", text)) for key, text in _table(name, value).items())


def _secrets(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(f"{name}: expected a list of strings")
    return tuple(_text(name, one) for one in value)


def _auth(name: str, value: object) -> Basic | Bearer:
    table = _table(name, value)
    if set(table) == {"user", "password"}:
        return Basic(_text(f"{name}.user", table["user"]), _text(f"{name}.password", table["password"]))
    if set(table) == {"bearer"}:
        return Bearer(_text(f"{name}.bearer", table["bearer"]))
    raise InvalidInput(f"{name}: give user and password, or bearer; not {', '.join(sorted(table)) or 'nothing'}")


def _table(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: expected a table, not {type(value).__name__}")
    return value


_FIELDS: Final[dict[str, Any]] = {
    "url": ("url", _text),
    "method": ("method", _text),
    "headers": ("headers", _headers),
    "timeout": ("timeout_s", _seconds),
    "auth": ("auth", _auth),
    "ca_file": ("ca_file", _text),
    "secrets": ("secrets", _secrets),
    "response_bytes": ("response_bytes", _whole),
    "result_ttl": ("result_ttl_s", _seconds),
    "gone_disables": ("gone_disables", _flag),
    "concurrency": ("concurrency", _whole),
    "rate": ("rate", _rate),
}
WEBHOOK_SETTINGS: Final = tuple(_FIELDS)


class Signer:
    """Signs with every secret it has, so that receivers can change from one to the next."""

    def __init__(self, secrets: Sequence[str]) -> None:
        # Keyed once: a copy of a keyed hash costs a fraction of keying it.
        self._keyed = [hmac.new(secret_key(secret), digestmod=hashlib.sha256) for secret in secrets]

    def headers(self, key: str, timestamp_s: int, payload: bytes) -> dict[str, str]:
        """The three headers. The id is the idempotency key, the same for every attempt."""
        # A full stop separates what is signed: within the id it could be shifted from one part to the next.
        id = key.replace(".", "%2E")
        signed = f"{id}.{timestamp_s}.".encode() + payload
        return {
            "webhook-id": id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": " ".join(self._sign(keyed, signed) for keyed in self._keyed),
        }

    @staticmethod
    def _sign(keyed: "hmac.HMAC", signed: bytes) -> str:
        one = keyed.copy()
        one.update(signed)
        return "v1," + base64.b64encode(one.digest()).decode()
