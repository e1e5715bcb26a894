"""Instructions to a device at set times, in order.

A valve that cannot be opened is not closed first.

All instructions to one device share a lane. While the device does not answer,
its next instruction is tried again and again, those behind it wait, and other
devices continue. Run as a program, an hour passes in an instant.
"""

import asyncio
import logging

from mainspring import DONE, Client, Delivery, Outcome, Retry
from mainspring.testing import Ticker, servers

log = logging.getLogger("devices")


class Devices:
    """The receiver. A real one would call the device and return its answer."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.done: list[str] = []

    def handle(self, delivery: Delivery) -> Outcome:
        device, action = delivery.value()["device"], delivery.value()["do"]
        if device in self.away:
            log.info(
                "%s is away (attempt %d to %s)",
                device,
                delivery.attempt,
                action,
            )
            return Retry("the device does not answer", after_ms=60_000)
        self.done.append(f"{device}: {action}")
        log.info("%s: %s", device, action)
        return DONE


async def water(client: Client, valve: str) -> None:
    """Open in ten minutes, close ten minutes later."""
    for action, after in (("open", "10m"), ("close", "20m")):
        await client.put(
            "queue:devices/command",
            {"device": valve, "do": action},
            after=after,
            lane=valve,
        )


async def main(url: str) -> list[str]:
    devices = Devices()
    async with Ticker(
        url, namespace="garden", handlers={"queue": devices.handle}
    ) as ticker:
        await water(ticker.client, "valve-1")
        await water(ticker.client, "valve-2")
        devices.away.add("valve-1")
        await ticker.advance(minutes=13)
        devices.away.remove("valve-1")
        await ticker.advance(minutes=47)
    return devices.done


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("mainspring").setLevel(
        logging.ERROR
    )  # it would tell of every failed attempt as well
    with servers.standalone() as server:
        asyncio.run(main(server.url))
