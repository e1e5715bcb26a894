"""Orders expire on a worker.

A declined card is tried again, and a repeated run charges no customer twice.

Run as a program it has everything in one process. In real life there are two:
`mainspring serve` and `mainspring worker order_worker:scheduler`.
"""

import asyncio
import logging

from mainspring import (
    Config,
    Context,
    Node,
    Retry,
    Scheduler,
    TaskFailed,
    Workplace,
    idempotent,
)
from mainspring.testing import servers

log = logging.getLogger("shop")

scheduler = Scheduler(Config(namespace="shop"))


@scheduler.handler(queue="orders", timeout="30s", result_ttl="1h")
async def expire_order(order_id: int) -> str:
    return f"order {order_id} expired"


@scheduler.handler(queue="payments", retries=5, result_ttl="1h")
@idempotent()
async def charge(ctx: Context, order_id: int, cents: int) -> str:
    if ctx.attempt == 1:
        raise Retry("the bank is busy", after="100ms")
    return f"order {order_id} charged {cents} cents in attempt {ctx.attempt}"


async def main(url: str) -> None:
    scheduler.configure(Config(redis_url=url))
    node, worker = Node(scheduler.config), Workplace(scheduler)
    await node.start()
    await worker.start()
    expiry = await expire_order.after("500ms", id="order-42/expiry").aput(
        order_id=42
    )
    payment = await charge.now(id="order-42/charge").aput(
        order_id=42, cents=1999
    )
    log.info(await payment.result(timeout="60s"))
    log.info(await expiry.result(timeout="60s"))
    client = await scheduler.client()
    wrong = await client.put(
        "queue:payments/charge", {"order_id": "42"}
    )  # as a program in another language might
    try:
        await wrong.result(timeout="60s")
    except TaskFailed as error:
        log.info(error.result.reason)
    await worker.stop()
    await node.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("mainspring").setLevel(logging.CRITICAL)
    with servers.standalone(aof=True) as server:
        asyncio.run(main(server.url))
