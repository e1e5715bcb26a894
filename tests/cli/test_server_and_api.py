"""Commands against a server and against a node's API: the same words, the same answers, the same exit codes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mainspring.cli import app
from mainspring.client.http import Api as RemoteApi
from mainspring.config.config import Config
from mainspring.model.access import new_token
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.errors import Ambiguous, Conflict, InvalidInput, NotConfirmed, Unavailable
from mainspring.model.explain import UNKNOWN, moment
from mainspring.model.times import delay_ms
from mainspring.model.workers import WorkerInfo
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.sinks.log import NullSink
from mainspring.store.members import worker_beat
from mainspring.testing.servers import Server
from tests.support.api_calls import Api, serving_api
from tests.support.verifying import home, raw
from tests.support.web_receiver import Answer, receiving

Say = Callable[..., Awaitable[Result]]


class MoodySink:
    """Does what a payload asks for."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        ends: dict[object, Outcome] = {"die": Dead("the receiver said no"), "fail": Retry("try later", 3_600_000)}
        return [ends.get(one.value(), DONE) for one in batch]

    async def aclose(self) -> None:
        return


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    server.call("FLUSHALL")
    config = Config(redis_url=server.url, port=0, partitions=4, http_allow=("127.0.0.0/8",))
    http = HttpSink(HttpOptions(allow=config.http_allow))
    async with serving_api(config, {"log": MoodySink(), "null": NullSink(), "http": http}) as made:
        yield made


@pytest.fixture(params=["server", "api"])
async def say(request: pytest.FixtureRequest, server: Server, api: Api, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs one command line, with the URL of the road at its end."""
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    url = server.url if request.param == "server" else api.url

    async def run(*words: str, code: int = 0) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--url", url])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


async def told(say: Say, *words: str, code: int = 0) -> Any:
    return json.loads((await say(*words, "--json", code=code)).stdout)


async def test_a_task_that_is_stored_and_not_confirmed_is_named_all_the_same(say: Say, api: Api) -> None:
    put = await say("task", "put", "1", "--in", "1h", "--target", "null:", "--durability", "disk", "--json", code=1)
    assert isinstance(put.exception, NotConfirmed)
    assert "tasks of this call" not in str(put.exception)
    assert (await api.client.get(json.loads(put.stdout)["id"])).state == "pending"


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(600):
        if await look():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come to pass within a minute")


# -- namespaces ------------------------------------------------------------------------------------------------


async def test_over_an_api_the_namespace_of_its_node_is_meant_unless_one_is_given(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.call("FLUSHALL")
    config = Config(redis_url=server.url, port=0, partitions=4, namespace="shop")

    async def counted(url: str, *options: str) -> Result:
        words = ["task", "count", "--json", "--url", url, *options]
        return await asyncio.to_thread(CliRunner().invoke, app, words)

    async with serving_api(config, {"null": NullSink()}) as api:
        made = await asyncio.to_thread(
            CliRunner().invoke, app, ["task", "put", "1", "--in", "1h", "--target", "null:", "--url", api.url]
        )
        assert made.exit_code == 0, made.output
        assert json.loads((await counted(api.url)).stdout)["pending"] == 1
        assert json.loads((await counted(api.url, "--namespace", "shop")).stdout)["pending"] == 1
        assert (await counted(api.url, "--namespace", "main")).exit_code == 1, "asked for by name, it is not there"
        monkeypatch.setenv("MAINSPRING_NAMESPACE", "main")
        assert (await counted(api.url)).exit_code == 1
        monkeypatch.delenv("MAINSPRING_NAMESPACE")
        (tmp_path / "mainspring.toml").write_text(f'api_url = "{api.url}"\n')
        found = await asyncio.to_thread(CliRunner().invoke, app, ["task", "count", "--json"])
        assert json.loads(found.stdout)["pending"] == 1


@pytest.mark.parametrize(
    "words",
    ["task list", "task get a", "task explain a", "task result a", "task cancel a", "dead show a", "dead replay a",
     "dead drop a --yes", "schedule show a", "resume --queue a"],
)  # fmt: skip
async def test_over_an_api_a_misspelt_namespace_is_not_mistaken_for_an_unknown_task(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    await api.client.put("null:", 1, after="1h", id="a")
    line = [*words.split(), "--url", api.url, "--namespace", "mian"]
    ended = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert str(ended.exception) == "there is no namespace 'mian' for this key"


async def test_a_list_has_columns_and_no_id_takes_hold_of_the_terminal(say: Say, api: Api) -> None:
    wild = "\x1b[2Jwild\r\n\u202e"
    await api.client.put("log:", "die", id=wild, lane=wild)
    await until(lambda: _is_dead(api, wild))
    await api.client.put("null:", 1, after="1h", id=wild + "2")
    await api.client.put("log:", 1, after="2h", id="tame")
    told = (await say("task", "list")).stdout.splitlines()
    assert [line.split()[:1] for line in told] == [["ID"], ["\ufffd[2Jwild\ufffd\ufffd\ufffd2"], ["tame"]]
    assert {line.index(target) for line, target in zip(told, ("TARGET", "null:", "log:"), strict=True)} == {40}
    for words in (("task", "get", wild + "2"), ("task", "explain", wild), ("dead", "list"), ("dead", "show", wild)):
        shown = (await say(*words)).stdout
        assert "\ufffd[2Jwild" in shown, words
        assert not {"\x1b", "\r", "\u202e"} & set(shown), words


async def _is_dead(api: Api, id: str) -> bool:
    return (await api.client.get(id)).state == "dead"


# -- tasks -----------------------------------------------------------------------------------------------------


LOOKS = (
    ("task", "list"), ("task", "count"), ("task", "get", "a"), ("task", "explain", "a"), ("task", "cancel", "a"),
    ("schedule", "list"), ("schedule", "show", "a"), ("lane", "list"), ("dead", "list"), ("dead", "replay", "--all"),
    ("pauses",), ("resume", "--all"), ("cluster", "status"), ("audit",), ("key", "list"),
    ("key", "add", "--role", "admin"),
)  # fmt: skip


async def test_only_what_puts_something_there_makes_a_namespace(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition count is fixed from then on, and a misspelt namespace would stay."""
    server.call("FLUSHALL")
    monkeypatch.chdir(tmp_path)

    async def run(*words: str) -> Result:
        line = [*words, "--redis-url", server.url, "--namespace", "shop"]
        return await asyncio.to_thread(CliRunner().invoke, app, line)

    for words in LOOKS:
        asked = await run(*words)
        assert asked.exit_code in (0, 1), (words, asked.output)
        assert server.call("EXISTS", "{shop}:meta") == 0, words
    (tmp_path / "mainspring.toml").write_text("partitions = 7")
    assert (await run("task", "put", "1", "--in", "1h")).exit_code == 0
    assert int(server.call("HGET", "{shop}:meta", "partitions")) == 7
    server.call("FLUSHALL")


async def test_a_task_from_put_to_cancel(say: Say) -> None:
    put = ("task", "put", '{"n": 1.50}', "--in", "2h", "--id", "a/b ü?", "--lane", "l 1", "--retry", "3 base=200ms")
    made = await told(say, *put, "--expires", "2031-01-01T00:00:00Z", "--timeout", "1m30s")
    assert (made["id"], made["outcome"]) == ("a/b ü?", "created")
    assert (await told(say, *put))["outcome"] == "kept"
    found = await told(say, "task", "get", "a/b ü?", "--lane", "l 1")
    assert (found["state"], found["payload"], found["lane"]) == ("pending", {"n": 1.5}, "l 1")
    assert (found["expires_ms"], found["timeout_ms"]) == (1_924_992_000_000, 90_000)
    assert "not due yet" in (await say("task", "explain", "a/b ü?", "--lane", "l 1")).stdout
    moved = await told(say, "task", "reschedule", "a/b ü?", "--at", "2030-01-01T09:00:00Z", "--lane", "l 1")
    assert moved["due_ms"] == 1_893_488_400_000
    listed = await told(say, "task", "list", "--after", "2029-12-31T00:00:00+02:00", "--before", "1893490000000")
    assert [(one["id"], one["due_ms"]) for one in listed["tasks"]] == [("a/b ü?", moved["due_ms"])]
    assert (await told(say, "task", "count"))["pending"] == 1
    assert (await told(say, "task", "count", "--before", "2029-01-01T00:00:00Z"))["pending"] == 0
    ended = await told(say, "task", "cancel", "a/b ü?", "nobody", "--lane", "l 1", code=1)
    assert [one["outcome"] for one in ended] == ["cancelled", "unknown"]
    assert (await told(say, "task", "get", "nobody", code=1))["state"] == "unknown"
    asked = await told(say, "task", "explain", "nobody", code=1)
    assert (asked["code"], asked["text"]) == ("unknown", UNKNOWN)
    assert asked["now_ms"] > 1_700_000_000_000
    assert isinstance((await say("task", "cancel", "", code=1)).exception, InvalidInput)


async def test_the_end_of_a_task_is_shown_while_it_is_kept(say: Say) -> None:
    with receiving(lambda _: Answer(200, {"X-Order": "42"}, b"stored")) as receiver:
        await say("task", "put", "1", "--in", "1s", "--id", "order 42", "--target", receiver.url)
        shown = (await say("task", "result", "order 42", "--wait", "30s")).stdout
        result = await told(say, "task", "result", "order 42")
    assert "answer      HTTP 200" in shown
    assert "  X-Order: 42\n" in shown
    assert "  stored\n" in shown
    assert (result["ending"], result["response"]["body"], result["output"]) == ("done", "stored", None)
    await say("task", "put", "--in", "1h", "--id", "later")
    assert "later is not over" in (await say("task", "result", "later", code=1)).stderr
    assert "there is no task 'nobody'" in str((await say("task", "result", "nobody", code=1)).exception)


async def test_pages_of_tasks_continue_where_they_ended(say: Say) -> None:
    for n in range(3):
        await say("task", "put", str(n), "--in", f"{n + 1}h")
    first = await told(say, "task", "list", "--limit", "2")
    rest = await told(say, "task", "list", "--limit", "2", "--cursor", first["next"])
    assert [one["payload"] for one in (*first["tasks"], *rest["tasks"])] == [0, 1, 2]
    assert rest["next"] is None


async def test_tasks_are_listed_by_state_target_and_lane(say: Say) -> None:
    await say("task", "put", "1", "--in", "1h", "--target", "kafka:a", "--lane", "x")
    await say("task", "put", "2", "--in", "1h", "--target", "kafka:b", "--lane", "y")
    await say("task", "put", "3", "--target", "queue:mail/send")

    async def listed(*words: str) -> list[int]:
        return [one["payload"] for one in (await told(say, "task", "list", *words))["tasks"]]

    assert await listed("--target", "kafka:b") == [2]
    assert await listed("--lane", "x") == [1]
    assert sorted(await listed("--target", "kafka:*")) == [1, 2]

    async def is_queued() -> bool:
        return await listed("--state", "queued") == [3]

    await until(is_queued)
    assert (
        "'lost' is not one of pending, fired, queued" in (await say("task", "list", "--state", "lost", code=2)).stderr
    )


async def test_workers_and_the_queues_that_they_serve_are_listed(say: Say, api: Api) -> None:
    place = r"(the namespace of the node|namespace \S+) (at|on) "
    assert re.match(f"no worker is running in {place}", (await say("worker", "list")).stderr)
    assert re.match(f"no queue has tasks or workers in {place}", (await say("queue", "list")).stderr)
    about = WorkerInfo(
        id="w1", host="pod-7", pid=42, version="1.2", queues={"mail": 3, "fax": 1}, targets=("queue:mail/send",),
        concurrency=8, running=2, started_ms=1_900_000_000_000, lease_ms=600_000,
    )  # fmt: skip
    await worker_beat(api.client.store, "w1/a", about)
    await say("task", "put", "1", "--in", "0s", "--target", "queue:mial/send", "--id", "typo")

    async def is_queued() -> bool:
        return [one["name"] for one in await told(say, "queue", "list")] == ["fax", "mail", "mial"]

    await until(is_queued)
    fax, mail, mial = await told(say, "queue", "list")
    assert fax == {
        "name": "fax", "ready": 0, "running": 0, "oldest_ms": None, "oldest": None, "paused": False, "workers": ["w1"],
        "nearest": None,
    }  # fmt: skip
    assert (mail["workers"], mial["workers"], mial["nearest"], mial["ready"]) == (["w1"], [], "mail", 1)
    rows = (await say("queue", "list")).stdout.splitlines()
    assert rows[2].split() == ["mail", "active", "0", "0", "-", "1"]
    assert rows[3].split()[:3] == ["mial", "no", "worker"]
    assert rows[3].endswith("0; did you mean mail?")
    [row] = await told(say, "worker", "list")
    assert row["seen_ms"] > 0
    assert {name: row[name] for name in ("id", "host", "queues", "running")} == {
        "id": "w1", "host": "pod-7", "queues": {"mail": 3, "fax": 1}, "running": 2,
    }  # fmt: skip
    _, line = (await say("worker", "list")).stdout.splitlines()
    assert re.split(" {2,}", line) == [
        "w1", "active", "mail:3,fax:1", "2/8", "1", "pod-7 42", "2030-03-17T17:46:40.000Z",
    ]  # fmt: skip
    assert "did you mean mail?" in (await say("task", "explain", "typo")).stdout


async def test_mistakes_are_errors_in_the_same_words(say: Say) -> None:
    assert isinstance((await say("task", "put", "--in", "1 parsec", code=1)).exception, ValueError)
    assert "no known scheme" in str((await say("task", "put", "--target", "nowhere:", code=1)).exception)
    await say("task", "put", "--id", "one", "--in", "1h")
    taken = await say("task", "put", "--id", "one", "--in", "1h", "--on-conflict", "reject", code=1)
    assert isinstance(taken.exception, Conflict)


# -- what failed -----------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_replayed_exported_and_dropped(say: Say, tmp_path: Path) -> None:
    for n in range(3):
        await say("task", "put", '"die"', "--id", f"d{n}")

    async def all_died() -> bool:
        return len((await told(say, "dead", "list"))["letters"]) == 3

    await until(all_died)
    dead_letter = await told(say, "dead", "show", "d0")
    assert (dead_letter["reason"], dead_letter["payload"], dead_letter["attempts"]) == (
        "the receiver said no",
        "die",
        1,
    )
    assert dead_letter["idempotency_key"].startswith("main/d0/")
    assert "no dead letter" in str((await say("dead", "show", "d9", code=1)).exception)
    file = tmp_path / "dead-letters.ndjson"
    await say("dead", "export", "-o", str(file))
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(one["id"] for one in exported) == ["d0", "d1", "d2"]
    assert [one["died_ms"] for one in exported] == sorted(one["died_ms"] for one in exported)
    assert {name: value for name, value in dead_letter.items() if name not in ("due", "died")} in exported
    assert moment(dead_letter["died_ms"]) == dead_letter["died"]
    assert (await told(say, "dead", "replay", "--all", "--dry-run"))["replayed"] == 3
    assert (await told(say, "dead", "replay", "d0", "d9", "--in", "1h", code=1))["gone"] == 1
    assert (await told(say, "task", "get", "d0"))["state"] == "pending"
    assert (await told(say, "dead", "replay", "--target", "log:", "--in", "1h"))["replayed"] == 2
    assert (await told(say, "dead", "drop", "--all", "--yes"))["dropped"] == 0
    assert "no dead letter" in str((await say("dead", "drop", "d1", "--yes", code=1)).exception)


async def test_a_lane_behind_its_head(say: Say) -> None:
    await say("task", "put", '"fail"', "--id", "head", "--lane", "l")

    async def stands() -> bool:
        lanes = await told(say, "lane", "list")
        return bool(lanes) and lanes[0]["head_id"] == "head"

    await until(stands)
    assert (await told(say, "lane", "show", "l"))["state"] == "retrying"
    assert (await told(say, "lane", "skip-head", "l", "--reason", "enough"))["answer"] == "ok"
    for word in ("retry-head", "skip-head", "resume"):
        again = await told(say, "lane", word, "l", code=1)
        assert again == {"lane": "l", "answer": "no head"}
        assert (await say("lane", word, "l", code=1)).stdout == "l: it is not waiting for a failed task\n"


async def test_a_pause_is_made_listed_and_ended(say: Say) -> None:
    made = await told(say, "pause", "--target", "kafka:*", "--reason", "upgrade", "--for", "1h")
    assert (made["scope"], made["reason"], made["until_ms"] - made["since_ms"]) == (
        "target kafka:*",
        "upgrade",
        3_600_000,
    )
    assert await told(say, "pauses") == [made]
    assert (await told(say, "resume", "--target", "kafka:*"))["resumed"] is True
    assert (await told(say, "resume", "--target", "kafka:*", code=1))["resumed"] is False
    await say("pause", "--all")
    assert (await told(say, "resume", "--all"))["scope"] == "all"


# -- schedules -------------------------------------------------------------------------------------------------


async def test_a_schedule_from_add_to_remove(say: Say) -> None:
    options = ("--cron", "30 2 * * *", "--every", "36h", "--tz", "Europe/Paris", "--payload", '{"a": 1}')
    more = (
        "--grace",
        "5m",
        "--exclude",
        "2030-12-25",
        "--overlap",
        "buffer_all(3)",
        "--retry",
        "2 base=1s",
        "--note",
        "x",
    )
    made = await told(say, "schedule", "add", "s", *options, "--target", "log:", *more)
    more_often = await told(say, "schedule", "edit", "s", "--retries", "4", "--dry-run")
    assert more_often["changes"]["retry"] == ["2", "5"]
    assert (made["specs"], made["timezone"], made["payload"]) == (
        ["30 2 * * *", "@every 36h"],
        "Europe/Paris",
        {"a": 1},
    )
    assert (made["grace"], made["overlap"], made["generation"], len(made["next"])) == ("5m", "buffer_all(3)", 1, 3)
    assert await told(say, "schedule", "show", "s") == made
    assert isinstance((await say("schedule", "add", "s", *options, "--target", "log:", code=1)).exception, Conflict)
    changes = await told(say, "schedule", "diff", "s", "--grace", "6m")
    assert changes == {"changes": {"grace": ["5m", "6m"]}}
    edited = await told(say, "schedule", "edit", "s", "--cron", "0 4 * * *", "--generation", "1")
    assert (edited["generation"], edited["grace"], edited["specs"]) == (2, "5m", ["0 4 * * *", "@every 36h"])
    assert isinstance(
        (await say("schedule", "edit", "s", "--grace", "1m", "--generation", "1", code=1)).exception, Conflict
    )
    paused = await told(say, "schedule", "pause", "s", "--until", "2h", "--reason", "why", "--hold")
    assert (paused["state"], paused["paused"]["mode"], paused["paused"]["reason"]) == ("paused", "hold", "why")
    assert (await told(say, "schedule", "resume", "s"))["state"] == "active"
    revisions = (await told(say, "schedule", "history", "s"))["revisions"]
    assert [one["generation"] for one in revisions] == [4, 3, 2, 1]
    assert revisions[-1]["note"] == "x"
    assert (await told(say, "schedule", "rollback", "s", "1"))["specs"] == made["specs"]
    assert (await told(say, "schedule", "trigger", "s"))["id"].startswith("s@")
    past = ("--from", "2026-01-01T00:00:00Z", "--to", "2026-01-03T00:00:00Z")
    assert (await told(say, "schedule", "backfill", "s", *past, "--dry-run"))["planned"] == 2
    assert (await told(say, "schedule", "list"))["count"] == 1
    assert (await told(say, "schedule", "remove", "s"))["removed"] is True
    assert (await told(say, "schedule", "remove", "s", code=1))["removed"] is False


@pytest.mark.parametrize("span", ["3600s", "5400000ms", "PT1H"])
async def test_a_schedule_is_paused_for_a_span_in_any_unit(say: Say, span: str) -> None:
    await say("schedule", "add", "s", "--cron", "7 * * * *", "--target", "log:")
    paused = await told(say, "schedule", "pause", "s", "--until", span)
    rests = datetime.fromisoformat(paused["paused"]["until"]) - datetime.fromisoformat(paused["paused"]["since"])
    assert rests == timedelta(milliseconds=delay_ms(span))
    await say("schedule", "pause", "s", "--until", "0s", code=1)


async def test_times_without_an_offset_are_of_the_schedules_zone(say: Say) -> None:
    options = ("--cron", "0 2 * * *", "--tz", "Europe/Paris", "--target", "log:")
    made = await told(say, "schedule", "add", "s", *options, "--start", "2026-01-01", "--end", "2030-01-01 12:00")
    assert (made["start"], made["end"]) == ("2026-01-01T00:00:00+01:00", "2030-01-01T12:00:00+01:00")
    diff = await told(say, "schedule", "diff", "s", "--end", "2030-07-01 12:00")
    assert diff["changes"]["end"][1] == "2030-07-01T12:00:00+02:00"
    edited = await told(say, "schedule", "edit", "s", "--end", "2030-07-01T12:00", "--tz", "Asia/Tokyo")
    assert edited["end"] == "2030-07-01T12:00:00+09:00"
    fill = ("schedule", "backfill", "s", "--dry-run", "--from", "2026-01-02 02:00")
    assert (await told(say, *fill, "--to", "2026-01-04 02:00"))["planned"] == 2
    assert (await told(say, *fill, "--to", "2026-01-04 02:01"))["planned"] == 3
    assert isinstance((await say(*fill, "--to", "noon", code=1)).exception, InvalidInput)


async def test_an_edit_of_one_kind_of_times_leaves_the_others_alone(say: Say) -> None:
    await say("schedule", "add", "s", "--cron", "7 * * * *", "--every", "1h", "--target", "log:")
    edit = ("schedule", "edit", "s")
    assert (await told(say, *edit, "--every", "2h"))["specs"] == ["7 * * * *", "@every 2h"]
    diff = await told(say, "schedule", "diff", "s", "--after-end", "5m")
    assert diff["changes"] == {"after_end": [None, "5m"]}
    assert (await told(say, *edit, "--after-end", "5m"))["specs"] == ["7 * * * *", "@every 2h", "@after-end 5m"]
    assert (await told(say, *edit, "--cron", "", "--after-end", ""))["specs"] == ["@every 2h"]
    assert (await told(say, *edit, "--cron", "8 * * * *", "--every", ""))["specs"] == ["8 * * * *"]
    assert isinstance((await say(*edit, "--cron", "", code=1)).exception, InvalidInput), "nothing would be left"


async def test_a_file_and_a_replacement_leave_a_pause_alone(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[schedules.a]\ncron = "7 * * * *"\ntarget = "log:"\n')
    await say("schedule", "apply", "-f", str(file))
    await say("schedule", "pause", "a", "--reason", "why")
    file.write_text('[schedules.a]\ncron = "8 * * * *"\ntarget = "log:"\n')
    await say("schedule", "apply", "-f", str(file))
    shown = await told(say, "schedule", "show", "a")
    assert (shown["state"], shown["specs"], shown["paused"]["reason"]) == ("paused", ["8 * * * *"], "why")
    options = ("--cron", "9 * * * *", "--target", "log:", "--replace")
    assert (await told(say, "schedule", "add", "a", *options))["state"] == "paused"


async def test_a_run_that_may_outlast_the_interval_is_warned_of(say: Say, tmp_path: Path) -> None:
    said = "warning: s: one run may take 6 x 90 s"
    options = ("--every", "1m", "--target", "https://example.com/", "--timeout", "90s")
    assert said in (await say("schedule", "add", "s", *options)).stderr
    assert "worst case  6 x 90 s" in (await say("schedule", "show", "s")).stdout
    assert "[too-long]" in (await say("schedule", "lint", code=1)).stdout
    file = tmp_path / "plan.toml"
    file.write_text('[schedules.s]\nevery = "50s"\ntarget = "https://example.com/"\ntimeout = "90s"\n')
    assert said in (await say("schedule", "apply", "-f", str(file))).stderr
    usual = await say("schedule", "edit", "s", "--timeout", "15s")
    assert usual.stderr == "", "these retries are the usual ones"
    assert "[default-retries]" in (await say("schedule", "lint", code=1)).stdout
    refused = await say("schedule", "edit", "s", "--retry", "4 base=1s", code=1)
    assert "4 x 15 s + 1 s + 2 s + 4 s = 67 s" in str(refused.exception)
    assert (await say("schedule", "edit", "s", "--retry", "4 base=1s", "--timeout", "5s")).stderr == ""


async def test_over_an_api_the_settings_of_the_node_say_how_long_a_run_may_take(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.call("FLUSHALL")
    monkeypatch.chdir(tmp_path)
    config = Config(redis_url=server.url, port=0, partitions=4, retry="2 base=1s", http_timeout_s=40)  # type: ignore[arg-type]
    said = "one run may take 2 x 40 s + 1 s = 81 s"
    file = tmp_path / "plan.toml"
    file.write_text('[schedules.s]\nevery = "50s"\ntarget = "https://example.com/"\n')
    async with serving_api(config, {"null": NullSink()}) as api:

        async def run(*words: str) -> str:
            return (await asyncio.to_thread(CliRunner().invoke, app, ["schedule", *words, "--url", api.url])).output

        assert said in await run("add", "s", "--every", "1m", "--target", "https://example.com/")
        assert said in await run("apply", "-f", str(file))
        assert said in await run("lint")
        assert said.removeprefix("one run may take ") in await run("show", "s")


async def test_a_file_of_schedules_applied_twice_changes_nothing(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[schedules.a]\ncron = "7 * * * *"\ntarget = "log:"\npayload = {x = [1, 2]}\ntimeout = "5s"\n'
                    '[schedules.b]\nevery = "30m"\nafter_end = "5m"\ntarget = "log:"\nlane = "l"\n')  # fmt: skip
    steps = (await told(say, "schedule", "apply", "-f", str(file)))["steps"]
    assert [(one["name"], one["action"]) for one in steps] == [("a", "create"), ("b", "create")]
    again = (await told(say, "schedule", "apply", "-f", str(file)))["steps"]
    assert [one["action"] for one in again] == ["same", "same"]
    file.write_text('[schedules.a]\ncron = "8 * * * *"\ntarget = "log:"\n')
    last = (await told(say, "schedule", "apply", "-f", str(file), "--prune"))["steps"]
    assert [(one["name"], one["action"]) for one in last] == [("a", "change"), ("b", "remove")]
    assert [one["name"] for one in (await told(say, "schedule", "list"))["schedules"]] == ["a"]


async def test_a_large_file_is_applied_over_an_api_in_batches(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    ask = RemoteApi.call

    def counted(self: RemoteApi, method: str, *path: str, **given: Any) -> Any:
        sent.append(f"{method} {path[0]}")
        return ask(self, method, *path, **given)

    monkeypatch.setattr(RemoteApi, "call", counted)
    file = tmp_path / "plan.toml"

    async def steps(payload: str, *words: str) -> set[str]:
        rows = (f"[schedules.s{n}]\nevery = '1h'\ntarget = 'log:'\npayload = '{payload}'\n" for n in range(150))
        file.write_text("".join(rows))
        line = ["schedule", "apply", "-f", str(file), "--url", api.url, "--json", *words]
        result = await asyncio.to_thread(CliRunner().invoke, app, line)
        assert result.exit_code == 0, result.output
        return {one["action"] for one in json.loads(result.stdout)["steps"]}

    assert await steps("small") == {"create"}
    assert sent == ["POST /v1/schedules:find"] * 2 + ["POST /v1/schedules:batch"] * 2 + ["POST /v1/schedules:find"] * 2
    sent.clear()
    assert await steps("small") == {"same"}
    assert sent == ["POST /v1/schedules:find"] * 2
    assert await steps("large " * 1_000) == {"change"}
    last = await api.client.schedules.get("s149")
    assert last is not None
    assert last.payload == "large " * 1_000


# -- the rest --------------------------------------------------------------------------------------------------


async def test_the_cluster_and_the_trail(say: Say, api: Api) -> None:
    await api.post("/v1/pauses", {"all": True, "reason": "trail"})
    assert (await told(say, "audit"))["changes"][0]["change"]["what"] == "pause.add"
    shown = (await say("audit", "--limit", "1")).stdout
    assert "pause.add" in shown
    assert "None" not in shown
    report = await told(say, "cluster", "status")
    assert (report["partitions"], report["without_owner"], len(report["nodes"])) == (4, [], 1)
    assert "(leader)" in (await say("cluster", "status")).stdout


async def test_a_key_goes_with_every_call(api: Api, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(new_token())
    config = Config(redis_url=server.url, namespace="closed", port=0, access="keys", api_key_file=file)
    async with serving_api(config) as closed:

        async def get(**environ: str) -> Result:
            line = ["task", "list", "--url", closed.url, "--namespace", "closed"]
            return await asyncio.to_thread(lambda: CliRunner(env=environ).invoke(app, line))

        assert "an API key is needed" in str((await get()).exception)
        assert "unknown, expired or revoked" in str((await get(MAINSPRING_API_TOKEN=new_token())).exception)
        assert (await get(MAINSPRING_API_TOKEN=file.read_text())).exit_code == 0
        assert (await get(MAINSPRING_API_TOKEN_FILE=str(file))).exit_code == 0


async def test_an_api_that_is_not_there_or_is_none(api: Api, server: Server) -> None:
    async def get(url: str) -> BaseException | None:
        line = ["task", "get", "x", "--url", url]
        return (await asyncio.to_thread(lambda: CliRunner().invoke(app, line))).exception

    assert isinstance(await get("http://127.0.0.1:1"), Unavailable)
    assert "write https://host" in str(await get(f"http://me:secret@{api.url.removeprefix('http://')}"))

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        assert "does not respond like Mainspring's API" in str(await get(f"http://127.0.0.1:{port}"))


async def test_a_command_that_needs_the_server_itself_says_so(api: Api) -> None:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["verify", "--url", api.url])
    assert "looks at the server itself" in str(result.exception)


async def test_keys_are_made_listed_and_revoked(say: Say, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_API_TOKEN", await api.key("admin"))
    made = await told(
        say, "key", "add", "shop", "--role", "reader", "--target", "log:*", "--expires", "1d", "--rate", "5",
        "--max-pending", "9", "--max-bytes", "1000",
    )  # fmt: skip
    assert (await api.get("/v1/tasks", authorization=f"Bearer {made['key']}")).status == 200
    shown = {name: value for name, value in made.items() if name != "key"}
    assert shown == {
        "id": made["id"], "name": "shop", "role": "reader",
        "created_ms": made["created_ms"], "created": moment(made["created_ms"]),
        "expires_ms": made["expires_ms"], "expires": moment(made["expires_ms"]),
        "also": [], "targets": ["log:*"], "rate": 5.0, "max_pending": 9, "max_bytes": 1000,
    }  # fmt: skip
    assert shown in await told(say, "key", "list")
    listed = (await say("key", "list")).stdout.splitlines()
    assert len({line.index(name) for line, name in zip(listed, ("NAME", "a test's", "shop"), strict=True)}) == 1, listed
    assert "9 pending; 1000 bytes pending" in listed[-1] + listed[-2]
    assert "'king' is not one of reader" in (await say("key", "add", "--role", "king", code=2)).stderr
    both = await told(say, "key", "revoke", made["id"], "k0", code=1)
    assert both == [{"id": made["id"], "outcome": "revoked"}, {"id": "k0", "outcome": "unknown"}]
    api.node_ring_forgets()
    assert (await api.get("/v1/tasks", authorization=f"Bearer {made['key']}")).status == 401
    trail = (await told(say, "audit"))["changes"]
    assert [(one["change"]["what"], one["change"]["object"]) for one in trail] == [
        ("key.revoke", made["id"]),
        ("key.add", made["id"]),
    ]
    assert made["key"] not in json.dumps(trail)


async def test_doctor_finds_the_same_directly_and_over_the_api(say: Say) -> None:
    rows = {row["name"]: row for row in await told(say, "doctor")}
    servers = {"version", "role", "eviction", "persistence", "clock", "latency", "memory", "rights"}
    assert servers | {"data", "orphans", "nodes", "open files"} <= set(rows)
    assert (rows["nodes"]["status"], rows["rights"]["status"]) == ("ok", "ok")


async def test_doctor_reports_an_api_that_it_cannot_reach(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(url: str) -> list[dict[str, str]]:
        found = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--json", "--url", url])
        assert found.exit_code == 1, found.output
        rows: list[dict[str, str]] = json.loads(found.stdout)
        return rows

    [nobody] = await asked("http://127.0.0.1:9")
    assert (nobody["name"], nobody["status"]) == ("reach", "error")
    assert "cannot connect" in nobody["message"]
    monkeypatch.setenv("MAINSPRING_API_TOKEN", await api.key("operator"))
    [refused] = await asked(api.url)
    assert "does not have the right 'admin'" in refused["message"]


async def test_the_environment_names_an_api_and_a_flag_a_server(api: Api, server: Server) -> None:
    await api.client.put("log:", id="known", after="1h")

    async def get(*flags: str, **environ: str) -> Result:
        line = ["task", "get", "known", *flags]
        return await asyncio.to_thread(lambda: CliRunner(env=environ).invoke(app, line))

    assert (await get(MAINSPRING_API_URL=api.url, MAINSPRING_REDIS_URL="redis://127.0.0.1:1")).exit_code == 0
    assert (await get("--redis-url", server.url, MAINSPRING_API_URL="http://127.0.0.1:1")).exit_code == 0


async def test_every_change_of_a_command_is_in_the_trail(say: Say) -> None:
    await say("task", "put", '"canary-payload"', "--in", "1h", "--id", "t", "--target", "http://h/x?k=canary-q")
    await say("task", "reschedule", "t", "--in", "2h")
    await say("task", "cancel", "t", "nobody", code=1)
    await say("pause", "--target", "kafka:a", "--reason", "why")
    await say("resume", "--target", "kafka:a")
    await say("resume", "--target", "kafka:a", code=1)
    await say("schedule", "add", "s", "--every", "1h", "--target", "null:", "--payload", '"canary-payload"')
    await say("schedule", "edit", "s", "--every", "2h")
    await say("schedule", "remove", "s")
    await say("schedule", "remove", "s", code=1)
    changes = [one["change"] for one in (await told(say, "audit", "--limit", "50"))["changes"]][::-1]
    assert [(one["what"], one["object"]) for one in changes] == [
        ("task.reschedule", "t"), ("task.cancel", "t"), ("pause.add", "target kafka:a"),
        ("pause.remove", "target kafka:a"), ("schedule.add", "s"), ("schedule.edit", "s"), ("schedule.remove", "s"),
    ]  # fmt: skip
    assert all(one["who"] and one["from"] for one in changes)
    assert changes[0]["after"]["due_ms"] - changes[0]["before"]["due_ms"] > 3_000_000
    assert changes[1]["before"]["state"] == "pending"
    assert (changes[3]["before"]["reason"], changes[3]["after"]) == ("why", {"state": "resumed"})
    assert (changes[5]["before"]["specs"], changes[5]["after"]["specs"]) == (["@every 1h"], ["@every 2h"])
    assert "canary" not in json.dumps(changes)


async def test_the_trail_says_the_same_directly_and_over_the_api(say: Say) -> None:
    put = ("task", "put", "--id", "t", "--target")
    await say(*put, "log:", "--in", "2h")
    await say(*put, "log:", "--in", "3h")
    await say(*put, "null:", "--in", "1h", "--on-conflict", "replace")
    assert [one["outcome"] for one in await told(say, "task", "cancel", "t", "t")] == ["cancelled", "cancelled"]
    for why in ("one", "other"):
        await say("pause", "--target", "null:", "--reason", why)
    add = ("schedule", "add", "s", "--target", "null:", "--replace", "--every")
    for every in ("1h", "1h", "2h"):
        await say(*add, every)
    await say("schedule", "edit", "s", "--every", "2h")
    await say("schedule", "resume", "s")
    await say("schedule", "trigger", "s")
    await say("dead", "drop", "--all", "--yes")
    await say("dead", "replay", "--all")
    changes = [one["change"] for one in (await told(say, "audit", "--limit", "50"))["changes"]][::-1]
    assert [one["what"] for one in changes] == [
        "task.replace", "task.cancel", "pause.add", "pause.add", "schedule.add", "schedule.edit", "schedule.trigger",
    ]  # fmt: skip
    replace, cancel, first, second, _, edit, trigger = changes
    assert replace["object"] == "t"
    assert (replace["before"]["target"], replace["after"]["target"]) == ("log:", "null:")
    assert replace["before"]["due_ms"] - replace["after"]["due_ms"] > 3_000_000
    assert (cancel["before"]["state"], cancel["after"]) == ("pending", {"state": "cancelled"})
    assert (first.get("before"), first["after"]["reason"]) == (None, "one")
    assert (second["before"]["reason"], second["after"]["reason"]) == ("one", "other")
    assert (edit["before"]["specs"], edit["after"]["specs"]) == (["@every 1h"], ["@every 2h"])
    assert (trigger.get("before"), set(trigger["after"])) == (None, {"id", "due_ms"})


async def test_the_trail_has_what_was_given_up_paused_and_applied(say: Say, tmp_path: Path) -> None:
    for name in ("d1", "d2", "d3"):
        await say("task", "put", '"die"', "--id", name, "--target", "log:")
    await say("task", "put", '"fail"', "--id", "head", "--lane", "l", "--target", "log:")
    await until(lambda: _is(say, "dead", "list", reached=lambda found: len(found["letters"]) == 3))
    await until(lambda: _is(say, "lane", "show", "l", reached=lambda lane: lane["head_id"] == "head"))
    await say("dead", "replay", "d1", "--in", "1h")
    await say("dead", "replay", "d1", "nobody", code=1)
    await say("dead", "drop", "d2", "--yes")
    await say("dead", "drop", "d2", "--yes", code=1)
    await say("dead", "drop", "--all", "--dry-run")
    await say("dead", "drop", "--target", "log:*", "--yes")
    await say("lane", "skip-head", "l")
    file = tmp_path / "jobs.toml"
    for every, prune in (("1h", ()), ("1h", ()), ("2h", ()), ("", ("--prune",))):
        table = f'[schedules.s]\nevery = "{every}"\ntarget = "null:"\n' if every else "[schedules]\n"
        file.write_text(table)
        await say("schedule", "apply", "-f", str(file), *prune)
        if every == "2h":
            await say("schedule", "pause", "s", "--reason", "deploy", "--until", "2031-01-01T00:00:00Z", "--hold")
    changes = [one["change"] for one in (await told(say, "audit", "--limit", "50"))["changes"]][::-1]
    assert [(one["what"], one["object"]) for one in changes] == [
        ("dead.replay", "d1"), ("dead.drop", "d2"), ("dead.drop", "many"), ("lane.skip-head", "l"),
        ("schedule.add", "s"), ("schedule.edit", "s"), ("schedule.pause", "s"), ("schedule.remove", "s"),
    ]  # fmt: skip
    replay, drop, drops, skip, _, edit, pause, _ = changes
    assert (replay["before"]["attempts"], list(replay["after"])) == (1, ["due_ms"])
    assert (drop["before"]["target"], drop.get("after")) == ("log:", None)
    assert (drops["before"], drops["after"]) == ({"target": "log:*"}, {"dropped": 1})
    assert skip["before"]["head_id"] == "head"
    assert (edit["before"]["specs"], edit["after"]["specs"]) == (["@every 1h"], ["@every 2h"])
    paused = pause["after"]["paused"]
    assert (paused["reason"], paused["until"], paused["mode"]) == ("deploy", "2031-01-01T00:00:00+00:00", "hold")


async def _is(say: Say, *words: str, reached: Callable[[Any], bool]) -> bool:
    return reached(await told(say, *words))


async def test_a_repair_is_in_the_trail(api: Api, server: Server) -> None:
    store = api.client.store
    keys = home(store, "a")
    await raw(store, keys.number, "HSET", keys.held, "a", b"0123456789abcdef")  # a lane that waits for no task

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*words, "--url", server.url, "--json"])

    await run("verify")
    assert json.loads((await run("audit")).stdout)["changes"] == [], "who only looks changes nothing"
    report = json.loads((await run("verify", "--repair")).stdout)
    assert report["repaired"]
    [entry] = json.loads((await run("audit")).stdout)["changes"]
    change = entry["change"]
    assert (change["what"], change["object"], change["after"]) == ("verify.repair", "main", report["repaired"])


async def test_an_id_that_several_lanes_have_is_answered_with_the_lanes_to_choose_from(say: Say, api: Api) -> None:
    for lane in ("lane-1", "lane-2"):
        await api.client.put("null:", after="1h", id="dup", lane=lane)
    cancelled = await say("task", "cancel", "dup", "other", code=1)
    assert "dup: ambiguous\nother: unknown" in cancelled.output
    assert "lane 'lane-1', lane 'lane-2'" in cancelled.stderr
    assert "--lane" in cancelled.stderr
    found = await say("task", "get", "dup", code=1)
    assert isinstance(found.exception, Ambiguous)
    assert found.exception.lanes == ("lane-1", "lane-2")
    assert "lane-2" in (await say("task", "get", "dup", "--lane", "lane-2")).output
    assert "dup: cancelled" in (await say("task", "cancel", "dup", "--lane", "lane-1")).output
    assert "dup: cancelled" in (await say("task", "cancel", "dup")).output
