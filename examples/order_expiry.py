"""An order that is not paid in 30 minutes expires.

Payment cancels the expiry, and only one of the two can win.

Run as a program it shows the story with two orders and a window of two seconds.
"""

import asyncio
import logging

from mainspring import Config, Scheduler
from mainspring.testing import servers

log = logging.getLogger("shop")
scheduler = Scheduler(Config(namespace="shop"))
orders: dict[int, str] = {}  # a real shop keeps them in its database
expired = asyncio.Event()


@scheduler.handler(queue="orders", retries=5, timeout="30s")
async def expire_order(order_id: int) -> None:
    """Expire an order. Calling it again for the same order changes nothing."""
    orders[order_id] = "expired"
    expired.set()
    log.info("order %d expired", order_id)


async def place(order_id: int, *, pay_within: str = "30m") -> None:
    # The id makes a repeated call harmless, and lets payment find the expiry
    # without storing a handle.
    await expire_order.after(pay_within, id=expiry_of(order_id)).aput(
        order_id=order_id
    )
    orders[order_id] = "open"
    log.info("order %d is open", order_id)


async def pay(order_id: int) -> bool:
    """Return True if the payment counts, False if the order has expired."""
    client = await scheduler.client()
    paid = await client.cancel(expiry_of(order_id)) == "cancelled"
    if paid:
        orders[order_id] = "paid"
    log.info(
        "order %d is %s", order_id, "paid" if paid else "too late to be paid"
    )
    return paid


def expiry_of(order_id: int) -> str:
    return f"order-{order_id}/expiry"


async def main(url: str) -> None:
    scheduler.configure(Config(redis_url=url))
    async with scheduler:
        await place(1, pay_within="2s")
        await place(2, pay_within="2s")
        await pay(1)
        await expired.wait()
        await pay(2)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("mainspring").setLevel(logging.WARNING)
    with servers.standalone(aof=True) as server:
        asyncio.run(main(server.url))
