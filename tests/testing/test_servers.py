"""The test servers themselves: data survives what it should, and no server outlives its process."""

import os
import signal
import subprocess
import sys

from mainspring.testing.servers import standalone, wait_until

_STARTS_AND_WAITS = """
import sys
from mainspring.testing.servers import standalone
with standalone() as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An ended process that has not been waited for still has its pid.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return not state.stdout.startswith("Z")


def test_a_server_dies_with_a_killed_process() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _STARTS_AND_WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # even one that cannot act on a polite signal
        owner.kill()
    wait_until(lambda: not _alive(pid), "the server is gone")


def test_an_append_only_server_has_its_data_after_a_kill() -> None:
    with standalone(aof=True, extra_config={"appendfsync": "always"}) as server:
        server.call("SET", "a", "kept")
        before = server.pid
        server.kill()
        assert not server.running
        server.restart()
        assert server.pid != before
        assert server.call("GET", "a") == b"kept"


def test_a_plain_server_keeps_nothing_and_leaves_no_folder() -> None:
    with standalone(password="x y") as server:
        server.call("SET", "a", "lost")
        server.restart()
        assert server.call("GET", "a") is None
    assert not server.folder.exists()
