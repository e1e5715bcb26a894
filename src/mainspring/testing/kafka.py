"""Real Kafka brokers for tests: one or several (KRaft, no ZooKeeper), on free ports, removed after use.

    with broker() as kafka:
        Config(kafka_url=kafka.url)

tools/kafka/start of the source tree starts the brokers and fetches them with Maven once, so they need Java and Maven.
Every broker listens on loopback only and dies with the process that started it, even when that process is killed.
"""

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ..model.errors import EmbeddedError
from .servers import Undertaker, free_port, wait_stopped, wait_until

START: Final = Path(__file__).parents[3] / "tools" / "kafka" / "start"
START_S: Final = 120.0
FETCH_S: Final = 600.0
QUICK: Final = "-XX:TieredStopAtLevel=1"
"""Java option: starts sooner and works less in the first minute, but is slower in the long run."""

_undertaker = Undertaker()


def missing_kafka() -> str | None:
    """Return why no broker can be started here (a reason to skip), or None. Fetches the broker if needed."""
    if not START.exists():
        return "tools/kafka/start is missing: brokers can be started from the source tree only"
    if shutil.which("java") is None:
        return "java is not on the PATH"
    prepared = subprocess.run([START, "--prepare"], capture_output=True, text=True, timeout=FETCH_S, check=False)
    return None if prepared.returncode == 0 else prepared.stderr.strip()[-300:]


class Broker:
    """One broker process, which is also its cluster's controller."""

    def __init__(self, folder: Path, port: int, jvm: str = QUICK) -> None:
        self.folder = folder
        self.port = port
        self._jvm = jvm
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"kafka://{self.servers}"

    @property
    def servers(self) -> str:
        """The address as other clients, such as kcat, expect it."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError("the broker is not running")
        return self._process.pid

    def launch(self) -> None:
        """Start the process without waiting; `wait_ready` waits until it answers."""
        with (self.folder / "log").open("ab") as log:
            environ = os.environ | {"KAFKA_JVM": self._jvm}
            command = [START, self.folder]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        _undertaker.tell("born", self._process.pid, self.folder)

    def wait_ready(self, brokers: int = 1) -> None:
        wait_until(lambda: self._knows(brokers), f"{brokers} Kafka brokers answer", timeout_s=START_S)

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def kill(self) -> None:
        """Send SIGKILL: looks like a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open and nothing answers."""
        os.killpg(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def wait_well(self) -> None:
        """Wait until topics can be created: after a long pause the broker may have no leader for a moment."""
        wait_until(self._makes_topics, "the Kafka broker makes topics", timeout_s=START_S)

    def close(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # Kill the group: at startup it has two processes, the script and the tool that formats the folder.
            os.killpg(process.pid, number)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _undertaker.tell("dead", process.pid, self.folder)

    def _makes_topics(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        # Use a new client each time: one that has found no controller waits long before it asks again.
        admin, name = AdminClient({"bootstrap.servers": self.servers, "log_level": 0}), f"probe-{uuid.uuid4().hex}"
        try:
            admin.create_topics([NewTopic(name, 1)], request_timeout=2)[name].result()
            admin.delete_topics([name], request_timeout=2)[name].result()
        except KafkaException:
            return False
        return True

    def _knows(self, brokers: int) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if self._process is None or self._process.poll() is not None:
            log = (self.folder / "log").read_text(errors="replace")[-800:]
            raise EmbeddedError(f"the Kafka broker ended during startup; its log ends:\n{log}")
        try:
            known = AdminClient({"bootstrap.servers": self.servers, "log_level": 0}).list_topics(timeout=1)
        except KafkaException:
            return False
        return len(known.brokers) >= brokers


class Brokers(Sequence[Broker]):
    """A cluster, as a sequence of its brokers."""

    def __init__(self, members: Sequence[Broker]) -> None:
        self._members = members

    def __getitem__(self, index: int) -> Broker:  # type: ignore[override]  # a cluster is never sliced
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    @property
    def servers(self) -> str:
        return ",".join(one.servers for one in self._members)

    @property
    def url(self) -> str:
        return f"kafka://{self.servers}"


@contextlib.contextmanager
def brokers(count: int, *, extra: Mapping[str, str] | None = None, jvm: str = QUICK) -> Iterator[Brokers]:
    """Start a cluster. With three brokers, topics have three replicas of which two must be in sync."""
    if reason := missing_kafka():
        raise EmbeddedError(reason)
    ports = [(free_port(), free_port()) for _ in range(count)]
    voters = ",".join(f"{number}@127.0.0.1:{controller}" for number, (_, controller) in enumerate(ports, 1))
    cluster_id = _new_cluster_id()
    with contextlib.ExitStack() as stack:
        made = []
        for number, (port, controller) in enumerate(ports, 1):
            one = Broker(Path(tempfile.mkdtemp(prefix="mainspring-kafka-")), port, jvm)
            stack.callback(one.close)
            settings = {
                **_settings(one, number, controller, count),
                "controller.quorum.voters": voters,
                **(extra or {}),
            }
            lines = [f"# cluster.id={cluster_id}", *(f"{name}={value}" for name, value in settings.items())]
            (one.folder / "server.properties").write_text("\n".join(lines) + "\n")
            one.launch()
            made.append(one)
        for one in made:
            one.wait_ready(count)
        yield Brokers(made)


@contextlib.contextmanager
def broker(*, extra: Mapping[str, str] | None = None, jvm: str = QUICK) -> Iterator[Broker]:
    """Start one broker."""
    with brokers(1, extra=extra, jvm=jvm) as made:
        yield made[0]


def _new_cluster_id() -> str:
    """Return a UUID as Kafka writes it, but never with a leading dash, which Kafka's tool takes for an option."""
    return "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def _settings(one: Broker, number: int, controller: int, count: int) -> dict[str, str]:
    replicas, in_sync = min(count, 3), min(count, 2)
    return {
        "process.roles": "broker,controller",
        "node.id": str(number),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{one.port},CONTROLLER://127.0.0.1:{controller}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(one.folder / "data"),
        "default.replication.factor": str(replicas),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(in_sync),
        # With several brokers a lost one is noticed within seconds, so that a test need not wait long for new leaders.
        # A single broker would only take itself for lost whenever the machine stalls.
        "broker.session.timeout.ms": "3000" if count > 1 else "9000",
        "broker.heartbeat.interval.ms": "500",
        "replica.lag.time.max.ms": "6000",
        # One producer and one consumer keep few threads busy; more only wake each other.
        "num.network.threads": "1",
        "num.io.threads": "2",
        # Internal topics of fifty partitions slow down each start, and no test needs them.
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
    }
