"""The history of runs over HTTP and on the command line: the same runs by the same words."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from typer.testing import CliRunner

from mainspring.api.runs import AT_ONCE_OF_ONE
from mainspring.cli import app as command_line
from mainspring.client.http import Api as Remote
from mainspring.client.http import RemoteClient
from mainspring.config.config import Config
from mainspring.model.access import hash_of
from mainspring.model.errors import InvalidInput
from mainspring.model.ids import idh_in_lane, idh_of
from mainspring.model.job import Output
from mainspring.model.run import Run, RunDetails, RunRecord
from mainspring.store import runs as history
from mainspring.store.access import list_keys, revoke_key
from mainspring.store.keys import partition_of
from mainspring.store.owner import fire
from mainspring.store.runs import publish_logs
from mainspring.store.tasks.find import Reference, resolve
from mainspring.store.tasks.index import IdInLane, note_lanes
from mainspring.testing.servers import Server, wait_until
from tests.support.api_calls import Api, serving_api
from tests.support.owner import HandOwner

HOOK = "https://example.com/hook?key=secret"


@pytest.fixture
async def api(server: Server, namespace: str) -> AsyncIterator[Api]:
    # Without the scheduler: the test writes as the owner.
    config = Config(redis_url=server.url, namespace=namespace, partitions=4, port=0, roles=("api",))
    async with serving_api(config) as serving:
        yield serving


def record(api: Api, number: int, **more: Any) -> RunRecord:
    now_ms = api.client.store.clock.now_ms()
    task_id = f"task-{number}"
    fields: dict[str, Any] = {"idh": idh_of(task_id), "id": task_id, "end": "done", "attempt": 1, "due_ms": now_ms - 50}
    fields |= {"began_ms": now_ms - 40, "ended_ms": now_ms, "target": HOOK, "by": "node-1", "code": 200}
    return RunRecord(**fields | more)


async def write(api: Api, *runs: Run) -> None:
    """Write runs as the owner of their partitions does."""
    store = api.client.store
    for run in runs:
        owner = await HandOwner.acquire(store, partition_of(run.record.task_id, len(store.keys)))
        work = fire.Commit(owner.partition, owner.token, owner.seq + 1, 0, 0, [], [], [], [], runs=[run])
        assert await fire.commit(store, work) == "ok"


@pytest.fixture
async def written(api: Api) -> Api:
    details = RunDetails(log=("one", "two"), output=Output(3, b"out\n", b"err\n", 4, 4), traceback="Trace")
    await write(
        api,
        Run(record(api, 1)),
        Run(
            record(api, 2, end="dead", code="OSError", reason="no route", target="command:backup", queue="ops"), details
        ),
        Run(record(api, 3, id="nightly@3", idh=idh_of("nightly@3"), planned_ms=3)),
    )
    return api


async def test_runs_are_listed_by_each_filter(written: Api) -> None:
    async def tasks(query: str) -> set[str]:
        answer = await written.get(f"/v1/runs{query}")
        assert answer.status == 200, answer
        return {one["task"] for one in answer.json["runs"]}

    assert await tasks("") == {"task-1", "task-2", "nightly@3"}
    assert await tasks("?schedule=nightly") == {"nightly@3"}
    assert await tasks("?queue=ops") == await tasks("?outcome=failed") == await tasks("?id=task-2") == {"task-2"}
    assert await tasks("?worker=node-2") == await tasks("?ended_before=2020-01-01T00:00:00Z") == set()
    assert await tasks("?target=https://*") == {"task-1", "nightly@3"}
    first = (await written.get("/v1/runs?limit=2")).json
    rest = (await written.get(f"/v1/runs?limit=2&cursor={first['next']}")).json
    assert [len(first["runs"]), len(rest["runs"]), rest["next"]] == [2, 1, None]


async def test_a_query_of_a_webhook_is_not_shown(written: Api) -> None:
    assert b"secret" not in (await written.get("/v1/runs")).body


@pytest.mark.parametrize(
    "query",
    [
        "?outcome=late",
        "?limit=0",
        "?cursor=x",
        "?lane=shop",
        "?ended_after=2021-01-01T00:00:00Z&ended_before=2020-01-01T00:00:00Z",
    ],
)
async def test_a_wrong_filter_is_refused(api: Api, query: str) -> None:
    answer = await api.get(f"/v1/runs{query}")
    assert answer.problem == "invalid"


@pytest.mark.parametrize("path", ["runs?ended_after=", "runs?ended_before=", "stats?start=", "stats?end="])
async def test_instants_in_another_unit_are_refused(api: Api, path: str) -> None:
    for instant, unit in (("1893488400", "seconds"), ("1893488400.5", "seconds"), ("1893488400000000", "microseconds")):
        answer = await api.get(f"/v1/{path}{instant}")
        assert answer.problem == "invalid"
        assert f"looks like {unit}; give milliseconds" in answer.json["detail"]


async def test_one_run_is_shown_with_its_details(written: Api) -> None:
    [run] = (await written.get("/v1/runs?outcome=dead")).json["runs"]
    shown = (await written.get(f"/v1/runs/{run['id']}")).json
    assert (shown["code"], shown["log"], shown["traceback"]) == ("OSError", ["one", "two"], "Trace")
    assert shown["output"]["stdout"] == "out\n"
    assert shown["ended"].endswith("Z")
    assert (await written.get("/v1/runs/0.1.1.1")).problem == "not-found"
    log = (await written.get(f"/v1/runs/{run['id']}/log")).json
    assert log == {"text": "one\ntwo\nout\nerr\n", "next": "0", "over": True}


async def test_a_bound_key_sees_only_the_runs_of_its_targets(written: Api) -> None:
    [hidden] = (await written.get("/v1/runs?outcome=dead")).json["runs"]
    written.token = await written.key("reader", targets=("https://example.com/*",))
    assert {one["task"] for one in (await written.get("/v1/runs")).json["runs"]} == {"task-1", "nightly@3"}
    assert (await written.get(f"/v1/runs/{hidden['id']}")).problem == "not-found"
    assert (await written.get(f"/v1/runs/{hidden['id']}/log")).problem == "not-found"
    assert (await written.get("/v1/runs/task-2/log")).problem == "not-found"
    assert (await written.get("/v1/stats")).problem == "forbidden"
    assert (await written.get("/v1/stats?target=https://example.com/hook")).status == 200


@pytest.mark.parametrize("query", ["id=task-2", "queue=ops", "outcome=dead", "target=command:*"])
async def test_a_page_shows_a_bound_key_no_runs_that_it_may_not_see(written: Api, query: str) -> None:
    written.token = await written.key("reader", targets=("https://example.com/*",))
    assert (await written.get(f"/v1/runs?{query}&limit=1")).json == {"runs": [], "next": None}


async def test_a_key_bound_to_a_part_of_a_host_does_not_see_the_counts_of_the_host(written: Api) -> None:
    written.token = await written.key("reader", targets=("https://example.com/hook*",))
    assert (await written.get("/v1/stats?target=https://example.com/hook")).problem == "forbidden"


async def test_runs_are_counted_over_time(written: Api) -> None:
    answer = (await written.get("/v1/stats")).json
    assert sum(one["ok"] for one in answer["stats"]) == 2
    assert sum(one["failed"] for one in answer["stats"]) == 1
    assert answer["history"]["written"] == 3
    [*_, hour] = (await written.get("/v1/stats?queue=ops&step=hour")).json["stats"]
    assert (hour["ok"], hour["failed"], sum(hour["durations"])) == (0, 1, 1)


async def test_python_says_the_same_directly_and_over_http(written: Api) -> None:
    def ask(call: Callable[[RemoteClient], Coroutine[Any, Any, Any]]) -> Any:
        with contextlib.closing(Remote(written.url)) as api:
            return asyncio.run(call(RemoteClient(api)))

    direct = await written.client.runs(outcome="failed")
    [over_http] = (await asyncio.to_thread(ask, lambda remote: remote.runs(outcome="failed"))).runs
    assert [over_http] == direct.runs
    one = await written.client.run(over_http.id)
    assert await asyncio.to_thread(ask, lambda remote: remote.run(over_http.id)) == one
    assert await asyncio.to_thread(ask, lambda remote: remote.run("0.1.1.1")) is None
    stats = await asyncio.to_thread(ask, lambda remote: remote.run_stats(queue="ops"))
    assert stats.history.written == 3
    assert sum(one.failed for one in stats.stats) == 1
    assert (await asyncio.to_thread(ask, lambda remote: remote.run_log(over_http.id))).over
    with pytest.raises(InvalidInput, match="outcome is 'late'"):
        await written.client.runs(outcome="late")  # type: ignore[arg-type]


@pytest.fixture
def call(server: Server, namespace: str) -> Callable[..., str]:
    def call(*words: str) -> str:
        place = ("--redis-url", server.url, "-n", namespace)
        result = CliRunner().invoke(command_line, ["run", *words, *place])
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


async def test_the_command_line_looks_further_back_where_a_page_has_no_match(
    written: Api, call: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 4)
    await write(written, *(Run(record(written, number)) for number in range(10, 50)))
    assert (await written.client.runs(worker="node-1", target="command:*")).runs == []
    assert "task-2" in await asyncio.to_thread(call, "list", "--target", "command:*")


async def test_the_command_line_lists_shows_and_counts_runs(written: Api, call: Callable[..., str]) -> None:
    table = await asyncio.to_thread(call, "list", "--outcome", "failed")
    assert "task-2" in table
    assert "no route" in table
    assert "task-1" not in table
    [run] = json.loads(await asyncio.to_thread(call, "list", "--outcome", "failed", "--json"))["runs"]
    shown = await asyncio.to_thread(call, "show", run["id"])
    for word in ("command:backup", "OSError", "no route", "Trace", "log         one"):
        assert word in shown
    assert await asyncio.to_thread(call, "log", run["id"]) == "one\ntwo\nout\nerr\n"
    chart = await asyncio.to_thread(call, "stats")
    assert "█" in chart
    assert "failed" in chart


async def test_a_schedule_is_shown_with_its_attempts_triggered_ones_too(
    written: Api, server: Server, namespace: str
) -> None:
    await written.client.schedules.add("nightly", cron="0 2 * * *", target="log:")
    triggered = "nightly@2026-11-19T00:00:00Z.a1b2c3"
    await write(written, Run(record(written, 4, id=triggered, idh=idh_of(triggered), planned_ms=4, end="dead")))

    def show() -> str:
        place = ("--redis-url", server.url, "-n", namespace)
        result = CliRunner().invoke(command_line, ["schedule", "show", "nightly", *place])
        assert result.exit_code == 0, result.output
        return result.stdout

    _, _, shown = (await asyncio.to_thread(show)).partition("Last runs\n")
    _, latest, earlier = shown.splitlines()
    assert (triggered in latest, "dead" in latest) == (True, True), shown
    assert "nightly@" in earlier


# -- logs of running jobs ---------------------------------------------------------------------------------------------


async def test_the_log_of_a_running_job_is_followed_to_its_end(api: Api) -> None:
    store = api.client.store
    handle = await api.client.put("log:", "x", after="1h")
    reference = Reference.parse(handle.id, None, len(store.keys))
    reading = asyncio.create_task(api.get(f"/v1/runs/{handle.id}/log?follow=true"))
    for text in ("one\n", "two\n"):
        await publish_logs(store, [(reference.home, reference.idh, text)])
    part = await api.client.run_log(handle.id)
    assert (part.text, part.over) == ("one\ntwo\n", False)
    await publish_logs(store, [(reference.home, reference.idh, "three\n")])
    rest = await api.client.run_log(handle.id, cursor=part.next)
    assert (rest.text, rest.over) == ("three\n", False)
    await api.client.cancel(handle.id)
    followed = await asyncio.wait_for(reading, 30)
    assert followed.headers["content-type"] == "text/plain; charset=utf-8"
    assert followed.body == b"one\ntwo\nthree\n"
    assert (await api.client.run_log(handle.id, cursor=rest.next)).over


async def follow(api: Api, path: str, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = api.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


async def test_one_client_cannot_take_all_places_for_followers(api: Api) -> None:
    one, other = [await api.key("reader") for _ in range(2)]
    handle = await api.client.put("log:", after="1h")
    path = f"/v1/runs/{handle.id}/log?follow=true"
    taken = api.face.app.followers.taken
    streams = [await follow(api, path, one) for _ in range(AT_ONCE_OF_ONE)]
    await asyncio.to_thread(wait_until, lambda: taken.total() == AT_ONCE_OF_ONE, "all follow")
    assert (await api.get(path, authorization=f"Bearer {one}")).problem == "rate"
    assert (await api.get(f"/v1/runs/{handle.id}/log", authorization=f"Bearer {one}")).status == 200
    followed = asyncio.create_task(api.get(path, authorization=f"Bearer {other}"))
    for _, writer in streams:
        writer.close()
    await api.client.cancel(handle.id)
    assert (await followed).status == 200
    await asyncio.to_thread(wait_until, lambda: not taken, "nobody follows any more")


async def test_a_stop_ends_the_responses_that_follow_a_log(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    handle = await api.client.put("log:", after="1h")
    reader, writer = await follow(api, f"/v1/runs/{handle.id}/log?follow=true", await api.key("reader"))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.wait_for(api.face.stop(), 60)
    assert await reader.read() == b"0\r\n\r\n", "the response is complete"
    writer.close()
    assert "ASGI" not in caplog.text


async def test_a_key_that_is_revoked_does_not_follow_any_further(api: Api) -> None:
    store = api.client.store
    handle = await api.client.put("log:", after="1h")
    token = await api.key("reader")
    reader, writer = await follow(api, f"/v1/runs/{handle.id}/log?follow=true", token)
    await reader.readuntil(b"\r\n\r\n")
    [key] = [one for one in await list_keys(store) if one.hash == hash_of(token)]
    await revoke_key(store, key.id)
    assert await asyncio.wait_for(reader.read(), 30) == b"0\r\n\r\n"
    writer.close()


async def test_a_bound_key_reads_no_log_of_another_callers_task_with_the_same_id(api: Api) -> None:
    store = api.client.store
    await write(api, Run(record(api, 1, id="dup", idh=idh_of("dup"), target="null:mine")))
    await api.client.put("queue:mail/send", id="dup", after="1h")
    await api.client.put("null:mine", id="both", after="1h")
    await api.client.put("queue:mail/send", id="both", lane="theirs", after="1h")
    for task_id, lane in (("dup", None), ("both", "theirs")):
        for spot in (await resolve(store, task_id, lane)).spots_of_records(len(store.keys)):
            await publish_logs(store, [(spot.partition, spot.idh, "secret")])
    api.token = await api.key("reader", targets=("null:mine",))
    assert (await api.get("/v1/runs/dup/log")).problem == "not-found"
    assert (await api.get("/v1/runs/both/log?lane=theirs")).problem == "not-found"
    assert (await api.get("/v1/runs/both/log")).json["text"] == ""


async def test_a_bound_key_learns_from_the_history_only_of_lanes_with_tasks_that_it_may_see(api: Api) -> None:
    partitions = len(api.client.store.keys)
    home = partition_of("dup", partitions)  # `write` puts the records there
    lanes = [name for name in map("lane-{}".format, range(100)) if partition_of(name, partitions) == home]
    first, second, third = sorted(lanes[:3])
    now_ms = api.client.store.clock.now_ms()
    for lane, target in ((first, "null:mine"), (second, "null:mine"), (third, "queue:mail/send")):
        assert await note_lanes(api.client.store, [IdInLane("dup", lane, now_ms)], now_ms) == [None]
        idh = idh_in_lane(idh_of("dup"), lane)
        await write(api, Run(record(api, 1, id="dup", idh=idh, lane=lane, target=target)))
    refused = await api.get("/v1/tasks/dup")
    assert (refused.problem, refused.json["lanes"]) == ("ambiguous", [first, second, third])
    api.token = await api.key("reader", targets=("null:mine",))
    refused = await api.get("/v1/tasks/dup")
    assert (refused.problem, refused.json["lanes"]) == ("ambiguous", [first, second])
    assert (await api.get(f"/v1/tasks/dup?lane={first}")).json["state"] == "done"
    assert (await api.get(f"/v1/tasks/dup?lane={third}")).problem == "not-found"
    api.token = await api.key("reader", targets=("queue:mail/send",))
    assert (await api.get("/v1/tasks/dup")).json["lane"] == third


async def test_a_lane_without_an_id_is_refused(api: Api) -> None:
    assert (await api.get("/v1/runs?lane=a")).problem == "invalid"


async def test_a_task_whose_id_looks_like_a_runs_has_a_log(api: Api) -> None:
    store = api.client.store
    await api.client.put("log:", id="1.2.3.4", after="1h")
    reference = await resolve(store, "1.2.3.4", None)
    await publish_logs(store, [(reference.home, reference.idh, "one\n")])
    assert (await api.get("/v1/runs/1.2.3.4/log")).json["text"] == "one\n"
    api.token = await api.key("reader", targets=("log:",))
    assert (await api.get("/v1/runs/1.2.3.4/log")).json["text"] == "one\n"
