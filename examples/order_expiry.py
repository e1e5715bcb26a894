"""An order that is not paid in 30 minutes expires. Payment cancels the expiry, and only one of the two can win.

Run as a program it shows the story with two orders and a window of two seconds.
"""

import asyncio
import logging
from collections.abc import Sequence

from mainspring import DONE, Client
from mainspring.config import Config
from mainspring.model.delivery import Delivery
from mainspring.model.outcome import Outcome
from mainspring.node import Node
from mainspring.testing.servers import standalone

log = logging.getLogger("shop")


class Shop:
    """The orders of a shop. A real one keeps them in its database."""

    def __init__(self, client: Client, *, pay_within: str = "30m") -> None:
        self._client = client
        self._pay_within = pay_within
        self.orders: dict[int, str] = {}

    async def place(self, order: int) -> None:
        # The id makes a repeated call harmless, and lets payment find the expiry without storing a handle.
        await self._client.put("queue:orders/expire", {"order": order}, after=self._pay_within, id=expiry_of(order))
        self.orders[order] = "open"
        log.info("order %d is open", order)

    async def pay(self, order: int) -> bool:
        """True when the payment counts; False when the order has expired, or is just expiring."""
        paid = await self._client.cancel(expiry_of(order)) == "cancelled"
        if paid:
            self.orders[order] = "paid"
        log.info("order %d is %s", order, "paid" if paid else "too late to be paid")
        return paid

    def expire(self, delivery: Delivery) -> Outcome:
        """Called when the time is over; may be called again for the same order, which changes nothing."""
        self.orders[delivery.value()["order"]] = "expired"
        log.info("order %d expired", delivery.value()["order"])
        return DONE


def expiry_of(order: int) -> str:
    return f"order-{order}/expiry"


class OrderSink:
    """Delivers `queue:orders/…` within this process."""

    def __init__(self) -> None:
        self.shop: Shop | None = None
        self.expired = asyncio.Event()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        assert self.shop is not None
        outcomes = [self.shop.expire(delivery) for delivery in batch]
        self.expired.set()
        return outcomes

    async def aclose(self) -> None:
        """Nothing is held open."""


async def main(url: str) -> None:
    sink = OrderSink()
    node = Node(Config(redis_url=url, namespace="shop"), {"queue": sink})
    async with Client(url, namespace="shop") as client:
        shop = sink.shop = Shop(client, pay_within="2s")
        await node.start()
        await shop.place(1)
        await shop.place(2)
        await shop.pay(1)
        await sink.expired.wait()
        await shop.pay(2)
        await node.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("mainspring").setLevel(logging.WARNING)
    with standalone(aof=True) as server:
        asyncio.run(main(server.url))
