"""What the API answers: every route with who may call it, what it takes and what it gives."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from ..model.access import Right
from .asgi import Answer, Scope
from .problems import Problem

if TYPE_CHECKING:
    from .call import Call

Handler = Callable[["Call"], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method of one path. `{name}` in a path stands for one segment, percent-encoded where it must be."""

    method: str
    path: str
    handler: Handler
    right: Right | None
    """What the caller must be allowed; None lets everybody in."""
    summary: str
    query: type | None = None
    """A Struct with one field per parameter."""
    body: type | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    """Status -> type of the answer; None for what is no JSON."""
    media: tuple[str, ...] = ()
    """Content types of answers that are no JSON."""
    problems: tuple[str, ...] = ()
    """Besides those that every route may answer."""
    streams: bool = False
    """The handler reads the body itself."""
    open_by: str = ""
    """A setting that lets everybody in when it is true."""
    lines: bool = False
    """Body and answer are lines of JSON, each of the given type."""

    @property
    def name(self) -> str:
        """The operation's id: the handler's name."""
        return getattr(self.handler, "__name__", "").strip("_")

    @property
    def tag(self) -> str:
        part = self.path.removeprefix("/v1/").strip("/").partition("/")[0].partition(":")[0]
        return part if self.path.startswith("/v1/") else "node"


_PARAMETER: Final = None
"""In the place of a segment: no request can say it."""


class Router:
    """Finds the route of a request. Literal segments go before parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._tree: dict[str | None, Any] = {}
        for route in self.routes:
            node = self._tree
            for segment in route.path.split("/")[1:]:
                node = node.setdefault(_PARAMETER if segment.startswith("{") else segment, {})
            methods = node.setdefault("", {})
            if route.method in methods:
                raise ValueError(f"two routes for {route.method} {route.path}")
            methods[route.method] = route

    def find(self, scope: Scope) -> tuple[Route, Mapping[str, str]]:
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
        for segment in segments:
            if segment and segment in node:
                node = node[segment]
            elif segment and _PARAMETER in node:
                node = node[_PARAMETER]
                values.append(segment)
            else:
                return None, values
        return node.get(""), values


def _segments(scope: Scope) -> list[str]:
    """Split before decoding: a `%2F` belongs to an id."""
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
