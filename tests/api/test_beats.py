"""`POST /v1/beats/{name}`: other people's jobs report over HTTP, and their keys reach nothing else."""

from collections.abc import AsyncIterator

import pytest

from mainspring.config.config import Config
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
