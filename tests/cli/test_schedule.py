"""`mainspring schedule …`: what a person types and reads; files that are applied; a file that a node watches."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mainspring import Config, Scheduler
from mainspring.cli import schedule
from mainspring.client.client import Client
from mainspring.client.sync import SyncClient
from mainspring.model.audit import Change
from mainspring.model.errors import Conflict, InvalidInput, NotFound
from mainspring.node.node import Node, ScheduleWatch
from mainspring.scheduler.publishing import publish
from mainspring.store.access import read_audit
from mainspring.testing.servers import Server
from tests.support.terminal import shown_by

PATIENCE_S = 60
FILE = """
[defaults]
timezone = "Europe/Paris"

[schedules.nightly]
cron = "0 2 * * *"
target = "command:backup"

[schedules.ping]
every = "30s"
target = "https://example.com/ping"
retry = { retries = 2, base = "200ms", jitter = "500ms" }
timeout = "500ms"
payload = { a = 1 }
"""


@pytest.fixture
def client(server: Server) -> Iterator[SyncClient]:
    server.call("FLUSHALL")
    with SyncClient(server.url, namespace="main", partitions=4) as opened:
        yield opened


def call(server: Server, *words: str) -> Result:
    return CliRunner().invoke(schedule.app, [*words, "--redis-url", server.url])


def told(server: Server, *words: str) -> dict[str, object]:
    result = call(server, *words, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_a_revision_names_the_user_of_the_command(
    server: Server, client: SyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    told(server, "add", "job", "--every", "1h", "--target", "null:")
    told(server, "edit", "job", "--every", "2h")
    told(server, "pause", "job")
    told(server, "resume", "job", "--by", "bob")
    told(server, "rollback", "job")
    file = tmp_path / "jobs.toml"
    file.write_text('[schedules.filed]\nevery = "1h"\ntarget = "null:"\n')
    told(server, "apply", "-f", str(file))
    assert [one.by for one in client.schedules.history("job")] == ["ann", "bob", "ann", "ann", "ann"]
    assert [one.by for one in client.schedules.history("filed")] == ["ann"]


def test_a_schedule_is_added_shown_edited_and_removed(server: Server, client: SyncClient) -> None:
    added = told(
        server, "add", "nightly", "--cron", "0 2 * * *", "--tz", "Europe/Paris", "--target", "command:backup",
        "--payload", '{"full": true}',
    )  # fmt: skip
    assert (added["generation"], added["payload"], added["state"]) == (1, {"full": True}, "active")
    following = added["next"]
    assert isinstance(following, list)
    assert len(following) == 3
    assert all("T02:00:00+0" in run for run in following)
    shown = call(server, "show", "nightly").stdout
    assert "command:backup" in shown
    assert shown.count("  next ") == 3
    listed = call(server, "list").stdout
    assert re.search(r"^nightly  active  \S+Z  0 2 \* \* \*  Europe/Paris  command:backup$", listed, re.MULTILINE)
    diff = told(server, "diff", "nightly", "--cron", "30 3 * * *")
    assert diff == {"changes": {"cron": [["0 2 * * *"], ["30 3 * * *"]]}}
    assert "cron" in call(server, "edit", "nightly", "--cron", "30 3 * * *", "--dry-run").stdout
    assert told(server, "show", "nightly")["generation"] == 1
    edited = told(server, "edit", "nightly", "--cron", "30 3 * * *", "--by", "ann", "--note", "later")
    assert (edited["generation"], edited["cron"]) == (2, ["30 3 * * *"])
    assert "by ann: later" in call(server, "history", "nightly").stdout
    assert told(server, "rollback", "nightly")["cron"] == ["0 2 * * *"]
    assert told(server, "pause", "nightly", "--reason", "move", "--until", "2h")["state"] == "paused"
    assert told(server, "resume", "nightly")["state"] == "active"
    assert str(told(server, "trigger", "nightly")["id"]).startswith("nightly@")
    filled = told(
        server, "backfill", "nightly", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-11T00:00:00Z", "--dry-run"
    )
    assert filled["planned"] == 10
    assert told(server, "remove", "nightly") == {"name": "nightly", "removed": True}
    assert call(server, "remove", "nightly").exit_code == 1
    assert call(server, "show", "nightly").exit_code == 1


def test_a_terminal_shows_how_far_a_backfill_is(server: Server, client: SyncClient) -> None:
    client.schedules.add("job", every="1m", target="log:", start="2026-01-01T00:00:00Z")
    day = ("schedule", "backfill", "job", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-02T00:00:00Z")
    code, printed, sent = shown_by(*day, "--redis-url", server.url)
    assert (code, printed) == (0, "job: 1440 runs put, 0 were known\n")
    assert "1000 of 1440 runs" in sent
    assert sent.endswith("1440 of 1440 runs\r\x1b[K")
    assert shown_by(*day, "--json", "--redis-url", server.url)[2] == ""


def test_revisions_and_diffs_say_what_changes_in_the_words_of_the_options(server: Server, client: SyncClient) -> None:
    client.schedules.add(
        "job", cron="0 2 * * *", target="log:", payload={"full": True}, end=1_900_000_000_000, max_runs=9
    )
    diff = told(
        server, "diff", "job", "--payload", '{"full": 1}', "--jitter", "5s", "--tz", "Asia/Tokyo", "--note", "x"
    )
    assert diff == {
        "changes": {
            "payload": [{"full": True}, {"full": 1}],
            "jitter": ["0ms", "5s"],
            "timezone": ["UTC", "Asia/Tokyo"],
        }
    }
    text = call(server, "edit", "job", "--cron", "0 3 * * *", "--dry-run").stdout
    assert "cron: 0 2 * * * -> 0 3 * * *" in text
    assert text.count("T03:00:00") + text.count(" 03:00:00+00:00") == 3, "the next three runs after the edit"
    edited = told(
        server, "edit", "job", "--end", "", "--max-runs", "0", "--exclude", "2030-01-01", "--note", "for good"
    )
    assert ("end" in edited, "max_runs" in edited, edited["exclude"]) == (False, False, ["2030-01-01"])
    assert "exclude" not in told(server, "edit", "job", "--exclude", "")
    lines = call(server, "history", "job").stdout.splitlines()
    assert "      max_runs: 9 -> none" in lines
    assert lines[-1] == "      0 2 * * * in UTC, log:"
    assert "tz data" in call(server, "show", "job").stdout


def test_schedules_that_name_no_zone_have_that_of_the_settings(
    server: Server, client: SyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSPRING_TIMEZONE", "Asia/Tokyo")
    assert told(server, "add", "typed", "--cron", "0 2 * * *", "--target", "log:")["timezone"] == "Asia/Tokyo"
    file = tmp_path / "s.toml"
    text = "[schedules.file]\ncron = '0 2 * * *'\ntarget = 'log:'\n[schedules.own]\ntimezone = 'UTC'\n"
    file.write_text(text + "cron = '0 2 * * *'\ntarget = 'log:'\n", encoding="utf-8")
    applied = call(server, "apply", "-f", str(file))
    assert applied.stdout.count(" 02:00:00+09:00 JST") == 3, "the next three runs are shown"
    (tmp_path / "tab").write_text("0 2 * * * /bin/true\n", encoding="utf-8")
    assert call(server, "import", str(tmp_path / "tab")).exit_code == 0
    zones = {view.name: view.definition.zone for view in client.schedules.all()}
    assert zones == {"typed": "Asia/Tokyo", "file": "Asia/Tokyo", "own": "UTC", "true": "Asia/Tokyo"}
    preview = CliRunner().invoke(schedule.app, ["preview", "0 2 * * *", "--count", "1", "--json"])
    assert json.loads(preview.stdout)["runs"][0].endswith("T02:00:00+09:00")


def test_a_file_that_could_not_work_is_refused_in_a_dry_run_too_and_nothing_of_it_is_written(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    client.schedules.add("laned", every="1h", target="log:", lane="a")
    file = tmp_path / "team.toml"
    for wrong, words in (
        ("[schedules.never]\nevery = '1h'\ntarget = 'log:'\nexclude = '* * * * *'\n", "never run"),
        ("[schedules.laned]\nevery = '1h'\ntarget = 'log:'\nlane = 'b'\n", "lane cannot be changed"),
    ):
        file.write_text("[schedules.good]\nevery = '1h'\ntarget = 'log:'\n" + wrong, encoding="utf-8")
        for dry in (["--dry-run"], []):
            result = call(server, "apply", "-f", str(file), *dry)
            assert words in str(result.exception)
    assert [view.name for view in client.schedules.all()] == ["laned"]


def test_mistakes_are_reported_and_nothing_is_written(server: Server, client: SyncClient) -> None:
    wrong = call(server, "add", "job", "--cron", "0 25 * * *", "--target", "log:")
    assert isinstance(wrong.exception, InvalidInput)
    assert "hour" in str(wrong.exception)
    both = call(server, "add", "job", "--every", "1h", "--target", "log:", "--retry", "3", "--retry-base", "1s")
    assert isinstance(both.exception, InvalidInput)
    assert call(server, "add", "job", "--every", "1h", "--target", "log:").exit_code == 0
    assert isinstance(call(server, "add", "job", "--every", "1h", "--target", "log:").exception, Conflict)
    assert isinstance(call(server, "edit", "nobody", "--every", "1h").exception, NotFound)
    too_long = call(
        server, "add", "hook", "--every", "2s", "--target", "https://example.com/", "--retries", "2", "--retry-base",
        "200ms", "--retry-jitter", "500ms", "--timeout", "500ms",
    )  # fmt: skip
    assert "3.1 s" in str(too_long.exception)


def test_the_worst_case_of_a_schedules_retries_is_shown_as_a_sum(server: Server, client: SyncClient) -> None:
    policy = "4 base=200ms factor=2 jitter=500ms"
    client.schedules.add("hook", every="1h", target="https://example.com/", retry=policy, timeout="1s")
    shown = call(server, "show", "hook").stdout
    assert "4 x 1 s + 200 ms + 400 ms + 800 ms + 3 x 500 ms = 6.9 s" in shown


def test_the_sum_is_shown_for_retries_and_timeouts_that_the_settings_say(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    settings = tmp_path / "mainspring.toml"
    settings.write_text('[targets.shop]\nurl = "https://example.com/"\ntimeout = "2s"\nretry = "2 base=1s"\n')
    client.schedules.add("job", every="1h", target="target:shop")
    words = ("show", "job", "--config", str(settings))
    assert "worst case  2 x 2 s + 1 s = 5 s\n" in call(server, *words).stdout
    assert told(server, *words)["worst_case"] == {"ms": 5_000, "sum": "2 x 2 s + 1 s = 5 s"}
    assert "worst case  1 s + 2 s + 4 s" in call(server, "show", "job").stdout, "nobody else says so"


def test_a_written_schedule_is_checked_by_the_settings_policy_too(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    said = "warning: job: one run may take 6 x 70 s + 1 s + 2 s"
    web = ("--target", "https://example.com/", "--timeout", "70s")
    assert said in call(server, "add", "job", "--every", "1m", *web).stderr
    assert said in call(server, "edit", "job", "--every", "50s").stderr
    assert said in call(server, "rollback", "job").stderr
    assert call(server, "edit", "job", "--overlap", "allow").stderr == "", "runs may go beside each other"
    file = tmp_path / "team.toml"
    file.write_text(
        "[schedules.job]\nevery = '55s'\ntarget = 'https://example.com/'\ntimeout = '70s'\n", encoding="utf-8"
    )
    for words in (["--dry-run"], ["--dry-run", "--json"], ["--json"]):
        assert said in call(server, "apply", "-f", str(file), *words).stderr


async def test_a_node_warns_of_what_is_not_meant_in_its_file(
    watched: "Watched", caplog: pytest.LogCaptureFixture
) -> None:
    await watched.rewrite("[schedules.job]\nevery = '1m'\ntarget = 'https://example.com/'\n")
    assert "schedule 'job': one run may take 6 x 15 s" in caplog.text
    assert await watched.names() == ["job"], "and it runs"


def test_lint_speaks_of_clock_changes_and_midnight(server: Server, client: SyncClient, tmp_path: Path) -> None:
    client.schedules.add("night", cron="30 2 * * *", timezone="Europe/Paris", target="log:")
    client.schedules.add("midnight", cron="0 0 * * *", target="log:")
    client.schedules.add("fine", every="1h", target="log:")
    result = call(server, "lint")
    assert result.exit_code == 1
    assert {line.partition(":")[0] for line in result.stdout.splitlines()} == {"night", "midnight"}
    assert call(server, "lint", "fine").exit_code == 0
    assert isinstance(call(server, "lint", "nobody").exception, NotFound)
    client.schedules.add("slow", every="10s", target="log:", timeout="60s")
    assert "[too-long]" in call(server, "lint", "slow").stdout
    assert "[too-long]" in call(server, "edit", "slow", "--timeout", "50s").stderr
    file = tmp_path / "s.toml"
    file.write_text(FILE, encoding="utf-8")
    assert CliRunner().invoke(schedule.app, ["lint", "-f", str(file)]).exit_code == 1


def test_a_schedule_that_is_over_does_not_hold_up_the_rest_of_its_file(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "team.toml"
    late = "[schedules.late]\nevery = '1h'\ntarget = 'log:'\nend = 2020-01-01\n"
    file.write_text("[schedules.good]\nevery = '1h'\ntarget = 'log:'\n" + late, encoding="utf-8")
    result = call(server, "apply", "-f", str(file))
    assert "! late: its end has passed" in result.stdout
    assert "1 changed, 1 as they were" in result.stderr
    assert {one.name for one in client.schedules.list().schedules} == {"good"}


def test_a_file_says_whose_its_schedules_are(server: Server, client: SyncClient, tmp_path: Path) -> None:
    files = [tmp_path / team / "schedules.toml" for team in ("a", "b")]
    for file in files:
        team = file.parent.name
        file.parent.mkdir()
        file.write_text(f"source = '{team}'\n[schedules.{team}]\nevery = '1h'\ntarget = 'log:'\n", encoding="utf-8")
        assert call(server, "apply", "-f", str(file), "--prune").exit_code == 0
    found = {one.name: one.definition.source for one in client.schedules.list().schedules}
    assert found == {"a": "a", "b": "b"}
    taken_over = call(server, "apply", "-f", str(files[0]), "--source", "c")
    assert "~ a\n    source: 'a' -> 'c'\n" in taken_over.stdout, "and not a change of nothing"
    files[0].write_text("source = 1\n", encoding="utf-8")
    assert "source is 1; give a name" in str(call(server, "apply", "-f", str(files[0])).exception)


def test_times_without_an_offset_are_of_the_schedules_zone(server: Server, client: SyncClient, tmp_path: Path) -> None:
    call(
        server,
        "add",
        "job",
        "--every",
        "1h",
        "--target",
        "log:",
        "--timezone",
        "Asia/Tokyo",
        "--start",
        "2031-01-01T09:00",
    )
    file = tmp_path / "team.toml"
    table = "[schedules.day]\nevery = '1h'\ntarget = 'log:'\ntimezone = 'Asia/Tokyo'\nstart = 2031-01-01\n"
    file.write_text(table, encoding="utf-8")
    assert call(server, "apply", "-f", str(file)).exit_code == 0
    found = {one.name: one.definition.start_ms for one in client.schedules.list().schedules}
    assert found == {"job": 1_924_992_000_000, "day": 1_924_992_000_000 - 9 * 3_600_000}
    result = call(server, "backfill", "job", "--from", "2026-01-01T00:00", "--to", "2026-01-02T00:00", "--dry-run")
    assert result.exit_code == 0


def test_lint_counts_default_timeouts_and_retries(server: Server, client: SyncClient) -> None:
    client.schedules.add("hook", every="30s", target="https://example.com/", retry="2 base=0.2s", overlap="buffer_one")
    assert "may take 2 x 15 s + 200 ms = 30.2 s" in call(server, "lint", "hook").stdout
    client.schedules.add("plain", every="10s", target="https://example.com/")
    assert "[too-long]" in call(server, "lint", "plain").stdout, "one attempt alone may take longer"
    client.schedules.add("hourly", every="1h", target="https://example.com/")
    assert call(server, "lint", "hourly").exit_code == 0


def test_lint_knows_the_retries_of_named_targets(server: Server, client: SyncClient, tmp_path: Path) -> None:
    client.schedules.add("job", every="60s", target="target:orders")
    assert call(server, "lint").exit_code == 0
    settings = tmp_path / "mainspring.toml"
    settings.write_text('[targets.orders]\nurl = "https://example.com/"\nretry = "5 base=10s"\n', encoding="utf-8")
    assert "[too-long]" in call(server, "lint", "--config", str(settings)).stdout


def test_a_file_is_applied_and_a_second_time_changes_nothing(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "team.toml"
    file.write_text(FILE, encoding="utf-8")
    client.schedules.add("by-hand", every="1h", target="log:")

    def steps(*words: str) -> dict[str, str]:
        answer = told(server, "apply", "-f", str(file), *words)
        rows = answer["steps"]
        assert isinstance(rows, list)
        return {row["name"]: row["action"] for row in rows}

    assert steps("--dry-run") == {"nightly": "create", "ping": "create"}
    assert client.schedules.get("nightly") is None
    assert steps() == {"nightly": "create", "ping": "create"}
    view = client.schedules.get("ping")
    assert view is not None
    assert (view.payload, view.definition.zone, view.definition.source) == ({"a": 1}, "Europe/Paris", "team")
    client.schedules.pause("ping", reason="by hand")
    assert steps("--prune") == {"nightly": "same", "ping": "same"}
    file.write_text(
        FILE.replace('"0 2 * * *"', '"0 4 * * *"').replace("[schedules.ping]", "[schedules.pong]"), encoding="utf-8"
    )
    assert steps("--dry-run") == {"nightly": "change", "pong": "create"}, "what is gone stays without --prune"
    assert steps("--prune") == {"nightly": "change", "pong": "create", "ping": "remove"}
    assert sorted(view.name for view in client.schedules.all()) == ["by-hand", "nightly", "pong"]


def test_a_crontab_is_taken_over(server: Server, client: SyncClient, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_text("0 3 * * * /usr/local/bin/backup --all\n@reboot /bin/x\n", encoding="utf-8")
    out = tmp_path / "schedules.toml"
    assert call(server, "import", str(file), "--out", str(out)).exit_code == 1
    assert "[schedules." in out.read_text(encoding="utf-8")
    result = call(server, "import", str(file), "--timezone", "Europe/Rome")
    assert result.exit_code == 1
    [added] = re.findall(r"^\[commands\.backup\]\nargv = .*$", result.stderr, re.MULTILINE)
    assert tomllib.loads(added) == {"commands": {"backup": {"argv": ["/usr/local/bin/backup", "--all"]}}}
    view = client.schedules.get("backup")
    assert view is not None
    assert (view.definition.zone, view.definition.target) == ("Europe/Rome", "command:backup")


def test_files_that_cannot_be_read_or_written_are_reported_in_one_line(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_bytes("0 3 * * * /bin/café\n".encode("latin-1"))
    assert f"{file} is not UTF-8" in str(call(server, "import", str(file)).exception)
    file.write_bytes("0 3 * * * /bin/café\n".encode("utf-8-sig"))
    assert call(server, "import", str(file), "--dry-run").exit_code == 0, "with the mark that some editors write"
    nowhere = tmp_path / "none" / "out.toml"
    assert f"{nowhere} cannot be written" in str(call(server, "import", str(file), "--out", str(nowhere)).exception)


def test_redbeat_keys_are_taken_over(server: Server, client: SyncClient) -> None:
    definition = {"name": "beat", "task": "t.a", "schedule": {"__type__": "interval", "every": 60}, "enabled": True}
    server.call("HSET", "redbeat:beat", "definition", json.dumps(definition))
    server.call("ZADD", "redbeat::schedule", 1, "redbeat:beat")
    result = call(server, "import", "--format", "redbeat", "--from", server.url)
    assert result.exit_code == 0, result.output
    view = client.schedules.get("beat")
    assert view is not None
    assert view.definition.target == "queue:celery/t.a"


class Watched:
    """A file of schedules, and who watches it."""

    def __init__(self, client: Client, file: Path) -> None:
        self.schedules = client.schedules
        self.file = file
        self.watch = ScheduleWatch(client.schedules, file, Config())

    def write(self, text: str) -> None:
        self.file.write_text(text, encoding="utf-8")

    async def rewrite(self, text: str) -> None:
        """With other words, which are applied."""
        self.write(text)
        await self.watch.step()

    async def names(self) -> list[str]:
        return sorted([view.name async for view in self.schedules.all()])


@pytest.fixture
async def watched(server: Server, tmp_path: Path) -> AsyncIterator[Watched]:
    server.call("FLUSHALL")
    async with Client(server.url, partitions=4) as client:
        made = Watched(client, tmp_path / "watched.toml")
        await made.rewrite(FILE)
        yield made


async def test_a_watched_file_is_applied_when_it_changes(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    assert await watched.names() == ["nightly", "ping"]
    with caplog.at_level(logging.ERROR):
        await watched.rewrite("[schedules.nightly]\ncron = '61 * * * *'\ntarget = 'log:'\n")
    assert "schedules are not applied" in caplog.text
    assert await watched.names() == ["nightly", "ping"], "what runs goes on"
    await watched.rewrite("[schedules.nightly]\ncron = '1 * * * *'\ntarget = 'log:'\n")
    [view] = [view async for view in watched.schedules.all()]
    assert view.definition.specs == ("1 * * * *",)
    await watched.schedules.remove("nightly")
    await watched.watch.step()
    assert await watched.names() == [], "unchanged files are left alone"
    watched.watch.again()
    await watched.watch.step()
    assert await watched.names() == ["nightly"]


@pytest.mark.parametrize(
    "table",
    [
        "every = 'often'\ntarget = 'log:'",
        "cron = '61 * * * *'\ntarget = 'log:'",
        "every = '1m'\ntarget = 'nowhere:x'",
    ],
)
def test_a_mistake_in_a_file_is_reported_with_the_schedule_that_has_it(
    server: Server, tmp_path: Path, table: str
) -> None:
    server.call("FLUSHALL")
    file = tmp_path / "many.toml"
    file.write_text(f"{FILE}\n[schedules.report]\n{table}\n", encoding="utf-8")
    answer = call(server, "apply", "-f", str(file))
    assert answer.exit_code != 0
    assert "schedule 'report': " in str(answer.exception or answer.output)


async def test_a_file_that_is_called_like_the_source_of_programs_does_not_remove_theirs(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.call("FLUSHALL")
    scheduler = Scheduler(Config(redis_url=server.url))
    scheduler.cron("0 3 * * *", "log:", name="declared")
    file = tmp_path / "code.toml"
    file.write_text(FILE, encoding="utf-8")
    async with Client(server.url, partitions=4) as client:
        await publish(client.schedules, scheduler.declared(), client.store.clock.now_ms())
        watch = ScheduleWatch(client.schedules, file, Config())
        await watch.step()
        assert "the source 'code' belongs to schedules that programs declare" in caplog.text
        assert [view.name async for view in client.schedules.all()] == ["declared"]
        file.write_text("source = 'team'\n" + FILE, encoding="utf-8")
        await watch.step()
        assert sorted([view.name async for view in client.schedules.all()]) == ["declared", "nightly", "ping"]


@pytest.mark.parametrize("where", ["[schedules.nightly]\n", "[schedules]\n[defaults]\n"])
async def test_a_watched_file_with_a_name_among_the_fields_is_a_mistake_like_others(
    watched: Watched, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    await watched.rewrite(f"{where}name = 'nightly'\n[schedules.other]\ncron = '1 * * * *'\ntarget = 'log:'\n")
    assert "unknown name" in caplog.text
    assert await watched.names() == ["nightly", "ping"]


async def test_a_watched_file_whose_schedules_keep_changing_is_applied_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def disturbed(*_: object) -> int:
        raise Conflict("schedule 'ping' keeps changing; try again")

    changed = FILE.replace("[schedules.ping]", "[schedules.pong]")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("mainspring.node.node.carry_out", disturbed)
        await watched.rewrite(changed)
    assert "schedule 'ping' keeps changing" in caplog.text
    assert await watched.names() == ["nightly", "ping"]
    await watched.watch.step()
    assert await watched.names() == ["nightly", "pong"]


async def test_a_watched_link_that_leads_to_a_file_of_the_same_age_and_size_is_followed(
    server: Server, tmp_path: Path
) -> None:
    server.call("FLUSHALL")
    file = tmp_path / "watched.toml"
    for hour in (2, 3):
        version = tmp_path / f"version-{hour}"
        version.write_text(FILE.replace("0 2 * * *", f"0 {hour} * * *"), encoding="utf-8")
        os.utime(version, (1, 1))
    file.symlink_to(tmp_path / "version-2")
    async with Client(server.url, partitions=4) as client:
        watch = ScheduleWatch(client.schedules, file, Config())
        await watch.step()
        file.unlink()
        file.symlink_to(tmp_path / "version-3")
        await watch.step()
        view = await client.schedules.get("nightly")
        assert view is not None
        assert view.definition.specs == ("0 3 * * *",)


async def test_a_watched_file_that_is_being_written_is_not_applied_by_halves(watched: Watched) -> None:
    watched.write(FILE[: FILE.index("[schedules.ping]")])  # a good file by itself
    step = asyncio.create_task(watched.watch.step())
    await asyncio.sleep(0)  # it has seen the first half
    watched.write(FILE.replace("0 2 * * *", "0 4 * * *"))
    await step
    views = {view.name: view.generation async for view in watched.schedules.all()}
    assert views == {"nightly": 2, "ping": 1}, "ping was never away"


@pytest.mark.parametrize("text", ["", "# moved\n", "[defaults]\ntimezone = 'Europe/Paris'\n"])
async def test_a_watched_file_without_schedules_removes_none_unless_it_says_so(
    watched: Watched, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    await watched.rewrite(text)
    assert await watched.names() == ["nightly", "ping"]
    assert "if there should be none, write an empty [schedules]" in caplog.text
    await watched.rewrite(text + "[schedules]\n")
    assert await watched.names() == []


async def test_secrets_are_not_in_the_log_of_a_watched_file(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.schedules.timezone = "Asia/Tokyo"
    changed = FILE.replace("a = 1", "a = 'hunter2'").replace("com/ping", "com/ping?key=hunter2")
    with caplog.at_level(logging.INFO):
        await watched.rewrite(changed.replace('timezone = "Europe/Paris"', ""))
    view = await watched.schedules.get("ping")
    assert view is not None
    assert (view.payload, view.definition.zone) == ({"a": "hunter2"}, "Asia/Tokyo")
    assert "payload: changed" in caplog.text
    assert "timezone: 'Europe/Paris' -> 'Asia/Tokyo'" in caplog.text
    assert "hunter2" not in caplog.text


async def test_changes_by_a_nodes_file_are_in_the_audit_trail(server: Server, tmp_path: Path) -> None:
    server.call("FLUSHALL")
    file = tmp_path / "filed.toml"
    file.write_text("[schedules.job]\nevery = '1h'\ntarget = 'https://h/?key=hunter2'\npayload = 'hunter2'\n")
    node = Node(Config(redis_url=server.url, partitions=4, roles=("api",), schedules=file, audit_entries=100))
    await node.start()
    try:
        assert node.client is not None
        store = node.client.store

        async def until(count: int) -> list[Change]:
            for _ in range(PATIENCE_S * 20):
                found = [one.change for one in (await read_audit(store)).changes]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.05)
            raise AssertionError(f"the trail has not come to {count} changes")

        [added] = await until(1)
        assert (added.what, added.object, added.who) == ("schedule.add", "job", "filed.toml (serve --schedules)")
        assert added.address
        node.apply_schedules()  # nothing is new
        file.write_text("[schedules.job]\nevery = '2h'\ntarget = 'https://h/?key=hunter2'\n")
        node.apply_schedules()
        edited, *_ = await until(2)
        assert edited.before is not None
        assert edited.after is not None
        assert (edited.what, edited.before["specs"], edited.after["specs"]) == (
            "schedule.edit", ["@every 1h"], ["@every 2h"],
        )  # fmt: skip
        file.write_text("[schedules]\n")
        node.apply_schedules()
        removed, *rest = await until(3)
        assert (removed.what, removed.object, removed.after, len(rest)) == ("schedule.remove", "job", None, 2)
        assert "hunter2" not in repr([removed, *rest])
    finally:
        await node.stop()


def test_a_node_applies_its_file_and_runs_it_and_again_on_a_hangup(
    server: Server, client: SyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "schedules.toml"
    file.write_text("[schedules.beat]\nevery = '1s'\ntarget = 'log:'\npayload = 'tick'\n", encoding="utf-8")
    words = ["serve", "--redis-url", server.url, "--port", "0", "--schedules", str(file)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    node = subprocess.Popen(
        [sys.executable, "-m", "mainspring", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=environment, text=True,
    )  # fmt: skip
    try:
        assert node.stdout is not None
        assert [json.loads(node.stdout.readline()) for _ in range(2)] == ["tick", "tick"]
        assert client.schedules.remove("beat")
        node.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_S
        while client.schedules.get("beat") is None:
            assert time.monotonic() < deadline, "the file was not applied again"
            time.sleep(0.05)
        assert node.poll() is None
    finally:
        node.terminate()
        node.wait(PATIENCE_S)
        if node.stdout is not None:
            node.stdout.close()
