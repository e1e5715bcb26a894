"""The HTTP API as a plain ASGI application, and the list of everything it answers."""

import asyncio
import logging
from typing import Final

from ..model.access import ApiKey
from ..model.audit import Change
from ..model.errors import MainspringError
from ..model.targets.url import AllowList
from ..node.node import Node
from . import admin, batch, dead, lanes, openapi, runs, schedules, tasks, ticks
from .asgi import (
    JSON,
    AsgiScope,
    AsgiSend,
    HungUp,
    Problem,
    Receive,
    Sendable,
    answer_to_error,
    check_content_type,
    read_body,
    read_json,
    read_query,
)
from .auth import OPEN, Authenticator, Quotas, check_right
from .batch import Batches
from .routes import NO_PARAMETERS, Call, Route, Router
from .spaces import Space, Spaces, no_such_namespace
from .ticks import TICK

log = logging.getLogger("mainspring.api")


WATCHED: Final[tuple[Route, ...]] = (*admin.PROBE_ROUTES, admin.METRICS_ROUTE)
"""Routes that a node without the role `api` serves too, for monitoring."""

ROUTES: Final[tuple[Route, ...]] = (
    TICK,
    *tasks.ROUTES,
    batch.ROUTE,
    *dead.ROUTES,
    *runs.ROUTES,
    *schedules.ROUTES,
    *lanes.ROUTES,
    *admin.QUEUE_ROUTES,
    *admin.TARGET_ROUTES,
    *admin.BEAT_ROUTES,
    admin.CLUSTER_ROUTE,
    admin.DOCTOR_ROUTE,
    *admin.KEY_ROUTES,
    admin.AUDIT_ROUTE,
    *WATCHED,
    *openapi.DOCUMENTATION_ROUTES,
)


NAMESPACE: Final = b"mainspring-namespace"


class App:
    """Answers requests. Success is reported only once the server has stored the result."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.authenticator = Authenticator(node.config)
        self.quotas = Quotas(node.config)
        self.spaces = Spaces(node)
        self.takes_requests = "api" in node.config.roles
        self.router = Router(ROUTES if self.takes_requests else WATCHED)
        self.reach = AllowList.parse(node.config.http_reach)
        """Private addresses that webhooks may reach besides public ones."""
        self.batches = Batches()
        self.followers = runs.Followers()
        self.examining = asyncio.Lock()
        self.previewing = asyncio.Lock()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            return
        found: Sendable
        try:
            found = await self._answer(scope, receive)
        except HungUp:
            return
        except (Problem, MainspringError) as error:
            found = answer_to_error(error)
        except Exception as error:
            log.exception("a request failed in an unexpected way")
            found = answer_to_error(error)
        await found.send(send)

    async def _answer(self, scope: AsgiScope, receive: Receive) -> Sendable:
        if scope["path"] == "/ticks" and scope["method"] == "POST" and self.takes_requests:
            route, params = ticks.TICK, NO_PARAMETERS  # skip the search for the hottest route
        else:
            route, params = self.router.find(scope)
        call = await self._admit(route, scope, receive)
        call.params = params
        call.query = read_query(route.query, scope["query_string"])
        if route.body is not None and not route.streams:
            await self._read(call, route, scope)
        return await route.handler(call)

    async def _read(self, call: Call, route: Route, scope: AsgiScope) -> None:
        check_content_type(call.headers, (JSON,))
        call.raw_body = await read_body(call.receive, self.node.config.api_body_bytes)
        call.body = read_json(route.body, call.raw_body, self.node.config.api_json_depth)
        call.method, call.path, call.query_string = (
            scope["method"].encode(),
            scope["path"].encode(),
            scope["query_string"],
        )

    async def _admit(self, route: Route, scope: AsgiScope, receive: Receive) -> Call:
        headers = dict(scope["headers"])
        address = (scope.get("client") or ("",))[0]
        if route.right is None or (route.open_by and getattr(self.node.config, route.open_by)):
            return Call(self, OPEN, address, None, headers, receive)
        home = self.spaces.home
        if self.authenticator.free and b"authorization" not in headers and NAMESPACE not in headers:
            return Call(self, self.authenticator.without_key(headers), address, home, headers, receive)
        key = await self.authenticator.admit(home.client.store, headers, address)
        check_right(key, route.right)
        return Call(self, key, address, await self._space(key, headers), headers, receive)

    async def _space(self, key: ApiKey, headers: dict[bytes, bytes]) -> Space:
        name = headers.get(NAMESPACE)
        if name is None:
            return self.spaces.home
        namespace = name.decode("latin-1")
        if namespace != self.node.config.namespace and not key.reaches(namespace):
            raise no_such_namespace(namespace)
        return await self.spaces.find(namespace)

    def log_unaudited(self, change: Change) -> None:
        log.error(
            "the server is full and stores no audit entry: %s did %s to %s", change.who, change.what, change.object
        )
