"""Start-up checks on real servers, healthy ones, careless ones and ones that do not let us ask."""

import re
import time
from collections.abc import Iterator, Mapping

import pytest

from mainspring.store.redis.servers import Servers
from mainspring.store.server_checks import Check, check_server
from mainspring.testing.servers import Kind, Server, sentinel, standalone


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    with standalone(kind) as started:
        yield started


async def checks_of(url: str, apart_s: float = 0) -> Mapping[str, Check]:
    links = await Servers.connect(url)
    try:
        checks = await check_server(links.for_slot(0), now=lambda: time.time() + apart_s)
    finally:
        await links.aclose()
    return {check.name: check for check in checks}


async def test_a_healthy_server_is_ok_in_everything(kind: Kind) -> None:
    with standalone(kind, aof=True) as server:
        checks = await checks_of(server.url)
    assert {check.status for check in checks.values()} == {"ok"}
    assert list(checks) == ["version", "role", "eviction", "persistence", "clock"]
    assert kind.capitalize() in checks["version"].message


async def test_no_persistence_warns_with_the_lines_that_repair_it(server: Server) -> None:
    check = (await checks_of(server.url))["persistence"]
    assert check.status == "warning"
    assert "every task" in check.message
    assert "CONFIG SET appendonly yes" in check.message


async def test_snapshots_alone_warn_what_is_lost(server: Server) -> None:
    server.call("CONFIG", "SET", "save", "3600 1")
    check = (await checks_of(server.url))["persistence"]
    assert check.status == "warning"
    assert "save 3600 1" in check.message


async def test_a_server_that_evicts_is_warned_about(server: Server) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    check = (await checks_of(server.url))["eviction"]
    assert check.status == "warning"
    assert "noeviction" in check.message


async def test_a_clock_apart_is_measured(server: Server) -> None:
    check = (await checks_of(server.url, apart_s=90))["clock"]
    assert check.status == "warning"
    behind = re.fullmatch(r"the server's clock is ([0-9.]+) s behind.*", check.message)
    assert behind is not None, check.message
    assert 90 <= float(behind[1]) < 120, "and the way there"
    check = (await checks_of(server.url, apart_s=-90))["clock"]
    ahead = re.fullmatch(r"the server's clock is ([0-9.]+) s ahead.*", check.message)
    assert ahead is not None, check.message
    assert 60 < float(ahead[1]) <= 90, "less the way back"


async def test_info_still_answers_if_config_is_denied(server: Server) -> None:
    server.call("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config")
    checks = await checks_of(f"redis://app:pw@127.0.0.1:{server.port}")
    assert checks["eviction"].status == "ok"
    assert checks["persistence"].status == "warning"


async def test_the_answer_is_unknown_if_info_and_config_are_denied(server: Server) -> None:
    server.call("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config", "-info")
    checks = await checks_of(f"redis://app:pw@127.0.0.1:{server.port}")
    for name in ("version", "role", "eviction", "persistence"):
        assert checks[name].status == "unknown"
        assert "refuses INFO" in checks[name].message
    assert "refuses CONFIG GET" in checks["eviction"].message
    assert checks["clock"].status == "ok"


async def test_config_answers_if_only_info_is_denied(server: Server) -> None:
    server.call("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-info")
    checks = await checks_of(f"redis://app:pw@127.0.0.1:{server.port}")
    assert checks["eviction"].status == "ok"
    assert checks["persistence"].status == "warning"
    assert checks["version"].status == "unknown"


async def test_a_replica_is_an_error(kind: Kind) -> None:
    with sentinel(kind) as group:
        check = (await checks_of(group.replica.url))["role"]
    assert check.status == "error"
    assert f":{group.primary.port}" in check.message
