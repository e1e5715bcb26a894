"""Calling the API of a node in this process over real HTTP."""

import asyncio
import contextlib
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from mainspring.api.server import ApiServer
from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.model.access import ApiKey, Role, hash_of, new_token
from mainspring.node.node import Node
from mainspring.sinks.base import Sink
from mainspring.sinks.log import NullSink
from mainspring.store.access import add_key, new_key_id

LATER = 1_900_000_000_000
"""2030, in milliseconds."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def problem(self) -> str:
        """The slug of a problem document; every field of one is looked at."""
        assert self.headers["content-type"] == "application/problem+json", self
        told = self.json
        members = {"id", "due_ms", "outcome"} if told["type"].endswith(":not-confirmed") else set()
        if told["type"].endswith(":ambiguous"):
            members = {"id", "lanes"}
        if told["type"].endswith(":conflict") and "answer" in told:
            members = {"answer"}
        if told["type"].endswith(":not-found") and told.get("missing") == "namespace":
            members = {"missing"}
        assert set(told) == {"type", "title", "status", "detail"} | members
        assert told["status"] == self.status
        prefix, _, slug = str(told["type"]).rpartition(":")
        assert prefix == "urn:mainspring:problem"
        return slug


class Api:
    """One node with its API. `token` goes with every call that names none of its own."""

    def __init__(self, node: Node, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.node = node
        self.url = url
        self.token: str | None = None
        self._address = url.partition("://")[2]
        self._tls = tls

    @property
    def client(self) -> Client:
        assert self.node.client is not None
        return self.node.client

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await asyncio.to_thread(self._call, method, path, body, headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.call("POST", path, {} if body is None else body, content_type="application/json", **headers)

    async def delete(self, path: str, **headers: str) -> Answer:
        return await self.call("DELETE", path, **headers)

    async def batch(self, lines: Any, query: str = "", **headers: str) -> Answer:
        if isinstance(lines, list):
            lines = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)
        kind = {"content_type": "application/x-ndjson"} | headers
        return await self.call("POST", f"/v1/tasks:batch{query}", lines, **kind)

    def _call(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        if self._tls is None:
            connection = http.client.HTTPConnection(self._address, timeout=60)
        else:
            connection = http.client.HTTPSConnection(self._address, timeout=60, context=self._tls)
        if self.token is not None:
            headers.setdefault("authorization", f"Bearer {self.token}")
        try:
            data = body if isinstance(body, (bytes, type(None), Iterator)) else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, named, encode_chunked=isinstance(body, Iterator))
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read())
        finally:
            connection.close()

    async def key(self, role: Role, **more: Any) -> str:
        """A new key in the store; its text."""
        token = new_token()
        store = self.client.store
        record = ApiKey(new_key_id(), f"a test's {role}", role, hash_of(token), store.clock.now_ms(), **more)
        await add_key(store, record)
        self.node_ring_forgets()
        return token

    def node_ring_forgets(self) -> None:
        """Tests do not wait for the second in which a node trusts what it knows of keys."""
        self.face.app.authenticator.ring.forget()

    face: ApiServer


@contextlib.asynccontextmanager
async def serving_api(
    config: Config, sinks: dict[str, Sink] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Api]:
    node = Node(config, {"null": NullSink(), "log": NullSink()} if sinks is None else sinks)
    face = ApiServer(node)
    await face.start()
    try:
        await node.start()
        api = Api(node, face.url, tls)
        api.face = face
        yield api
    finally:
        await face.stop()
        await node.stop()
