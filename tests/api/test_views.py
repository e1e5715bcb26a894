"""Dead letters, named targets, the cluster and the OpenAPI document over real HTTP."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from mainspring import __version__
from mainspring.api import app, dead
from mainspring.api.asgi import PROBLEMS
from mainspring.client.http import Api as Remote
from mainspring.client.http import RemoteClient
from mainspring.config.config import Config
from mainspring.model.dead_letter import DeadLetter, ReplaySummary
from mainspring.model.delivery import Dead, Delivery, Outcome
from mainspring.model.errors import InvalidInput
from mainspring.model.targets.named import Targets
from mainspring.sinks.log import NullSink
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Api, serving_api

SECRETS = (
    "s3cret-password",
    "s3cret-bearer",
    "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0",
    "s3cret-header",
    "s3cret-query",
)
TARGETS = Targets.read(
    {
        "hook": {
            "url": "https://hooks.example.com/in?token=s3cret-query",
            "auth": {"user": "me", "password": SECRETS[0]},
            "secrets": [SECRETS[2]],
            "headers": {"x-api-key": SECRETS[3]},
            "timeout": "5s",
        },
        "other": {"url": "https://other.example.com/", "auth": {"bearer": SECRETS[1]}},
        "topic": {"address": "kafka:orders"},
    }
)


class DyingSink:
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [Dead("the receiver said no")] * len(batch)

    async def aclose(self) -> None:
        return


class BrokenSink(DyingSink):
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        raise ValueError("a bug in the sink")


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    config = Config(redis_url=server.url, port=0, partitions=4, targets=TARGETS)
    async with serving_api(config, {"null": NullSink(), "log": DyingSink(), "kafka": BrokenSink()}) as made:
        yield made
        await balance(made.client.store)
    server.call("FLUSHALL")


async def kill(api: Api, *ids: str, target: str = "log:") -> None:
    for task_id in ids:
        await api.client.put(target, {"of": task_id}, id=task_id)
    for _ in range(1200):
        if len((await api.client.dead.list(limit=1000)).letters) >= len(ids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the tasks do not die")


# -- dead letters ----------------------------------------------------------------------------------------------


async def test_a_dead_letter_is_listed_shown_and_replayed(api: Api) -> None:
    await kill(api, "a/1", "b")
    page = (await api.get("/v1/dead?limit=1")).json
    rest = (await api.get(f"/v1/dead?limit=1&cursor={page['next']}")).json
    assert {one["id"] for one in (*page["letters"], *rest["letters"])} == {"a/1", "b"}
    shown = (await api.get("/v1/dead/a%2F1")).json
    assert (shown["reason"], shown["payload"], shown["target"]) == ("the receiver said no", {"of": "a/1"}, "log:")
    rehearsed = await api.post("/v1/dead/b/replay", {"dry_run": True, "at": LATER})
    assert rehearsed.json["outcome"] == "replayed"
    replayed = await api.post("/v1/dead/b/replay", {"at": LATER})
    assert (replayed.json["outcome"], replayed.json["due_ms"]) == ("replayed", LATER)
    assert (await api.client.get("b")).state == "pending"
    assert (await api.get("/v1/dead/b")).status == 404


async def test_a_dead_letter_is_shown_with_the_traceback_of_its_last_attempt(api: Api) -> None:
    await api.client.put("kafka:broken", id="a", retry="1")
    async with asyncio.timeout(60):
        while (answer := await api.get("/v1/dead/a")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    shown = answer.json
    assert shown["traceback"].startswith("Traceback (most recent call last):\n")
    assert shown["traceback"].endswith("ValueError: a bug in the sink")

    def dead_letter() -> DeadLetter | None:
        with contextlib.closing(Remote(api.url)) as remote:
            return asyncio.run(RemoteClient(remote).dead.get("a"))

    assert (found := await asyncio.to_thread(dead_letter)) is not None
    assert found.traceback == shown["traceback"]


async def test_a_dead_letter_whose_id_lives_again_is_a_conflict(api: Api) -> None:
    await kill(api, "a")
    await api.client.put("null:", 1, at=LATER, id="a", on_conflict="replace")
    answer = await api.post("/v1/dead/a/replay", {"at": LATER})
    assert (answer.status, answer.problem) == (409, "conflict")


async def test_a_dropped_dead_letter_is_gone(api: Api) -> None:
    await kill(api, "a")
    assert (await api.delete("/v1/dead/a")).json == {"id": "a", "outcome": "dropped"}
    assert (await api.delete("/v1/dead/a")).status == 404


async def test_many_dead_letters_are_replayed_and_dropped_by_filter(api: Api) -> None:
    await kill(api, *(f"n{n}" for n in range(6)))
    assert (await api.post("/v1/dead:replay", {})).problem == "invalid"
    assert (await api.post("/v1/dead:drop", {})).problem == "invalid"
    nothing = (await api.post("/v1/dead:replay", {"target": "kafka:*", "at": LATER})).json
    assert (nothing["replayed"], nothing["complete"]) == (0, True)
    rehearsed = (await api.post("/v1/dead:drop", {"target": "log:", "dry_run": True})).json
    assert rehearsed == {"dropped": 6, "dry_run": True, "complete": True}
    replayed = (await api.post("/v1/dead:replay", {"reason": "said NO", "at": LATER})).json
    assert (replayed["replayed"], replayed["conflict"], replayed["problems"]) == (6, 0, [])
    await kill(api, "x", "y")
    assert (await api.post("/v1/dead:drop", {"all": True})).json["dropped"] == 2


async def test_a_replay_that_takes_many_requests_ends_though_all_die_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "MANY_S", 0.5)
    await kill(api, *(f"n{n}" for n in range(60)))
    before = await api.client.dead.list(limit=100)

    def replay() -> ReplaySummary:
        with contextlib.closing(Remote(api.url)) as remote:
            return asyncio.run(RemoteClient(remote).dead.replay_many(rate=20))

    async with asyncio.timeout(60):
        summary = await asyncio.to_thread(replay)
    assert summary.replayed == 60
    for _ in range(1200):
        dead_letters = (await api.client.dead.list(limit=100)).letters
        if len(dead_letters) == 60 and min(one.died_ms for one in dead_letters) > max(
            one.died_ms for one in before.letters
        ):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("not all of them were delivered once more")
    died_ms = [one.died_ms for one in dead_letters]
    assert max(died_ms) - min(died_ms) > 2_500, "requests that follow one another keep the rate together"


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
async def test_a_rate_that_is_no_number_is_refused_before_it_means_none_at_all(api: Api, rate: float) -> None:
    with pytest.raises(InvalidInput, match=r"rate is (nan|inf); give a number"):
        await RemoteClient(Remote(api.url)).dead.replay_many(rate=rate)


@pytest.mark.parametrize("query", ["limit=0", "cursor=1", "died_after=now", "died_before=0", "reason=a&reason=b"])
async def test_wrong_parameters_of_dead_letters_are_refused(api: Api, query: str) -> None:
    assert (await api.get(f"/v1/dead?{query}")).problem == "invalid"


# -- targets and cluster ---------------------------------------------------------------------------------------


async def test_named_targets_are_shown_without_their_secrets(api: Api) -> None:
    listed, one = await api.get("/v1/targets"), await api.get("/v1/targets/hook")
    assert set(listed.json["targets"]) == {"hook", "other", "topic"}
    assert one.json["url"] == "https://hooks.example.com/in?***"
    assert one.json["auth"] == {"user": "***", "password": "***"}
    assert (one.json["headers"], one.json["timeout"]) == ({"x-api-key": "***"}, "5000ms")
    assert listed.json["targets"]["topic"]["address"] == "kafka:orders"
    for secret in SECRETS:
        assert secret.encode() not in listed.body + one.body
    assert (await api.get("/v1/targets/nobody")).problem == "not-found"


async def test_the_cluster_shows_its_node(api: Api) -> None:
    told = (await api.get("/v1/cluster")).json
    for _ in range(600):
        if not told["without_owner"]:
            break
        await asyncio.sleep(0.05)
        told = (await api.get("/v1/cluster")).json
    assert told["partitions"] == 4
    [node] = told["nodes"]
    assert node["id"] == told["leader"]
    assert node["partitions"] == [0, 1, 2, 3]


# -- the document ----------------------------------------------------------------------------------------------


async def test_the_document_has_every_route_and_its_problems(api: Api) -> None:
    document = (await api.get("/openapi.json")).json
    assert document["openapi"].startswith("3.1")
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(route.method, route.path) for route in app.ROUTES}
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    text = (await api.get("/openapi.json")).body.decode()
    for slug in set(PROBLEMS) - {"method", "timeout", "headers", "bug"}:  # these belong to no route in particular
        assert f"urn:mainspring:problem:{slug}`" in text, slug
    assert references(document) <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_page_is_whole_and_loads_nothing_from_elsewhere(api: Api) -> None:
    page = await api.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("page.css", "page.js"):
        assert f"/docs/{name}".encode() in page.body
        asset = await api.get(f"/docs/{name}")
        assert asset.status == 200
        assert b"://" not in asset.body
    assert b"://" not in page.body
    assert (await api.get("/docs/app.py")).problem == "not-found"


async def test_the_first_page_names_the_version_and_leads_on(api: Api) -> None:
    page = await api.get("/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert f"<small>{__version__}</small>".encode() in page.body
    assert b"://" not in page.body
    for path in re.findall(rb'href="([^"]+)"', page.body):
        assert (await api.get(path.decode())).status == 200, path


@pytest.mark.parametrize("path", ["/livez", "/v1/cluster", "/openapi.json", "/v1/tasks/nobody"])
async def test_every_answer_carries_the_security_headers(api: Api, path: str) -> None:
    headers = (await api.get(path)).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"


async def test_answers_have_the_shapes_the_document_gives_them(api: Api) -> None:
    """For the routes that read: what they really answer fits the type that the document is made of."""
    await api.client.put("null:", {"a": 1}, at=LATER, id="t")
    await kill(api, "d")
    await api.post("/v1/schedules", {"name": "s", "cron": "@daily", "target": "null:", "payload": [1]})
    await api.post("/v1/pauses", {"lane": "some"})
    run = (await api.client.runs()).runs[0].id  # of the task that was given up
    values = {"{id}": "t", "schedules/{name}": "schedules/s", "{name}": "hook", "{lane}": "some"}
    for route in app.ROUTES:
        kind = route.answers.get(200)
        if route.method != "GET" or kind is None or route.path == "/v1/queues/{name}":
            continue
        path = route.path.replace("dead/{id}", "dead/d").replace("tasks/{id}/result", "tasks/d/result")
        path = path.replace("runs/{id}/log", "runs/t/log").replace("runs/{id}", f"runs/{run}")
        for name, value in values.items():
            path = path.replace(name, value)
        answer = await api.get(path)
        assert answer.status == 200, path
        msgspec.json.decode(answer.body, type=kind)
