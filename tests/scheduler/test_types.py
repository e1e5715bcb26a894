"""Type checkers know the arguments and results of tasks: they accept a correct program and find each mistake."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.missing_parts import gap

GOOD = """\
from typing import Any, assert_type

from mainspring import Config, Context, Handle, Scheduler, SyncClient

scheduler = Scheduler(Config())


@scheduler.handler
def expire(order_id: str) -> int:
    return len(order_id)


@scheduler.handler(queue="mail", retries=5)
async def send(ctx: Context, to: str, copies: int = 1) -> float:
    return ctx.attempt / copies


@scheduler.cron("0 3 * * *", timezone="Europe/Berlin", jitter="5m")
def tidy() -> None: ...


@scheduler.every("30s", kwargs={"to": "a"})
@scheduler.handler(queue="mail")
async def greet(ctx: Context, to: str) -> str:
    return to


def plain(n: int) -> str:
    return str(n)


counted = scheduler.once("2099-01-01T00:00:00Z", plain, kwargs={"n": 1}, overlap="allow")
assert_type(scheduler.cron("0 3 * * *", "https://example.org", name="ping", payload=[1]), str)
scheduler.cron("0 3 * * *", send, args=["a"])
assert_type(expire("o"), int)
assert_type(expire.after("30m", id="a").put(order_id="42"), Handle[int])
assert_type(expire.after("30m").put("42").result(timeout="1s"), int)
assert_type(send.now(lane="x", retries=2).put(to="a").result(), float)
assert_type(counted.now().put(3).result(), str)
assert_type(tidy.now().put(), Handle[None])
assert_type(greet.now().put(to="a").result(), str)
bare: Handle = expire.now().put(order_id="1")
key: str = bare.idempotency_key


async def main(ctx: Context) -> None:
    assert_type(await send(ctx, "a"), float)
    handle = await send.after("30m").aput("a", copies=2)
    assert_type(await handle.result(), float)
    assert_type(await (await expire.now().aput("a")).result(), int)
    assert_type(await handle.cancel(), Any)


def sync(client: SyncClient) -> None:
    assert_type(client.put("log:").result(), Any)
"""

BAD = """\
from mainspring import Config, Context, Scheduler

scheduler = Scheduler(Config())


@scheduler.handler
def expire(order_id: str) -> int:
    return len(order_id)


@scheduler.handler(queue="mail")
async def send(ctx: Context, to: str) -> float:
    return 1.0


expire.after("30m").put(oder_id="42")  # wrong
expire.after("30m").put(order_id=42)  # wrong
expire.after("30m").put()  # wrong
send.now().put("a", "b")  # wrong
expire.now(idd="x")  # wrong
expire.now(id=5)  # wrong
scheduler.cron("0 3 * * *", expire, timezoone="UTC")  # wrong
scheduler.every("30s", expire, jitter=5)  # wrong
scheduler.cron("0 3 * * *", expire, dst_gap="never")  # wrong
text: str = expire.now().put(order_id="x").result()  # wrong
scheduler.handler(queue=5)  # wrong


async def main() -> None:
    await send.now().aput(ctx=1, to="a")  # wrong
    number: str = await (await send.now().aput("a")).result()  # wrong
    print(number)
"""

PYRIGHT = '{"typeCheckingMode": "strict", "pythonVersion": "3.11"}'
"""Settings that change nothing but the strictness."""


def wrong_lines(checker: str, program: str, folder: Path) -> list[int]:
    """Lines of the program in which the checker finds an error."""
    (folder / "program.py").write_text(program)
    if checker == "mypy":
        cache = str(folder / "cache")
        command = ["-m", "mypy", "--strict", "--python-version", "3.11", "--cache-dir", cache, "program.py"]
    else:
        if shutil.which("node") is None:
            gap("pyright needs node")
        (folder / "pyrightconfig.json").write_text(PYRIGHT)
        command = ["-m", "pyright", "--pythonpath", sys.executable, "program.py"]
    found = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    lines = [
        line.partition("program.py:")[2]
        for line in found.stdout.splitlines()
        if " error: " in line or " - error" in line
    ]
    return sorted({int(line.split(":")[0]) for line in lines})


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_correct_program_passes_strict_checks(checker: str, tmp_path: Path) -> None:
    assert wrong_lines(checker, GOOD, tmp_path) == []


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_each_mistake_is_found(checker: str, tmp_path: Path) -> None:
    marked = [number for number, line in enumerate(BAD.splitlines(), 1) if line.endswith("# wrong")]
    assert wrong_lines(checker, BAD, tmp_path) == marked
