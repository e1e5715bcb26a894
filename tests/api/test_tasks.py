"""`/v1/tasks` over real HTTP: what each route answers, what it changes, and what it leaves alone."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.model.errors import Unavailable
from mainspring.model.flow import Rate
from mainspring.model.task import Task
from mainspring.store import records
from mainspring.store.access import list_keys
from mainspring.store.keys import partition_of
from mainspring.store.records import KeptAnswer
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server
from tests.support.api_calls import LATER, Answer, Api, serving_api
from tests.support.job_queues import TARGET, HandWorker


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as made:
        yield made
        await balance(made.client.store)
    server.call("FLUSHALL")


LATER_TEXT = "2030-03-17T17:46:40.000Z"


async def put(api: Api, **fields: Any) -> Answer:
    return await api.post("/v1/tasks", {"target": "null:", "at": LATER} | fields)


# -- create ----------------------------------------------------------------------------------------------------


async def test_a_new_task_is_201_with_its_place_and_can_be_looked_at_there(api: Api) -> None:
    made = await put(
        api, payload={"order": 42, "sum": 1.50}, lane="shop 1", expires="1h", retry="3 base=1s", timeout="5s"
    )
    assert made.status == 201
    assert made.json["outcome"] == "created"
    assert made.json["due_ms"] == LATER
    found = await api.get(made.headers["location"])
    assert found.status == 200
    assert found.json["id"] == made.json["id"]
    assert found.json["state"] == "pending"
    assert found.json["payload"] == {"order": 42, "sum": 1.5}
    assert (found.json["lane"], found.json["expires_ms"]) == ("shop 1", LATER + 3_600_000)
    assert (found.json["retry"], found.json["timeout_ms"]) == ("3", 5_000)


async def test_instants_are_answered_as_text_too_and_payloads_are_left_alone(api: Api) -> None:
    payload = {"due_ms": 5, "tasks": [{"since_ms": LATER}]}
    made = await put(api, id="a", payload=payload, expires="1h")
    assert made.json["due"] == LATER_TEXT
    found = (await api.get("/v1/tasks/a")).json
    assert (found["due_ms"], found["due"], found["payload"]) == (LATER, LATER_TEXT, payload)
    assert (found["expires"], found["since_ms"], found["since"]) == ("2030-03-17T18:46:40.000Z", None, None)
    assert (await api.get("/v1/tasks")).json["tasks"] == [found]
    assert (await api.get("/v1/tasks/a/explain")).json["due"] == LATER_TEXT
    moved = await api.post("/v1/tasks/a/reschedule", {"at": LATER + 1})
    assert moved.json["due"] == "2030-03-17T17:46:40.001Z"
    paused = (await api.post("/v1/pauses", {"queue": "mail", "until": LATER})).json
    assert paused["until"] == LATER_TEXT
    assert (await api.get("/v1/pauses")).json["pauses"] == [paused]


async def test_hot_answers_have_the_milliseconds_alone(api: Api) -> None:
    tick = await api.post("/ticks", {"item": "a", "at": LATER})
    assert (tick.json["due_ms"], "due" in tick.json) == (LATER, False)
    line = {"target": "null:", "at": LATER}
    batch = await api.call("POST", "/v1/tasks:batch", msgspec.json.encode(line), content_type="application/x-ndjson")
    assert (batch.lines[0]["due_ms"], "due" in batch.lines[0]) == (LATER, False)


@pytest.mark.parametrize(
    ("fields", "retry"), [({"retries": 2}, "3"), ({"retries": 0, "retry": "9 base=2s"}, "1 base=2s")]
)
async def test_retries_count_alike_in_a_single_put_and_in_a_batch(api: Api, fields: dict[str, Any], retry: str) -> None:
    task = {"target": "null:", "at": LATER, "id": "a" * 40} | fields  # an id that the fast path of a batch passes on
    assert (await put(api, id="one", **fields)).status == 201
    assert (await api.batch([task, task | {"id": "b"}])).lines[-1]["summary"]["created"] == 2
    for name in ("one", "a" * 40, "b"):
        assert (await api.get(f"/v1/tasks/{name}")).json["retry"] == retry
    wrong = await put(api, retries=-1)
    assert (wrong.status, wrong.problem) == (400, "invalid")
    assert "retries is -1" in wrong.json["detail"]


async def test_a_task_without_a_time_is_due_now_and_one_with_a_delay_later(api: Api) -> None:
    now_ms = api.client.store.clock.now_ms()
    now = await api.post("/v1/tasks", {"target": "null:"})
    later = await api.post("/v1/tasks", {"target": "null:", "after": "30m"})
    assert now_ms <= now.json["due_ms"] <= now_ms + 60_000
    assert now_ms + 1_800_000 <= later.json["due_ms"] <= now_ms + 1_860_000


async def test_an_id_may_hold_anything_and_is_found_by_its_path(api: Api) -> None:
    task_id = "order/42 ü%2F?&#{x}"
    made = await put(api, id=task_id)
    assert made.json["id"] == task_id
    assert "/" not in made.headers["location"].removeprefix("/v1/tasks/")
    assert (await api.get(made.headers["location"])).json["id"] == task_id


@pytest.mark.parametrize(
    ("on_conflict", "status", "outcome", "due_ms"),
    [
        ("keep", 200, "kept", LATER),
        ("replace", 200, "replaced", LATER + 1000),
        ("earliest", 200, "kept", LATER),
        ("reject", 409, None, LATER),
    ],
)
async def test_a_second_task_with_an_id_goes_by_the_rule(
    api: Api, on_conflict: str, status: int, outcome: str | None, due_ms: int
) -> None:
    await put(api, id="a")
    again = await put(api, id="a", at=LATER + 1000, on_conflict=on_conflict)
    assert again.status == status
    if outcome is None:
        assert again.problem == "conflict"
    else:
        assert (again.json["outcome"], again.json["due_ms"]) == (outcome, due_ms)
    assert (await api.client.get("a")).due_ms == due_ms


async def test_rejects_in_a_crowd_refuse_all_but_one_of_an_id(api: Api) -> None:
    """They travel in one write; a refusal must not be taken for one's own earlier put."""
    answers = await asyncio.gather(*(put(api, id=f"n{n % 5}", on_conflict="reject") for n in range(40)))
    statuses = [answer.status for answer in answers]
    assert (statuses.count(201), statuses.count(409)) == (5, 35)


async def test_a_durability_that_cannot_be_confirmed_says_that_the_task_is_stored(api: Api) -> None:
    answer = await put(api, id="a", durability="disk")
    assert (answer.status, answer.problem) == (503, "not-confirmed")
    assert (await api.client.get("a")).state == "pending"
    assert (await put(api, id="a", durability="disk", on_conflict="reject")).problem == "conflict"
    moved = await put(api, id="a", durability="disk", at=LATER + 1, on_conflict="replace")
    assert (moved.problem, moved.json["outcome"], moved.json["due_ms"]) == ("not-confirmed", "replaced", LATER + 1)


async def test_each_caller_learns_which_of_its_tasks_are_unconfirmed(api: Api) -> None:
    """They travel in one write. Without its id, a task that has none of its own could not be found."""
    answers = await asyncio.gather(*(put(api, payload={"n": n}, durability="disk") for n in range(20)))
    assert {answer.problem for answer in answers} == {"not-confirmed"}
    assert [(await api.client.get(answer.json["id"])).payload for answer in answers] == [{"n": n} for n in range(20)]
    assert {answer.json["due_ms"] for answer in answers} == {LATER}


WRONG: list[tuple[str, Any, str]] = [
    ("no target", {"target": None}, "$.target"),
    ("an unknown scheme", {"target": "smtp:a"}, "no known scheme"),
    ("an unknown field", {"when": 1}, "unknown field `when`; there are target, payload, at, after, id,"),
    ("both times", {"after": "1s"}, "both at and after"),
    ("a delay that is none", {"at": None, "after": "soon"}, "not a delay"),
    ("an endless delay", {"at": None, "after": "9" * 400 + "w"}, ""),
    ("a naive time", {"at": "2030-01-01T09:00:00"}, "naive"),
    ("the end of time", {"at": "9999-12-31T23:59:59-23:59"}, ""),
    ("an id of a generated form", {"id": "0" * 32 + "~0.rs.0.0.0"}, "generated"),
    ("a long id", {"id": "x" * 257}, "at most 256"),
    ("an empty lane", {"lane": ""}, "lane is empty"),
    ("expires before it is due", {"expires": LATER - 1}, "expires lies before"),
    ("expires after all time", {"expires": "9999-12-31T23:59:59-23:59"}, ""),
    ("a rule that is none", {"on_conflict": "maybe"}, "on_conflict"),
    ("a level that is none", {"durability": "stone"}, "durability"),
    ("a timeout that is none", {"timeout": "long"}, "timeout"),
    ("no time at all", {"timeout": "0s"}, "leave it out"),
    ("a retry that is none", {"retry": "often"}, "retry"),
    ("a web target without a host", {"target": "http://"}, ""),
    ("a webhook that may take too long", {"target": "https://example.com/", "timeout": "601s"}, "max_timeout"),
]


@pytest.mark.parametrize(("fields", "detail"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
async def test_a_wrong_task_is_refused_and_leaves_nothing(api: Api, fields: dict[str, Any], detail: str) -> None:
    answer = await put(api, **fields)
    assert (answer.status, answer.problem) == (400, "invalid")
    assert detail in answer.json["detail"]
    assert (await api.client.count()).pending == 0


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        (b"", 400, "invalid"),
        (b"{", 400, "malformed"),
        (b"\xff", 400, "malformed"),
        (b"[1]", 400, "invalid"),
        (b'{"target": "null:", "payload": %b%b}' % (b"[" * 65, b"]" * 65), 400, "invalid"),
        (b'{"target": "null:", "payload": %b' % (b'{"a":' * 30_000), 413, "too-large"),
        (b'{"target": "null:", "payload": %b' % (b"[" * 100_000), 400, "invalid"),
        (b" " * 200_000, 413, "too-large"),
        (b'{"target": "null:", "payload": "\xff"}', 400, "invalid"),
        (b'{"target": "null:", "payload": 1e999}', 400, "invalid"),
        (b'{"target": "null:", "payload": [-%b]}' % (b"9" * 5000), 400, "invalid"),
    ],
)
async def test_a_body_that_is_no_task_is_refused(api: Api, body: bytes, status: int, slug: str) -> None:
    answer = await api.call("POST", "/v1/tasks", body, content_type="application/json")
    assert (answer.status, answer.problem) == (status, slug)
    assert (await api.client.count()).pending == 0


async def test_a_payload_nested_as_deep_as_allowed_is_taken(api: Api) -> None:
    deep = b'{"target": "null:", "at": %d, "payload": %b"]["%b}' % (LATER, b"[" * 63, b"]" * 63)
    assert (await api.call("POST", "/v1/tasks", deep)).status == 201


async def test_a_wrong_task_in_a_crowd_fails_alone(api: Api) -> None:
    answers = await asyncio.gather(*(put(api, id=f"n{n}", **({} if n % 4 else {"expires": 1})) for n in range(40)))
    assert [answer.status for answer in answers] == [201 if n % 4 else 400 for n in range(40)]
    assert (await api.client.count()).pending == 30


# -- idempotency -----------------------------------------------------------------------------------------------


async def test_a_request_repeated_with_its_key_is_one_task_and_one_answer(api: Api) -> None:
    body = {"target": "null:", "after": "1h", "payload": 1}
    first = await api.post("/v1/tasks", body, idempotency_key="pay-1")
    again = await api.post("/v1/tasks", body, idempotency_key="pay-1")
    assert (first.status, again.status) == (201, 201)
    assert first.body == again.body
    assert first.headers["location"] == again.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (await api.client.count()).pending == 1


async def test_a_key_that_was_used_for_something_else_is_422(api: Api) -> None:
    await put(api, id="a")
    first = await api.post("/v1/tasks", {"target": "null:", "at": LATER}, idempotency_key="k")
    other = await api.post("/v1/tasks", {"target": "null:", "at": LATER + 1}, idempotency_key="k")
    assert first.status == 201
    assert (other.status, other.problem) == (422, "idempotency")
    assert (await api.client.count()).pending == 2


@pytest.mark.parametrize("on_conflict", ["keep", "reject", "replace"])
async def test_the_same_request_many_times_at_once_is_one_task(api: Api, on_conflict: str) -> None:
    body = {"target": "null:", "after": "1h", "on_conflict": on_conflict}
    answers = await asyncio.gather(*(api.post("/v1/tasks", body, idempotency_key="k") for _ in range(20)))
    assert {answer.status for answer in answers} == {201}
    assert len({answer.json["id"] for answer in answers}) == 1
    assert (await api.client.count()).pending == 1


async def test_a_key_of_a_refused_request_is_free_again(api: Api) -> None:
    wrong = await api.post("/v1/tasks", {"target": "null:", "after": "soon"}, idempotency_key="k")
    right = await api.post("/v1/tasks", {"target": "null:", "after": "1h"}, idempotency_key="k")
    assert (wrong.status, right.status) == (400, 201)


@pytest.mark.parametrize("key", ["", "x" * 256, "ü"])
async def test_an_invalid_idempotency_key_is_refused(api: Api, key: str) -> None:
    answer = await api.post("/v1/tasks", {"target": "null:"}, idempotency_key=key.encode().decode("latin-1"))
    assert (answer.status, answer.problem) == (400, "invalid")


# -- look ------------------------------------------------------------------------------------------------------


async def test_an_unknown_id_is_not_found_by_any_route(api: Api) -> None:
    for method, path in (
        ("GET", "/v1/tasks/nobody"),
        ("DELETE", "/v1/tasks/nobody"),
        ("GET", "/v1/tasks/nobody/explain"),
        ("GET", "/v1/tasks/nobody/result"),
        ("POST", "/v1/tasks/nobody/reschedule"),
        ("GET", "/v1/tasks/" + "0" * 32),
        ("GET", "/v1/dead/nobody"),
        ("POST", "/v1/dead/nobody/replay"),
        ("DELETE", "/v1/dead/nobody"),
    ):
        answer = await api.call(method, path, {"after": "1s"} if method == "POST" else None)
        assert (answer.status, answer.problem) == (404, "not-found"), path


async def test_an_id_from_another_namespace_is_invalid_or_unknown(api: Api) -> None:
    answer = await api.get("/v1/tasks/" + "0" * 32 + "~zz.rs.1.1.1")
    assert answer.status in (400, 404)


async def test_bytes_are_shown_in_base64(api: Api) -> None:
    await api.client.put("null:", b"\xff\x00", at=LATER, id="raw")
    told = (await api.get("/v1/tasks/raw")).json
    assert base64.b64decode(told["payload_base64"]) == b"\xff\x00"
    assert "payload" not in told


async def test_tasks_are_listed_in_due_order_page_by_page(api: Api) -> None:
    for n in range(25):
        await api.client.put("null:", n, at=LATER + n * 700)
    seen, cursor = [], ""
    while True:
        page = (await api.get(f"/v1/tasks?limit=10{cursor}")).json
        seen += [task["payload"] for task in page["tasks"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == list(range(25))


async def test_a_list_can_be_narrowed_by_time_target_and_lane(api: Api) -> None:
    for n in range(12):
        target = "log:" if n % 2 else "null:"
        await api.client.put(target, n, at=LATER + n * 1000, lane="even" if n % 4 == 0 else None)

    async def listed(query: str) -> list[int]:
        answer = await api.get(f"/v1/tasks?{query}")
        assert answer.status == 200, answer
        return [task["payload"] for task in answer.json["tasks"]]

    assert await listed("target=log:") == [1, 3, 5, 7, 9, 11]
    assert await listed("target=n*") == [0, 2, 4, 6, 8, 10]
    assert await listed("lane=even") == [0, 4, 8]
    assert await listed(f"due_after={LATER + 3000}&due_before={LATER + 6000}") == [3, 4, 5]
    assert await listed(f"due_after={LATER + 3000}&target=log:&limit=2") == [3, 5]
    assert await listed("state=fired") == []
    assert await listed("due_after=2030-03-17T17:46:48Z&lane=even") == [8]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=1001", "limit=ten", "cursor=x", "cursor=1.2.3", "cursor=9999999999999999999999.0.0.0",
        "due_after=yesterday", "due_after=-1", "due_after=1893488400",
        "due_after=99999999999999999", "state=done", "colour=red",
        "limit=1&limit=2", "lane=%ff", "due_before=1970-01-01T00:00:00Z",
    ],
)  # fmt: skip
async def test_wrong_parameters_of_a_list_are_refused(api: Api, query: str) -> None:
    answer = await api.get(f"/v1/tasks?{query}")
    assert answer.status == 400
    assert answer.problem in ("invalid", "malformed")


async def test_explain_says_why_a_task_has_not_run(api: Api) -> None:
    await put(api, id="a")
    told = (await api.get("/v1/tasks/a/explain")).json
    assert (told["code"], told["state"], told["due_ms"]) == ("not-due", "pending", LATER)


# -- change ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "query"), [(None, ""), (None, "?lane="), ("l", ""), ("l", "?lane=l")])
async def test_a_cancelled_task_is_cancelled_and_a_second_cancel_says_the_same(
    api: Api, lane: str | None, query: str
) -> None:
    await put(api, id="a", lane=lane)
    bound = await api.key("operator", targets=("null:",))
    for _ in range(3):
        cancelled = await api.delete(f"/v1/tasks/a{query}")
        assert (cancelled.status, cancelled.json) == (200, {"id": "a", "outcome": "cancelled"})
    assert (await api.client.get("a")).state == "cancelled"
    other = await api.delete(f"/v1/tasks/a{query}", authorization=f"Bearer {bound}")
    assert other.status == 404, "nobody knows any more whether the key may see it"
    assert (await api.delete(f"/v1/tasks/never{query}")).status == 404


async def test_a_task_without_an_id_is_cancelled_by_its_handle(api: Api) -> None:
    made = await put(api)
    assert (await api.delete(made.headers["location"])).status == 200
    assert (await api.client.count()).pending == 0


async def test_a_task_moves_to_another_time(api: Api) -> None:
    await put(api, id="a", lane="l")
    moved = await api.post("/v1/tasks/a/reschedule?lane=l", {"at": LATER + 5000})
    assert (moved.status, moved.json["due_ms"]) == (200, LATER + 5000)
    assert (await api.client.get("a", lane="l")).due_ms == LATER + 5000
    for wrong in ({}, {"at": LATER, "after": "1s"}, {"at": "soon"}, {"at": "9999-12-31T23:59:59-23:59"}):
        assert (await api.post("/v1/tasks/a/reschedule?lane=l", wrong)).problem == "invalid"


async def test_a_finished_task_cannot_be_cancelled_or_moved(api: Api) -> None:
    await api.client.put("null:", 1, id="done")
    for _ in range(600):
        if (await api.client.get("done")).state not in ("pending", "fired"):
            break
        await asyncio.sleep(0.05)
    cancel = await api.delete("/v1/tasks/done")
    assert (cancel.status, cancel.problem) == (409, "too-late")
    move = await api.post("/v1/tasks/done/reschedule", {"after": "1h"})
    assert (move.status, move.problem) == (409, "conflict")


async def test_a_request_whose_answer_was_lost_is_answered_as_the_first_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is stored, and the node dies (here: loses the store) before the answer is kept."""
    body = {"target": "null:", "after": "1h"}

    async def lost(*_: Any, **__: Any) -> None:
        raise Unavailable("the connection broke", sent=True)

    with monkeypatch.context() as patch:
        patch.setattr(records, "keep_answer", lost)
        first = await api.post("/v1/tasks", body, idempotency_key="k")
        assert (first.status, first.problem) == (503, "unavailable")
    again = await api.post("/v1/tasks", body, idempotency_key="k")
    assert (again.status, again.json["outcome"]) == (201, "created")
    assert (await api.client.count()).pending == 1
    third = await api.post("/v1/tasks", body, idempotency_key="k")
    assert (third.body, third.headers["idempotency-replayed"]) == (again.body, "true")


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_request_whose_answer_was_lost_is_not_repeated_once_its_id_may_be_forgotten(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch, *, forgotten: bool
) -> None:
    body = {"target": "null:", "after": "3h"}

    async def lost(*_: Any, **__: Any) -> None:
        raise Unavailable("the connection broke", sent=True)

    with monkeypatch.context() as patch:
        patch.setattr(records, "keep_answer", lost)
        assert (await api.post("/v1/tasks", body, idempotency_key="k")).status == 503
    [name] = server.call("KEYS", "*idem*")
    claim = msgspec.msgpack.decode(bytes(server.call("GET", name)), type=KeptAnswer)
    two_hours_ago = msgspec.structs.replace(claim, claimed_ms=claim.claimed_ms - 7_200_000)
    server.call("SET", name, msgspec.msgpack.encode(two_hours_ago), "KEEPTTL")
    if forgotten:
        for keys in api.client.store.keys.partitions:
            await api.client.store.run_one(keys.slot, [("DEL", keys.ids)])
    again = await api.post("/v1/tasks", body, idempotency_key="k")
    if forgotten:
        assert (again.status, again.problem) == (409, "conflict")
        assert "may have been stored as task 'idem-" in again.json["detail"]
    else:
        assert (again.status, again.json["outcome"]) == (201, "created")
    assert (await api.client.count()).pending == 1


async def test_pending_tasks_are_counted(api: Api) -> None:
    for n in range(3):
        await api.client.put("log:", at=LATER + n * 1_000)
    assert (await api.get("/v1/tasks:count")).json == {"pending": 3, "exact": True}
    hours = LATER // 3_600_000 * 3_600_000
    found = (await api.get(f"/v1/tasks:count?due_after={hours}&due_before={hours + 7_200_000}")).json
    assert found == {"pending": 3, "exact": True}
    assert (await api.get("/v1/tasks:count?due_before=2029-01-01T00:00:00Z")).json["pending"] == 0
    assert (await api.get("/v1/tasks:count?due_after=soon")).problem == "invalid"
    api.token = await api.key("reader", targets=("log:",))
    assert (await api.get("/v1/tasks:count")).problem == "forbidden"


async def test_a_task_that_a_worker_runs_is_not_called_cancelled(api: Api) -> None:
    """The worker is asked to stop the task, and may finish first: that is another answer."""
    await api.client.put(TARGET, 1, id="runs")
    worker = HandWorker(api.client.store)
    for _ in range(600):
        if await worker.take():
            break
        await asyncio.sleep(0.05)
    ended = await api.delete("/v1/tasks/runs")
    assert (ended.status, ended.json) == (202, {"id": "runs", "outcome": "cancelling"})


async def test_explain_says_that_what_is_overdue_goes_out_little_by_little(server: Server) -> None:
    async with Client(server.url, namespace="slowly", partitions=4) as client:
        due_ms = client.store.clock.now_ms() + 100
        await client.put_many(Task("null:", n, due_ms, id=f"late-{n}") for n in range(200))
        for _ in range(600):
            if client.store.clock.now_ms() > due_ms + 1_100:  # no node is there to fire them
                break
            await asyncio.sleep(0.05)
    config = Config(
        redis_url=server.url, port=0, partitions=4, namespace="slowly", catch_up_rate=Rate(1.0), catch_up_after_s=1.0
    )
    codes: set[str] = set()
    async with serving_api(config) as api:
        for _ in range(600):
            codes.add((await api.get("/v1/tasks/late-199/explain")).json["code"])
            if "catch-up" in codes:
                break
            await asyncio.sleep(0.05)
        assert "catch-up" in codes
    server.call("FLUSHALL")


# -- one id in several lanes -----------------------------------------------------------------------------------


def lanes_in(partition: int, count: int) -> list[str]:
    return [name for name in map("lane-{}".format, range(100)) if partition_of(name, 4) == partition][:count]


[LANE_A, BESIDE_A], [LANE_B] = lanes_in(1, 2), lanes_in(2, 1)


async def test_an_id_without_its_lane_that_several_lanes_have_is_409_with_the_lanes(api: Api) -> None:
    for lane in (LANE_A, LANE_B):
        assert (await put(api, id="dup", lane=lane)).status == 201
    path = "/v1/tasks/dup"
    for refused in (
        await api.get(path),
        await api.get(f"{path}/explain"),
        await api.get(f"{path}/result"),
        await api.delete(path),
        await api.post(f"{path}/reschedule", {"after": "1h"}),
    ):
        assert (refused.status, refused.problem) == (409, "ambiguous")
        assert refused.json["lanes"] == [LANE_A, LANE_B]
    assert (await api.get(f"{path}?lane=")).status == 404
    assert (await api.delete(f"{path}?lane={LANE_B}")).json["outcome"] == "cancelled"
    assert (await api.get(path)).json["lane"] == LANE_A


async def test_a_task_without_a_lane_is_named_by_an_empty_one(api: Api) -> None:
    for lane in ({}, {"lane": LANE_A}, {"lane": LANE_B}):
        assert (await put(api, id="dup", **lane)).status == 201
    assert (await api.get("/v1/tasks/dup")).json["lanes"] == ["", LANE_A, LANE_B]
    assert (await api.get("/v1/tasks/dup?lane=")).json["lane"] is None
    assert (await api.delete("/v1/tasks/dup?lane=")).json["outcome"] == "cancelled"


async def test_lanes_of_one_partition_put_the_same_id_side_by_side(api: Api) -> None:
    assert (await put(api, id="dup", lane=LANE_A)).status == 201
    together = await asyncio.gather(
        *(put(api, id=f"other-{n}") for n in range(8)),
        *(put(api, id="dup", lane=lane) for lane in (BESIDE_A, LANE_B)),
    )
    assert [(one.status, one.json["outcome"]) for one in together] == [(201, "created")] * 10
    again = await asyncio.gather(*(put(api, id="dup", lane=lane) for lane in (LANE_A, BESIDE_A, LANE_B)))
    assert [(one.status, one.json["outcome"]) for one in again] == [(200, "kept")] * 3
    assert (await api.get("/v1/tasks/dup")).json["lanes"] == sorted([LANE_A, BESIDE_A, LANE_B])
    assert (await api.get(f"/v1/tasks/dup?lane={BESIDE_A}")).json["lane"] == BESIDE_A


async def test_lines_of_a_batch_have_one_id_in_lanes_of_one_partition(api: Api) -> None:
    line = {"target": "null:", "at": LATER, "id": "dup"}
    wanted = [line | {"lane": LANE_A}, line | {"lane": BESIDE_A}, line | {"lane": LANE_B}, line]
    for outcome in ("created", "kept"):
        *told, told_in_short = (await api.batch(wanted)).lines
        assert [one["outcome"] for one in told] == [outcome] * 4
        assert told_in_short["summary"]["complete"]
    assert (await api.get("/v1/tasks:count")).json["pending"] == 4


async def test_a_bound_key_sees_no_lanes_of_others(api: Api) -> None:
    for lane, target in ((LANE_A, "log:"), (LANE_B, "null:")):
        assert (await put(api, id="dup", lane=lane, target=target)).status == 201
    api.token = await api.key("operator", targets=("null:",))
    assert (await api.get("/v1/tasks/dup")).json["lane"] == LANE_B
    assert (await api.delete("/v1/tasks/dup")).json["outcome"] == "cancelled"
    api.token = await api.key("operator", targets=("queue:mine",))
    assert (await api.get("/v1/tasks/dup")).status == 404


async def test_a_bound_key_uses_an_id_in_its_own_lane_although_others_have_it_elsewhere(api: Api) -> None:
    token = await api.key("operator", targets=("null:",))
    [key] = [one for one in await list_keys(api.client.store) if one.targets is not None]
    own = f"{key.id}/mine"
    [theirs] = lanes_in(partition_of(own, 4), 1)
    assert (await put(api, id="dup", lane=theirs, target="log:")).status == 201
    api.token = token
    line = {"target": "null:", "at": LATER, "id": "dup", "lane": own}
    assert (await put(api, id="dup", lane=own)).json["outcome"] == "created"
    [told, _] = (await api.batch([line])).lines
    assert told["outcome"] == "kept"
    assert (await api.get("/v1/tasks/dup")).json["lane"] == own
    assert (await api.get(f"/v1/tasks/dup?lane={theirs}")).status == 404
