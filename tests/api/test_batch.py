"""`/v1/tasks:batch`: every line has its outcome, wrong ones fail alone, and what is sent again counts once."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest

from mainspring.api import batch
from mainspring.config.config import Config
from mainspring.model.errors import Unavailable
from mainspring.store.redis.connection import RedisCommand
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.servers import Server, wait_until
from tests.support.api_calls import LATER, Api, serving_api

LIMITS = {"api_batch_lines": 5_000, "api_batch_bytes": 2_000_000, "api_body_bytes": 100_000}


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, **LIMITS)) as made:  # type: ignore[arg-type]
        yield made
        await balance(made.client.store)
    server.call("FLUSHALL")


def line(n: int, **more: Any) -> dict[str, Any]:
    return {"target": "null:", "at": LATER + n, "payload": {"n": n}} | more


async def pending(api: Api) -> int:
    return (await api.client.count()).pending


async def test_every_line_is_a_task_with_an_answer_in_order(api: Api) -> None:
    answer = await api.batch([line(n, **({"id": f"o{n}"} if n % 2 else {})) for n in range(3000)])
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    *told, last = answer.lines
    assert [one["line"] for one in told] == list(range(1, 3001))
    assert [one["due_ms"] for one in told] == [LATER + n for n in range(3000)]
    assert told[1]["id"] == "o1"
    assert last == {"summary": {
        "lines": 3000, "created": 3000, "kept": 0, "replaced": 0, "failed": 0, "skipped": 0, "complete": True,
        "next_line": None, "error": None,
    }}  # fmt: skip
    assert await pending(api) == 3000
    for one in (told[0], told[1], told[2998]):
        assert (await api.client.get(one["id"])).payload == {"n": one["line"] - 1}


async def test_wrong_lines_fail_alone_and_are_named_by_their_number(api: Api) -> None:
    lines: list[Any] = [
        line(0, id="good"),
        b"{not json}\n",
        line(1, target="smtp:x"),
        b"\n",
        line(2, after="1s"),
        b'{"target": "null:"} {"target": "null:"}\n',
        b'{"target": "null:", "payload": %b%b}\n' % (b"[" * 2000, b"]" * 2000),
        b'{"target": "null:", "payload": "\xff"}\n',
        line(3, expires=1),
        line(4, retry="nonsense"),
        line(4, timeout="nonsense"),
        line(5, colour="red"),
        b"  \r\n",
        line(6),
    ]
    told = (await api.batch(lines)).lines
    failed = {one["line"]: one["error"]["type"].rpartition(":")[2] for one in told if "error" in one}
    assert failed == {
        2: "malformed", 3: "invalid", 5: "invalid", 6: "malformed", 7: "invalid", 8: "invalid",
        9: "invalid", 10: "invalid", 11: "invalid", 12: "invalid",
    }  # fmt: skip
    assert [one["line"] for one in told if "id" in one] == [1, 14]
    assert told[-1]["summary"]["failed"] == 10
    assert await pending(api) == 2


async def test_a_batch_sent_again_counts_once(api: Api) -> None:
    lines = [line(n, id=f"o{n}") for n in range(500)]
    first, again = await api.batch(lines), await api.batch(lines)
    assert first.lines[-1]["summary"]["created"] == 500
    assert again.lines[-1]["summary"]["kept"] == 500
    assert await pending(api) == 500


async def test_lines_without_ids_count_once_under_one_idempotency_key(api: Api) -> None:
    lines = [line(1), line(1), line(2)]
    for key, created in (("k", 3), ("k", 0), ("other", 3)):
        told = (await api.batch(lines, idempotency_key=key)).lines
        assert told[-1]["summary"]["created"] == created
    changed = (await api.batch([line(1), line(7)], idempotency_key="k")).lines
    assert [one["outcome"] for one in changed[:-1]] == ["kept", "created"]
    rejecting = await api.batch([line(1), line(8), line(9, id="own")], "?on_conflict=reject", idempotency_key="k")
    assert [one["outcome"] for one in rejecting.lines[:-1]] == ["kept", "created", "created"]
    again = await api.batch([line(1), line(8), line(9, id="own")], "?on_conflict=reject", idempotency_key="k")
    assert [one.get("outcome") for one in again.lines[:-1]] == ["kept"] * 3, "it is the same request"
    other = await api.batch([line(9, id="own")], "?on_conflict=reject", idempotency_key="another")
    assert other.lines[0]["error"]["type"].endswith(":conflict")


async def forget_ids(api: Api) -> None:
    """Do what owners do an hour after the tasks are done."""
    for keys in api.client.store.keys.partitions:
        await api.client.store.run_one(keys.slot, [("DEL", keys.ids)])


async def test_a_batch_counts_once_as_long_as_its_idempotency_key_is_kept(api: Api) -> None:
    lines = [line(1), line(2, id="own"), line(3, id="lane", lane="l"), {"target": "null:", "after": "1h"}, b"wrong\n"]
    first = (await api.batch(lines, idempotency_key="k")).lines
    assert [one.get("outcome") for one in first[:-1]] == [*["created"] * 4, None]
    for _ in range(2):
        await forget_ids(api)
        again = (await api.batch(lines, idempotency_key="k")).lines
        assert [one.get("outcome") for one in again[:-1]] == [*["kept"] * 4, None]
        assert [(one.get("id"), one.get("due_ms")) for one in again] == [
            (one.get("id"), one.get("due_ms")) for one in first
        ]
        summary = again[-1]["summary"]
        assert (summary["lines"], summary["kept"], summary["failed"]) == (5, 4, 1)
        in_short = (await api.batch(lines, "?answers=errors", idempotency_key="k")).lines
        assert [one.get("line") for one in in_short[:-1]] == [5]
    assert await pending(api) == 4
    assert (await api.batch(lines, idempotency_key="other")).lines[-1]["summary"]["created"] == 4


async def test_a_batch_that_was_cut_is_completed_when_it_is_sent_again(api: Api) -> None:
    lines = [line(n) for n in range(5_000)]
    for answers in ("", "?answers=errors"):
        await api.batch(lines[:4_500], answers, idempotency_key="k" + answers)
        await forget_ids(api)
        summary = (await api.batch(lines, answers, idempotency_key="k" + answers)).lines[-1]["summary"]
        assert (summary["kept"], summary["created"]) == (4_500, 500)


async def test_lines_that_were_written_just_before_a_crash_are_not_written_again_once_their_ids_may_be_forgotten(
    api: Api, server: Server
) -> None:
    lines = [line(1), line(2, id="own"), line(3, id="lane", lane="l")]
    store = api.client.store
    with bad_road(store) as network:

        def marks_after_the_tasks(commands: Sequence[RedisCommand]) -> bool:
            written = any(calls("put_ids")(earlier) for _, earlier in network.trips)
            return written and uses("SETRANGE")(commands)

        network.next("never sent", only=marks_after_the_tasks)
        first = await api.batch(lines, idempotency_key="k")
    ids = [one["id"] for one in first.lines[:-1]]
    assert first.lines[-1]["summary"]["complete"] is False
    early = (await api.batch(lines[:1], idempotency_key="k")).lines
    assert [one.get("outcome") for one in early[:-1]] == ["kept"], "its id is still known"
    await forget_ids(api)
    [name] = server.call("KEYS", "*idem*")
    two_hours_ago_ms = await store.fresh_ms() - 7_200_000
    server.call("SETRANGE", name, 0, two_hours_ago_ms.to_bytes(6, "big"))
    late = (await api.batch([*lines, line(4)], idempotency_key="k")).lines
    assert [one.get("outcome") for one in late[:-1]] == ["kept", None, None, "created"]
    for one, id in zip(late[1:3], ids[1:], strict=True):
        assert one["error"]["type"].endswith(":conflict")
        assert f"may have been stored as task {id!r}" in one["error"]["detail"]
    assert await pending(api) == 4, "three of the first request, and line 4"
    await forget_ids(api)
    assert (await api.batch([line(1)], idempotency_key="other")).lines[-1]["summary"]["created"] == 1


async def test_the_marks_of_a_batch_are_small_and_expire(api: Api, server: Server) -> None:
    await api.batch([line(n) for n in range(1_000)], idempotency_key="k")
    [name] = server.call("KEYS", "*idem*")
    assert server.call("STRLEN", name) == 6 + 4 * 1_000
    assert 86_000_000 < server.call("PTTL", name) <= 86_400_000


async def test_a_line_that_changed_or_was_refused_is_not_taken_for_stored(api: Api) -> None:
    taken = line(1, id="own")
    await api.batch([line(2, id="own")])
    refused = (await api.batch([taken, line(3)], "?on_conflict=reject", idempotency_key="k")).lines
    assert [one.get("outcome") for one in refused[:-1]] == [None, "created"]
    assert (await api.delete("/v1/tasks/own")).status == 200
    again = (await api.batch([taken, line(3, payload=4)], "?on_conflict=reject", idempotency_key="k")).lines
    assert [one.get("outcome") for one in again[:-1]] == ["created", "created"]


@pytest.mark.parametrize("key", ["", "x" * 256, "schlüssel"])
async def test_an_invalid_idempotency_key_of_a_batch_is_refused(api: Api, key: str) -> None:
    for _ in range(2):
        refused = await api.batch([line(1)], idempotency_key=key.encode().decode("latin-1"))
        assert (refused.status, refused.problem) == (400, "invalid")
    assert (await api.get("/v1/tasks:count")).json["pending"] == 0


async def test_the_rule_for_known_ids_holds_for_all_lines(api: Api) -> None:
    await api.batch([line(n, id=f"o{n}") for n in range(3)])
    moved = await api.batch([line(100, id="o1"), line(100, id="o9")], "?on_conflict=replace")
    assert [one["outcome"] for one in moved.lines[:-1]] == ["replaced", "created"]
    refused = await api.batch([line(0, id="o1"), line(0, id="new"), line(0, id="new")], "?on_conflict=reject")
    summary = refused.lines[-1]["summary"]
    assert (summary["lines"], summary["created"], summary["failed"]) == (3, 1, 2)
    assert [one.get("outcome") for one in refused.lines[:-1]] == [None, "created", None]
    assert refused.lines[0]["error"]["type"].endswith(":conflict")


async def test_answers_may_be_left_out_but_never_errors(api: Api) -> None:
    told = (await api.batch([line(0), line(1, target="x"), line(2)], "?answers=errors")).lines
    assert [one.get("line") for one in told] == [2, None]
    assert told[-1]["summary"]["created"] == 2
    again = [line(0, id="a"), line(1, id="a"), line(2)]
    for rule, counts in (("keep", (2, 1, 0)), ("replace", (1, 0, 2)), ("reject", (1, 0, 0))):
        summary = (await api.batch(again, f"?answers=errors&on_conflict={rule}")).lines[-1]["summary"]
        assert (summary["created"], summary["kept"], summary["replaced"]) == counts


async def test_a_body_in_pieces_cut_anywhere_is_read_whole(api: Api) -> None:
    whole = b"".join(json.dumps(line(n)).encode() + b"\n" for n in range(200)).rstrip(b"\n")
    pieces = iter([whole[at : at + 37] for at in range(0, len(whole), 37)])
    assert (await api.batch(pieces)).lines[-1]["summary"]["created"] == 200


async def test_too_many_lines_are_cut_and_the_rest_can_be_sent(api: Api) -> None:
    lines = [line(n, id=f"o{n}") for n in range(6000)]
    summary = (await api.batch(lines)).lines[-1]["summary"]
    assert (summary["created"], summary["complete"], summary["next_line"]) == (5000, False, 5001)
    assert summary["error"]["type"].endswith(":too-large")
    assert await pending(api) == 5000
    rest = (await api.batch(lines[summary["next_line"] - 1 :])).lines[-1]["summary"]
    assert (rest["created"], rest["complete"]) == (1000, True)


async def test_a_body_that_is_known_to_be_too_large_is_refused_whole(api: Api) -> None:
    answer = await api.batch([line(n, payload="x" * 1000) for n in range(2000)])
    assert (answer.status, answer.problem) == (413, "too-large")
    assert await pending(api) == 0


async def test_a_body_of_unknown_length_is_cut_where_the_limit_is(api: Api) -> None:
    lines = iter([json.dumps(line(n, payload="x" * 1000)).encode() + b"\n" for n in range(3000)])
    summary = (await api.batch(lines)).lines[-1]["summary"]
    assert summary["complete"] is False
    assert summary["next_line"] == summary["lines"] + 1
    assert await pending(api) == summary["created"] < 3000


async def test_an_endless_line_is_cut(api: Api) -> None:
    summary = (await api.batch(iter([b"x" * 50_000] * 30))).lines[-1]["summary"]
    assert (summary["complete"], summary["created"]) == (False, 0)


async def test_an_empty_batch_is_one(api: Api) -> None:
    for body in (b"", b"\n\n", b"  "):
        assert (await api.batch(body)).lines == [{"summary": {
            "lines": 0, "created": 0, "kept": 0, "replaced": 0, "failed": 0, "skipped": 0, "complete": True,
            "next_line": None, "error": None,
        }}]  # fmt: skip


async def test_a_full_server_refuses_the_whole_batch(api: Api, server: Server) -> None:
    server.call("CONFIG", "SET", "maxmemory", "1")
    try:
        answer = await api.batch([line(n) for n in range(10)])
        assert (answer.status, answer.problem) == (507, "out-of-memory")
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")
    assert await pending(api) == 0


@pytest.mark.parametrize(
    ("query", "status"), [("?on_conflict=maybe", 400), ("?durability=stone", 400), ("?answers=some", 400)]
)
async def test_wrong_parameters_are_refused_before_anything_is_read(api: Api, query: str, status: int) -> None:
    assert (await api.batch([line(1)], query)).status == status
    assert await pending(api) == 0


async def test_another_content_type_is_refused(api: Api) -> None:
    answer = await api.batch([line(1)], content_type="text/csv")
    assert (answer.status, answer.problem) == (415, "content-type")


@pytest.mark.parametrize("path", ["/v1/tasks:batch", "/v1/tasks", "/ticks", "/ticks?replace=true"])
async def test_a_compressed_body_is_called_that_and_not_malformed(api: Api, path: str) -> None:
    packed = gzip.compress(b'{"target": "null:"}')
    answer = await api.call("POST", path, packed, content_type="application/json", content_encoding="gzip")
    assert (answer.status, answer.problem) == (415, "content-type")
    assert "the content encoding is 'gzip'" in answer.json["detail"]
    plain = await api.call("POST", "/v1/tasks", b'{"target": "null:", "after": "1h"}', content_encoding="identity")
    assert plain.status == 201


async def test_more_lines_than_travel_together_are_each_stored_once(server: Server) -> None:
    """Short lines: more of them fit into one portion than travel in one write."""
    lines = [b'{"target":"null:","at":%d}\n' % (LATER + n) for n in range(12_000)]
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as api:
        told = (await api.batch(lines)).lines
        assert told[-1]["summary"]["created"] == 12_000
        assert len({one["id"] for one in told[:-1]}) == 12_000
        assert await pending(api) == 12_000
        await balance(api.client.store)
    server.call("FLUSHALL")


async def test_a_server_lost_in_the_middle_is_reported_with_the_line_to_continue_from(api: Api) -> None:
    first = [line(n, id=f"o{n}", payload="x" * 1000) for n in range(1000)]

    async def break_after_the_first(*_: Any, **__: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise Unavailable("the connection broke", sent=True)
        return await put_many(*_, **__)

    calls: list[int] = []
    put_many = api.client.put_many
    api.client.put_many = break_after_the_first  # type: ignore[method-assign]
    try:
        told = (await api.batch(first)).lines
    finally:
        del api.client.put_many
    summary = told[-1]["summary"]
    stored = await pending(api)
    assert (summary["complete"], summary["created"], summary["next_line"]) == (False, stored, stored + 1)
    assert summary["error"]["type"].endswith(":unavailable")
    assert {one["error"]["status"] for one in told[:-1] if "error" in one} == {503}
    rest = (await api.batch(first[stored:])).lines[-1]["summary"]
    assert rest["created"] == 1000 - stored


async def test_a_line_longer_than_a_portion_is_read_where_the_limits_allow_it(server: Server) -> None:
    config = Config(redis_url=server.url, port=0, partitions=4, api_body_bytes=2_000_000)
    long = b'{"target":"null:","at":%d,%b"payload":1}\n' % (LATER, b" " * 1_000_000)
    async with serving_api(config) as api:
        told = (await api.batch([long, line(1), long])).lines
        assert [one.get("outcome") for one in told[:-1]] == ["created"] * 3
    server.call("FLUSHALL")


@pytest.mark.parametrize(("levels", "failed"), [(62, 0), (63, 0), (64, 1), (500, 1)])
async def test_a_line_that_is_nested_too_deep_fails_alone(api: Api, levels: int, failed: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    answer = await api.batch([line(0), line(1, payload=deep), line(2)])
    assert answer.lines[-1]["summary"]["failed"] == failed
    assert await pending(api) == 3 - failed


@pytest.mark.parametrize("answers", ["all", "errors"])
async def test_a_batch_that_is_stored_and_not_confirmed_has_its_lines(api: Api, answers: str) -> None:
    """The server of these tests writes nothing to disk. Without the ids the stored tasks could not be found."""
    await api.client.put("null:", {"n": 5}, at=LATER + 5, id="o5")
    lines = [line(n, **({"id": f"o{n}"} if n % 2 else {})) for n in range(100)]
    answer = await api.batch([*lines, line(1, target="smtp:x")], f"?durability=disk&answers={answers}")
    assert answer.status == 200
    *told, last = answer.lines
    assert [(one["id"] if n % 2 else "", one["confirmed"]) for n, one in enumerate(told[:-1])] == [
        (f"o{n}" if n % 2 else "", False) for n in range(100)
    ]
    assert told[-1]["error"]["type"].endswith(":invalid")
    summary = last["summary"]
    assert (summary["created"], summary["kept"], summary["failed"]) == (99, 1, 1)
    assert (summary["complete"], summary["next_line"]) == (False, 1)
    assert summary["error"]["type"].endswith(":not-confirmed")
    assert await pending(api) == 100
    for one in (told[0], told[1]):
        assert (await api.client.get(one["id"])).due_ms == one["due_ms"]


async def test_a_batch_of_rubbish_ends_at_the_limit_of_errors_and_the_rest_is_counted(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_batch_errors=50)) as api:
        answer = await api.batch(b"x\n" * 100_000)
        *told, last = answer.lines
        assert [one["line"] for one in told] == list(range(1, 51))
        summary = last["summary"]
        assert (summary["lines"], summary["failed"], summary["skipped"]) == (50, 50, 99_950)
        assert (summary["complete"], summary["next_line"]) == (False, 51)
        assert summary["error"]["type"].endswith(":invalid")
        # Known ids are no errors of the caller's: sent again, all of them have their answer.
        again = [line(n, id=f"o{n}") for n in range(100)]
        for failed in (0, 100):
            summary = (await api.batch(again, "?on_conflict=reject")).lines[-1]["summary"]
            assert (summary["failed"], summary["skipped"], summary["complete"]) == (failed, 0, True)
    server.call("FLUSHALL")


TASK_LINES = b'{"target":"null:","at":1900000000000}\n'


@pytest.mark.parametrize(
    ("body", "headers", "most"),
    [
        (b"x\n" * 50_000, {}, 8_192),
        (TASK_LINES * 20_000, {}, 8_192),
        (TASK_LINES * 20_000, {"idempotency_key": "k"}, 1_024),
    ],
)
async def test_others_have_their_turn_between_a_few_thousand_lines(
    server: Server, body: bytes, headers: dict[str, str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    taken: list[tuple[int, int]] = []
    take = batch.Lines.take

    def counted(self: batch.Lines, portion: bytes, *rest: Any) -> batch.Portion:
        taken.append((batch.count_lines(portion), turns))
        return take(self, portion, *rest)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(batch.Lines, "take", counted)
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_batch_errors=1_000_000)) as api:
        others = asyncio.create_task(turn())
        summary = (await api.batch(body, **headers)).lines[-1]["summary"]
        others.cancel()
        assert summary["lines"] == body.count(b"\n")
    assert max(lines for lines, _ in taken) <= most
    assert len({at for _, at in taken}) == len(taken), "others ran between any two portions"
    server.call("FLUSHALL")


async def test_lines_after_the_last_allowed_one_are_counted_and_not_cut_apart(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = 0
    portions = batch._portions

    def counted(*given: Any) -> Iterator[bytes]:
        nonlocal cut
        for portion in portions(*given):
            cut += 1
            yield portion

    monkeypatch.setattr(batch, "_portions", counted)
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, **LIMITS)) as api:  # type: ignore[arg-type]
        summary = (await api.batch(b"\n" * 1_900_000)).lines[-1]["summary"]
    assert (summary["skipped"], summary["next_line"]) == (1_895_000, 5_001)
    assert cut < 20, "one portion with lines that are looked at, and one for each piece of the body"
    server.call("FLUSHALL")


async def test_ids_of_runs_are_refused_together_and_change_no_run(api: Api) -> None:
    assert (await api.post("/v1/schedules", {"name": "nightly", "cron": "0 3 * * *", "target": "null:"})).status == 201
    [run] = (await api.get("/v1/tasks")).json["tasks"]
    lines = [line(1, id=run["id"]), line(2, id="free"), line(3, id="nightly@2030-01-01T03:00:00Z", lane="l")]
    puts: list[int] = []
    with bad_road(api.client.store) as network:
        for rule in ("keep", "replace", "reject"):
            told = (await api.batch([*lines[::2] * 500, lines[1]], f"?on_conflict={rule}")).lines
            assert told[-1]["summary"]["failed"] == 1_000 + (rule == "reject")
            assert all("is that of a run of schedule 'nightly'" in one["error"]["detail"] for one in told[:1_000])
            puts.append(sum(uses("HEXISTS")(commands) for _, commands in network.trips))
    assert puts[-1] <= 6, "the lines of a portion are looked at together"
    assert (await api.post("/v1/tasks", lines[0])).problem == "conflict"
    assert (await api.get(f"/v1/tasks/{quote(run['id'], safe='')}")).json["due_ms"] == run["due_ms"]
    assert await pending(api) == 2


async def test_answers_that_fill_their_memory_end_the_batch(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "HELD_BYTES", 100_000)
    monkeypatch.setattr(batch, "PORTION_LINES", 500)
    lines = [line(n) for n in range(4_000)]
    summary = (await api.batch(lines)).lines[-1]["summary"]
    assert summary["complete"] is False
    assert summary["error"]["type"].endswith(":rate")
    assert 0 < summary["created"] < 4_000
    assert (summary["next_line"], summary["skipped"]) == (summary["created"] + 1, 4_000 - summary["created"])
    assert api.face.app.batches.held_bytes == 0, "what is sent is let go"
    rest = (await api.batch(lines, "?answers=errors")).lines[-1]["summary"]
    assert (rest["created"], rest["complete"]) == (4_000, True)


async def test_each_line_counts_as_a_request(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, api_rate=100.0)) as api:
        summary = (await api.batch([line(n) for n in range(1_000)])).lines[-1]["summary"]
        assert 100 <= summary["created"] < 1_000
        assert (summary["complete"], summary["next_line"]) == (False, summary["created"] + 1)
        assert summary["skipped"] == 1_000 - summary["created"]
        assert summary["error"]["type"].endswith(":rate")
        assert await pending(api) == summary["created"]
    server.call("FLUSHALL")


async def test_one_client_cannot_take_all_places_for_batches(server: Server) -> None:
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4, access="open")) as api:
        one, other = [await api.key("submit-only") for _ in range(2)]
        head = (
            "POST /v1/tasks:batch HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-length: 9\r\n\r\n"
        )
        reading = api.face.app.batches.taken
        host, _, port = api.url.removeprefix("http://").rpartition(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(batch.AT_ONCE_OF_ONE)]
        for _, writer in slow:
            writer.write(head.format(one).encode())
        await asyncio.to_thread(wait_until, lambda: reading.total() == batch.AT_ONCE_OF_ONE, "all are read")
        refused = await api.batch([line(1)], authorization=f"Bearer {one}")
        assert (refused.status, refused.problem) == (429, "rate")
        assert (await api.batch([line(1)], authorization=f"Bearer {other}")).status == 200
        for _, writer in slow:
            writer.close()
        await asyncio.to_thread(wait_until, lambda: not reading, "none is read any more")
        assert (await api.batch([line(1)], authorization=f"Bearer {one}")).status == 200
    server.call("FLUSHALL")


async def test_a_payload_over_the_limit_is_too_large_on_every_route(server: Server) -> None:
    big = "x" * (64 * 1024)
    recurring = {"name": "s", "cron": "0 9 * * *", "target": "null:"}
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4)) as api:
        assert (await api.post("/v1/schedules", recurring)).status == 201
        for answer in (
            await api.post("/v1/tasks", line(1, payload=big)),
            await api.post("/ticks", {"item": "a", "at": LATER, "more": big}),
            await api.post("/v1/schedules", recurring | {"name": "t", "payload": big}),
            await api.call("PATCH", "/v1/schedules/s", {"payload": big}, content_type="application/json"),
        ):
            assert (answer.status, answer.problem) == (413, "too-large")
        told = (await api.batch([line(1, payload=big), line(2)])).lines
        assert (told[0]["error"]["status"], told[0]["error"]["type"]) == (413, "urn:mainspring:problem:too-large")
        assert told[1]["outcome"] == "created"
    server.call("FLUSHALL")


async def test_a_line_whose_webhook_may_take_too_long_is_refused(api: Api) -> None:
    web = {"target": "https://example.com/"}
    answer = await api.batch([line(0, **web, timeout="10m"), line(1, **web, timeout="3650d"), line(2, timeout="3650d")])
    *told, _ = answer.lines
    assert ["error" in one for one in told] == [False, True, False]
    assert "max_timeout" in json.dumps(told[1])
