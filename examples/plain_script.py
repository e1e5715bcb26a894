"""Schedules in a plain script.

They are declared with decorators, and run in the background while the script
does its own work.
"""

import os
import threading

from mainspring import Config, Scheduler

# Settings come from MAINSPRING_* and mainspring.toml; without any, the script
# starts a server of its own. The namespace is the example's own.
scheduler = Scheduler(Config.load({"namespace": "plain-script"}, os.environ))
three_ticks = threading.Semaphore(0)


@scheduler.every("1s", name="heartbeat", kwargs={"word": "tick"})
def say(word: str) -> None:
    print(word)
    three_ticks.release()


@scheduler.cron("0 9 * * MON-FRI", timezone="Asia/Tokyo")
@scheduler.handler(queue="reports", retries=5, timeout="10m")
def morning_report() -> None:
    print("the report")


def main() -> None:
    scheduler.start()
    for _ in range(3):
        three_ticks.acquire()
    # An example leaves nothing behind; a program of yours keeps its schedules.
    for entry in scheduler.entries():
        scheduler.sync_client().schedules.remove(entry.name)
    scheduler.stop()
    for entry in scheduler.entries():
        print(f"{entry.name}: {entry.spec} in {entry.zone}, {entry.target}")


if __name__ == "__main__":
    # A script that does nothing else would call scheduler.run(), which blocks
    # until a signal.
    main()
