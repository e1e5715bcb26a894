"""A credential provider is asked at every connect, so a changed password or token costs one reconnect."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring import Client, Config, Scheduler
from mainspring.model.errors import ConfigError, Refused, StoreError, Unavailable
from mainspring.store.redis.servers import LinkOptions, Servers
from mainspring.testing.servers import Server, ServerCluster, cluster, standalone
from tests.support.serving import run
from tests.support.workers import until

ADMIN = "admin-secret"


class Vault:
    """A source of tokens that counts how often it was asked."""

    def __init__(self, user: str | None, token: str) -> None:
        self.user, self.token, self.asked = user, token, 0

    def login(self) -> tuple[str | None, str]:
        self.asked += 1
        return self.user, self.token

    async def alogin(self) -> tuple[str | None, str]:
        await asyncio.sleep(0)
        return self.login()


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone(password=ADMIN) as made:
        yield made


def let_in(server: Server, user: str, token: str) -> None:
    server.call("ACL", "SETUSER", user, "reset", "on", f">{token}", "~*", "&*", "+@all")


def cut_off(server: Server, user: str) -> None:
    server.call("CLIENT", "KILL", "USER", user)


def bare(server: Server) -> str:
    """The address alone: who we are comes from the provider."""
    return f"redis://127.0.0.1:{server.port}"


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_token_that_changes_while_running_is_asked_for_again(server: Server, kind: str) -> None:
    let_in(server, "app", "token-1")
    vault = Vault("app", "token-1")
    provider = vault.login if kind == "plain" else vault.alogin
    async with Client(bare(server), wait_s=30, options=LinkOptions(credentials=provider)) as client:
        await client.put("log:", 1, after="1h", id="a")
        before = vault.asked
        assert before >= 1
        await client.put("log:", 1, after="1h", id="b")
        assert vault.asked == before, "an open connection needs no new token"
        let_in(server, "app", "token-2")
        vault.token = "token-2"
        cut_off(server, "app")
        assert (await client.put("log:", 1, after="1h", id="c")).outcome == "created"
        assert vault.asked > before


async def test_the_default_user_and_the_password_of_the_server(server: Server) -> None:
    vault = Vault(None, ADMIN)
    # The provider goes before what the URL says.
    url = f"redis://:wrong@127.0.0.1:{server.port}"
    async with Client(url, options=LinkOptions(credentials=vault.login)) as client:
        assert (await client.get("none")).state == "unknown"


async def test_a_wrong_token_is_refused_and_a_provider_that_fails_is_named(server: Server) -> None:
    async def connect(provider: object, within_s: float = 30.0) -> None:
        links = await Servers.connect(bare(server), LinkOptions(connect_timeout_s=within_s, credentials=provider))  # type: ignore[arg-type]
        await links.aclose()

    with pytest.raises(Refused, match="AUTH was refused"):
        await connect(lambda: ("app", "nobody knows it"))

    def broken() -> tuple[None, str]:
        raise OSError("the token service is away")

    with pytest.raises(Unavailable, match="provider failed: OSError: the token service is away"):
        await connect(broken)

    def gone() -> tuple[None, str]:
        raise SystemExit("no such profile")

    with pytest.raises(Unavailable, match="provider failed: SystemExit: no such profile"):
        await connect(gone)

    async def slow() -> tuple[None, str]:
        await asyncio.Event().wait()
        return None, ""

    with pytest.raises(Unavailable, match=r"provider did not answer within 0\.5 s"):
        await connect(slow, within_s=0.5)
    with pytest.raises(ConfigError, match=r"must return \(user or None, password\)") as caught:
        await connect(lambda: ADMIN)
    assert ADMIN not in str(caught.value)


def test_a_provider_that_does_not_answer_holds_up_neither_a_start_nor_its_failure(server: Server) -> None:
    service, answers = threading.Event(), []

    def stuck() -> tuple[None, str]:
        service.wait(30.0)
        answers.append(ADMIN)
        return None, ADMIN

    scheduler = Scheduler(Config(redis_url=bare(server), credentials=stuck))
    with pytest.raises(Unavailable, match="provider did not answer"):
        scheduler.start()
    assert (scheduler.state, answers) == ("stopped", [])
    service.set()


async def test_a_running_scheduler_survives_a_change_of_its_token(server: Server) -> None:
    let_in(server, "app", "token-1")
    vault = Vault("app", "token-1")
    scheduler = Scheduler(Config(redis_url=bare(server), credentials=vault.login, lease_s=2))
    ran: list[int] = []

    @scheduler.handler()
    async def note(n: int) -> None:
        ran.append(n)

    async with scheduler:
        await note.now().aput(n=1)
        await until(lambda: ran == [1])
        let_in(server, "app", "token-2")
        vault.token = "token-2"
        cut_off(server, "app")
        await put_again(scheduler, note.handler.target)
        await until(lambda: ran == [1, 2])


async def put_again(scheduler: Scheduler, target: str) -> None:
    """As a careful caller does: the first call may find the connection just broken."""
    client = await scheduler.client()
    async with asyncio.timeout(60):
        while True:
            try:
                await client.put(target, {"n": 2}, id="second")
                return
            except StoreError:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def nodes() -> Iterator[ServerCluster]:
    with cluster(3, 0) as made:
        yield made


async def test_every_server_of_a_cluster_gets_the_token(nodes: ServerCluster) -> None:
    for server in nodes.masters:
        let_in(server, "app", "token")
    vault = Vault("app", "token")
    async with Client(nodes.url, namespace="vault", options=LinkOptions(credentials=vault.login)) as client:
        await client.put("log:", 1, after="1h", id="a")
    users = [line for one in nodes.masters for line in one.call("ACL", "LIST") if b"user app " in line]
    assert len(users) == len(nodes.masters)
    assert vault.asked >= len(nodes.masters)


def test_commands_take_a_provider_by_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "vault_of_test.py").write_text(f"def login():\n    return None, {ADMIN!r}\n")
    environ = {"MAINSPRING_REDIS_URL": bare(server), "PYTHONPATH": str(tmp_path)}
    refused = run("task", "get", "x", cwd=tmp_path, **environ)
    assert refused.returncode == 1
    assert "NOAUTH" in refused.stderr
    ended = run("task", "get", "x", cwd=tmp_path, MAINSPRING_CREDENTIALS="vault_of_test:login", **environ)
    assert "there is no task 'x' (namespace main" in ended.stderr
