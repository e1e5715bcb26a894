"""`mainspring dead` and `mainspring task explain`: what a person types and reads."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mainspring.cli import dead, task
from mainspring.client.sync import SyncClient
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Dead
from mainspring.model.errors import InvalidInput
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker
from tests.support.owner import address_of
from tests.support.terminal import shown_by


@pytest.fixture
async def ticker(server: Server) -> AsyncIterator[Ticker]:
    """Three dead letters of a minute ago, on a clock that commands share: t0, t2 of log:, t1 of kafka:a in lane l."""
    server.call("FLUSHALL")
    clock = ManualClock(int(time.time() * 1000) - 60_000)
    async with Ticker(server.url, namespace="main", partitions=4, clock=clock) as opened:
        for scheme in ("log", "kafka"):
            opened.answer(scheme, lambda one: Dead(f"no {one.target}"))
        for n in range(3):
            lane = "l" if n == 1 else None
            await opened.client.put("kafka:a" if n == 1 else "log:", {"n": n}, id=f"t{n}", lane=lane, after=f"{n}s")
        await opened.advance(seconds=3)
        for scheme in ("log", "kafka"):
            opened.answer(scheme, lambda _: None)
        yield opened
        await balance(opened.store)


async def call(server: Server, *words: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(dead.app, [*words, "--redis-url", server.url]))


async def explain(server: Server, *words: str) -> Result:
    line = ["explain", *words, "--redis-url", server.url]
    return await asyncio.to_thread(lambda: CliRunner().invoke(task.app, line))


async def test_the_list_shows_the_newest_first_by_page(server: Server, ticker: Ticker) -> None:
    result = await call(server, "list")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "t2", "t1", "t0"]
    assert "kafka:a" in lines[2]
    assert lines[2].endswith("no kafka:a")
    page = json.loads((await call(server, "list", "--limit", "2", "--json")).stdout)
    assert [one["id"] for one in page["letters"]] == ["t2", "t1"]
    rest = await call(server, "list", "--cursor", page["next"])
    assert [line.split()[0] for line in rest.stdout.splitlines()] == ["ID", "t0"]
    filtered = await call(server, "list", "--target", "kafka:*", "--lane", "l", "--reason", "kafka", "-o", "name")
    assert filtered.stdout == "t1\n"


async def test_show_prints_everything(server: Server, ticker: Ticker) -> None:
    result = await call(server, "show", "t1")
    assert result.exit_code == 0, result.output
    for words in (
        "no kafka:a",
        "originally",
        "attempts    1",
        "lane        l",
        "error 1",
        '{"n":1}',
        "key         main/l/t1/",
    ):
        assert words in result.stdout
    told = json.loads((await call(server, "show", "t1", "--json")).stdout)
    assert (told["payload"], told["errors"], told["lane"]) == ({"n": 1}, ["no kafka:a"], "l")
    missing = await call(server, "show", "nobody")
    assert missing.exit_code == 1
    assert "there is no dead letter 'nobody'" in str(missing.exception)


async def test_replay_by_id_by_filter_and_all(server: Server, ticker: Ticker) -> None:
    dry = await call(server, "replay", "--all", "--dry-run")
    assert dry.stdout == "3 would be replayed\n"
    one = await call(server, "replay", "t1", "--in", "1h")
    assert (one.exit_code, one.stdout) == (0, "1 replayed\n")
    again = await call(server, "replay", "t1")
    assert again.exit_code == 1
    assert "there is no dead letter 't1'" in str(again.exception)
    by_filter = await call(server, "replay", "--target", "log:", "--died-before", "2100-01-01T00:00:00Z", "--json")
    assert json.loads(by_filter.stdout)["replayed"] == 2
    assert (await call(server, "list")).stdout == ""
    ticker.clock.set(int(time.time() * 1000) + 5_000)
    assert sorted(one.value()["n"] for one in await ticker.turn()) == [0, 2]
    assert [one.value() for one in await ticker.advance(hours=1)] == [{"n": 1}]


async def test_replay_with_a_rate_and_a_conflict(server: Server, ticker: Ticker) -> None:
    await ticker.client.put("log:", "new", id="t0", after="1h", on_conflict="replace")
    result = await call(server, "replay", "--all", "--rate", "1000")
    assert result.exit_code == 1
    assert result.stdout == "2 replayed, 1 in conflict\n"
    assert "t0: conflict: a task with this id is pending or under way" in result.stderr


async def test_replay_and_drop_need_ids_or_filters(server: Server, ticker: Ticker) -> None:
    for words in (
        ["replay"],
        ["drop"],
        ["replay", "t0", "--all"],
        ["drop", "t0", "--target", "log:"],
        ["drop", "--all"],
    ):
        result = await call(server, *words)
        assert isinstance(result.exception, InvalidInput), words
    assert len((await call(server, "list", "-o", "name")).stdout.splitlines()) == 3


async def test_drop_needs_a_yes(server: Server, ticker: Ticker) -> None:
    assert (await call(server, "drop", "--all", "--dry-run")).stdout == "3 would be dropped\n"
    assert (await call(server, "drop", "t0", "--yes")).stdout == "1 dropped\n"
    unknown = await call(server, "drop", "t0", "t1", "--yes")
    assert (unknown.exit_code, unknown.stdout) == (1, "1 dropped\n")
    assert "there is no dead letter 't0'" in str(unknown.exception)
    assert (await call(server, "drop", "--all", "--yes")).stdout == "1 dropped\n"
    assert (await call(server, "list")).stdout == ""


async def test_an_export_goes_to_a_file_or_to_standard_output(server: Server, ticker: Ticker, tmp_path: Path) -> None:
    result = await call(server, "export")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["t0", "t1", "t2"]
    file = tmp_path / "dead-letters.jsonl"
    written = await call(server, "export", "--lane", "l", "-o", str(file))
    assert "1 dead letters written" in written.stderr
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["t1"]


async def test_a_damaged_dead_letter_shows_its_bytes(server: Server, ticker: Ticker) -> None:
    row = b"\0\0\0\1\0" + b"\7" * 16 + b"\xc1"
    address = address_of((await ticker.client.put("log:", "x", after="1s")).id)
    keys = ticker.store.keys.partitions[address.partition]
    await ticker.store.run_one(keys.slot, [("LSET", keys.entries(address.slice.name), address.index, row)])
    await ticker.advance(seconds=3)
    listed = await call(server, "list", "--reason", "cannot be read")
    _, line = listed.stdout.splitlines()
    id = line.split()[0]
    assert "(damaged)" in line
    shown = await call(server, "show", id)
    assert "07" * 16 + "c1" in shown.stdout
    replayed = await call(server, "replay", id)
    assert replayed.exit_code == 1
    assert "damaged: its entry cannot be read" in replayed.stderr
    assert (await call(server, "drop", id, "--yes")).stdout == "1 dropped\n"


async def test_explain_prints_one_sentence_or_json(server: Server, ticker: Ticker) -> None:
    result = await explain(server, "t1", "--lane", "l")
    assert result.exit_code == 0
    assert result.stdout.startswith("t1: It was given up ")
    assert "no kafka:a" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    found = json.loads((await explain(server, "t1", "--json")).stdout)
    assert (found["code"], found["reason"], found["lane"]) == ("dead", "no kafka:a", "l")
    unknown = await explain(server, "nobody")
    assert unknown.exit_code == 1
    assert "Unknown id" in unknown.stdout


async def test_the_synchronous_client_has_the_same_calls(server: Server, ticker: Ticker) -> None:
    def work() -> list[object]:
        lines: list[bytes] = []
        with SyncClient(server.url, partitions=4) as client:
            return [
                [one.id for one in client.dead.list(limit=10).letters],
                client.dead.export(lines.append),
                client.dead.replay("t0", after="1h").outcome,
                client.explain("t0").code,
                client.dead.replay_many(lane="l", after="1h").replayed,
                client.dead.drop("t2"),
                client.dead.drop_many(),
                client.dead.get("t2"),
            ]

    assert await asyncio.to_thread(work) == [["t2", "t1", "t0"], 3, "replayed", "not-due", 1, "dropped", 0, None]


# -- progress --------------------------------------------------------------------------------------------------


BARS = {
    "replay of all": (("replay", "--all", "--in", "1h"), "3 of 3 dead letters"),
    "replay by id": (("replay", "t0", "t2", "--in", "1h"), "2 of 2 dead letters"),
    "drop of what died lately": (("drop", "--died-after", "2020-01-01T00:00:00Z", "--yes"), "3 of 3 dead letters"),
    "drop by id": (("drop", "t0", "--yes"), "1 of 1 dead letters"),
    "drop by content": (("drop", "--target", "log:", "--yes"), "2 dead letters"),
    "export": (("export",), "3 of 3 dead letters"),
}


@pytest.mark.parametrize(("words", "shown"), BARS.values(), ids=BARS.keys())
async def test_a_terminal_shows_how_far_it_is(
    server: Server, ticker: Ticker, words: tuple[str, ...], shown: str
) -> None:
    code, _, sent = await asyncio.to_thread(shown_by, "dead", *words, "--redis-url", server.url)
    assert code == 0, sent
    assert f"{shown}\r\x1b[K" in sent, sent


async def test_for_programs_no_bar_is_drawn(server: Server, ticker: Ticker) -> None:
    where = ("--redis-url", server.url)
    code, printed, sent = await asyncio.to_thread(shown_by, "dead", "replay", "--all", "--in", "1h", "--json", *where)
    assert (code, sent, json.loads(printed)["replayed"]) == (0, "", 3)
    piped = await call(server, "drop", "--all", "--yes")
    assert (piped.exit_code, piped.stderr) == (0, "")


async def test_an_id_without_a_dead_letter_is_named_below_the_bar(server: Server, ticker: Ticker) -> None:
    where = ("--redis-url", server.url)
    code, printed, sent = await asyncio.to_thread(shown_by, "dead", "drop", "nobody", "t0", "--yes", *where)
    assert (code, printed) == (1, "1 dropped\n")
    first, *rest = sent.rpartition("\x1b[K")[2].replace("\r\n", " ").split(" (")
    assert first == "mainspring: there is no dead letter 'nobody'"
    assert rest[0].endswith("try: mainspring dead list ")


async def test_dead_letters_are_counted_without_being_read(ticker: Ticker) -> None:
    client = ticker.client
    first, *_ = sorted(one.died_ms for one in (await client.dead.list()).letters)
    assert await client.dead.count() == 3
    assert await client.dead.count(died_before=first) == 0
    assert await client.dead.count(died_after=first, died_before=first + 1) == 1


async def test_show_prints_the_traceback_of_the_last_attempt_line_by_line(server: Server, ticker: Ticker) -> None:
    def fail(_: object) -> None:
        raise ValueError("no stock\x1b[2J")

    ticker.answer("log", fail)
    await ticker.client.put("log:", id="broken", after="1s", retry="1")
    await ticker.advance(seconds=1)
    lines = (await call(server, "show", "broken")).stdout.splitlines()
    first = lines.index("traceback") + 1
    shown = [line[2:] for line in lines[first:] if line.startswith("  ")]
    assert shown[0] == "Traceback (most recent call last):"
    assert any(line.endswith("in fail") for line in shown)
    assert shown[-1] == "ValueError: no stock\\x1b[2J"
    assert json.loads((await call(server, "show", "broken", "--json")).stdout)["traceback"] == "\n".join(shown)
    ticker.answer("log", lambda _: None)
