"""The consumer of ticks in the containers, on a real broker. The generator is in tests/deploy."""

import json
import re
import signal
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

from confluent_kafka import Producer

from mainspring.testing.kafka import Broker
from mainspring.testing.servers import wait_until
from tests.support.paths import ROOT
from tests.support.serving import ENVIRON

CONSUME = ROOT / "deploy" / "poc" / "consume.py"
LINE = re.compile(r"late p50 (-?\d+) ms   p99 (-?\d+) ms   early (\d+)   total (\d+)$", re.MULTILINE)


def post(kafka: Broker, topic: str, *late_s: float) -> None:
    """Ticks that were due so long ago."""
    producer = Producer({"bootstrap.servers": kafka.servers})
    for late in late_s:
        at = (datetime.now(UTC) - timedelta(seconds=late)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        producer.produce(topic, json.dumps({"item": "user1", "at": at}).encode())
    assert producer.flush(60) == 0


def test_the_consumer_counts_ticks_and_says_which_were_late_and_early(kafka: Broker, tmp_path: Path) -> None:
    topic = f"poc-{uuid.uuid4().hex[:8]}"
    post(kafka, topic, 5, 6, 7, -3600)
    out = tmp_path / "lines"
    with out.open("wb") as file:
        command = [sys.executable, str(CONSUME), "--kafka", kafka.servers, "--topic", topic]
        consumer = subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRON)
    try:
        wait_until(lambda: (LINE.findall(out.read_text()) or [("",) * 4])[-1][3] == "4", "all ticks came", timeout_s=60)
    finally:
        consumer.send_signal(signal.SIGTERM)
        consumer.wait(60)
    counted = LINE.findall(out.read_text())
    assert counted[-1][2:] == ("1", "4")
    assert max(int(p99) for _, p99, _, _ in counted) >= 7_000
    assert "Traceback" not in out.read_text()
