"""A module of ours as a process of its own, which listens on a port and ends with its standard input."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def counterpart(module: str) -> AsyncIterator[str]:
    """Its address; the first line it prints is its port."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()  # its word to end
        await process.wait()
