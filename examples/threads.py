"""One scheduler shared by many threads.

Each puts work and looks at the schedules while handlers run beside them.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from mainspring import Config, Scheduler

scheduler = Scheduler(
    Config.load({"namespace": "threads"}, os.environ)
)  # a namespace of the example's own
lock = threading.Lock()
counted: set[int] = set()
all_counted = threading.Event()


@scheduler.handler(queue="numbers")
def count(number: int) -> None:
    with lock:  # handlers that are plain functions run in threads as well
        counted.add(number)
        if len(counted) == 100:
            all_counted.set()


scheduler.cron("@hourly", count, name="hourly", kwargs={"number": -1})


def customer(number: int) -> str:
    for i in range(10):
        count.after("10ms").put(number=10 * number + i)
    return scheduler.entry("hourly").spec


def main() -> None:
    with scheduler, ThreadPoolExecutor(10) as threads:
        specs = set(threads.map(customer, range(10)))
        all_counted.wait(60)
        print(f"{len(counted)} numbers counted")
        print(f"hourly is {' '.join(specs)}")
        scheduler.sync_client().schedules.remove(
            "hourly"
        )  # an example leaves nothing behind


if __name__ == "__main__":
    main()
