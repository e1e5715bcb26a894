"""The OpenAPI 3.1 document, made from the routes, and `/docs`. Neither needs a key."""

import inspect
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from .. import __version__
from ..model.explain import INSTANTS
from .asgi import NOSNIFF, PREFIX, PROBLEMS, Answer, Header, Problem, answer
from .routes import Call, Route

_REF: Final = "#/components/schemas/{name}"
_EVERYWHERE: Final = ("malformed", "invalid", "unauthenticated", "forbidden", "not-found", "rate", "unavailable")
"""Problems that any route with a right may return."""

_PROBES: Final = ("malformed", "invalid", "unavailable")
_NAMESPACE: Final = {
    "name": "Mainspring-Namespace",
    "in": "header",
    "required": False,
    "description": "Another namespace on the same servers, if the key may reach it.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"},
}
_NDJSON: Final = "application/x-ndjson"
_ABOUT: Final = (
    "Tasks that reach their target at their time, to the millisecond. Errors are RFC 9457 problem documents with a"
    " stable type. Lists with a parameter cursor are paged; keys, pauses, workers, targets and beats come whole."
    " A put with an id, or with an Idempotency-Key, may be repeated and counts once."
)


_BARE: Final = ("Accepted", "LineAnswer")
"""Answers of ticks and lines of a batch: too many to write their times twice."""


class ProblemDocument(msgspec.Struct):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str


def document(routes: Iterable[Route]) -> dict[str, Any]:
    routes = tuple(routes)
    kinds: dict[Any, None] = {ProblemDocument: None}
    for route in routes:
        kinds |= dict.fromkeys(kind for kind in (route.query, route.body, *route.answers.values()) if kind is not None)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, components)
    _add_times(components)
    for shape in components.values():
        if "description" in shape:
            shape["description"] = inspect.cleandoc(shape["description"])
    for query in {route.query for route in routes if route.query is not None}:
        components.pop(query.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mainspring", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "bearerFormat": "msk_…"}},
        },
    }


def _add_times(components: dict[str, Any]) -> None:
    """Describe the texts that `with_times` adds."""
    text = {"type": "string", "format": "date-time"}
    for name, shape in components.items():
        properties = shape.get("properties", {})
        for field in sorted(INSTANTS & properties.keys()) if name not in _BARE else ():
            kind = {"anyOf": [text, {"type": "null"}]} if "anyOf" in properties[field] else text
            properties.setdefault(field.removesuffix("_ms"), kind)


def _operation(route: Route, schema_of: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "security": [] if route.right is None else [{}, {"key": []}],
    }
    if route.right is not None:
        operation["x-right"] = route.right
    parameters = [*_in_path(route), *_in_query(route, components), *_in_header(route)]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        needed = bool(components.get(route.body.__name__, {}).get("required")) and not route.lines
        operation["requestBody"] = {"required": needed, "content": _content(route, schema_of[route.body])}
    operation["responses"] = _responses(route, schema_of)
    return operation


def _content(route: Route, schema: Any) -> dict[str, Any]:
    if route.lines:
        return {_NDJSON: {"schema": {"type": "string"}, "x-line-schema": schema}}
    return {"application/json": {"schema": schema}}


def _in_path(route: Route) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    names = re.findall(r"\{(\w+)\}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _in_query(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    shape = components[route.query.__name__]
    about = shape.get("description", "")
    needed = shape.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": _plain(schema), "description": about}
        for name, schema in shape["properties"].items()
    ]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a parameter's schema: a parameter is given or left out, never null."""
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1:
        return {name: value for name, value in schema.items() if name not in ("anyOf", "default")} | dict(choices[0])
    return schema


def _in_header(route: Route) -> list[dict[str, Any]]:
    found = []
    if "idempotency" in route.problems or route.lines:  # it also recognizes lines without ids
        schema = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
        found.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema})
    if route.right is not None:
        found.append(_NAMESPACE)
    return found


def _responses(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        content = {one: {} for one in route.media} if kind is None else _content(route, schema_of[kind])
        responses[str(status)] = {"description": route.summary, "content": content}
    slugs = dict.fromkeys((*(_PROBES if route.right is None else _EVERYWHERE), *route.problems))
    for slug in slugs:
        status, meaning = PROBLEMS[slug]
        text = f"`{PREFIX}{slug}`: {meaning}"
        if str(status) in responses:
            responses[str(status)]["description"] += f"; {text}"
        else:
            schema = _REF.format(name="ProblemDocument")
            content = {"application/problem+json": {"schema": {"$ref": schema}}}
            responses[str(status)] = {"description": text, "content": content}
    return responses


_GUARDS: Final[tuple[Header, ...]] = (
    NOSNIFF,
    (b"cache-control", b"no-cache"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
)
"""The page loads its own script and style, and nothing from elsewhere."""

_KINDS: Final = {
    "page.html": b"text/html; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
}


async def openapi(call: Call) -> Answer:
    return _document_of(call.app.router.routes)


@cache
def _document_of(routes: tuple[Route, ...]) -> Answer:
    return answer(document(routes))


async def home(call: Call) -> Answer:
    del call
    page = _text("home.html").replace(b"{version}", __version__.encode())
    return Answer(200, page, _KINDS["page.html"], guards=_GUARDS)


async def docs(call: Call) -> Answer:
    del call
    return _asset("page.html")


async def docs_asset(call: Call) -> Answer:
    return _asset(call.params["name"])


@cache
def _text(name: str) -> bytes:
    return (files(__package__) / "docs" / name).read_bytes()


def _asset(name: str) -> Answer:
    if name not in _KINDS:
        raise Problem("not-found", f"there is nothing at /docs/{name[:80]}")
    return Answer(200, _text(name), _KINDS[name], guards=_GUARDS)


DOCUMENTATION_ROUTES: Final = (
    Route("GET", "/", home, None, "Show a page that leads on.", answers={200: None}, media=("text/html",)),
    Route("GET", "/openapi.json", openapi, None, "This document.", answers={200: dict[str, Any]}),
    Route("GET", "/docs", docs, None, "The API's documentation.", answers={200: None}, media=("text/html",)),
    Route(
        "GET", "/docs/{name}", docs_asset, None, "Files of the documentation page.", answers={200: None},
        media=("text/html", "text/css", "text/javascript"), problems=("not-found",),
    ),
)  # fmt: skip
