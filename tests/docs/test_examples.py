"""The examples run as they are, and do what their first lines say."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType
from zoneinfo import ZoneInfo

import httpx
import pytest

from mainspring import Config, RetryPolicy, Scheduler, SyncClient, embedded
from mainspring.testing import Ticker
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.serving import serving

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

SAID = {
    "quickstart": ['{"hello":"world"}'],
    "order_expiry": [
        "order 1 is open",
        "order 2 is open",
        "order 1 is paid",
        "order 2 expired",
        "order 2 is too late to be paid",
    ],
    "order_worker": [
        "order 42 charged 1999 cents in attempt 2",
        "order 42 expired",
        "argument order_id of handler 'payments/charge': Expected `int`, got `str`",
    ],
    "plain_script": [
        "tick",
        "tick",
        "tick",
        "heartbeat: @every 1s in UTC, queue:default/say",
        "morning_report: 0 9 * * MON-FRI in Asia/Tokyo, queue:reports/morning_report",
    ],
    "web_app": ["{'id': 'welcome-ada@example.com'}", "['ada@example.com']", "nightly 3"],
    "threads": ["100 numbers counted", "hourly is @hourly"],
    "device_command": [
        "valve-1 is away (attempt 1 to open)",
        "valve-2: open",
        "valve-1 is away (attempt 2 to open)",
        "valve-1 is away (attempt 3 to open)",
        "valve-1 is away (attempt 4 to open)",
        "valve-1: open",
        "valve-1: close",
        "valve-2: close",
    ],
}


def load(name: str) -> ModuleType:
    return load_file(ROOT / "examples" / f"{name}.py")


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_is(path: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MAINSPRING_DATA_DIR": str(tmp_path / "data")},
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines() or ended.stderr.splitlines()
    # Lanes keep the order of their own tasks; between lanes there is none.
    assert sorted(said) == sorted(SAID[path.stem])


def test_the_quickstart_prints_its_line_beside_a_running_node_every_time(tmp_path: Path) -> None:
    with serving(tmp_path) as start:
        node = start()
        for _ in range(2):
            ended = subprocess.run(
                [sys.executable, str(ROOT / "examples" / "quickstart.py")],
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
                env={**os.environ, "MAINSPRING_DATA_DIR": str(tmp_path / "data")},
            )
            assert (ended.returncode, ended.stdout.splitlines()) == (0, SAID["quickstart"]), ended.stderr
        assert (node.end(), node.lines) == (0, [])


@pytest.mark.parametrize("name", ["plain_script", "threads", "web_app"])
def test_an_example_beside_a_running_node_keeps_to_a_namespace_of_its_own_and_leaves_no_schedules(
    name: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with serving(tmp_path) as start, contextlib.ExitStack() as opened:
        node = start()
        ended = subprocess.run(
            [sys.executable, str(ROOT / "examples" / f"{name}.py")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "MAINSPRING_DATA_DIR": str(data)},
        )
        assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, sorted(SAID[name])), ended.stderr
        namespace = load(name).scheduler.config.namespace
        assert namespace != "main"
        url = opened.enter_context(embedded.guest(data)).url
        for one in ("main", namespace):
            client = opened.enter_context(SyncClient(url, namespace=one))
            assert client.schedules.all() == []
        opened.close()
        assert node.end() == 0


async def test_an_unpaid_order_expires_after_thirty_minutes_and_a_paid_one_never(mainspring_ticker: Ticker) -> None:
    shop = load("order_expiry")
    async with mainspring_ticker.running(shop.scheduler) as ticker:
        await shop.place(1)
        await shop.place(2)
        await ticker.advance(minutes=29)
        assert await shop.pay(1)
        await ticker.advance(seconds=59, ms=999)
        assert shop.orders == {1: "paid", 2: "open"}
        await ticker.advance(ms=1)
        assert shop.orders == {1: "paid", 2: "expired"}
        assert not await shop.pay(2)
        await ticker.advance(hours=1)
        assert shop.orders == {1: "paid", 2: "expired"}


async def test_placing_an_order_twice_keeps_one_expiry(mainspring_ticker: Ticker) -> None:
    shop = load("order_expiry")
    async with mainspring_ticker.running(shop.scheduler) as ticker:
        await shop.place(1)
        await shop.place(1)
        assert (await ticker.client.count()).pending == 1
        assert await shop.pay(1)
        await ticker.advance(hours=1)
        assert shop.orders == {1: "paid"}


async def test_a_handler_that_fails_expires_the_order_at_its_next_attempt(mainspring_ticker: Ticker) -> None:
    shop = load("order_expiry")
    attempts: list[int] = []

    scheduler: Scheduler = shop.scheduler

    @scheduler.handler(queue="orders", name="stubborn", retry=RetryPolicy(base_ms=60_000, jitter="none"))
    async def stubborn(order_id: int) -> None:
        attempts.append(order_id)
        if len(attempts) == 1:
            raise OSError("the database is away")
        await shop.expire_order(order_id)

    async with mainspring_ticker.running(scheduler) as ticker:
        await stubborn.after("30m").aput(order_id=7)
        await ticker.advance(minutes=30, seconds=59)
        assert (attempts, shop.orders) == ([7], {})
        await ticker.advance(seconds=1)
        assert (attempts, shop.orders) == ([7, 7], {7: "expired"})


async def test_declared_schedules_run_on_a_clock_held_by_hand(mainspring_ticker: Ticker) -> None:
    module = load("plain_script")
    said: list[int] = []
    scheduler = Scheduler(Config(redis_url="redis://nobody.invalid", timezone="Europe/Paris"))

    @scheduler.cron("0 9 * * *", name="morning")
    def note() -> None:
        said.append(mainspring_ticker.clock.now_ms())

    async with mainspring_ticker.running(scheduler) as ticker:
        await ticker.advance(hours=24 * 7)
        hours = {datetime.fromtimestamp(ms / 1000, ZoneInfo("Europe/Paris")).hour for ms in said}
        assert (len(said), hours) == (7, {9})
    assert [one.name for one in module.scheduler.entries()] == ["heartbeat", "morning_report"]


async def test_an_unreachable_device_holds_up_its_own_instructions_only(mainspring_ticker: Ticker) -> None:
    module = load("device_command")
    devices = module.Devices()
    async with mainspring_ticker as ticker:
        ticker.answer("queue", devices.handle)
        await module.water(ticker.client, "valve-1")
        await module.water(ticker.client, "valve-2")
        devices.away.add("valve-1")
        await ticker.advance(minutes=21)
        assert devices.done == ["valve-2: open", "valve-2: close"]


async def test_the_order_of_the_fastapi_guide_expires_after_exactly_thirty_minutes(
    mainspring_ticker: Ticker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = blocks(ROOT / "docs" / "guides" / "fastapi.md", "python")
    (tmp_path / "shop.py").write_text(code, encoding="utf-8")
    shop = load_file(tmp_path / "shop.py")
    async with mainspring_ticker.running(shop.scheduler) as ticker:
        web = httpx.AsyncClient(transport=httpx.ASGITransport(shop.app), base_url="http://shop")
        async with shop.app.router.lifespan_context(shop.app), web:
            for order in (42, 43):
                assert (await web.post(f"/orders/{order}")).status_code == 201
            assert (await web.post("/orders/42/payment")).status_code == 200
            await ticker.advance(minutes=29, seconds=59)
            assert capsys.readouterr().out == ""
            await ticker.advance(seconds=1)
            assert capsys.readouterr().out == "order 43 has expired\n"
            assert (await web.post("/orders/43/payment")).status_code == 409
