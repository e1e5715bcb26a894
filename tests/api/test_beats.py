"""`POST /v1/beats/{name}`: other people's jobs report over HTTP, and their keys reach nothing else."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from mainspring.config.config import Config
from mainspring.model.notice import BeatState, Expected
from mainspring.store import notices
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Api, serving_api


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
    assert first.status == 202
    assert first.json["outcome"] == "created"


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
    assert (await api.post("/v1/beats/backup", {"every": "1h"})).status == 202
    assert (await api.post("/v1/beats/other", {"every": "1h"})).status == 403
    assert (await api.post("/v1/tasks", {"target": "log:", "payload": 1})).status == 403


async def test_a_key_that_may_not_operate_cannot_change_when_a_beat_is_expected(api: Api) -> None:
    """`every = 10y` would silence the watch on somebody else's job."""
    await watch(api, "backup", deadline_ms=LATER)
    api.token = await api.key("submit-only")
    assert (await api.post("/v1/beats/backup", {"every": "60m"})).status == 202
    assert (await api.post("/v1/beats/backup")).status == 202
    assert (await api.post("/v1/beats/backup", {"every": "3000d"})).problem == "forbidden"
    api.token = await api.key("operator")
    assert (await api.post("/v1/beats/backup", {"every": "3000d"})).status == 202


@pytest.mark.parametrize("target", ["beat:backup", "notify:ops", "notify:ops/digest"])
async def test_no_caller_forges_beats_and_notices(api: Api, target: str) -> None:
    task = {"target": target, "payload": {"came_ms": 1_900_000_000_000}}
    assert (await api.post("/v1/tasks", task)).problem == "invalid"
    [line, _] = (await api.batch([task])).lines
    assert line["error"]["type"].endswith(":invalid")
    schedule = {"name": "s", "cron": "0 9 * * *", "target": target}
    assert (await api.post("/v1/schedules", schedule)).problem == "invalid"


async def test_the_number_of_beats_is_bounded_and_those_nobody_watches_make_room(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "MOST_BEATS", 2)
    await watch(api, "a", deadline_ms=LATER)
    await watch(api, "b", deadline_ms=LATER)
    assert (await api.post("/v1/beats/c", {"every": "1h"})).problem == "conflict"
    assert (await api.post("/v1/beats/a", {"every": "2h"})).status == 202
    await watch(api, "b", deadline_ms=1)
    assert (await api.post("/v1/beats/c", {"every": "1h"})).status == 202


async def watch(api: Api, name: str, *, deadline_ms: int) -> None:
    """Write what the sink of beats writes; the node of this test has none."""
    keys = api.client.store.keys
    state = msgspec.msgpack.encode(BeatState(Expected(every_ms=3_600_000), deadline_ms=deadline_ms))
    await api.client.store.run_one(keys.slot, [("HSET", keys.watched, name, state)])
