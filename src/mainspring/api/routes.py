"""Routes, and one request on its way to its handler."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import msgspec

from ..client.client import Client
from ..model.access import ApiKey, Right
from ..model.audit import Change
from ..model.errors import Ambiguous, Conflict, InvalidInput, OutOfMemory
from ..model.notice import OURS
from ..model.targets.url import AllowList
from ..model.task import Handle, SubmittedTask, Task
from ..node.node import Node
from ..sinks.http_network import check_literal_target
from ..store import access
from ..store.tasks.dead_letters import find_live
from .asgi import AsgiScope, Headers, Problem, Receive, Sendable, not_ready
from .auth import check_target
from .spaces import Space

if TYPE_CHECKING:
    from .app import App


RouteHandler = Callable[["Call"], Awaitable[Sendable]]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method of one path. `{name}` in a path matches one segment, percent-encoded if necessary."""

    method: str
    path: str
    handler: RouteHandler
    right: Right | None
    """The right that the caller needs; None admits everybody."""
    summary: str
    query: type | None = None
    """A Struct with one field per parameter."""
    body: type | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    """Status -> type of the response; None if it is not JSON."""
    media: tuple[str, ...] = ()
    """Content types of responses that are not JSON."""
    problems: tuple[str, ...] = ()
    """Problems besides those that every route may return."""
    streams: bool = False
    """True if the handler reads the body itself."""
    open_by: str = ""
    """A setting that admits everybody if it is true."""
    lines: bool = False
    """True if body and response are lines of JSON, each of the given type."""

    @property
    def name(self) -> str:
        """The operation's id: the handler's name."""
        return getattr(self.handler, "__name__", "").strip("_")

    @property
    def tag(self) -> str:
        part = self.path.removeprefix("/v1/").strip("/").partition("/")[0].partition(":")[0]
        return part if self.path.startswith("/v1/") else "node"


_PARAMETER: Final = None
"""Key of a parameter in place of a segment: no request can contain it."""


class Router:
    """Finds the route of a request. Literal segments precede parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._tree: dict[str | None, Any] = {}
        for route in self.routes:
            node = self._tree
            for segment in filter(None, route.path.split("/")):
                node = node.setdefault(_PARAMETER if segment.startswith("{") else segment, {})
            methods = node.setdefault("", {})
            if route.method in methods:
                raise ValueError(f"two routes for {route.method} {route.path}")
            methods[route.method] = route

    def find(self, scope: AsgiScope) -> tuple[Route, Mapping[str, str]]:
        methods, values = self._walk(_segments(scope))
        if methods is None:
            shown = "; /docs shows every route" if "docs" in self._tree else ""
            raise Problem("not-found", f"there is nothing at {scope['path'][:200]}{shown}")
        method = scope["method"]
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            spoken = ", ".join(_spoken(methods))
            raise Problem("method", f"{scope['path'][:200]} answers {spoken}", allow=spoken)
        names = [segment[1:-1] for segment in route.path.split("/") if segment.startswith("{")]
        return route, dict(zip(names, values, strict=True))

    def _walk(self, segments: list[str]) -> tuple[dict[str, Route] | None, list[str]]:
        node, values = self._tree, []
        for segment in [] if segments == [""] else segments:
            if segment and segment in node:
                node = node[segment]
            elif segment and _PARAMETER in node:
                node = node[_PARAMETER]
                values.append(segment)
            else:
                return None, values
        return node.get(""), values


def _segments(scope: AsgiScope) -> list[str]:
    """Split the path before decoding: a `%2F` belongs to an id."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    try:
        return [unquote(part, errors="strict") for part in raw.decode("ascii").split("/")[1:]]
    except UnicodeDecodeError:
        raise Problem("malformed", "the path is not UTF-8 once its %-signs are decoded") from None


def _spoken(methods: Mapping[str, Route]) -> Iterator[str]:
    for method in methods:
        yield method
        if method == "GET":
            yield "HEAD"


def check_put_target(target: str, reach: AllowList) -> None:
    """Refuse a target that no webhook may reach, and those of notices and beats: a caller could forge them."""
    check_literal_target(target, reach)
    if target.startswith(OURS):
        raise InvalidInput(
            f"target {target[:200]!r}: only nodes put such tasks; report a beat with POST /v1/beats/{{name}}"
        )


NO_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType({})


class Call(msgspec.Struct):
    """The request: caller, route, parameters, and body."""

    app: "App"
    key: ApiKey
    address: str
    space: Space | None
    """None on routes that are open to everybody."""
    headers: Headers
    receive: Receive
    params: Mapping[str, str] = NO_PARAMETERS
    query: Any = None
    body: Any = None
    raw_body: bytes = b""
    method: bytes = b""
    path: bytes = b""
    query_string: bytes = b""

    @property
    def client(self) -> Client:
        return self.put_into.client

    @property
    def put_into(self) -> Space:
        if self.space is None:
            raise not_ready("the node is starting or stopping")
        return self.space

    @property
    def node(self) -> Node:
        return self.app.node

    @property
    def namespace(self) -> str:
        return self.client.store.keys.namespace

    @property
    def who(self) -> str:
        """The caller's name in the audit trail."""
        return self.key.id if not self.key.hash else f"{self.key.id} ({self.key.name})"

    @property
    def may_reach_all(self) -> bool:
        return self.key.targets is None

    def check_target(self, target: str) -> None:
        """Refuse a target that this key may not use, or that no webhook may reach."""
        check_target(self.key, target)
        check_put_target(target, self.app.reach)

    def signed(self, task: Task) -> Task:
        """Name the caller in a task with an id if its key may not operate: it can replace only what it put itself."""
        if task.id is None or self.key.may("operate"):
            return task
        return SubmittedTask(**{name: getattr(task, name) for name in Task.__struct_fields__}, by=self.key.id)

    def check_changeable(self, handle: Handle) -> None:
        """Refuse a put that was to replace the task of another caller, and has kept it."""
        if handle.of_another:
            raise Problem(
                "forbidden",
                f"another caller put the task {handle.id[:300]!r}; a key with the role {self.key.role} replaces only"
                " its own tasks, the right 'operate' is needed for others",
            )

    def check_seen(self, target: str | None, what: str, name: str) -> None:
        """Treat an object as missing if this key may not see its target."""
        if not self.key.sees(target):
            raise no_such(what, name)

    async def lane_seen(
        self, lane: str | None, what: str, target_in: Callable[[str | None], Awaitable[str | None]]
    ) -> str | None:
        """Return the lane of a task. If several tasks have an id, a bound key learns only of those that it may see."""
        if lane is not None or self.may_reach_all:
            return lane
        try:
            await target_in(None)
        except Ambiguous as error:
            seen = [one for one in error.lanes if self.key.sees(await target_in(one))]
            if not seen:
                raise no_such(what, error.id) from None
            if len(seen) > 1:
                raise Ambiguous(error.id, seen) from None
            return seen[0]
        return None

    async def check_not_others(self, task_id: str, lane: str | None = None) -> None:
        """A key cannot replace, or learn about, a task that it may not see."""
        if self.may_reach_all:
            return
        known = await find_live(self.client.store, task_id, lane or "")
        if known.state != "unknown" and not self.key.sees(known.target):
            raise Conflict(f"the id {task_id!r} is taken")

    def check_unbound(self) -> None:
        """Refuse a bound key what concerns all targets at once."""
        if not self.may_reach_all:
            raise Problem("forbidden", "this key is bound to targets, and this concerns all of them")

    async def audit(
        self, what: str, name: str, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None
    ) -> None:
        """Record a change in the audit trail before the response is sent."""
        change = Change(self.who, what, name, self.address, self.key.role, before, after)
        try:
            await access.record_change(self.client.store, change, kept=self.node.config.audit_entries)
        except OutOfMemory:
            # A full server must still cancel and drop tasks, or it would stay full.
            self.app.log_unaudited(change)


def no_such(what: str, name: str) -> Problem:
    return Problem("not-found", f"there is no {what} {name[:300]!r}")
