"""A cable carries everything until it is pulled, parts the nodes of a run, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mainspring.client.client import Client
from mainspring.store.keys import Keyspace
from mainspring.testing.history import FaultEvent
from mainspring.testing.servers import wait_until
from tests.support.chaos.faults import Faults, Ground
from tests.support.chaos.fleet import Fleet
from tests.support.chaos.network import Cable, refused
from tests.support.chaos.profile import Planned, Profile
from tests.support.chaos.recorder import Journal, Recorder
from tests.support.chaos.servers import Standalone
from tests.support.chaos.wire_log import Witness

CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()"
CRASH = "from tests.support.chaos.network import Cable; print(Cable().plug, flush=True); input()"
LINKS = Path("/sys/class/net")
IFF_UP = 1
PROFILE = Profile("parted", "standalone", {"partition": 1}, nodes=1, partitions=2, lease_s=1.0)


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    why_not = refused()
    if why_not is not None:
        pytest.skip(f"network namespaces are not allowed here: {why_not}")


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    yield made
    made.remove()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(0.01)


def plugged_in(plug: str) -> bool:
    # The flag changes with the command; `operstate` is the kernel's later opinion, up to a second behind.
    return bool(int((LINKS / plug / "flags").read_text(), 16) & IFF_UP)


def test_no_packet_comes_through_while_the_cable_is_pulled(cable: Cable) -> None:
    with cable.listen() as listener:
        call = [*cable.inside, sys.executable, "-I", "-S", "-c", CALL, *map(str, listener.getsockname())]
        assert subprocess.run([*call, "20"], check=False).returncode == 0
        assert cable.pull()
        assert subprocess.run([*call, "1"], check=False, stderr=subprocess.DEVNULL).returncode == 1
        assert cable.plug_in()
        # The kernel may take a second to notice: then the first packet is lost, and the next follows a second later.
        assert subprocess.run([*call, "20"], check=False).returncode == 0


def test_two_cables_have_different_addresses(cable: Cable) -> None:
    other = Cable()
    try:
        assert other.host != cable.host
    finally:
        other.remove()


def test_a_removed_cable_is_gone_and_cannot_be_pulled(cable: Cable) -> None:
    assert (LINKS / cable.plug).exists()
    cable.remove()
    assert not (LINKS / cable.plug).exists()
    assert not cable.pull()
    assert not cable.plug_in()
    cable.remove()


def test_a_run_that_is_killed_leaves_no_cable_behind() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CRASH], stdin=pipe, stdout=pipe, text=True) as run:
        assert run.stdout is not None
        plug = run.stdout.readline().strip()
        assert (LINKS / plug).exists()
        os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not (LINKS / plug).exists(), "the kernel removes the cable of a killed run")


def test_without_the_tools_there_is_no_cable_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare" in str(refused())


@asynccontextmanager
async def ground(folder: Path) -> AsyncIterator[Ground]:
    keys, journal = Keyspace("parted", PROFILE.partitions), Journal(folder / "history.jsonl")
    witness = Witness(keys, journal.wrote)
    recorder = Recorder(journal, witness, folder / "recorder")
    await recorder.start()
    stage = await asyncio.to_thread(Standalone, PROFILE, keys, witness)
    fleet = Fleet(stage, recorder, folder, lease_s=PROFILE.lease_s, bugs=(), cabled=True)
    try:
        async with Client(stage.direct_url, namespace=keys.namespace, partitions=PROFILE.partitions):
            pass
        yield Ground(stage, fleet, [], journal, recorder, keys, PROFILE.lease_s)
    finally:
        await fleet.aclose()
        await stage.aclose()
        await recorder.aclose()
        journal.close()


async def test_a_partition_pulls_the_cable_of_a_node_and_nothing_of_it_outlives_the_node(tmp_path: Path) -> None:
    async with ground(tmp_path) as on:
        await on.fleet.ready(1)
        [member] = on.fleet.live
        assert member.cable is not None
        plug = member.cable.plug
        assert plugged_in(plug)
        strike = asyncio.create_task(Faults(on).strike(Planned(0.0, "partition", 0.0, 0.0)))
        await until(lambda: not plugged_in(plug))
        assert not member.road.weather.silent
        await strike
        assert plugged_in(plug)
        assert [one.what for one in on.journal.events if isinstance(one, FaultEvent)] == [f"partition of {member.name}"]
        await on.fleet.kill(member)
        await until(lambda: not (LINKS / plug).exists())
        left = (await on.fleet.join()).cable
    assert left is not None
    assert not (LINKS / left.plug).exists()
