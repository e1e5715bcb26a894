"""`/openapi.json` and `/docs`: what the API answers, for programs and for people. No key is needed to read it."""

from functools import cache
from importlib.resources import files
from typing import Any, Final

from .asgi import NOSNIFF, Answer, Header, answer
from .call import Call
from .openapi import document
from .problems import Problem
from .routes import Route

_GUARDS: Final[tuple[Header, ...]] = (
    NOSNIFF,
    (b"cache-control", b"no-cache"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
)
"""The page loads its own script and style and nothing else, from nowhere else."""

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


ROUTES: Final = (
    Route("GET", "/openapi.json", openapi, None, "This document.", answers={200: dict[str, Any]}),
    Route("GET", "/docs", docs, None, "The same for people.", answers={200: None}, media=("text/html",)),
    Route(
        "GET", "/docs/{name}", docs_asset, None, "What the page is made of.", answers={200: None},
        media=("text/html", "text/css", "text/javascript"), problems=("not-found",),
    ),
)  # fmt: skip
