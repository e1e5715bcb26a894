"""Quotas of an API key, in tasks and bytes, over real HTTP, on one node and on two."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest

from mainspring.api.auth import Quotas
from mainspring.config.config import Config
from mainspring.model.access import Role, new_token
from mainspring.model.clock import ManualClock
from mainspring.store.access import list_keys
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Answer, Api, serving_api

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def config(server: Server, **more: Any) -> Config:
    return Config(redis_url=server.url, port=0, partitions=4, **more)


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with serving_api(config(server, api_pending_tasks=3, api_pending_bytes=1_000)) as made:
        yield made
    server.call("FLUSHALL")


def task(n: int, **more: Any) -> dict[str, Any]:
    return {"target": "null:", "id": f"task-{n}", "at": LATER, "payload": n} | more


async def put(api: Api, n: int, **more: Any) -> Answer:
    return await api.post("/v1/tasks", task(n, **more))


async def statuses(api: Api, *numbers: int) -> list[int]:
    return [(await put(api, n)).status for n in numbers]


async def test_a_key_cannot_exceed_its_pending_tasks(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.token = await api.key("submit-only")
    assert await statuses(api, 1, 2, 3) == [201, 201, 201]
    refused = await put(api, 4)
    assert (refused.status, refused.problem) == (429, "quota")
    assert "3 tasks pending of 3 (api_pending_tasks)" in refused.json["detail"]
    assert "retry-after" not in refused.headers, "it may be years until the first of them is due"
    assert (await put(api, 5)).status == 429
    assert (await api.client.count()).pending == 3
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING and "tasks pending of 3" in one.message]
    assert len(warnings) == 1, "one a minute for a key, however often it is refused"


async def test_payloads_count_by_their_bytes(api: Api) -> None:
    api.token = await api.key("submit-only")
    assert (await put(api, 1, payload="x" * 600)).status == 201
    refused = await put(api, 2, payload="x" * 600)
    assert (refused.problem, "602 bytes of 1,000 (api_pending_bytes)" in refused.json["detail"]) == ("quota", True)
    assert (await put(api, 3, payload="x" * 100)).status == 201, "a smaller one has room"


async def test_every_key_has_its_own_quota_and_callers_without_a_key_have_none(api: Api) -> None:
    for at, role in enumerate(get_args(Role)[1:]):
        api.token = await api.key(role)
        assert await statuses(api, *range(10 * at, 10 * at + 4)) == [201, 201, 201, 429], role
    api.token = None
    assert await statuses(api, *range(100, 110)) == [201] * 10


async def test_keys_of_a_file_have_the_quota_of_the_setting(server: Server, tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "keys").write_text(token)
    settings = config(server, access="keys", api_key_file=tmp_path / "keys", api_pending_tasks=1)
    async with serving_api(settings) as api:
        api.token = token
        assert await statuses(api, 1, 2) == [201, 429]
    server.call("FLUSHALL")


async def test_a_keys_own_limits_go_before_the_settings(api: Api) -> None:
    api.token = await api.key("submit-only", max_pending=1)
    refused = [await put(api, n) for n in (1, 2)][1]
    assert "1 tasks pending of 1 (the key's max_pending)" in refused.json["detail"]
    api.token = await api.key("submit-only", max_bytes=10)
    assert "(the key's max_bytes)" in (await put(api, 3, payload="x" * 9)).json["detail"]
    api.token = await api.key("submit-only", max_pending=0, max_bytes=0)
    assert await statuses(api, *range(10, 20)) == [201] * 10, "0 is no limit"


async def test_a_setting_of_zero_is_no_limit(server: Server) -> None:
    async with serving_api(config(server, api_pending_tasks=0, api_pending_bytes=0)) as api:
        api.token = await api.key("submit-only")
        assert await statuses(api, 1, 2, 3, 4) == [201] * 4
        await api.face.app.quotas.flush()
        assert server.call("KEYS", "*:quota:*") == [], "nothing is counted for it"
    server.call("FLUSHALL")


async def test_lines_beyond_the_quota_are_refused_and_the_batch_continues(server: Server) -> None:
    async with serving_api(config(server, api_pending_bytes=1_000, api_batch_errors=2)) as api:
        api.token = await api.key("submit-only")
        sizes = [398, 398, 398, 398, 398, 98]
        lines = (await api.batch([task(n, payload="x" * size) for n, size in enumerate(sizes)])).lines
        assert [one.get("outcome") for one in lines[:-1]] == ["created", "created", None, None, None, "created"]
        assert {one["error"]["type"] for one in lines[2:5]} == {"urn:mainspring:problem:quota"}
        summary = lines[-1]["summary"]
        assert (summary["lines"], summary["created"], summary["failed"], summary["complete"]) == (6, 3, 3, True)
    server.call("FLUSHALL")


@pytest.mark.parametrize("answers", ["all", "errors"])
async def test_a_repeated_put_counts_once_toward_a_quota(api: Api, answers: str) -> None:
    api.token = await api.key("submit-only")
    for _ in range(3):
        await api.batch([task(1), task(2)], f"?answers={answers}")
        assert (await put(api, 1)).status == 200
    assert await statuses(api, 3, 4) == [201, 429]


async def test_a_task_that_is_due_already_is_not_pending(api: Api) -> None:
    api.token = await api.key("submit-only")
    for n in range(10):
        assert (await api.post("/v1/tasks", {"target": "null:", "payload": n})).status == 201


@pytest.mark.parametrize("path", ["/ticks", "/ticks?replace=false"])
async def test_ticks_of_a_key_count_on_both_ways(api: Api, path: str) -> None:
    api.token = await api.key("submit-only")
    answers = [await api.post(path, {"item": f"item-{n}", "at": LATER}) for n in (1, 2, 2, 3, 4)]
    assert [one.status for one in answers] == [202, 202, 200, 202, 429]
    assert answers[-1].problem == "quota"


async def test_nothing_is_counted_for_ticks_without_a_key(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError(f"asked about a quota: {args}")

    for name in ("of", "has_room", "check", "refusals", "add"):
        monkeypatch.setattr(Quotas, name, never)
    for n in range(10):
        assert (await api.post("/ticks", {"item": f"item-{n}", "at": LATER})).status == 202


async def test_nodes_count_together(api: Api, server: Server) -> None:
    async with serving_api(config(server, api_pending_tasks=3)) as other:
        api.token = other.token = await api.key("submit-only")
        assert await statuses(api, 1, 2) == [201, 201]
        await api.face.app.quotas.flush()
        assert await statuses(other, 3, 4) == [201, 429]
        await other.face.app.quotas.flush()
        assert await statuses(api, 5) == [201], "it goes by what it knew until it has written that"
        await api.face.app.quotas.flush()
        assert await statuses(api, 6) == [429]


async def test_quota_counts_are_written_when_the_node_stops(server: Server) -> None:
    async with serving_api(config(server, api_pending_tasks=2)) as api:
        token = api.token = await api.key("submit-only")
        assert await statuses(api, 1, 2) == [201, 201]
    async with serving_api(config(server, api_pending_tasks=2)) as api:
        api.token = token
        assert await statuses(api, 3) == [429]
    server.call("FLUSHALL")


async def test_due_tasks_do_not_count_toward_a_quota(api: Api, server: Server) -> None:
    store = api.client.store
    start = LATER - LATER % DAY_MS
    clock = store.clock = ManualClock(start)
    api.token = await api.key("submit-only")
    [key] = await list_keys(store)
    for n, ahead_ms in enumerate((90_000, 10 * HOUR_MS + 1, 30 * DAY_MS + 1)):
        assert (await put(api, n, at=start + ahead_ms)).status == 201
    assert await statuses(api, 7) == [429]
    await api.face.app.quotas.flush()
    name = store.keys.quota(key.id)
    ends = [start + 120_000, start + 11 * HOUR_MS, start + 31 * DAY_MS]
    assert set(server.call("HKEYS", name)) == {
        f"{end}:{what}".encode() for end in ends for what in ("tasks", "bytes")
    }, "a minute, an hour and a day"
    assert 30 * DAY_MS < server.call("PTTL", name) <= 31 * DAY_MS, "it ends with the last of them"
    clock.advance(ms=119_999)
    assert await statuses(api, 7) == [429]
    clock.advance(ms=1)
    assert await statuses(api, 7, 8) == [201, 429], "that minute is over"
    await api.face.app.quotas.flush()
    clock.advance(ms=11 * HOUR_MS)
    assert await statuses(api, 8, 9) == [201, 429], "that hour is over"
    await api.face.app.quotas.flush()
    assert f"{ends[1]}:tasks".encode() not in server.call("HKEYS", name)


async def test_a_cancelled_task_counts_until_its_time(api: Api) -> None:
    api.token = await api.key("operator")
    assert await statuses(api, 1, 2, 3) == [201] * 3
    assert (await api.delete("/v1/tasks/task-1")).status == 200
    assert await statuses(api, 4) == [429]


async def test_a_key_is_made_with_limits_and_makes_none_with_more(api: Api) -> None:
    api.token = await api.key("admin", max_bytes=100)
    made = await api.post("/v1/keys", {"role": "submit-only", "max_pending": 2, "max_bytes": 50})
    assert (made.status, made.json["max_pending"], made.json["max_bytes"]) == (201, 2, 50)
    for more in ({"max_bytes": 101}, {"max_bytes": 0}, {}, {"max_bytes": 50, "max_pending": 4}):
        refused = await api.post("/v1/keys", {"role": "reader"} | more)
        assert (refused.status, refused.problem) == (403, "forbidden"), more
    assert (await api.post("/v1/keys", {"role": "reader", "max_pending": -1})).problem == "invalid"
    api.token = made.json["key"]
    assert await statuses(api, 1, 2, 3) == [201, 201, 429]


async def test_a_namespace_of_its_own_has_counts_of_its_own(server: Server) -> None:
    async with serving_api(config(server, api_pending_tasks=1, namespace="shop")) as shop:
        shop.token = await shop.key("submit-only", namespaces=("*",))
        assert await statuses(shop, 1, 2) == [201, 429]
        async with serving_api(config(server)):
            there = await shop.post("/v1/tasks", task(1), mainspring_namespace="main")
            assert there.status == 201
            assert (await shop.post("/v1/tasks", task(2), mainspring_namespace="main")).status == 429
    server.call("FLUSHALL")


async def test_a_field_that_is_no_count_is_removed(api: Api, server: Server) -> None:
    api.token = await api.key("submit-only")
    [key] = await list_keys(api.client.store)
    name = api.client.store.keys.quota(key.id)
    server.call("HSET", name, "torn", json.dumps({}))
    assert await statuses(api, 1) == [201]
    assert server.call("EXISTS", name) == 0
