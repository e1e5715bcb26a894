"""Bad input: one clear error each, and nothing written. A namespace of another format is never mixed with."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.model.errors import Conflict, InvalidInput, WrongFormat
from mainspring.model.task import Task
from mainspring.store.keys import meta_key, slot_of
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server, ServerCluster

NAIVE = datetime(2030, 1, 1, 9, 0)  # noqa: DTZ001 - that is the point

SECONDS = "looks like seconds; give milliseconds, or a datetime"

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "naive datetime": ({"at": NAIVE}, "naive datetime"),
    "naive text": ({"at": "2030-01-01T09:00:00"}, "naive datetime"),
    "not a time": ({"at": "tomorrow"}, "ISO 8601"),
    "NaN": ({"at": float("nan")}, "finite"),
    "infinity": ({"at": float("inf")}, "finite"),
    "bool as time": ({"at": True}, "bool"),
    "list as time": ({"at": []}, "at is of type list"),
    "before 1970": ({"at": -1}, "before 1970"),
    "beyond the horizon": ({"after": timedelta(days=3_700)}, "ten years"),
    "zero": ({"at": 0}, "at is 0, which looks like seconds"),
    "seconds": ({"at": 1_893_488_400}, SECONDS),
    "seconds with a fraction": ({"at": 1_893_488_400.25}, SECONDS),
    "seconds divided by a thousand": ({"at": datetime.fromtimestamp(1_893_488.4, UTC)}, SECONDS),
    "seconds as expiry": ({"expires": 1_893_488_400}, "expires is 1893488400, which looks like seconds"),
    "microseconds": ({"at": 1_893_488_400_000_000}, "looks like microseconds; give milliseconds"),
    "nanoseconds": ({"at": 1_893_488_400 * 10**9}, "looks like nanoseconds; give milliseconds"),
    "at and after": ({"at": 1_800_000_000_000, "after": "1s"}, "both"),
    "negative delay": ({"after": timedelta(seconds=-1)}, "negative"),
    "not a delay": ({"after": "soon"}, "not a delay"),
    "number as delay": ({"after": 5}, "after is of type int"),
    "months": ({"after": "P1M"}, "not a delay"),
    "empty id": ({"id": ""}, "id is empty"),
    "long id": ({"id": "ü" * 129}, "id has 258 bytes"),
    "id of another type": ({"id": 42}, "id is of type int"),
    "id like a generated one": ({"id": "a" * 32 + "~0.rs.0.0.0"}, "generated"),
    "surrogate in id": ({"id": "a\ud800"}, "Unicode"),
    "empty lane": ({"lane": ""}, "lane is empty"),
    "long lane": ({"lane": "x" * 257}, "lane has 257 bytes"),
    "lane of another type": ({"lane": b"x"}, "lane is of type bytes"),
    "lane and id wrong": ({"lane": "", "id": "fine"}, "lane is empty"),
    "unknown scheme": ({"target": "ftp://x"}, "no known scheme"),
    "no scheme": ({"target": "ticks"}, "no known scheme"),
    "scheme alone": ({"target": "kafka:"}, "names nothing"),
    "target of another type": ({"target": 5}, "target"),
    "target that cannot be hashed": ({"target": []}, "target"),
    "surrogate in target": ({"target": "kafka:\ud800"}, "target"),
    "long target": ({"target": "kafka:" + "x" * 300}, "longer"),
    "big payload": ({"payload": b"x" * 65_537}, "65537 bytes"),
    "big payload as JSON": ({"payload": "x" * 65_536}, "65538 bytes"),
    "payload that is not JSON": ({"payload": object()}, "JSON"),
    "surrogate in payload": ({"payload": "\ud800"}, "payload"),
    "expires before due": ({"after": "1h", "expires": 1_800_000_000_000}, "expires"),
    "naive expires": ({"expires": NAIVE}, "naive"),
    "expires of another type": ({"expires": []}, "expires"),
    "unknown policy": ({"on_conflict": "merge"}, "on_conflict"),
    "unknown durability": ({"durability": "paper"}, "durability"),
    "no replicas": ({"durability": "replicas=0"}, "durability"),
    "durability of another type": ({"durability": 1}, "durability"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_one_clear_error_and_writes_nothing(client: Client, store: Store, name: str) -> None:
    arguments, message = BAD[name]
    call: dict[str, Any] = {"target": "log:", **arguments}
    with pytest.raises(InvalidInput, match=message):
        await client.put(call.pop("target"), call.pop("payload", None), **call)
    assert (await balance(store)).accepted == 0


@pytest.mark.parametrize("name", [name for name in BAD if not {"on_conflict", "durability"} & BAD[name][0].keys()])
async def test_a_wrong_task_in_a_batch_stops_it_before_anything_is_written(
    client: Client, store: Store, name: str
) -> None:
    arguments, message = BAD[name]
    good = [Task("log:", n, after="1s", id=f"id-{n}" if n % 2 else None) for n in range(10)]
    wrong = Task(**{"target": "log:", **arguments})
    with pytest.raises(InvalidInput, match=message):
        await client.put_many([*good, wrong, *good])
    assert (await balance(store)).accepted == 0


async def test_something_that_is_no_task_is_refused(client: Client, store: Store) -> None:
    with pytest.raises(InvalidInput, match="Task"):
        await client.put_many([Task("log:"), {"target": "log:"}])  # type: ignore[list-item]
    wrong: Any
    for wrong in (None, 5, Task("log:")):
        with pytest.raises(InvalidInput, match="an iterable of Task objects"):
            await client.put_many(wrong)
    assert (await balance(store)).accepted == 0


async def test_a_progress_that_cannot_be_called_is_refused_before_anything_is_written(
    client: Client, store: Store
) -> None:
    wrong: Any = 5
    with pytest.raises(InvalidInput, match="progress is of type int"):
        await client.put_many([Task("log:")], progress=wrong)
    assert (await balance(store)).accepted == 0


async def test_a_rejected_id_says_what_of_its_call_is_stored(client: Client, store: Store) -> None:
    await client.put("log:", id="a", after="1h")
    with pytest.raises(Conflict, match=r"\(2 tasks of this call are stored\)") as refused:
        await client.put_many([Task("log:", id="a"), Task("log:"), Task("log:", id="b")], on_conflict="reject")
    assert refused.value.stored == 2
    assert (await balance(store)).accepted == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.cancel_many("abc"), r"use cancel, or \[id\]"),
        (lambda client: client.cancel_many(None), "an iterable of ids; this is of type NoneType"),
        (lambda client: client.list(cursor=5), "cursor"),
        (lambda client: client.list(target=5), "target is of type int"),
        (lambda client: client.list(lane=5), "lane is of type int"),
        (lambda client: client.list(allowed="log:"), "give a list"),
        (lambda client: client.list(allowed=5), "allowed is of type int"),
        (lambda client: client.list(allowed=[5]), "allowed is of type int"),
        (lambda client: client.get("a", lane=5), "lane is of type int"),
        (lambda client: client.explain("a", lane=b"l"), "lane is of type bytes"),
        (lambda client: client.cancel("a", lane="\ud800"), "lane is not valid Unicode"),
        (lambda client: client.cancel_many(["a"], lane="x" * 257), "lane has 257 bytes"),
        (lambda client: client.reschedule("a", after="1h", lane=5), "lane is of type int"),
        (lambda client: client.reschedule("a", after=""), "after: '' is not a delay"),
        (lambda client: client.reschedule("a", after=0), "after is of type int"),
        (lambda client: client.find_result("a", lane=5), "lane is of type int"),
        (lambda client: client.dead.get("a", lane=5), "lane is of type int"),
        (lambda client: client.dead.list(cursor=5), "cursor"),
        (lambda client: client.dead.list(reason=5), "reason is of type int"),
        (lambda client: client.dead.replay_many(rate="5"), "rate is '5'"),
        (lambda client: client.pause(target=5), "target is of type int"),
        (lambda client: client.pause(lane="l", reason=5), "reason is of type int"),
        (lambda client: client.pause(lane="l", by=None), "by is of type NoneType"),
        (lambda client: client.pause(lane="l", until=1 << 70), "until is .* which looks like nanoseconds"),
        (lambda client: client.pause(lane="l", until=1_893_488_400), "until is 1893488400, which looks like seconds"),
        (lambda client: client.reschedule("a", at=1_893_488_400), SECONDS),
        (lambda client: client.list(due_after=1_893_488_400), "due_after is 1893488400, which looks like seconds"),
        (lambda client: client.count(due_before=1_893_488_400), "due_before is 1893488400, which looks like seconds"),
        (lambda client: client.dead.list(died_after=1_893_488_400), "died_after is .* looks like seconds"),
        (lambda client: client.dead.replay("a", at=1_893_488_400), SECONDS),
        (lambda client: client.runs(ended_after=1_893_488_400), "ended_after is .* looks like seconds"),
        (lambda client: client.runs(ended_before=1_893_488_400_000_000), "ended_before is .* looks like microseconds"),
        (lambda client: client.run_stats(start=1_893_488_400), "start is .* looks like seconds"),
        (lambda client: client.run_stats(end="1893488400000000"), "end is .* looks like microseconds"),
        (lambda client: client.schedules.add("s", every="1d", target="log:", start=1_893_488_400), SECONDS),
        (lambda client: client.schedules.add("s", every="1d", target="log:", end=1_893_488_400), SECONDS),
        (lambda client: client.resume(queue=5), "queue is of type int"),
        (lambda client: client.lane_skip_head("l", reason=5), "reason is of type int"),
    ],
)
async def test_wrong_types_of_other_calls_are_refused_too(
    client: Client, call: Callable[[Any], Awaitable[Any]], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        await call(client)


@pytest.mark.parametrize("instant", [1_893_488_400, "1893488400", 1_893_488_400.5, 1_893_488_400_000_000])
async def test_instants_in_another_unit_are_refused_for_a_schedule_that_exists(client: Client, instant: Any) -> None:
    schedules = client.schedules
    await schedules.add("s", every="1d", target="log:")
    with pytest.raises(InvalidInput, match=r"until is .* looks like"):
        await schedules.pause("s", until=instant)
    with pytest.raises(InvalidInput, match=r"start is .* looks like"):
        await schedules.backfill("s", start=instant, end="2030-01-01T00:00:00Z")
    with pytest.raises(InvalidInput, match=r"end is .* looks like"):
        await schedules.backfill("s", start="2020-01-01T00:00:00Z", end=instant)
    with pytest.raises(InvalidInput, match=r"end is .* looks like"):
        await schedules.edit("s", end=instant)


@pytest.mark.parametrize(
    "option", [{"wait_s": "5"}, {"wait_s": -1}, {"max_payload_bytes": "1"}, {"options": 5}, {"clock": 5}]
)
def test_wrong_options_of_a_client_are_refused_where_it_is_made(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(option))):
        Client(**option)


@pytest.mark.parametrize(
    "arguments",
    [
        {"payload": b"x" * 65_536}, {"payload": "x" * 65_534}, {"id": "x" * 256}, {"lane": "ü" * 128},
        {"after": timedelta(days=3_650)}, {"at": datetime(2027, 1, 15, 9, tzinfo=UTC)}, {"at": 10**11},
        {"at": 10**11 + 0.5},
        {"at": "2027-01-15T09:00:00+01:00"}, {"after": "1h30m"}, {"after": "PT10M"}, {"after": "250ms"},
        {"target": "https://example.com/" + "x" * 2_000}, {"expires": "1s"}, {"expires": timedelta(days=1)},
        {"expires": "3600s"},
    ],
)  # fmt: skip
async def test_values_just_within_the_limits_are_accepted(client: Client, arguments: dict[str, Any]) -> None:
    call = {"target": "log:", **arguments}
    handle = await client.put(call.pop("target"), call.pop("payload", None), **call)
    assert (await client.get(handle.id, lane=arguments.get("lane"))).state == "pending"


@pytest.mark.parametrize("bad", ["", "x" * 257, 5, None])
async def test_look_ups_check_their_id_too(client: Client, bad: Any) -> None:
    for call in (client.get, client.cancel):
        with pytest.raises(InvalidInput):
            await call(bad)
    with pytest.raises(InvalidInput):
        await client.reschedule(bad, after="1s")


@pytest.mark.parametrize(
    "handle",
    [
        "0" * 32 + "~zz.rs.1.1.1", "0" * 32 + "~0.1.1.1.1.1", "0" * 32 + "~0.5.1.1.1",
        "f" * 32 + "~0.rs." + "z" * 60 + ".0.0",
        "0" * 32 + "~0.rs.0.zzzzzzzz.0", "0" * 32 + "~0.rs.0.0." + "z" * 9,
    ],
)  # fmt: skip
async def test_a_crafted_handle_is_refused_or_unknown(client: Client, store: Store, handle: str) -> None:
    for call in (client.get, client.cancel):
        try:
            answer = await call(handle)
        except InvalidInput:
            continue
        assert getattr(answer, "state", answer) in ("unknown", "finished")


async def test_reschedule_needs_one_time(client: Client) -> None:
    handle = await client.put("log:", after="1h")
    with pytest.raises(InvalidInput, match="either"):
        await client.reschedule(handle.id)
    with pytest.raises(InvalidInput, match="either"):
        await client.reschedule(handle.id, at=10**12, after="1s")
    with pytest.raises(InvalidInput, match="ten years"):
        await client.reschedule(handle.id, after="4000d")


@pytest.mark.parametrize("limit", [0, -1, 1001, "5", 1.5, True])
async def test_a_page_has_a_sensible_size(client: Client, limit: Any) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        await client.list(limit=limit)


async def test_an_empty_range_is_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="range"):
        await client.list(due_after=2 * 10**12, due_before=10**12)


async def test_old_names_of_a_range_are_accepted_with_a_warning(client: Client) -> None:
    await client.put("log:", after="1h")
    late: Any = {"after": 2 * 10**12}
    early: Any = {"before": 2 * 10**12}
    with pytest.warns(DeprecationWarning, match="after= is due_after= now") as said:
        assert (await client.list(**late)).tasks == []
    assert said[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="before= is due_before= now"):
        assert (await client.count(**early)).pending == 1
    whose: Any = {"who": "ann"}
    with pytest.warns(DeprecationWarning, match="who= is by= now"):
        assert (await client.pause(lane="l", **whose)).who == "ann"
    with pytest.raises(InvalidInput, match="give due_after alone"):
        await client.list(due_after=10**12, **late)


# -- the format of a namespace ---------------------------------------------------------------------------------


@pytest.fixture
def url(fleet: Server | ServerCluster) -> str:
    return fleet.url


async def test_another_partition_count_is_never_mixed(store: Store, url: str) -> None:
    with pytest.raises(WrongFormat, match="has 4 partitions, 8 were asked for"):
        await Store.open(url, namespace=store.keys.namespace, partitions=8)
    found = await Store.open(url, namespace=store.keys.namespace)
    assert len(found.keys) == 4
    await found.aclose()


@pytest.mark.parametrize(("field", "value"), [("format", 2), ("format", "new"), ("partitions", "x"), ("partitions", 0)])
async def test_an_unknown_format_is_refused(store: Store, url: str, field: str, value: Any) -> None:
    name = store.keys.namespace
    await store.servers.for_slot(slot_of(name)).pipeline([("HSET", meta_key(name), field, value)])
    with pytest.raises(WrongFormat):
        await Store.open(url, namespace=name)


@pytest.mark.parametrize("namespace_", ["", "a b", "a{b}", "a:b", "x" * 65, "ü", 5, None])
async def test_a_namespace_is_plain(url: str, namespace: str, namespace_: Any) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        await Store.open(url, namespace=namespace_)


@pytest.mark.parametrize("partitions", [0, -1, 5000, "8", True])
async def test_a_partition_count_is_sensible(url: str, namespace: str, partitions: Any) -> None:
    with pytest.raises(InvalidInput, match="partitions"):
        await Store.open(url, namespace=namespace, partitions=partitions)
    made = await Store.open(url, namespace=namespace, partitions=2)
    assert len(made.keys) == 2, "nothing was made before"
    await made.aclose()
