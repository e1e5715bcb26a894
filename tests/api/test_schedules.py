"""Schedules, lanes, queues and pauses over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

import pytest

from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.model.delivery import Delivery, Outcome, Retry
from mainspring.model.lane import Scope
from mainspring.model.task import Task
from mainspring.model.workers import WorkerInfo
from mainspring.sinks.log import NullSink
from mainspring.store import queue_state
from mainspring.store.lanes import read_pause
from mainspring.store.members import worker_beat
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Answer, Api, serving_api
from tests.support.workers import until_async


class FailingSink:
    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [Retry("try later", after_ms=3_600_000)] * len(batch)

    async def aclose(self) -> None:
        return


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    config = Config(redis_url=server.url, port=0, partitions=4)
    async with serving_api(config, {"null": NullSink(), "log": FailingSink()}) as made:
        yield made
        await balance(made.client.store)
    server.call("FLUSHALL")


NIGHTLY: dict[str, Any] = {"name": "nightly", "cron": "0 2 * * *", "target": "null:", "payload": {"job": "backup"}}


async def add(api: Api, **fields: Any) -> Answer:
    return await api.post("/v1/schedules", NIGHTLY | fields)


async def whats(api: Api) -> list[str]:
    changes = (await api.get("/v1/audit?limit=100")).json["changes"]
    return [one["change"]["what"] for one in reversed(changes)]


def bytes_sent_by(server: Server) -> int:
    [line] = [one for one in server.call("INFO", "stats").splitlines() if b"total_net_output_bytes" in one]
    return int(line.partition(b":")[2])


# -- schedules -------------------------------------------------------------------------------------------------


async def test_a_schedule_is_added_looked_at_listed_and_removed(api: Api) -> None:
    made = await add(api, timezone="Europe/Paris")
    assert made.status == 201, made
    assert (made.json["state"], made.json["generation"], len(made.json["next"])) == ("active", 1, 3)
    assert all("T02:00:00+0" in run for run in made.json["next"])
    assert (await api.get("/v1/schedules/nightly")).json == made.json
    listed = (await api.get("/v1/schedules")).json
    assert ([one["name"] for one in listed["schedules"]], listed["next"]) == (["nightly"], None)
    assert (await api.delete("/v1/schedules/nightly")).json == {"name": "nightly", "outcome": "removed"}
    assert (await api.get("/v1/schedules/nightly")).problem == "not-found"
    assert await whats(api) == ["schedule.add", "schedule.remove"]


async def test_schedules_that_name_no_zone_have_that_of_the_settings(server: Server) -> None:
    config = Config(redis_url=server.url, port=0, partitions=4, timezone="Asia/Tokyo")
    async with serving_api(config, {"null": NullSink()}) as api:
        assert (await add(api)).json["timezone"] == "Asia/Tokyo"
        assert (await add(api, name="own", timezone="UTC")).json["timezone"] == "UTC"
        put = await api.call("PUT", "/v1/schedules/put", {"cron": "0 2 * * *", "target": "null:"})
        assert [run[10:] for run in put.json["next"]] == ["T02:00:00+09:00"] * 3
        edited = await api.call("PATCH", "/v1/schedules/own", {"cron": "0 3 * * *"})
        assert edited.json["timezone"] == "UTC", "an edit leaves it as it is"
        told = (await api.post("/v1/schedules:preview", {"cron": "0 2 * * *", "count": 1})).json
        assert told["runs"][0].endswith("T02:00:00+09:00")
        far = (await api.post("/v1/schedules:preview", {"every": "3650d", "count": 1000})).json
        assert far["runs"][-1].startswith("64"), "as far as calendars go"
        local = {"cron": "0 2 * * *", "count": 1, "after": "2027-01-01 02:00", "end": "2027-01-02 02:00"}
        assert (await api.post("/v1/schedules:preview", local)).json["runs"] == ["2027-01-02T02:00:00+09:00"]
    server.call("FLUSHALL")


async def test_diffs_and_revisions_use_the_names_of_the_fields(api: Api) -> None:
    await add(api)
    diff = await api.post("/v1/schedules/nightly/diff", {"payload": {"job": True}, "timeout": "5s", "timezone": "UTC"})
    assert diff.json == {"payload": [{"job": "backup"}, {"job": True}], "timeout": [None, "5s"]}
    await api.post("/v1/schedules/nightly/pause", {"reason": "move"})
    paused, first = (await api.get("/v1/schedules/nightly/history")).json["revisions"]
    assert (paused["paused"]["reason"], "paused" in first, bool(first["tz_version"])) == ("move", False, True)


async def test_a_taken_name_goes_by_the_rule(api: Api) -> None:
    await add(api)
    assert (await add(api, cron="0 3 * * *")).problem == "conflict"
    kept = await add(api, cron="0 3 * * *", on_conflict="keep")
    assert (kept.status, kept.json["specs"]) == (200, ["0 2 * * *"])
    replaced = await add(api, cron="0 3 * * *", on_conflict="replace")
    assert (replaced.status, replaced.json["specs"], replaced.json["generation"]) == (200, ["0 3 * * *"], 2)
    await api.post("/v1/schedules/nightly/pause", {"reason": "move"})
    again = await add(api, cron="0 3 * * *", on_conflict="replace")
    assert (again.json["state"], again.json["generation"]) == ("paused", 3), "the same as before: nothing is written"
    put = await api.call("PUT", "/v1/schedules/nightly", {"cron": "0 4 * * *", "target": "null:"})
    assert (put.json["state"], put.json["paused"]["reason"], put.json["generation"]) == ("paused", "move", 4)
    written = await api.call("PUT", "/v1/schedules/nightly", {"every": "5m", "target": "null:"})
    assert (written.status, written.json["every"], "cron" in written.json) == (200, ["5m"], False)
    assert written.json["specs"] == ["@every 5m"]
    more = await api.call("PATCH", "/v1/schedules/nightly", {"cron": "0 3 * * *"})
    assert more.json["specs"] == ["0 3 * * *", "@every 5m"]
    assert (more.json["cron"], more.json["every"]) == (["0 3 * * *"], ["5m"])
    waits = await api.post("/v1/schedules", {"name": "waits", "after_end": "5m", "cron": "@daily", "target": "null:"})
    assert (waits.json["cron"], waits.json["after_end"]) == (["@daily"], "5m")
    less = await api.call("PATCH", "/v1/schedules/nightly", {"every": None})
    assert less.json["specs"] == ["0 3 * * *"]
    fresh = await api.call("PUT", "/v1/schedules/fresh", {"every": "5m", "target": "null:"})
    assert fresh.status == 201


async def test_many_schedules_are_added_and_found_at_once(api: Api) -> None:
    await add(api)
    many = [{**NIGHTLY, "name": name, "cron": "0 3 * * *"} for name in ("a", "nightly", "b")]
    assert (await api.post("/v1/schedules:batch", {"schedules": many})).problem == "conflict"
    kept = (await api.post("/v1/schedules:batch", {"schedules": many[:2], "on_conflict": "keep"})).json["schedules"]
    assert [(one["name"], one["outcome"], one["specs"]) for one in kept] == [
        ("a", "created", ["0 3 * * *"]),
        ("nightly", "kept", ["0 2 * * *"]),
    ]
    done = (await api.post("/v1/schedules:batch", {"schedules": many, "on_conflict": "replace"})).json["schedules"]
    assert [one["outcome"] for one in done] == ["kept", "replaced", "created"]
    assert await whats(api) == ["schedule.add", "schedule.add", "schedule.edit", "schedule.add"]
    found = (await api.post("/v1/schedules:find", {"names": ["b", "nobody", "nightly"]})).json["schedules"]
    assert found == [(await api.get(f"/v1/schedules/{name}")).json for name in ("b", "nightly")]
    assert (await api.post("/v1/schedules:find", {"names": []})).json == {"schedules": []}


async def test_schedules_that_are_slow_to_evaluate_take_a_request_no_longer_than_one_preview(api: Api) -> None:
    """Nearly all of their planned times are excluded, so each takes half a second; and one answer has a hundred."""
    slow = {
        "cron": "0-58 * * * *", "exclude": ["1-58 * * * *", "0 0-22 * * *", "0 23 1-30 * *", "0 23 31 1-11 *"],
        "target": "log:",
    }  # fmt: skip
    names = [f"slow-{n:02}" for n in range(100)]
    added = await api.post("/v1/schedules:batch", {"schedules": [{**slow, "name": one} for one in names]})
    assert added.status == 200
    found = (await api.post("/v1/schedules:find", {"names": names})).json["schedules"]
    assert [one["name"] for one in found] == names
    looked_at = ["worst_case" in one for one in found]
    assert looked_at == sorted(looked_at, reverse=True)
    assert 1 <= sum(looked_at) < 50


async def test_a_wrong_schedule_of_many_is_named_and_none_of_them_is_written(api: Api) -> None:
    await add(api)
    good = {"name": "good", "every": "1h", "target": "log:"}
    api.token = await api.key("operator", targets=("log:",))
    for wrong, status, words in (
        ({"name": "bad", "every": "1h", "target": "null:"}, 403, "schedule 'bad': this key may not use"),
        ({"name": "bad", "every": "1h", "target": "log:", "lane": "l"}, 403, "schedule 'bad': this key is bound"),
        ({"name": "bad", "cron": "0 25 * * *", "target": "log:"}, 400, "schedule 'bad': "),
        ({"name": "bad", "every": "1h", "target": "log:", "end": 1}, 400, "bad"),
        ({"name": "nightly", "every": "1h", "target": "log:"}, 409, "the name 'nightly' is taken"),
        (good, 400, "the name 'good' is there more than once"),
    ):
        refused = await api.post("/v1/schedules:batch", {"schedules": [good, wrong], "on_conflict": "replace"})
        assert (refused.status, words in refused.json["detail"]) == (status, True), refused.body
    assert (await api.post("/v1/schedules:find", {"names": ["good", "nightly"]})).json == {"schedules": []}
    many = [{**good, "name": f"n{n}"} for n in range(101)]
    assert "at most 100" in (await api.post("/v1/schedules:batch", {"schedules": many})).json["detail"]
    assert (
        "at most 100" in (await api.post("/v1/schedules:find", {"names": [str(n) for n in range(101)]})).json["detail"]
    )


async def test_an_add_repeated_with_its_idempotency_key_is_one(api: Api) -> None:
    first = await api.post("/v1/schedules", NIGHTLY, idempotency_key="k")
    again = await api.post("/v1/schedules", NIGHTLY, idempotency_key="k")
    assert (first.status, again.status, again.body) == (201, 201, first.body)


async def test_an_edit_changes_some_fields_and_a_stale_one_is_a_conflict(api: Api) -> None:
    await add(api)
    diff = await api.post("/v1/schedules/nightly/diff", {"cron": "0 4 * * *"})
    assert diff.status == 200
    assert "0 4 * * *" in diff.body.decode()
    edited = await api.call("PATCH", "/v1/schedules/nightly", {"cron": "0 4 * * *", "generation": 1})
    assert (edited.status, edited.json["specs"], edited.json["generation"]) == (200, ["0 4 * * *"], 2)
    assert edited.json["payload"] == {"job": "backup"}
    stale = await api.call("PATCH", "/v1/schedules/nightly", {"cron": "0 5 * * *", "generation": 1})
    assert (stale.status, stale.problem) == (409, "conflict")
    history = (await api.get("/v1/schedules/nightly/history")).json["revisions"]
    assert [one["generation"] for one in history] == [2, 1]
    back = await api.post("/v1/schedules/nightly/rollback", {"generation": 1})
    assert (back.json["specs"], back.json["generation"]) == (["0 2 * * *"], 3)
    change = (await api.get("/v1/audit")).json["changes"][1]["change"]
    assert (change["before"]["specs"], change["after"]["specs"]) == (["0 2 * * *"], ["0 4 * * *"])
    assert "payload" not in change["before"]


async def test_a_schedule_is_paused_and_resumed(api: Api) -> None:
    await add(api)
    paused = await api.post("/v1/schedules/nightly/pause", {"reason": "holiday", "for": "2d", "mode": "hold"})
    assert (paused.status, paused.json["state"], paused.json["paused"]["reason"]) == (200, "paused", "holiday")
    resumed = await api.post("/v1/schedules/nightly/resume")
    assert (resumed.status, resumed.json["state"]) == (200, "active")
    for wrong in ({"until": LATER, "for": "1h"}, {"until": 1}, {"mode": "maybe"}, {"for": "soon"}):
        assert (await api.post("/v1/schedules/nightly/pause", wrong)).problem == "invalid"


async def test_a_schedule_is_triggered_and_filled_in(api: Api) -> None:
    await add(api)
    ran = await api.post("/v1/schedules/nightly/trigger", {"after": "1h"})
    assert ran.status == 201
    assert (await api.client.get(ran.json["id"])).state == "pending"
    body = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-04T00:00:00Z", "rate": 1}
    planned = await api.post("/v1/schedules/nightly/backfill", body | {"dry_run": True})
    assert (planned.json["planned"], planned.json["created"]) == (3, 0)
    done = await api.post("/v1/schedules/nightly/backfill", body)
    again = await api.post("/v1/schedules/nightly/backfill", body)
    assert (done.json["created"], again.json["created"], again.json["kept"]) == (3, 0, 3)
    assert await whats(api) == ["schedule.add", "schedule.trigger", "schedule.backfill", "schedule.backfill"]


async def test_a_trigger_repeated_with_its_idempotency_key_runs_once(api: Api) -> None:
    await add(api)
    first = await api.post("/v1/schedules/nightly/trigger", {"after": "1h"}, idempotency_key="k")
    again = await api.post("/v1/schedules/nightly/trigger", {"after": "1h"}, idempotency_key="k")
    assert (first.status, again.status, again.body) == (201, 201, first.body)
    other = await api.post("/v1/schedules/nightly/trigger", {"after": "2h"}, idempotency_key="k")
    assert (other.status, other.problem) == (422, "idempotency")
    assert (await whats(api)).count("schedule.trigger") == 1


async def test_a_preview_stores_nothing(api: Api, server: Server) -> None:
    body = {"cron": "30 2 * * *", "timezone": "Europe/Paris", "count": 4, "from": "2026-03-27T12:00:00Z"}
    told = (await api.post("/v1/schedules:preview", body)).json
    old = {"after" if word == "from" else word: value for word, value in body.items()}
    assert (await api.post("/v1/schedules:preview", old)).json == told
    assert told["runs"][0] == "2026-03-28T02:30:00+01:00"
    assert told["runs"][1].startswith("2026-03-29T03:")  # 02:30 does not exist on that day
    assert any("clock" in warning or "02:30" in warning for warning in told["warnings"])
    assert (await api.get("/v1/schedules")).json["schedules"] == []


HOOK: dict[str, Any] = {"name": "hook", "every": "5s", "target": "https://example.com/"}


async def test_a_schedule_is_shown_with_its_worst_case_as_a_sum(api: Api) -> None:
    calm = {"every": "1h", "retry": "3 base=200ms jitter=none", "timeout": "1s"}
    made = await api.post("/v1/schedules", HOOK | calm)
    assert made.json["worst_case"] == {"ms": 3_600, "sum": "3 x 1 s + 200 ms + 400 ms = 3.6 s"}
    assert (await api.get("/v1/schedules/hook")).json["worst_case"] == made.json["worst_case"]
    edited = await api.call("PATCH", "/v1/schedules/hook", {"timeout": "2s"})
    assert (edited.json["worst_case"]["ms"], edited.json["findings"]) == (6_600, [])
    [listed] = (await api.get("/v1/schedules")).json["schedules"]
    assert "worst_case" not in listed


async def test_retries_of_a_webhook_without_a_timeout_count_with_the_usual_one(api: Api) -> None:
    refused = await api.post("/v1/schedules", HOOK | {"retry": "3 base=200ms"})
    assert (refused.status, refused.problem) == (400, "invalid")
    assert "3 x 15 s + 200 ms + 400 ms = 45.6 s" in refused.json["detail"]
    assert (await api.post("/v1/schedules", HOOK | {"retry": "3 base=200ms", "timeout": "1s"})).status == 201


async def test_retries_from_the_nodes_settings_are_reported_and_not_refused(server: Server) -> None:
    targets = {"shop": {"url": "https://example.com/", "timeout": "2s", "retry": "2 base=1s"}}
    config = Config(redis_url=server.url, port=0, partitions=4, targets=targets, retry="1")  # type: ignore[arg-type]
    async with serving_api(config, {"null": NullSink()}) as api:
        made = await api.post("/v1/schedules", HOOK | {"target": "target:shop", "every": "4s"})
        [finding] = made.json["findings"]
        assert (made.status, finding["code"]) == (201, "too-long")
        assert "2 x 2 s + 1 s = 5 s" in finding["message"]
        plain = await api.post("/v1/schedules", HOOK | {"name": "plain"})
        assert (plain.status, plain.json["worst_case"]["sum"]) == (201, "15 s = 15 s")
        beside = await api.call("PATCH", "/v1/schedules/plain", {"overlap": "allow"})
        assert beside.json["findings"] == []
    server.call("FLUSHALL")


async def test_a_preview_with_a_target_says_how_long_a_run_may_take(api: Api) -> None:
    body = {"every": "1m", "target": "https://example.com/", "count": 1}
    told = (await api.post("/v1/schedules:preview", body)).json
    assert told["worst_case"]["ms"] == 121_000
    assert told["worst_case"]["sum"] in told["warnings"][0]
    short = (await api.post("/v1/schedules:preview", body | {"retry": "2 base=1s", "timeout": "1s"})).json
    assert (short["worst_case"]["ms"], short["warnings"]) == (3_000, [])
    assert (await api.post("/v1/schedules:preview", body | {"overlap": "allow"})).json["warnings"] == []
    assert "worst_case" not in (await api.post("/v1/schedules:preview", {"every": "1m"})).json
    for wrong in ({"target": "smtp:x"}, {"overlap": "sometimes"}, {"retry": "often"}):
        assert (await api.post("/v1/schedules:preview", body | wrong)).problem == "invalid"


async def test_a_key_that_is_bound_to_targets_previews_for_these_and_for_none(api: Api) -> None:
    api.token = await api.key("operator", targets=("log:",))
    for target, status in (({}, 200), ({"target": "log:"}, 200), ({"target": "target:shop"}, 403)):
        assert (await api.post("/v1/schedules:preview", {"every": "1m", **target})).status == status


@pytest.mark.parametrize(
    "fields",
    [
        {"cron": "61 * * * *"},
        {"cron": []},
        {"cron": None},
        {"target": "smtp:x"},
        {"name": "a@b"},
        {"name": ""},
        {"timezone": "Mars/Base"},
        {"colour": "red"},
        {"start": "9999-12-31T23:59:59-23:59"},
        {"max_runs": -1},
        {"misfire": "perhaps"},
        {"retry": {"colour": 1}},
        {"timeout": "soon"},
        {"payload": "x" * 70_000},
    ],
)
async def test_a_wrong_schedule_is_refused_and_leaves_nothing(api: Api, fields: dict[str, Any]) -> None:
    answer = await add(api, **fields)
    assert (answer.status, answer.problem) == ((413, "too-large") if "payload" in fields else (400, "invalid"))
    assert (await api.get("/v1/schedules")).json["schedules"] == []


async def test_every_call_on_an_unknown_schedule_is_404(api: Api) -> None:
    whole = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-02T00:00:00Z"}
    for verb, body in (
        ("diff", {}),
        ("pause", {}),
        ("resume", {}),
        ("trigger", {}),
        ("backfill", whole),
        ("rollback", {}),
    ):
        answer = await api.post(f"/v1/schedules/nobody/{verb}", body)
        assert (answer.status, answer.problem) == (404, "not-found"), verb
    assert (await api.get("/v1/schedules/nobody/history")).problem == "not-found"
    assert (await api.call("PATCH", "/v1/schedules/nobody", {"note": "x"})).problem == "not-found"
    assert (await api.delete("/v1/schedules/nobody")).problem == "not-found"


async def test_a_bound_key_sees_and_writes_only_schedules_of_its_targets(api: Api) -> None:
    await add(api)
    await add(api, name="mine", target="log:")
    api.token = await api.key("operator", targets=("log:",))
    assert [one["name"] for one in (await api.get("/v1/schedules")).json["schedules"]] == ["mine"]
    assert (await api.get("/v1/schedules/nightly")).status == 404
    assert (await api.delete("/v1/schedules/nightly")).status == 404
    assert (await add(api, name="new")).status == 403
    assert (await add(api, target="log:", on_conflict="replace")).status == 409
    assert (await api.call("PATCH", "/v1/schedules/mine", {"target": "null:"})).status == 403


async def test_a_bound_key_neither_sees_nor_brings_back_a_revision_that_went_elsewhere(api: Api) -> None:
    await add(api, name="mine", payload="theirs")
    await api.call("PATCH", "/v1/schedules/mine", {"target": "log:", "payload": "ours"})
    api.token = await api.key("operator", targets=("log:",))
    assert [one["payload"] for one in (await api.get("/v1/schedules/mine/history")).json["revisions"]] == ["ours"]
    for body in ({}, {"generation": 1}):
        assert (await api.post("/v1/schedules/mine/rollback", body)).status == 403
    assert (await api.get("/v1/schedules/mine")).json["generation"] == 2


async def test_a_bound_key_brings_back_no_such_revision_over_a_pause_either(api: Api) -> None:
    await add(api, name="mine")
    await api.call("PATCH", "/v1/schedules/mine", {"target": "log:"})
    api.token = await api.key("operator", targets=("log:",))
    await api.post("/v1/schedules/mine/pause", {})
    await api.post("/v1/schedules/mine/resume")
    refused = await api.post("/v1/schedules/mine/rollback", {})  # the last that was another is the first one
    assert (refused.status, refused.problem) == (403, "forbidden")
    assert (await api.get("/v1/schedules/mine")).json["target"] == "log:"


async def test_a_removed_schedule_comes_back_by_a_rollback(api: Api) -> None:
    await add(api)
    await api.delete("/v1/schedules/nightly")
    back = await api.post("/v1/schedules/nightly/rollback")
    assert (back.status, back.json["payload"], back.json["generation"]) == (200, {"job": "backup"}, 2)
    assert (await whats(api))[-2:] == ["schedule.remove", "schedule.rollback"]


# -- pauses, lanes, queues -------------------------------------------------------------------------------------


async def test_a_target_is_paused_listed_and_resumed(api: Api) -> None:
    made = await api.post("/v1/pauses", {"target": "null:*", "reason": "deploy", "for": "1h"})
    assert made.status == 201, made
    assert (made.json["scope"], made.json["mode"], made.json["reason"]) == ("target null:*", "hold", "deploy")
    assert made.json["by"] == made.json["who"] == "open"
    assert (await api.get("/v1/pauses")).json["pauses"] == [made.json]
    assert (await api.delete("/v1/pauses?target=null:*")).json == {"scope": "target null:*", "outcome": "resumed"}
    assert (await api.delete("/v1/pauses?target=null:*")).problem == "not-found"
    assert await whats(api) == ["pause.add", "pause.remove"]
    everything = await api.post("/v1/pauses", {"all": True})
    assert everything.json["scope"] == "all"
    assert (await api.delete("/v1/pauses?all=true")).status == 200


async def test_the_trail_has_the_pause_that_a_new_one_replaced_or_that_was_ended(api: Api) -> None:
    for body in ({"target": "null:*"}, {"lane": "a", "reason": "one"}, {"lane": "a", "reason": "two"}):
        assert (await api.post("/v1/pauses", body)).status == 201
    await api.delete("/v1/pauses?lane=a")
    changes = [one["change"] for one in (await api.get("/v1/audit?limit=10")).json["changes"]]
    before = [(one["what"], one["object"], (one.get("before") or {}).get("reason")) for one in reversed(changes)]
    assert before == [
        ("pause.add", "target null:*", None),
        ("pause.add", "lane a", None),
        ("pause.add", "lane a", "one"),
        ("pause.remove", "lane a", "two"),
    ]


async def test_one_pause_is_read_without_the_others(api: Api, server: Server) -> None:
    async with Client(server.url, namespace="unwatched", partitions=4) as client:
        for n in range(50):
            await client.pause(lane=f"l{n}", reason="x" * 500)
        before = bytes_sent_by(server)
        found = await read_pause(client.store, Scope("lane", "l7"))
        assert found is not None
        assert bytes_sent_by(server) - before < 10_000, "all of them are more, the heartbeats of a node far less"
        assert await read_pause(client.store, Scope("lane", "l50")) is None


@pytest.mark.parametrize(
    "body",
    [{}, {"target": "a", "lane": "b"}, {"all": True, "lane": "b"}, {"target": "nothing"}, {"lane": "a", "until": 1}],
)
async def test_a_wrong_pause_is_refused(api: Api, body: dict[str, Any]) -> None:
    assert (await api.post("/v1/pauses", body)).problem == "invalid"
    assert (await api.get("/v1/pauses")).json == {"pauses": []}


async def standing(api: Api, count: int = 1) -> list[dict[str, Any]]:
    """Return the lanes once this many are stalled."""
    for _ in range(1200):
        lanes: list[dict[str, Any]] = (await api.get("/v1/lanes")).json["lanes"]
        if len(lanes) == count:
            return lanes
        await asyncio.sleep(0.05)
    raise AssertionError("the lanes do not stand still")


async def test_a_preview_of_times_that_are_hard_to_find_ends_and_blocks_no_other_call(api: Api) -> None:
    """Once an hour, behind a hundred steps over what is left out, of thirty lines each."""
    lines = [f"{n},{n + 1} * * * * *" for n in range(0, 60, 2)]
    hard = {"cron": lines, "exclude": ["* 1-59 * * * *", "1-59 0 * * * *"], "count": 1000}

    async def preview() -> tuple[Any, int]:
        looking, answered = asyncio.create_task(api.post("/v1/schedules:preview", hard)), 0
        while not looking.done():
            assert (await api.get("/livez")).status == 200
            answered += 1
        return (await looking).json, answered

    shown, answered = await preview()
    for _ in range(4):  # one that falls into a standstill of the machine shows nothing
        if shown["runs"] and answered > 5:
            break
        shown, answered = await preview()
    assert 0 < len(shown["runs"]) < 1000
    assert "slow to find" in shown["warnings"][-1]
    assert answered > 5
    many = await api.post("/v1/schedules:preview", {"cron": [f"{n} * * * *" for n in range(33)]})
    assert many.problem == "invalid"


async def test_a_diff_to_times_that_are_hard_to_find_blocks_no_other_call(api: Api) -> None:
    """Every line is left out whole, which takes a century of days to find out."""
    await api.client.schedules.add("hard", cron="0 0 * * *", target="null:")
    everything = {"exclude": ["0-29 * * * *", "30-59 * * * *"]}
    looking = asyncio.create_task(api.post("/v1/schedules/hard/diff", everything))
    answered = 0
    while not looking.done():
        assert (await api.get("/livez")).status == 200
        answered += 1
    assert "its exclusions leave none of its runs" in (await looking).json["detail"]
    assert answered > 5
    fine = (await api.post("/v1/schedules/hard/diff", {"exclude": ["* * 24 12 *"]})).json
    assert fine == {"exclude": [[], ["* * 24 12 *"]]}


async def test_lanes_come_by_pages_in_the_order_of_the_list(api: Api) -> None:
    for n in range(5):
        await api.client.put("log:", "head", id=f"head-{n}", lane=f"a.b/{n} ä")
    names = [one["lane"] for one in await standing(api, 5)]
    paged: list[str] = []
    page: dict[str, Any] = (await api.get("/v1/lanes?limit=2")).json
    while page["next"] is not None:
        assert len(page["lanes"]) == 2
        paged += [one["lane"] for one in page["lanes"]]
        page = (await api.get(f"/v1/lanes?limit=2&cursor={quote(page['next'])}")).json
    assert [*paged, page["lanes"][0]["lane"]] == names
    for wrong in ("limit=0", "limit=1001", "cursor=x", "cursor=%C2%B2.a"):
        assert (await api.get(f"/v1/lanes?{wrong}")).problem == "invalid"


async def test_a_page_of_lanes_reads_the_tasks_of_its_own_lanes_only(api: Api, server: Server) -> None:
    """Fifty thousand stalled lanes once cost a node 140 MB for each page of one lane."""
    await api.client.put_many([Task("log:", "x" * 60_000, id=f"head-{n}", lane=f"shop/{n}") for n in range(40)])

    async def all_failed() -> bool:
        return len(await api.client.lanes()) == 40

    await until_async(all_failed)

    for path in ("/v1/lanes?limit=1", "/v1/lanes/shop%2F7"):
        before = bytes_sent_by(server)
        assert (await api.get(path)).status == 200
        assert bytes_sent_by(server) - before < 600_000, (
            "40 tasks of 60 kB are far more, 32 partitions and heartbeats far less"
        )


async def test_a_lane_behind_a_failed_head_is_shown_and_continues_without_it(api: Api) -> None:
    await api.client.put("log:", "head", id="head", lane="shop/1")
    lanes = await standing(api)
    assert (lanes[0]["lane"], lanes[0]["head_id"], lanes[0]["error"]) == ("shop/1", "head", "try later")
    assert (await api.get("/v1/lanes/shop%2F1")).json["state"] == "retrying"
    assert (await api.post("/v1/lanes/shop%2F1/skip-head", {"reason": "not needed"})).json["answer"] == "ok"
    again = await api.post("/v1/lanes/shop%2F1/skip-head")
    assert (again.status, again.problem) == (409, "conflict")
    assert "lane.skip-head" in await whats(api)


async def test_a_lane_that_flows_has_no_head_to_retry(api: Api) -> None:
    for verb in ("retry-head", "resume"):
        answer = await api.post(f"/v1/lanes/free/{verb}")
        assert (answer.status, answer.problem) == (409, "conflict")


async def test_queues_show_how_long_they_are(api: Api) -> None:
    await api.client.put("queue:mail/send", 1)
    for _ in range(1200):
        queues = (await api.get("/v1/queues")).json["queues"]
        if queues:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the task does not reach its queue")
    assert (queues[0]["name"], queues[0]["ready"], queues[0]["running"]) == ("mail", 1, 0)
    for state, count in (("queued", 1), ("running", 0)):
        listed = (await api.get(f"/v1/tasks?state={state}")).json
        assert (len(listed["tasks"]), listed["next"]) == (count, None)
    await api.post("/v1/pauses", {"queue": "mail"})
    assert (await api.get("/v1/queues/mail")).json["paused"] is True
    assert (await api.get("/v1/queues/nobody")).problem == "not-found"


async def test_a_page_of_schedules_ends_when_their_payloads_are_large(api: Api) -> None:
    for n in range(100):
        await api.client.schedules.add(f"large-{n}", every="1h", target="null:", payload="x" * 60_000)
    names, cursor = [], ""
    while True:
        page = await api.get(f"/v1/schedules?limit=1000{cursor}")
        assert len(page.body) < 7 << 20, "4 MiB of payloads, and those that were read together with the last"
        names += [one["name"] for one in page.json["schedules"]]
        if page.json["next"] is None:
            break
        cursor = f"&cursor={page.json['next']}"
    assert sorted(names) == sorted(f"large-{n}" for n in range(100))
    assert cursor, "more than one page"


async def test_queues_are_paged_and_few_of_their_names_are_compared(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of names takes a sixth of a millisecond: thousands of queues would stop the node."""
    monkeypatch.setattr(queue_state, "_AT_ONCE", 7)  # portions, as of many more queues
    compared: list[str] = []

    def counting(name: str, known: Collection[str], n: int = 3) -> list[str]:
        compared.extend(known)
        return get_close_matches(name, known, n)

    await api.client.put_many([Task(f"queue:maik{n:02}/send") for n in range(40)])
    await until_async(lambda: _has_queues(api, 40))
    about = WorkerInfo(id="w", queues={f"mail{n:02}": 1 for n in range(50)}, lease_ms=60_000)
    await worker_beat(api.client.store, "w", about)
    monkeypatch.setattr("difflib.get_close_matches", counting)
    page: dict[str, Any] = {"next": ""}
    queues: list[dict[str, Any]] = []
    for size in (40, 40, 10):
        compared.clear()
        page = (await api.get(f"/v1/queues?limit=40&cursor={page['next']}")).json
        assert (len(page["queues"]), len(compared) <= 100) == (size, True)
        queues += page["queues"]
    assert page["next"] is None
    assert [one["name"] for one in queues] == sorted(
        [f"mai{k}{n:02}" for k, most in (("k", 40), ("l", 50)) for n in range(most)]
    )
    assert [one["ready"] for one in queues] == [1] * 40 + [0] * 50
    assert [one["name"] for one in queues if one["nearest"]] == [f"maik{n:02}" for n in range(2)]
    assert (await api.get("/v1/queues/maik39")).json["nearest"] == "mail39"
    assert len((await api.get("/v1/queues")).json["queues"]) == len(await api.client.queues()) == 90
    compared.clear()
    [found] = [one for one in (await api.get("/v1/doctor")).json["checks"] if one["name"] == "workers"]
    assert "and 35 more" in found["message"]
    assert len(compared) <= 250, "for the five that it names"
    assert (await api.get("/v1/queues?limit=0")).problem == "invalid"


async def _has_queues(api: Api, count: int) -> bool:
    return len(await api.client.queues()) == count


async def test_pages_of_queued_tasks_are_bounded_by_number_and_bytes(api: Api) -> None:
    """The server returns a hash of up to 512 tasks whole, whatever number is asked for."""
    names = [f"big-{n}" for n in range(300)]
    await api.client.put_many([Task("queue:big/run", "x" * 60_000, id=name) for name in names])
    await until_async(lambda: _has_ready(api, len(names)))
    for limit in (1000, 7):
        shown: list[str] = []
        page: dict[str, Any] = {"next": ""}
        while page["next"] is not None:
            cursor = f"&cursor={page['next']}" if page["next"] else ""
            answer = await api.get(f"/v1/tasks?state=queued&limit={limit}{cursor}")
            page = answer.json
            assert len(page["tasks"]) <= limit
            assert len(answer.body) < 9 << 20, "4 MiB, and what was read together with the last task"
            shown += [one["id"] for one in page["tasks"]]
        assert sorted(shown) == sorted(names)
    for wrong in ("q0.0.", "q0.0.a", "q0.0.xx", "q0.0.ab.cd"):
        assert (await api.get(f"/v1/tasks?state=queued&cursor={wrong}")).problem == "invalid", wrong


async def _has_ready(api: Api, count: int) -> bool:
    return sum(one.ready for one in await api.client.queues()) == count
