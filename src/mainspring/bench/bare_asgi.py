"""An ASGI application that does nothing but echo each request body: the most that uvicorn can do.

Run as a module, it prints its port and exits when its standard input closes.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
import uvloop


async def echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def main() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        config = uvicorn.Config(
            echo, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    uvloop.run(main())
