"""Server URLs and credentials: the forms of a URL, and how to print one without its secret.

redis://[user:password@]host[:port][/db]                      one server
rediss://…?ca=…&cert=…&key=…                                  the same over TLS, always verified
unix:///path/to/socket[?user=…&password=…&db=…]               one server on this machine
redis+cluster://host:port,host:port                           a cluster, any of its nodes as seeds
redis+sentinel://host:port,host:port/master-name[/db]         the primary that the sentinels name
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from mainspring.model.errors import ConfigError, InvalidInput, Unavailable

_SCHEMES = {"redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"}
_TLS_KEYS = {"ca", "cert", "key"}
# Only these are printed by safe_url; any other value in a query may be (part of) a secret.
_PUBLIC_KEYS = _TLS_KEYS | {"db", "user", "sentinel_user"}
_MASK = "***"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files for TLS. There is no switch to skip verification; `ca` None means the system's authorities."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: host and port, or `path` of a unix socket."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: Tls | None = None

    @property
    def address(self) -> str:
        if self.path is not None:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def at(self, host: str, port: int) -> Endpoint:
        """Return this endpoint at another address, for a node that a cluster or a sentinel names."""
        return replace(self, host=host, port=port)


@dataclass(frozen=True, slots=True)
class ClusterEndpoint:
    seeds: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class SentinelEndpoint:
    """`primary` carries the credentials for the server; its host and port come from the sentinels."""

    sentinels: tuple[Endpoint, ...]
    master: str
    primary: Endpoint


AnyEndpoint = Endpoint | ClusterEndpoint | SentinelEndpoint


@dataclass(frozen=True, slots=True)
class _Parts:
    scheme: str
    userinfo: str
    hosts: str
    path: str
    query: dict[str, str]


def parse_url(url: str) -> AnyEndpoint:
    """Read a server URL; InvalidInput says what is wrong with it, without the secret."""
    parts = _split(url)
    if parts.scheme == "unix":
        return _unix(parts)
    if parts.scheme.endswith("+cluster"):
        return _cluster(parts)
    if parts.scheme.endswith("+sentinel"):
        return _sentinel(parts)
    base = _base(parts, allowed={"db"})
    if "," in parts.hosts:
        _wrong("lists several servers; use redis+cluster:// or redis+sentinel://")
    path_db = parts.path.strip("/")
    return replace(base.at(*_host_port(parts.hosts, 6379)), db=_db(path_db or parts.query.get("db", "")))


def safe_url(url: str) -> str:
    """Return the URL with every secret replaced by ***, for logs. If in doubt, hide."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return _MASK
    rest, question, query = rest.partition("?")
    if scheme != "unix" and "@" in query:  # a raw "?" inside the password
        rest, question, query = query, "", ""
        rest = "@" + rest
    if scheme != "unix" and "@" in rest:
        rest = f"{_MASK}@{rest.rpartition('@')[2]}"
    if scheme != "unix":  # redis://user:secret, without "@host": the "port" is the secret
        rest = re.sub(r":(?!\d{1,5}(?=[,/]|$))[^,/\[\]:]*(?=[,/]|$)", f":{_MASK}", rest)
    items = "&".join(_safe_item(item) for item in query.split("&")) if query else ""
    return f"{scheme}://{rest}{question}{items}"


def _safe_item(item: str) -> str:
    name, equals, value = item.partition("=")
    if not equals:
        return _MASK
    return f"{name}={value if name in _PUBLIC_KEYS else _MASK}"


def _wrong(problem: str) -> NoReturn:
    raise InvalidInput(f"redis URL: {problem}")


def _split(url: str) -> _Parts:
    if not isinstance(url, str):
        _wrong(f"must be a string, not {type(url).__name__}")
    if any("\ud800" <= one <= "\udfff" for one in url):
        _wrong("is not valid Unicode (a lone surrogate)")
    scheme, mark, rest = url.strip().partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in _SCHEMES:
        schemes = ", ".join(f"{known}://" for known in sorted(_SCHEMES))
        _wrong(f"must start with one of {schemes} (commands also take http:// and https:// of a node's API)")
    if "#" in rest:
        _wrong('has a "#"; write it as %23')
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if scheme != "unix" and ("@" in path or "@" in query):
        _wrong('has a "/", "?" or "@" in user or password; percent-encode it (%2F, %3F, %40)')
    userinfo, _, hosts = authority.rpartition("@")
    return _Parts(scheme, userinfo, hosts, slash + path, _query(query))


def _query(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in filter(None, text.split("&")):
        name, equals, value = item.partition("=")
        if not equals:
            _wrong("has an option without a value; options are written ?name=value&name=value")
        found[name] = unquote(value)
    return found


def _base(parts: _Parts, allowed: set[str]) -> Endpoint:
    """Return credentials and TLS, which all forms share."""
    secure = parts.scheme.startswith("rediss")
    unknown = parts.query.keys() - allowed - (_TLS_KEYS if secure else set())
    if unknown & _TLS_KEYS:
        _wrong("ca, cert and key need TLS; write rediss:// instead of redis://")
    if unknown:
        _wrong(f"has unknown options; allowed here: {', '.join(sorted(allowed | _TLS_KEYS)) or 'none'}")
    user, _, password = parts.userinfo.partition(":")
    if user and not password:
        _wrong("names a user but no password; a password alone is written redis://:password@host")
    tls = Tls(**{name: parts.query[name] for name in _TLS_KEYS & parts.query.keys()}) if secure else None
    return Endpoint(user=unquote(user) or None, password=unquote(password) or None, tls=tls)


def _unix(parts: _Parts) -> Endpoint:
    if parts.hosts or parts.userinfo or len(parts.path) < 2:
        _wrong("needs three slashes and a path: unix:///path/to/socket")
    if "\0" in unquote(parts.path):
        _wrong("has a NUL in the path of the socket")
    base = _base(parts, allowed={"user", "password", "db"})
    user, password = parts.query.get("user"), parts.query.get("password")
    if user and not password:
        _wrong("names a user but no password")
    db = _db(parts.query.get("db", ""))
    return replace(base, path=unquote(parts.path), user=user or None, password=password or None, db=db)


def _cluster(parts: _Parts) -> ClusterEndpoint:
    base = _base(parts, allowed=set())
    if parts.path.strip("/") not in ("", "0"):
        _wrong("names a database, but a cluster has only database 0")
    return ClusterEndpoint(_each(parts.hosts, 6379, base.at))


def _sentinel(parts: _Parts) -> SentinelEndpoint:
    primary = _base(parts, allowed={"sentinel_user", "sentinel_password", "db"})
    master, _, db = parts.path.strip("/").partition("/")
    if not master:
        _wrong("needs the master's name: redis+sentinel://host:port,host:port/master-name")
    user, password = parts.query.get("sentinel_user"), parts.query.get("sentinel_password")
    if user and not password:
        _wrong("has sentinel_user but no sentinel_password")
    guard = Endpoint(user=user or None, password=password or None, tls=primary.tls)
    sentinels = _each(parts.hosts, 26379, guard.at)
    primary = replace(primary, db=_db(db or parts.query.get("db", "")))
    return SentinelEndpoint(sentinels, unquote(master), primary)


def _each(hosts: str, default_port: int, make: Callable[[str, int], Endpoint]) -> tuple[Endpoint, ...]:
    return tuple(make(*_host_port(item, default_port)) for item in hosts.split(","))


def _host_port(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*))(?::([^:]*))?", text)
    if match is None:
        _wrong("has a host that cannot be read; an IPv6 address is written [::1]:6379")
    host = match[1] or match[2] or "localhost"
    if not _can_be_looked_up(host):
        _wrong("has an invalid host name: each part between dots needs 1 to 63 characters, and no NUL")
    port = match[3]
    if port is None:
        return host, default_port
    # Do not repeat the text: with a forgotten "@host" it is the password.
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        _wrong("needs a port from 1 to 65535 after the host's colon")
    return host, int(port)


def _can_be_looked_up(host: str) -> bool:
    try:
        host.encode("idna")  # as the lookup does, which would raise an unexpected error
    except UnicodeError:
        return False
    return "\0" not in host


def _db(text: str) -> int:
    if text == "":
        return 0
    if not re.fullmatch(r"[0-9]{1,6}", text):
        _wrong("needs a number as database, as in redis://localhost:6379/0")
    return int(text)


Login = tuple[str | None, str]
"""User (None: the default user) and password or token."""
CredentialProvider = Callable[[], Login | Awaitable[Login]]
"""Called at every (re)connect. A plain function runs in a thread, so it may ask over the network."""

_THREADS: Final = threading.BoundedSemaphore(256)
"""Limit of concurrent provider calls; only providers that never return can reach it."""


async def signed(endpoint: Endpoint, provider: CredentialProvider | None, *, within_s: float) -> Endpoint:
    """Return the endpoint with the provider's current credentials, or unchanged if there is no provider."""
    if provider is None:
        return endpoint
    import asyncio  # here: settings name providers, and programs that only read settings need no asyncio

    try:
        async with asyncio.timeout(within_s):
            answer = await _ask(provider)
    except TimeoutError:
        raise Unavailable(
            f"{endpoint.address}: the credential provider did not answer within {within_s:g} s", sent=False
        ) from None
    except (Exception, SystemExit) as error:  # any failure: a token service may be down, like a server
        raise Unavailable(
            f"{endpoint.address}: the credential provider failed: {type(error).__name__}: {error}", sent=False
        ) from error
    user, password = _checked(endpoint, answer)
    return replace(endpoint, user=user, password=password)


async def _ask(provider: CredentialProvider) -> object:
    answer = provider() if inspect.iscoroutinefunction(provider) else await _in_thread(provider)
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(provider: CredentialProvider) -> object:
    """Run the provider in a separate thread that is never joined: one that does not return must not delay a stop or the
    end of the process, as a thread of the loop's executor would."""
    import asyncio

    if not _THREADS.acquire(blocking=False):
        raise TimeoutError
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
    context = copy_context()

    def tell(answer: object, error: BaseException | None) -> None:
        if not answered.done():
            answered.set_result((answer, error))

    def ask() -> None:
        answer: object = None
        failure: BaseException | None = None
        try:
            answer = context.run(provider)
        except BaseException as error:  # noqa: BLE001  # raised again where the answer is awaited
            failure = error
        _THREADS.release()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, answer, failure)

    threading.Thread(target=ask, name="mainspring-credentials", daemon=True).start()
    answer, error = await answered
    if error is not None:
        raise error
    return answer


def _checked(endpoint: Endpoint, answer: Any) -> Login:
    # Never repeat the answer in an error: half of it is a secret.
    good = isinstance(answer, tuple) and len(answer) == 2
    if not good or not isinstance(answer[1], str) or not (answer[0] is None or isinstance(answer[0], str)):
        raise ConfigError(
            f"{endpoint.address}: the credential provider must return (user or None, password), both strings"
        )
    return answer[0] or None, answer[1]


def provider_of(named: CredentialProvider | str | None) -> CredentialProvider | None:
    """Return the function itself, or the one named by `module:function`."""
    if named is None or callable(named):
        return named
    module, colon, attribute = named.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"credentials is {named!r}; write module:function, e.g. myapp.tokens:redis_login")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"credentials is {named!r}, which cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"credentials is {named!r}, which is of type {type(found).__name__}, not a function")
    provider: CredentialProvider = found
    return provider
