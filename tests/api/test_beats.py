"""`POST /v1/beats/{name}`: other people's jobs report over HTTP, and their keys reach nothing else."""

from collections.abc import AsyncIterator

import pytest

from mainspring.config.config import Config
from mainspring.store import notices
from mainspring.testing.servers import Server
from tests.support.api_calls import Api, serving_api


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    server.call("FLUSHALL")
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as made:
        yield made


async def test_a_beat_says_once_when_the_next_is_expected(api: Api) -> None:
    unknown = await api.post("/v1/beats/backup", {})
    assert (unknown.status, unknown.problem) == (404, "not-found")
    assert "say when it is expected" in unknown.json["detail"]
    first = await api.post("/v1/beats/backup", {"every": "1h", "grace": "5m"})
    assert first.status == 200
    assert first.json["name"] == "backup"
    assert (first.json["every"], first.json["grace"], first.json["last"] is None) == ("1h", "5m", False)
    assert first.json["deadline_ms"] == first.json["last_ms"] + 65 * 60_000
    listed = await api.get("/v1/beats")
    assert listed.json["beats"] == [first.json]


async def test_a_beat_is_removed_once(api: Api) -> None:
    await api.post("/v1/beats/backup", {"cron": "0 2 * * *", "timezone": "Europe/Paris"})
    removed = await api.delete("/v1/beats/backup")
    assert (removed.status, removed.json) == (200, {"name": "backup", "outcome": "removed"})
    assert (await api.delete("/v1/beats/backup")).status == 404
    assert (await api.get("/v1/beats")).json["beats"] == []


async def test_a_beat_of_the_settings_is_not_removed_for_it_would_come_back(server: Server) -> None:
    server.call("FLUSHALL")
    beats = {"backup": {"every": "1h"}}
    config = Config(redis_url=server.url, port=0, partitions=4, beats=beats)  # type: ignore[arg-type]  # as in a file
    async with serving_api(config) as api:
        assert (await api.post("/v1/beats/backup", {"every": "1h"})).status == 200
        refused = await api.delete("/v1/beats/backup")
        assert (refused.status, refused.problem) == (409, "conflict")
        assert refused.json["detail"].endswith("remove [beats.backup] from them")
        assert len((await api.get("/v1/beats")).json["beats"]) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"every": "1h", "cron": "0 2 * * *"}, "give one of them"),
        ({"cron": "0 2 * *"}, "cron"),
        ({"evry": "1h"}, "evry"),
        ({"every": "1h", "timezone": 7}, "timezone"),
    ],
)
async def test_a_wrong_expectation_is_refused(api: Api, body: dict[str, object], said: str) -> None:
    answer = await api.post("/v1/beats/backup", body)
    assert answer.status in (400, 422)
    assert said in answer.json["detail"]


async def test_a_key_that_is_limited_to_beats_reaches_nothing_else(api: Api) -> None:
    api.token = await api.key("submit-only", targets=("beat:backup",))
    assert (await api.post("/v1/beats/backup", {"every": "1h"})).status == 200
    assert (await api.post("/v1/beats/other", {"every": "1h"})).status == 403
    assert (await api.delete("/v1/beats/backup")).status == 403  # who sends beats cannot stop the watch
    assert (await api.get("/v1/beats")).status == 403
    assert (await api.post("/v1/tasks", {"target": "log:", "payload": 1})).status == 403


async def test_a_key_sees_and_removes_only_the_beats_that_it_is_limited_to(api: Api) -> None:
    for name in ("backup", "other"):
        assert (await api.post(f"/v1/beats/{name}", {"every": "1h"})).status == 200
    api.token = await api.key("operator", targets=("beat:backup",))
    assert [one["name"] for one in (await api.get("/v1/beats")).json["beats"]] == ["backup"]
    assert (await api.delete("/v1/beats/other")).status == 403
    assert (await api.delete("/v1/beats/backup")).status == 200
    assert (await api.post("/v1/tasks", {"target": "beat:backup", "payload": 1})).status == 400


async def test_a_key_that_may_not_operate_cannot_change_when_a_beat_is_expected(api: Api) -> None:
    """`every = 10y` would silence the watch on somebody else's job."""
    assert (await api.post("/v1/beats/backup", {"every": "1h"})).status == 200
    api.token = await api.key("submit-only")
    assert (await api.post("/v1/beats/backup", {"every": "60m"})).status == 200
    assert (await api.post("/v1/beats/backup")).status == 200
    assert (await api.post("/v1/beats/backup", {"every": "3000d"})).problem == "forbidden"
    api.token = await api.key("operator")
    assert (await api.post("/v1/beats/backup", {"every": "3000d"})).status == 200


@pytest.mark.parametrize("target", ["beat:backup", "notify:ops", "notify:ops/digest"])
async def test_no_caller_forges_beats_and_notices(api: Api, target: str) -> None:
    task = {"target": target, "payload": {"came_ms": 1_900_000_000_000}}
    assert (await api.post("/v1/tasks", task)).problem == "invalid"
    [line, _] = (await api.batch([task])).lines
    assert line["error"]["type"].endswith(":invalid")
    schedule = {"name": "s", "cron": "0 9 * * *", "target": target}
    assert (await api.post("/v1/schedules", schedule)).problem == "invalid"


async def test_the_number_of_beats_is_bounded_and_removed_ones_make_room(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "MOST_BEATS", 2)
    for name in ("a", "b"):
        assert (await api.post(f"/v1/beats/{name}", {"every": "1h"})).status == 200
    assert (await api.post("/v1/beats/c", {"every": "1h"})).problem == "conflict"
    assert (await api.post("/v1/beats/a", {"every": "2h"})).status == 200
    assert (await api.delete("/v1/beats/b")).status == 200
    assert (await api.post("/v1/beats/c", {"every": "1h"})).status == 200
