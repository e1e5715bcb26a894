"""`mainspring verify` as a person and a program use it; and the page that explains it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mainspring import Client
from mainspring.store.verify.report import KINDS
from mainspring.testing.servers import Server
from tests.support.paths import ROOT


def run(*arguments: str, server: Server | None, namespace: str = "main") -> "subprocess.CompletedProcess[str]":
    where = [] if server is None else ["--redis-url", server.url]
    command = [sys.executable, "-m", "mainspring", "verify", *where, "--namespace", namespace, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fill(url: str, namespace: str) -> None:
    async def put() -> None:
        async with Client(url, namespace=namespace) as client:
            for number in range(10):
                await client.put("log:", number, after="30m", id=f"order-{number}")
            await client.cancel("order-9")

    asyncio.run(put())


def damage(server: Server, namespace: str) -> None:
    """One list loses its slice, one counter is wrong, one key is a stranger's."""
    keys: Sequence[bytes] = server.call("KEYS", f"{{{namespace}:*}}:slices")
    first, second, *_ = sorted(keys)
    server.call("DEL", first)
    server.call("HINCRBY", second.replace(b"slices", b"n"), "accepted", 3)
    server.call("SET", f"{{{namespace}}}:note", "x")


def test_a_namespace_in_order_is_proven_so_in_three_lines(mainspring_server: Server, mainspring_namespace: str) -> None:
    fill(mainspring_server.url, mainspring_namespace)
    ended = run(server=mainspring_server, namespace=mainspring_namespace)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert lines[1] == "accepted 10 = pending 9 + fired 0 + queued 0 + done 0 + cancelled 1 + replaced 0 + dead 0"
    assert lines[2:] == ["the counters balance, nothing is orphaned"]


def test_findings_are_reported_repaired_on_request_and_counted_by_the_exit_code(
    mainspring_server: Server, mainspring_namespace: str
) -> None:
    fill(mainspring_server.url, mainspring_namespace)
    damage(mainspring_server, mainspring_namespace)
    looked = run(server=mainspring_server, namespace=mainspring_namespace)
    assert looked.returncode == 1
    for kind in ("orphan-list", "orphan-index", "unbalanced", "unknown-key"):
        assert f"\n{kind}: {KINDS[kind]}" in looked.stdout
    assert "repaired" not in looked.stdout
    assert looked.stdout.splitlines()[-1].endswith("to repair, add --repair")

    repaired = run("--repair", "--json", server=mainspring_server, namespace=mainspring_namespace)
    assert repaired.returncode == 1, "a stranger's key is left"
    report = json.loads(repaired.stdout)
    assert report["left"] == 1
    assert report["books"]["accepted"] == 10
    assert report["books"]["missing"] == 0
    assert [row["kind"] for row in report["findings"] if not row["repaired"]] == ["unknown-key"]
    assert all(row["repair"] for row in report["findings"])

    mainspring_server.call("DEL", f"{{{mainspring_namespace}}}:note")
    assert run(server=mainspring_server, namespace=mainspring_namespace).returncode == 0


def test_a_namespace_that_is_not_there_is_neither_clean_nor_made(mainspring_server: Server) -> None:
    ended = run(server=mainspring_server, namespace="misspelt")
    assert ended.returncode == 2
    assert "nothing to verify: namespace misspelt on redis://" in ended.stderr
    assert mainspring_server.call("EXISTS", "{misspelt}:meta") == 0


def test_verify_without_repair_writes_nothing(mainspring_server: Server, mainspring_namespace: str) -> None:
    fill(mainspring_server.url, mainspring_namespace)
    damage(mainspring_server, mainspring_namespace)
    assert changes_of(mainspring_server, mainspring_namespace) == 0, "with findings of several kinds"
    mainspring_server.call("HDEL", f"{{{mainspring_namespace}}}:meta", "format", "partitions")
    mainspring_server.call("HSET", f"{{{mainspring_namespace}}}:meta", "joined", 1)
    assert changes_of(mainspring_server, mainspring_namespace) == 0, "nor where the partition count is lost"


def changes_of(server: Server, namespace: str) -> int:
    """How many changes the server counted while `verify` looked."""
    before = int(server.info("persistence")["rdb_changes_since_last_save"])
    assert run(server=server, namespace=namespace).returncode in (1, 2)
    return int(server.info("persistence")["rdb_changes_since_last_save"]) - before


def test_the_embedded_server_of_a_folder_can_be_verified(tmp_path: Path) -> None:
    put = [sys.executable, "-m", "mainspring", "task", "put", "--in", "30m", "--data-dir", str(tmp_path), "1"]
    subprocess.run(put, capture_output=True, timeout=60, check=True)
    ended = run("--data-dir", str(tmp_path), server=None)
    assert ended.returncode == 0, ended.stderr
    assert "pending 1 " in ended.stdout


def test_the_operations_page_explains_every_kind_of_finding() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"| `{kind}` |" in page, kind
