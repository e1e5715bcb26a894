"""A cable that can be pulled: a network namespace whose only way out is one pair of virtual Ethernet ends.

A proxy that falls silent still answers for the network: it takes every packet. When the cable is pulled, the kernel of
the node itself finds that nothing comes back: packets vanish, connections stand, and what was sent arrives late and
all at once when it is plugged in again.

    cable = Cable()
    listener = cable.listen()                      # what the namespace can reach of this machine: nothing else
    Popen([*cable.inside, "python", …])            # a process that has no other network
    cable.pull()
    …
    cable.plug_in()
    cable.remove()

The namespace has no name. It lives as long as a process in it: a keeper, which ends when this process does, however
that ends. With the namespace the kernel removes both ends of the cable, so no run leaves anything behind for the next.
"""

import contextlib
import secrets
import socket
import subprocess
import sys
import threading
from ipaddress import IPv4Address
from typing import Final

_KEEPER: Final = ("unshare", "--net", "sh", "-c", "echo made; exec cat")
_FIRST_NET: Final = IPv4Address("198.18.0.0")
"""198.18.0.0/15 is set aside for tests of networks: nobody's own addresses lie there."""
_NETS: Final = 1 << 15
_NET_SIZE: Final = 4
_PATIENCE_S: Final = 10.0
_CALL: Final = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


class NoCable(Exception):
    """Network namespaces cannot be had here; the message says why."""


class Cable:
    """A network namespace and the cable between it and this machine."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.plug = f"ms{secrets.token_hex(5)}"
        """The name of this machine's end."""
        self._keeper = _keeper()
        self.inside: tuple[str, ...] = ("nsenter", f"--net=/proc/{self._keeper.pid}/ns/net", "--")
        """What to put before a command so that it runs at the far end."""
        try:
            _ip(f"link add {self.plug} type veth peer name far netns {self._keeper.pid}")
            # No two links of a machine have the same number, so no two cables have the same address.
            net = _FIRST_NET + socket.if_nametoindex(self.plug) % _NETS * _NET_SIZE
            self.host = str(net + 1)
            """This machine, as seen from the far end."""
            _ip(f"addr add {self.host}/30 dev {self.plug}", f"link set {self.plug} up")
            _ip(f"addr add {net + 2}/30 dev far", "link set far up", "link set lo up", inside=self.inside)
        except (NoCable, OSError):
            self.remove()
            raise

    def listen(self) -> socket.socket:
        """A socket on a free port of this end, for whoever calls from the far end."""
        listener = socket.socket()
        try:
            # Bound to the cable too: when it is pulled, answers must not go looking for another way.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.plug.encode())
            listener.bind((self.host, 0))
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    def pull(self) -> bool:
        """Nothing passes any more, in either direction. False if the cable was removed meanwhile."""
        return self._set("down")

    def plug_in(self) -> bool:
        """Everything passes again. False if the cable was removed meanwhile."""
        return self._set("up")

    def _set(self, state: str) -> bool:
        with self._turn:
            if self._keeper.returncode is None:
                _ip(f"link set {self.plug} {state}")
            return self._keeper.returncode is None

    def remove(self) -> None:
        """Take both ends away; processes at the far end have no network from then on."""
        with self._turn:
            if self._keeper.returncode is not None:
                return
            with contextlib.suppress(NoCable):  # never made
                _ip(f"link del {self.plug}")
            self._keeper.communicate(timeout=_PATIENCE_S)


def refused() -> str | None:
    """Why there can be no cables here (no rights, no tools, a firewall), or None. Makes one and sends through it."""
    try:
        cable = Cable()
    except (NoCable, OSError) as error:
        return str(error)
    try:
        with cable.listen() as listener:
            call = [*cable.inside, sys.executable, "-I", "-S", "-c", _CALL, *map(str, listener.getsockname())]
            subprocess.run(call, check=True, capture_output=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nothing comes through a cable: {error}"
    finally:
        cable.remove()
    return None


def _keeper() -> "subprocess.Popen[bytes]":
    """The process that keeps a namespace in being until its input ends."""
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C is for the run, which takes its cables away in order.
    keeper = subprocess.Popen(_KEEPER, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert keeper.stdout is not None
    if keeper.stdout.readline() != b"made\n":
        _, complaint = keeper.communicate(timeout=_PATIENCE_S)
        raise NoCable(complaint.decode(errors="replace").strip())
    return keeper


def _ip(*lines: str, inside: tuple[str, ...] = ()) -> None:
    """Commands of `ip`, here or in a namespace."""
    call = [*inside, "ip", "-batch", "-"]
    done = subprocess.run(call, input="\n".join(lines).encode(), capture_output=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise NoCable(f"ip {'; '.join(lines)}: {done.stderr.decode(errors='replace').strip()}")
