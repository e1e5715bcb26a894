"""Rights: every route with every role, the bindings of keys, tenants, and the audit trail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mainspring.api import app
from mainspring.api.routes import Route
from mainspring.client.client import Client
from mainspring.client.dead_letters import DeadLetters
from mainspring.config.config import Config
from mainspring.model.access import RIGHTS, Right, Role, new_token
from mainspring.model.dead_letter import ReplaySummary
from mainspring.model.delivery import Response
from mainspring.model.errors import OutOfMemory
from mainspring.model.ids import idh_of
from mainspring.model.job import Result
from mainspring.model.workers import WorkerInfo
from mainspring.store.access import list_keys, revoke_key
from mainspring.store.keys import partition_of
from mainspring.store.members import worker_beat
from mainspring.store.records import KeptResult, keep_results
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Api, serving_api

RULES: dict[str, Right | None] = {
    "POST /ticks": "submit",
    "GET /v1/beats": "read",
    "POST /v1/beats/{name}": "submit",
    "DELETE /v1/beats/{name}": "operate",
    "POST /v1/tasks": "submit",
    "POST /v1/tasks:batch": "submit",
    "GET /v1/tasks": "read",
    "GET /v1/tasks:count": "read",
    "GET /v1/tasks/{id}": "read",
    "GET /v1/tasks/{id}/explain": "read",
    "GET /v1/tasks/{id}/result": "read",
    "DELETE /v1/tasks/{id}": "operate",
    "POST /v1/tasks/{id}/reschedule": "operate",
    "GET /v1/runs": "read",
    "GET /v1/runs/{id}": "read",
    "GET /v1/runs/{id}/log": "read",
    "GET /v1/stats": "read",
    "GET /v1/dead": "read",
    "GET /v1/dead/{id}": "read",
    "POST /v1/dead/{id}/replay": "operate",
    "DELETE /v1/dead/{id}": "operate",
    "POST /v1/dead:replay": "operate",
    "POST /v1/dead:drop": "operate",
    "GET /v1/schedules": "read",
    "POST /v1/schedules": "operate",
    "POST /v1/schedules:batch": "operate",
    "POST /v1/schedules:find": "read",
    "POST /v1/schedules:preview": "read",
    "GET /v1/schedules/{name}": "read",
    "PUT /v1/schedules/{name}": "operate",
    "PATCH /v1/schedules/{name}": "operate",
    "DELETE /v1/schedules/{name}": "operate",
    "GET /v1/schedules/{name}/history": "read",
    "POST /v1/schedules/{name}/diff": "read",
    "POST /v1/schedules/{name}/pause": "operate",
    "POST /v1/schedules/{name}/resume": "operate",
    "POST /v1/schedules/{name}/trigger": "operate",
    "POST /v1/schedules/{name}/backfill": "operate",
    "POST /v1/schedules/{name}/rollback": "operate",
    "GET /v1/lanes": "read",
    "GET /v1/lanes/{lane}": "read",
    "POST /v1/lanes/{lane}/retry-head": "operate",
    "POST /v1/lanes/{lane}/skip-head": "operate",
    "POST /v1/lanes/{lane}/resume": "operate",
    "GET /v1/pauses": "read",
    "POST /v1/pauses": "operate",
    "DELETE /v1/pauses": "operate",
    "GET /v1/queues": "read",
    "GET /v1/queues/{name}": "read",
    "GET /v1/workers": "read",
    "GET /v1/targets": "read",
    "GET /v1/targets/{name}": "read",
    "GET /v1/cluster": "read",
    "GET /v1/audit": "admin",
    "GET /v1/doctor": "admin",
    "GET /v1/keys": "admin",
    "POST /v1/keys": "admin",
    "DELETE /v1/keys/{id}": "admin",
    "GET /livez": None,
    "GET /readyz": None,
    "GET /healthy": None,
    "GET /metrics": "read",
    "GET /openapi.json": None,
    "GET /": None,
    "GET /docs": None,
    "GET /docs/{name}": None,
}
"""Written by hand on purpose: a new route has no line here, and the test fails."""

ROLES: tuple[Role, ...] = ("reader", "submit-only", "operator", "admin")


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[Api]:
    """A node that needs keys. One key is in a file, so that the node starts; each test makes its own keys in the
    store."""
    file = tmp_path / "keys"
    file.write_text(f"# for the first start\n{new_token()}\n")
    config = Config(redis_url=server.url, port=0, partitions=4, access="keys", api_key_file=file)
    async with serving_api(config) as made:
        yield made
    server.call("FLUSHALL")


@pytest.fixture
async def open_api(server: Server) -> AsyncIterator[Api]:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as made:
        yield made
    server.call("FLUSHALL")


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


async def call(api: Api, route: Route) -> int:
    path = route.path.replace("{id}", "x").replace("{name}", "page.js").replace("{lane}", "x")
    body = None if route.body is None else b"{}"
    return (await api.call(route.method, path, body)).status


# -- routes and roles ------------------------------------------------------------------------------------------


def test_every_route_has_its_rule() -> None:
    assert {name_of(route): route.right for route in app.ROUTES} == RULES


@pytest.mark.parametrize("route", app.ROUTES, ids=name_of)
async def test_a_route_answers_the_roles_that_may_call_it_and_no_others(api: Api, route: Route) -> None:
    right = RULES[name_of(route)]
    api.token = None
    assert (await call(api, route) == 401) == (right is not None)
    for role in ROLES:
        api.token = await api.key(role)
        status = await call(api, route)
        if right is None or right in RIGHTS[role]:
            assert status not in (401, 403, 500), (role, status)
        else:
            assert status == 403, role


async def test_an_unknown_path_reveals_nothing(api: Api) -> None:
    assert (await api.get("/v1/nothing")).status == 404
    assert (await api.get("/v1/secrets")).status == 404


# -- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["msk_", "Bearer", "Bearer msk_short", "Basic bXNrXw==", "Bearer msk_" + "x" * 43, "Bearer \xff", "bearer  "],
)
async def test_a_text_that_is_no_key_opens_nothing(api: Api, header: str) -> None:
    await api.key("admin")
    answer = await api.get("/v1/tasks", authorization=header)
    assert (answer.status, answer.problem) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_only_the_hash_of_a_key_is_stored(api: Api, server: Server) -> None:
    token = await api.key("admin")
    [stored] = await list_keys(api.client.store)
    record = server.call("HGETALL", "{main}:access")[1]
    assert token.encode() not in record
    assert token.removeprefix("msk_").encode() not in record
    assert stored.hash.encode() in record
    assert len(token) >= len("msk_") + 22


async def test_a_key_opens_until_it_expires(api: Api) -> None:
    now_ms = api.client.store.clock.now_ms()
    live = await api.key("reader", expires_ms=now_ms + 600_000)
    over = await api.key("reader", expires_ms=now_ms - 1)
    assert (await api.get("/v1/tasks", authorization=f"Bearer {live}")).status == 200
    assert (await api.get("/v1/tasks", authorization=f"Bearer {over}")).status == 401


async def test_a_revoked_key_opens_nothing_any_more(api: Api) -> None:
    api.token = await api.key("reader")
    assert (await api.get("/v1/tasks")).status == 200
    [key] = await list_keys(api.client.store)
    await revoke_key(api.client.store, key.id)
    for _ in range(200):
        if (await api.get("/v1/tasks")).status == 401:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the key still opens")


async def test_a_key_that_is_shown_counts_also_where_none_is_needed(open_api: Api) -> None:
    assert (await open_api.get("/v1/tasks")).status == 200
    assert (await open_api.get("/v1/tasks", authorization="Bearer msk_" + "x" * 43)).status == 401
    open_api.token = await open_api.key("reader")
    assert (await open_api.get("/v1/tasks")).status == 200
    assert (await open_api.post("/v1/tasks", {"target": "null:"})).status == 403
    assert (await open_api.post("/ticks", {"item": "a", "at": LATER})).status == 403


async def test_guessing_keys_is_slowed_down(api: Api) -> None:
    statuses = [(await api.get("/v1/tasks", authorization=f"Bearer msk_{n:043}")).status for n in range(60)]
    assert statuses[0] == 401
    assert 429 in statuses
    # A caller with a key is not held up by others who guess keys from the same address.
    api.token = await api.key("reader")
    assert (await api.get("/v1/tasks")).status == 200


async def test_an_administrator_makes_lists_and_revokes_keys(api: Api, server: Server) -> None:
    api.token = await api.key("admin")
    made = await api.post("/v1/keys", {"role": "reader", "name": "shop", "expires": "1d"})
    assert (made.status, made.headers["cache-control"]) == (201, "no-store")
    text, key_id = made.json["key"], made.json["id"]
    assert (await api.get("/v1/tasks", authorization=f"Bearer {text}")).status == 200, "at once, not a second later"
    listed = await api.get("/v1/keys")
    assert key_id in [one["id"] for one in listed.json["keys"]]
    assert text not in listed.body.decode()
    assert "hash" not in listed.body.decode()
    for key in server.call("KEYS", "*"):
        assert text.encode() not in (server.call("DUMP", key) or b""), key
    assert (await api.delete(f"/v1/keys/{key_id}")).json == {"id": key_id, "name": "shop", "outcome": "revoked"}
    assert (await api.get("/v1/tasks", authorization=f"Bearer {text}")).status == 401
    assert (await api.delete(f"/v1/keys/{key_id}")).problem == "not-found"
    for wrong in ({}, {"role": "king"}, {"role": "reader", "rate": 0}, {"role": "reader", "expires": 1}, {"rolle": 1}):
        assert (await api.post("/v1/keys", wrong)).problem == "invalid", wrong


async def test_a_key_that_is_asked_for_with_an_idempotency_key_is_not_made(api: Api) -> None:
    api.token = await api.key("admin")
    refused = await api.post("/v1/keys", {"role": "reader"}, idempotency_key="a")
    assert (refused.problem, len(await list_keys(api.client.store))) == ("invalid", 1)
    assert "revoke it and make another" in refused.json["detail"]


@pytest.mark.parametrize(
    ("giver", "order", "status"),
    [
        ({}, {"role": "admin"}, 201),
        ({}, {"role": "reader", "also": ["shop"]}, 403),
        ({}, {"role": "reader", "also": ["*"]}, 403),
        ({"namespaces": ("shop",)}, {"role": "reader", "also": ["shop", "main"]}, 201),
        ({"namespaces": ("shop",)}, {"role": "reader", "also": ["*"]}, 403),
        ({"namespaces": ("*",)}, {"role": "reader", "also": ["*"]}, 201),
        ({"expires_ms": LATER}, {"role": "reader"}, 403),
        ({"expires_ms": LATER}, {"role": "reader", "expires": LATER + 1}, 403),
        ({"expires_ms": LATER}, {"role": "reader", "expires": LATER}, 201),
        ({"rate": 50.0}, {"role": "reader"}, 403),
        ({"rate": 50.0}, {"role": "reader", "rate": 51}, 403),
        ({"rate": 50.0}, {"role": "reader", "rate": 50}, 201),
        ({"targets": ("log:*",)}, {"role": "reader", "targets": ["log:*"]}, 403),
    ],
)
async def test_a_key_makes_none_that_may_more_than_itself(
    api: Api, giver: dict[str, Any], order: dict[str, Any], status: int
) -> None:
    api.token = await api.key("admin", **giver)
    before = len(await list_keys(api.client.store))
    assert (await api.post("/v1/keys", order)).status == status
    assert len(await list_keys(api.client.store)) == before + (status == 201)


async def test_a_key_does_not_lift_the_rate_of_the_setting(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_rate=50.0)) as api:
        api.token = await api.key("admin")
        assert (await api.post("/v1/keys", {"role": "reader", "rate": 51})).status == 403
        assert (await api.post("/v1/keys", {"role": "reader"})).status == 201
    server.call("FLUSHALL")


async def test_a_record_that_cannot_be_read_is_no_key_and_can_be_taken_away(api: Api, server: Server) -> None:
    api.token = await api.key("admin")
    server.call("HSET", api.client.store.keys.access, "k1", "{torn")
    assert [one["id"] for one in (await api.get("/v1/keys")).json["keys"]] != []
    assert (await api.delete("/v1/keys/k1")).problem == "not-found"
    assert server.call("HEXISTS", api.client.store.keys.access, "k1") == 0


async def test_an_open_api_makes_and_revokes_no_keys(open_api: Api) -> None:
    await open_api.key("reader")
    [known] = await list_keys(open_api.client.store)
    assert (await open_api.post("/v1/keys", {"role": "admin"})).problem == "forbidden"
    assert (await open_api.delete(f"/v1/keys/{known.id}")).problem == "forbidden"
    assert await list_keys(open_api.client.store) == [known]
    assert (await open_api.get("/v1/keys")).status == 200


async def test_a_key_has_its_own_rate(api: Api) -> None:
    api.token = await api.key("reader", rate=0.001)
    assert (await api.get("/v1/tasks")).status == 200
    refused = await api.get("/v1/tasks")
    assert (refused.status, refused.problem) == (429, "rate")
    assert int(refused.headers["retry-after"]) >= 1


async def test_every_key_of_a_file_has_its_own_rate_and_its_own_answers(server: Server, tmp_path: Path) -> None:
    tokens = [new_token(), new_token()]
    (tmp_path / "keys").write_text("\n".join(tokens))
    config = Config(
        redis_url=server.url, port=0, partitions=4, access="keys", api_key_file=tmp_path / "keys", api_rate=0.001
    )
    async with serving_api(config) as api:
        made = []
        for api.token in tokens:
            made.append(await api.post("/v1/tasks", {"target": "log:", "at": LATER}, idempotency_key="same"))
            assert (await api.get("/v1/tasks")).status == 429
    assert [answer.status for answer in made] == [201, 201]
    assert made[0].json["id"] != made[1].json["id"], "one key was given the other's answer"
    server.call("FLUSHALL")


async def test_every_client_has_the_rate_of_the_setting(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_rate=1.0)) as api:
        answers = [await api.post("/ticks", {"item": "a", "at": LATER}) for _ in range(10)]
        assert answers[0].status == 202
        assert 429 in {answer.status for answer in answers}
        assert (await api.get("/livez")).status == 200
    server.call("FLUSHALL")


# -- pages in browsers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"host": "localhost:8000"}, 202),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, 202),
        ({"host": "attacker.example"}, 403),
        ({"host": "127.0.0.1.nip.io:8000"}, 403),
        ({"host": "localhost.attacker.example"}, 403),
        ({"origin": "https://attacker.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://attacker.example/127.0.0.1:8000"}, 403),
        ({"host": "LocalHost:8000", "origin": "http://localhost:8000"}, 202),
        ({"origin": "null"}, 403),
    ],
)
async def test_without_keys_no_page_of_another_site_gets_in(
    open_api: Api, headers: dict[str, str], status: int
) -> None:
    answer = await open_api.call("POST", "/ticks", {"item": "a", "at": LATER}, **headers)
    assert answer.status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "10.0.0.7:8000"}, 202),
        ({"host": "mainspring:8000", "origin": "http://mainspring:8000"}, 202),
        ({"host": "mainspring.jobs.svc"}, 202),
        ({"host": "Jobs.example.com"}, 202),
        ({"host": "attacker.example"}, 403),
        ({"host": "10.0.0.7.attacker.example"}, 403),
        ({"host": "10.0.0.7:8000", "origin": "https://attacker.example"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
async def test_open_access_is_not_open_to_pages_of_other_sites(
    server: Server, headers: dict[str, str], status: int
) -> None:
    config = Config(redis_url=server.url, port=0, partitions=4, access="open", api_hosts=("jobs.example.com",))
    async with serving_api(config) as api:
        assert (await api.call("POST", "/ticks", {"item": "a", "at": LATER}, **headers)).status == status
    server.call("FLUSHALL")


# -- targets ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def bound(api: Api) -> Api:
    """Its key may reach `log:` and one path of one host; there is a task of its own and one of somebody else's."""
    for target, name in (("log:", "mine"), ("null:", "theirs"), ("https://a.example/mine/x", "hook")):
        await api.client.put(target, {"of": name}, at=LATER, id=name)
    api.token = await api.key("operator", targets=("log:", "https://a.example/mine/*"))
    return api


async def test_a_bound_key_sends_only_where_it_may(bound: Api) -> None:
    async def status(target: str) -> int:
        return (await bound.post("/v1/tasks", {"target": target, "at": LATER})).status

    assert await status("log:") == 201
    assert await status("https://a.example/mine/deep/er") == 201
    for target in (
        "null:",
        "https://a.example/other",
        "https://a.example/mine/../other",
        "https://a.example/mine/%2e%2E/other",
        "https://a.example/mine/..%2fother",
        "http://a.example/mine/x",
        "https://a.example.attacker.example/mine/",
    ):
        assert await status(target) in (400, 403), target
    assert (await bound.post("/ticks", {"item": "a", "at": LATER})).status == 202  # the tick target is log:
    told = (await bound.batch([{"target": "log:", "at": LATER}, {"target": "null:", "at": LATER}])).lines
    assert (told[0]["outcome"], told[1]["error"]["status"]) == ("created", 403)


async def test_a_bound_key_puts_only_into_lanes_of_its_own(bound: Api) -> None:
    [key] = [one for one in await list_keys(bound.client.store) if one.targets is not None]
    task = {"target": "log:", "at": LATER}
    schedule = {"target": "log:", "every": "1h"}
    for lane, status in (("orders", 403), (key.id, 403), (f"{key.id}0/orders", 403), (f"{key.id}/orders", 201)):
        assert (await bound.post("/v1/tasks", {**task, "lane": lane})).status == status, lane
        told = await bound.post("/v1/schedules", {**schedule, "name": f"at {lane}", "lane": lane})
        assert told.status == status, lane
        [line, plain] = (await bound.batch([{**task, "lane": lane}, task])).lines[:2]
        assert line["error"]["status"] == 403 if status == 403 else line["outcome"] == "created", lane
        assert plain["outcome"] == "created"
    assert [one.lane for one in (await bound.client.list(lane="orders")).tasks] == []


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "10.0.0.1", "192.168.1.1:8080", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]",
        "[64:ff9b::a9fe:a9fe]", "[fd00::1]", "2130706433", "0x7f.1", "0177.0.0.1",
    ],
)  # fmt: skip
async def test_a_literal_address_that_no_webhook_may_reach_is_refused_at_the_put(api: Api, host: str) -> None:
    api.token = await api.key("operator")
    target = f"http://{host}/hook"
    told = await api.post("/v1/tasks", {"target": target, "at": LATER, "id": "literal"})
    assert (told.status, told.problem) == (400, "invalid")
    good, bad = (await api.batch([{"target": "log:", "at": LATER}, {"target": target, "at": LATER}])).lines[:2]
    assert (good["outcome"], bad["error"]["type"]) == ("created", "urn:mainspring:problem:invalid")
    assert (await api.post("/v1/schedules", {"name": "s", "every": "1h", "target": target})).problem == "invalid"
    assert (await api.post("/v1/schedules", {"name": "s", "every": "1h", "target": "log:"})).status == 201
    edited = await api.call("PATCH", "/v1/schedules/s", {"target": target}, content_type="application/json")
    assert edited.problem == "invalid"
    assert (await api.client.get("literal")).state == "unknown"


async def test_an_address_that_the_settings_allow_is_put(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, http_allow=("10.0.0.0/8",))) as api:
        told = await api.post("/v1/tasks", {"target": "http://10.1.2.3/hook", "at": LATER})
        [line] = (await api.batch([{"target": "http://10.1.2.3/hook", "at": LATER}])).lines[:1]
        assert (told.status, line["outcome"]) == (201, "created")
    server.call("FLUSHALL")


async def test_a_bound_key_does_not_read_the_queues_of_others_among_the_figures(api: Api) -> None:
    await api.client.put("queue:theirs", after="1h")
    bound = await api.key("reader", targets=("queue:mine",))
    refused = await api.get("/metrics", authorization=f"Bearer {bound}")
    assert (refused.status, refused.problem) == (403, "forbidden")
    assert (await api.get("/metrics", authorization=f"Bearer {await api.key('reader')}")).status == 200


async def test_a_bound_key_learns_nothing_of_the_queues_and_workers_of_others(api: Api) -> None:
    for name, queue in (("ours", "mine"), ("theirs", "mines")):
        about = WorkerInfo(id=name, queues={queue: 1}, targets=(f"queue:{queue}/run",), lease_ms=60_000)
        await worker_beat(api.client.store, name, about)
    key = {"authorization": f"Bearer {await api.key('submit-only', targets=('queue:mine/*', 'queue:mime/*'))}"}
    reader = {"authorization": f"Bearer {await api.key('reader', targets=('queue:mine/*', 'queue:mime/*'))}"}
    assert (await api.get("/v1/workers", **reader)).problem == "forbidden"
    [queue] = (await api.get("/v1/queues", **reader)).json["queues"]
    assert (queue["name"], queue["workers"]) == ("mine", ["ours"])
    for task_id, target in (("typo", "queue:mime/run"), ("well", "queue:mine/run")):
        assert (await api.post("/v1/tasks", {"target": target, "at": LATER, "id": task_id}, **key)).status == 201
    text = (await api.get("/v1/tasks/typo/explain", **reader)).json["text"]
    assert text.endswith("; no worker serves queue mime, only mine; did you mean mine?")
    assert "worker" not in (await api.get("/v1/tasks/well/explain", **reader)).json["text"]


async def test_tasks_for_other_targets_do_not_exist_for_a_bound_key(bound: Api) -> None:
    assert (await bound.get("/v1/tasks/mine")).status == 200
    for method, path in (
        ("GET", "/v1/tasks/theirs"),
        ("GET", "/v1/tasks/theirs/explain"),
        ("GET", "/v1/tasks/theirs/result"),
        ("DELETE", "/v1/tasks/theirs"),
        ("POST", "/v1/tasks/theirs/reschedule"),
    ):
        answer = await bound.call(method, path, b'{"after": "1s"}' if method == "POST" else None)
        assert (answer.status, answer.problem) == (404, "not-found"), path
        unknown = await bound.call(method, path.replace("theirs", "nobody"), b'{"after": "1s"}')
        assert answer.json["detail"].replace("theirs", "nobody") == unknown.json["detail"]
    listed = (await bound.get("/v1/tasks")).json["tasks"]
    assert {task["id"] for task in listed} == {"mine", "hook"}
    assert (await bound.client.get("theirs")).state == "pending"


@pytest.mark.parametrize("on_conflict", ["keep", "replace", "earliest", "reject"])
async def test_a_bound_key_cannot_take_an_id_of_another_caller(bound: Api, on_conflict: str) -> None:
    task = {"target": "log:", "at": LATER - 1, "id": "theirs", "on_conflict": on_conflict}
    answer = await bound.post("/v1/tasks", task)
    assert (answer.status, answer.problem) == (409, "conflict")
    info = await bound.client.get("theirs")
    assert (info.target, info.due_ms) == ("null:", LATER)


async def test_an_id_that_was_cancelled_is_free_for_a_bound_key_too(bound: Api) -> None:
    assert (await bound.delete("/v1/tasks/mine")).status == 200
    for again in (await bound.delete("/v1/tasks/mine"), await bound.post("/v1/tasks/mine/reschedule", {"after": "1s"})):
        assert (again.status, again.problem) == (404, "not-found")
    put = await bound.post("/v1/tasks", {"target": "log:", "at": LATER, "id": "mine"})
    assert (put.status, put.json["outcome"]) == (201, "created")


async def test_a_bound_key_cannot_take_such_an_id_by_ticks_or_lines_either(bound: Api) -> None:
    tick = await bound.post("/ticks?replace=true", {"item": "theirs", "at": LATER - 1})
    assert (tick.status, tick.problem) == (409, "conflict")
    await bound.client.put("null:", 1, at=LATER + 5, id=f"x@{LATER}")
    for path in ("/ticks", "/ticks?replace=false"):
        tick = await bound.post(path, {"item": "x", "at": LATER})
        assert (tick.status, tick.problem) == (409, "conflict"), path
    lines = [{"target": "log:", "at": LATER - 1, "id": name} for name in ("theirs", "mine", "new")]
    assert (await bound.batch(lines, "?on_conflict=replace")).status == 403
    told = (await bound.batch(lines)).lines
    assert (told[0]["error"]["status"], told[1]["outcome"], told[2]["outcome"]) == (409, "kept", "created")
    info = await bound.client.get("theirs")
    assert (info.target, info.due_ms) == ("null:", LATER)


async def test_a_bound_key_finds_the_results_of_its_own_tasks_alone(bound: Api) -> None:
    answer = Response(200, (), b"fine", 1)
    for name, target in (("ours", "https://a.example/mine/x"), ("others", "https://a.example/other")):
        result = Result("done", target=target, ended_ms=1, response=answer)
        await bound.client.put("null:", at=10**12, id=name)
        partition = partition_of(name, len(bound.client.store.keys))
        kept = KeptResult(partition, idh_of(name), result.encode(), 60_000)
        for _ in range(600):
            if (await bound.client.get(name)).state in ("done", "finished"):
                break
            await asyncio.sleep(0.05)
        await keep_results(bound.client.store, [kept])
    assert (await bound.get("/v1/tasks/ours/result")).json["response"]["body"] == "fine"
    assert (await bound.get("/v1/tasks/others/result")).problem == "not-found"


async def test_a_bound_key_names_its_target_where_many_are_meant(bound: Api) -> None:
    for body in ({"all": True}, {"target": "null:"}, {"target": "https://a.example/*"}, {"reason": "x"}):
        assert (await bound.post("/v1/dead:drop", body)).status == 403
        assert (await bound.post("/v1/dead:replay", body)).status == 403
    assert (await bound.post("/v1/dead:drop", {"target": "https://a.example/mine/x*"})).status == 200


# -- tenants ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def neighbours(api: Api, server: Server) -> Api:
    """Beside the node's own namespace there are `shop` and `bank` on the same server, each with a task `order`."""
    for namespace in ("shop", "bank"):
        async with Client(server.url, namespace=namespace, partitions=8) as client:
            await client.put("null:", {"of": namespace}, at=LATER, id="order")
    return api


async def test_another_tenants_ids_answer_404(neighbours: Api) -> None:
    api = neighbours
    api.token = await api.key("admin", namespaces=("shop",))
    assert (await api.get("/v1/tasks/order")).status == 404
    own = await api.get("/v1/tasks/order", mainspring_namespace="shop")
    assert (own.status, own.json["payload"]) == (200, {"of": "shop"})
    for namespace in ("bank", "nobodys", "", "*", "a:b", "ü"):
        answer = await api.get("/v1/tasks/order", mainspring_namespace=namespace)
        assert (answer.status, answer.problem) == (404, "not-found"), namespace
        assert answer.json["missing"] == "namespace"
        assert answer.json["detail"].startswith("there is no namespace "), "one that is there and one that is not"
        assert (await api.delete("/v1/tasks/order", mainspring_namespace=namespace)).status == 404
        tick = await api.post("/ticks", {"item": "a", "at": LATER}, mainspring_namespace=namespace)
        assert tick.status == 404


async def test_a_key_for_all_namespaces_reaches_those_that_exist_and_makes_none(
    neighbours: Api, server: Server
) -> None:
    api = neighbours
    api.token = await api.key("operator", namespaces=("*",))
    made = await api.post("/v1/tasks", {"target": "null:", "at": LATER, "id": "new"}, mainspring_namespace="bank")
    assert made.status == 201
    async with Client(server.url, namespace="bank") as bank:
        assert (await bank.get("new")).state == "pending"
    assert (await api.get("/v1/tasks", mainspring_namespace="fresh")).status == 404
    assert server.call("EXISTS", "{fresh}:meta") == 0


# -- audit -----------------------------------------------------------------------------------------------------


async def changes(api: Api) -> list[dict[str, Any]]:
    token, api.token = api.token, await api.key("admin")
    page = (await api.get("/v1/audit?limit=100")).json
    api.token = token
    return [{"at_ms": one["at_ms"], **one["change"]} for one in page["changes"]]


async def test_every_change_is_recorded_with_caller_object_before_after_and_address(api: Api) -> None:
    api.token = await api.key("operator")
    [key] = await list_keys(api.client.store)
    for name in ("a", "b"):
        await api.client.put("null:", {"secret": "payload"}, at=LATER, id=name)
    assert (await api.delete("/v1/tasks/a")).status == 200
    assert (await api.post("/v1/tasks/b/reschedule", {"at": LATER + 5})).status == 200
    moved, cancelled = await changes(api)
    assert cancelled["what"] == "task.cancel"
    assert cancelled["object"] == "a"
    assert cancelled["who"].startswith(key.id)
    assert (cancelled["role"], cancelled["from"]) == ("operator", "127.0.0.1")
    assert cancelled["before"] == {"state": "pending", "target": "null:", "due_ms": LATER, "lane": None}
    assert cancelled["after"] == {"state": "cancelled"}
    assert (moved["what"], moved["before"]["due_ms"], moved["after"]["due_ms"]) == (
        "task.reschedule", LATER, LATER + 5,
    )  # fmt: skip
    assert moved["at_ms"] >= cancelled["at_ms"] > 1_600_000_000_000


async def test_a_put_that_replaces_a_task_is_written_down_and_no_other_put(api: Api) -> None:
    api.token = await api.key("operator")
    url, body = "http://h.example/x?key=canary", {"payload": "canary", "at": LATER, "id": "a"}
    await api.post("/v1/tasks", body | {"target": "null:"})
    await api.post("/v1/tasks", body | {"target": "null:", "at": LATER + 1})
    await api.post("/v1/tasks", body | {"target": "null:", "at": LATER + 1, "on_conflict": "earliest"})
    assert await changes(api) == []
    await api.post("/v1/tasks", body | {"target": "null:", "at": LATER - 1, "on_conflict": "earliest"})
    await api.post("/v1/tasks", body | {"target": url, "at": LATER - 1, "on_conflict": "replace"})
    second, first = await changes(api)
    assert {(one["what"], one["object"], one["role"], one["from"]) for one in (first, second)} == {
        ("task.replace", "a", "operator", "127.0.0.1")
    }
    assert (first["before"], first["after"]) == ({"due_ms": LATER}, {"due_ms": LATER - 1})
    assert (second["before"], second["after"]) == ({"target": "null:"}, {"target": "http://h.example/x?***"})


@pytest.mark.parametrize("on_conflict", ["replace", "earliest"])
async def test_a_key_that_may_only_submit_changes_nothing_that_is_there(api: Api, on_conflict: str) -> None:
    await api.client.put("log:", "theirs", at=LATER, id="theirs")
    api.token = await api.key("submit-only")
    task = {"target": "log:", "id": "theirs", "at": LATER - 5, "payload": "mine"}
    new = {**task, "id": "new"}
    assert (await api.post("/v1/tasks", {**task, "on_conflict": on_conflict})).problem == "forbidden"
    assert (await api.post("/v1/tasks", {**new, "on_conflict": on_conflict})).status == 201
    assert (await api.post("/ticks?replace=true", {"item": "theirs", "at": LATER - 5})).problem == "forbidden"
    assert (await api.post("/ticks?replace=true", {"item": "tick", "at": LATER - 5})).status == 202
    for answers in ("all", "errors"):
        told = await api.batch([task], f"?on_conflict={on_conflict}&answers={answers}")
        assert (told.lines[0]["error"]["status"], told.lines[-1]["summary"]["failed"]) == (403, 1)
    there = await api.client.get("theirs")
    assert (there.due_ms, there.payload) == (LATER, "theirs")
    assert await changes(api) == []


async def test_a_key_that_may_only_submit_replaces_what_it_put_itself_and_nothing_else(api: Api) -> None:
    first, second = await api.key("submit-only"), await api.key("submit-only")
    api.token = first
    task = {"target": "log:", "id": "a", "at": LATER, "payload": 1}
    for wanted, outcome in (({"on_conflict": "replace"}, "created"), ({"on_conflict": "replace"}, "replaced")):
        assert (await api.post("/v1/tasks", task | wanted)).json["outcome"] == outcome
    later = await api.post("/v1/tasks", task | {"at": LATER + 5, "on_conflict": "earliest"})
    assert (later.status, later.json["outcome"]) == (200, "kept"), "its own, which is due earlier"
    moved = await api.post("/v1/tasks", task | {"at": LATER - 5, "on_conflict": "earliest"})
    assert moved.json["outcome"] == "replaced"
    told = await api.batch([task | {"payload": 2}], "?on_conflict=replace&answers=errors")
    assert told.lines[-1]["summary"]["replaced"] == 1
    ticks = [await api.post("/ticks?replace=true", {"item": "user1", "at": at}) for at in (LATER, LATER + 5)]
    assert [tick.json["outcome"] for tick in ticks] == ["created", "replaced"]
    assert len(await changes(api)) == 4
    api.token = second
    assert (await api.post("/v1/tasks", task | {"on_conflict": "replace"})).problem == "forbidden"
    assert (await api.post("/ticks?replace=true", {"item": "user1", "at": LATER})).problem == "forbidden"
    told = await api.batch([task], "?on_conflict=replace")
    assert told.lines[0]["error"]["status"] == 403
    api.token = await api.key("operator")
    assert (await api.post("/v1/tasks", task | {"on_conflict": "replace"})).json["outcome"] == "replaced"
    api.token = first
    assert (await api.post("/v1/tasks", task | {"on_conflict": "replace"})).problem == "forbidden", "the operator's now"
    assert (await api.post("/v1/tasks", task | {"by": "k1"})).problem == "invalid"


async def test_a_tick_that_is_moved_is_written_down_and_those_of_a_batch_together(api: Api) -> None:
    api.token = await api.key("operator")
    for at in (LATER, LATER + 5):
        await api.post("/ticks?replace=true", {"item": "user1", "at": at})
        await api.post("/ticks", {"item": "user2", "at": at})
    lines = [{"target": "null:", "id": "user1", "at": LATER + 9}]
    assert (await api.batch(lines, "?on_conflict=replace")).lines[0]["outcome"] == "replaced"
    [batch, moved] = await changes(api)
    assert (batch["what"], batch["object"], batch["after"]) == ("task.replace", "lines of a batch", {"replaced": 1})
    assert (moved["what"], moved["object"]) == ("task.replace", "user1")
    assert (moved["before"], moved["after"]) == ({"due_ms": LATER}, {"due_ms": LATER + 5})


async def test_puts_that_travel_together_are_written_down_each_as_its_own_callers(api: Api) -> None:
    names = [f"n{n}" for n in range(20)]
    for name in names:
        await api.client.put("null:", 1, at=LATER, id=name)
    api.token = await api.key("operator")
    body = {"target": "null:", "at": LATER + 1, "on_conflict": "replace"}
    await asyncio.gather(*(api.post("/v1/tasks", body | {"id": name}) for name in names))
    assert sorted(one["object"] for one in await changes(api)) == sorted(names)


async def test_a_replaced_task_is_written_down_though_the_put_was_not_confirmed(api: Api) -> None:
    await api.client.put("null:", 1, at=LATER, id="a")
    api.token = await api.key("operator")
    body = {"target": "null:", "at": LATER + 1, "id": "a", "on_conflict": "replace", "durability": "replicas=1"}
    assert (await api.post("/v1/tasks", body)).problem == "not-confirmed"
    [change] = await changes(api)
    assert (change["what"], change["after"]) == ("task.replace", {"due_ms": LATER + 1})


@pytest.mark.parametrize(("route", "done"), [("drop", {"dropped": 2}), ("replay", {"replayed": 2})])
async def test_changes_made_before_a_failure_are_recorded(
    api: Api, monkeypatch: pytest.MonkeyPatch, route: str, done: dict[str, int]
) -> None:
    async def two_and_no_more(_: DeadLetters, *, progress: Callable[[Any], None], **_options: object) -> None:
        progress(2 if route == "drop" else ReplaySummary(False, replayed=2))
        raise OutOfMemory("the server is full")

    monkeypatch.setattr(DeadLetters, f"{route}_many", two_and_no_more)
    api.token = await api.key("operator")
    assert (await api.post(f"/v1/dead:{route}", {"target": "null:"})).problem == "out-of-memory"
    [change] = await changes(api)
    assert (change["what"], change["before"], change["after"]) == (f"dead.{route}", {"target": "null:"}, done)


async def test_a_refused_request_changes_nothing_and_is_not_recorded(api: Api) -> None:
    await api.client.put("null:", 1, at=LATER, id="a")
    api.token = await api.key("reader")
    assert (await api.delete("/v1/tasks/a")).status == 403
    api.token = await api.key("operator")
    assert (await api.delete("/v1/tasks/nobody")).status == 404
    assert (await api.post("/v1/tasks/a/reschedule", {"at": "soon"})).status == 400
    assert await changes(api) == []


async def test_the_trail_is_paged_and_bounded(server: Server) -> None:
    config = Config(redis_url=server.url, port=0, partitions=4, audit_entries=100)
    async with serving_api(config) as api:
        for n in range(450):
            await api.client.put("null:", 1, at=LATER, id=f"n{n}")
        await asyncio.gather(*(api.delete(f"/v1/tasks/n{n}") for n in range(450)))
        assert 100 <= server.call("XLEN", "{main}:audit:tasks") < 400
        first = (await api.get("/v1/audit?limit=60")).json
        second = (await api.get(f"/v1/audit?limit=60&cursor={first['next']}")).json
        seen = [one["id"] for one in (*first["changes"], *second["changes"])]
        assert len(seen) == len(set(seen)) == 120 or second["next"] is None
        assert (await api.get("/v1/audit?cursor=nonsense")).problem == "invalid"
    server.call("FLUSHALL")


async def test_changes_of_tasks_do_not_push_others_out_of_the_trail(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, audit_entries=100)) as api:
        await api.post("/v1/pauses", {"target": "log:", "reason": "deploy"})
        for n in range(450):
            task = {"target": "null:", "payload": n, "at": LATER + n, "id": "a", "on_conflict": "replace"}
            assert (await api.post("/v1/tasks", task)).status in (200, 201)
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await api.get(f"/v1/audit?limit=100{cursor and '&cursor=' + cursor}")).json
            seen += [one["change"]["what"] for one in page["changes"]]
            cursor = page["next"]
        assert 100 <= seen.count("task.replace") < 400
        assert seen[-1] == "pause.add"
    server.call("FLUSHALL")


async def test_a_page_of_the_trail_holds_all_changes_with_its_last_id(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as api:
        for name, ids in (("audit", ("1-0", "2-0", "3-0")), ("audit:tasks", ("2-0", "3-0", "4-0"))):
            for one in ids:
                server.call("XADD", f"{{main}}:{name}", one, "c", "{}")
        pages: list[list[str]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await api.get(f"/v1/audit?limit=2{cursor and '&cursor=' + cursor}")).json
            pages.append([one["id"] for one in page["changes"]])
            cursor = page["next"]
        assert pages == [["4-0", "3-0", "3-0"], ["2-0", "2-0"], ["1-0"]]
    server.call("FLUSHALL")


async def test_a_full_server_still_lets_tasks_be_cancelled(open_api: Api, server: Server) -> None:
    await open_api.client.put("null:", 1, at=LATER, id="a")
    server.call("CONFIG", "SET", "maxmemory", "1")
    try:
        assert (await open_api.delete("/v1/tasks/a")).status == 200
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")
