"""Reads the topic of ticks; every second says how many came, how late, and whether any came early."""

import argparse
import json
import time
from datetime import datetime

from confluent_kafka import Consumer


def late_ms(value: bytes, now_s: float) -> float:
    return (now_s - datetime.fromisoformat(json.loads(value)["at"]).timestamp()) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kafka", default="localhost:9092")
    parser.add_argument("--topic", default="ticks")
    given = parser.parse_args()
    consumer = Consumer(
        {"bootstrap.servers": given.kafka, "group.id": "mainspring-poc", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([given.topic])
    total = early = 0
    since, lateness = time.monotonic(), []
    while True:
        messages = consumer.consume(1_000, timeout=0.1)
        # A topic that is not there yet is an error.
        lateness += [late_ms(one.value(), time.time()) for one in messages if not one.error()]
        span = time.monotonic() - since
        if span >= 1:
            total += len(lateness)
            early += sum(late < 0 for late in lateness)
            ordered = sorted(lateness) or [0.0]
            print(
                f"Consumed items/s {len(lateness) / span:8.0f}   late p50 {ordered[len(ordered) // 2]:.0f} ms"
                f"   p99 {ordered[int(len(ordered) * 0.99)]:.0f} ms   early {early}   total {total}",
                flush=True,
            )
            since, lateness = time.monotonic(), []


if __name__ == "__main__":
    main()
