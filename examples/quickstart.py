"""Server, node and client in one process.

One task fires, another is cancelled in time. Runs as it is.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from mainspring import Client, Config, Node, embedded


async def main(url: str) -> None:
    node = Node(
        Config(redis_url=url)
    )  # fires what comes due; `log:` prints it, one line each
    await node.start()
    async with Client(
        url
    ) as client:  # any process that reaches the server may do this
        hello = await client.put("log:", {"hello": "world"}, after="1s")
        await client.put("log:", {"expired": 42}, after="30m", id="order-42")
        assert await client.cancel("order-42") == "cancelled"
        while (await client.get(hello.id)).state in ("pending", "fired"):
            await asyncio.sleep(0.1)
    await node.stop()


# A real Valkey on a folder of its own: a node that runs on this machine
# already would fire these tasks otherwise.
with TemporaryDirectory() as folder, embedded.start(Path(folder)) as server:
    asyncio.run(main(server.url))
