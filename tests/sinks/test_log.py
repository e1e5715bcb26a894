"""The log: sink on real pipes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from mainspring.model.delivery import DONE, Body, Delivery, GivenDelivery, Retry
from mainspring.sinks.log import LogSink


def delivery(payload: bytes, *, raw: bool = False) -> Delivery:
    return GivenDelivery(Body("log:", payload, raw=raw), "main", bytes(16), 0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (delivery(b'{"item": "a",  "at": 1.50}'), b'{"item": "a",  "at": 1.50}\n'),
        (delivery(b'{\n  "item": "a\\nb",\r\n  "at": 1\n}'), b'{"item":"a\\nb","at":1}\n'),
        (delivery(b"null"), b"null\n"),
        (delivery("grüße\n".encode(), raw=True), '"grüße\\n"\n'.encode()),
        (delivery(b"\xff\x00", raw=True), b'{"base64":"/wA="}\n'),
        (delivery('"a\u2028b\u2029c\x85d\x9b31me\x7ff"'.encode()), b'"a\\u2028b\\u2029c\\u0085d\\u009b31me\\u007ff"\n'),
        (
            delivery("\x1b[31m\x9b\r\n2026 ERROR\u2028".encode(), raw=True),
            b'"\\u001b[31m\\u009b\\r\\n2026 ERROR\\u2028"\n',
        ),
        (delivery(b"\x1b[2K no JSON\n2026 ERROR"), b'"\\u001b[2K no JSON\\n2026 ERROR"\n'),
    ],
)
async def test_a_task_is_one_line_with_its_payload_as_it_was_given(
    pipe: tuple[int, int], one: Delivery, line: bytes
) -> None:
    sink = LogSink(pipe[1])
    assert await sink.deliver([one]) == [DONE]
    assert os.read(pipe[0], 1000) == line
    msgspec.json.decode(line)
    await sink.aclose()


async def test_a_broken_pipe_is_a_retry_and_not_the_end(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    sink = LogSink(pipe[1])
    outcomes = await sink.deliver([delivery(b"1"), delivery(b"2")])
    assert outcomes == [Retry("standard output cannot be written: Broken pipe")] * 2
    await sink.aclose()


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_reader_that_does_not_read_holds_up_deliveries_but_not_the_loop(
    pipe: tuple[int, int], blocking: bool
) -> None:
    os.set_blocking(pipe[1], blocking)
    sink = LogSink(pipe[1])
    size = 1 << 20
    stuck = asyncio.create_task(sink.deliver([delivery(b'"%b"' % (b"x" * size))]))
    read = len(await asyncio.to_thread(os.read, pipe[0], 1))  # it has begun, and a pipe holds far less
    assert not stuck.done()
    while read < size + 3:
        read += len(await asyncio.to_thread(os.read, pipe[0], 1 << 16))
    assert await stuck == [DONE]
    await sink.aclose()


_WRITER = """
import asyncio
from mainspring.model.delivery import Body, GivenDelivery
from mainspring.sinks.log import LogSink

async def main():
    sink = LogSink()
    lines = [GivenDelivery(Body("log:", b'"%b"' % (b"x" * 3000)), "main", bytes(16), 0) for _ in range(40)]
    for _ in range(10):
        await sink.deliver(lines)

asyncio.run(main())
"""


def test_lines_of_several_processes_on_one_pipe_do_not_mix(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER], stdout=write_fd) for _ in range(3)]
    os.close(write_fd)
    with os.fdopen(os.dup(read_fd), "rb") as out:
        lines = out.read().splitlines()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert lines == [b'"%b"' % (b"x" * 3000)] * 1200
