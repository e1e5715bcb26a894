"""With the rights that `mainspring acl` prints, everything works; with fewer, the doctor says what is missing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring.client.client import Client
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.servers import Kind, Server, ServerCluster, standalone, wait_until
from tests.support.narrow_rights import ON, SECRET, TESTS_OWN, USER, rules, sign_in
from tests.support.serving import in_seconds, run, serving


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    with standalone(kind) as made:
        yield made


async def test_the_tests_of_the_data_path_run_as_that_user(fleet: Server | ServerCluster, store: Store) -> None:
    """All that use the fixtures `fleet`, `store`, `client` and `ticker` prove that its rights are enough."""
    await store.sample_clock()
    servers = fleet.masters if isinstance(fleet, ServerCluster) else [fleet]
    rows = [row for server in servers for row in server.call("CLIENT", "LIST", "TYPE", "NORMAL").decode().splitlines()]
    clients = [dict(field.partition("=")[::2] for field in row.split()) for row in rows]
    users = {client["user"] for client in clients if client["addr"].startswith("127.0.0.1:")}
    assert users == {"default" if isinstance(fleet, ServerCluster) else USER}
    assert isinstance(fleet, ServerCluster) or fleet.kind in ON
    assert not {f"+{command}" for command in TESTS_OWN} & set(rules("t*")), "what we need is not granted by the tests"


def test_the_printed_rules_work_on_a_server_and_a_node_runs_with_them(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    told = run("acl", "--user", USER, "--namespace", "shop", "--password-file", "secret", cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    assert SECRET not in told.stdout
    assert server.call(*told.stdout.split()) == b"OK"
    url = server.url.replace("://", f"://{USER}:{SECRET}@", 1)
    with serving(tmp_path) as start:
        node = start("--redis-url", url, "--namespace", "shop")
        assert node.status("/ticks", {"item": "narrow", "at": in_seconds(0.1)}) == 202
        wait_until(lambda: any("narrow" in line for line in node.lines), "the tick is printed", timeout_s=60)
        assert node.end() == 0
    assert "NOPERM" not in node.log
    refused = [row for row in server.call("ACL", "LOG") if dict(zip(row[::2], row[1::2], strict=True))]
    asked = {dict(zip(row[::2], row[1::2], strict=True))[b"object"] for row in refused}
    assert asked <= {b"config|get", b"config"}


def test_that_user_cannot_configure_the_server_nor_leave_its_namespace(server: Server) -> None:
    sign_in(server, [server], "shop")
    for line in ("CONFIG GET save", "DEBUG SLEEP 0", "FLUSHALL", "KEYS *", "GET other", "GET {shopping}:meta"):
        assert b"permission" in server.call("ACL", "DRYRUN", USER, *line.split()), line
    assert server.call("ACL", "DRYRUN", USER, "GET", "{shop}:meta") == b"OK"


async def test_a_write_succeeds_although_publishing_is_denied(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The usual user of Redis 7 has no channels. A put that failed for want of a wake-up was stored, and stored again
    when it was repeated."""
    server.call("ACL", "SETUSER", "deaf", "on", f">{SECRET}", "~*", "+@all", "resetchannels")
    async with Client(server.url.replace("://", f"://deaf:{SECRET}@", 1)) as client:
        assert (await client.put("log:", 1)).outcome == "created"
        assert (await client.put("log:", 2, id="two")).outcome == "created"
        assert (await client.put_many([Task("log:", n) for n in range(10)])).created == 10
        later = await client.put("log:", 3, after="1h")
        assert (await client.reschedule(later.id, after="1s")).outcome == "replaced"
        await client.pause(target="log:")
        assert await client.resume(target="log:")
        assert (await client.count()).pending == 13
    [told] = [record.getMessage() for record in caplog.records if record.name == "mainspring.store"]
    assert "NOPERM" in told
    assert "mainspring acl" in told


def _examined(server: Server, folder: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    told = run("doctor", "--redis-url", server.url, "--json", *options, cwd=folder)
    return told.returncode, {row["name"]: row for row in json.loads(told.stdout)}


def test_the_doctor_finds_a_right_that_is_missing(server: Server, tmp_path: Path) -> None:
    sign_in(server, [server], "main")
    code, found = _examined(server, tmp_path)
    assert (code, found["rights"]["status"]) == (0, "ok")
    server.call("ACL", "SETUSER", USER, "-setrange", "-xgroup")
    code, found = _examined(server, tmp_path)
    assert (code, found["rights"]["status"]) == (1, "error")
    assert "setrange, xgroup|create" in found["rights"]["message"]
    assert "mainspring acl" in found["rights"]["message"]
    assert server.call("DBSIZE") == 0  # it only asked
