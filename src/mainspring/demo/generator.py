"""The process that posts ticks: one by one or in batches over HTTP, or with the client straight to the server."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from ..client import Client
from ..model.errors import MainspringError, StoreError
from ..model.task import Task
from .journal import Journal
from .plan import Plan
from .road import PATIENCE_S, PAUSE_S, Request, Road, request
from .side import Inside
from .ticks import Ticks, id_of, lines_of, text_of

TAKEN: Final = (200, 202)
BATCHES_AT_ONCE: Final = 4
"""To one scheduler: enough to keep it busy."""

_WHOLE: Final = (b'"failed":0', b'"complete":true')


class Order(msgspec.Struct, frozen=True):
    plan: Plan
    urls: list[str]
    redis_url: str
    namespace: str
    sent: str
    """The file for the numbers of ticks that were taken."""


class Load:
    """Which ticks are to go out now: at the plan's pace, until its end."""

    def __init__(self, plan: Plan, inside: Inside) -> None:
        self._plan = plan
        self._inside = inside
        self._ticks = Ticks(plan)
        self._began = time.monotonic()
        self._made = 0
        self._exhausted = False

    @property
    def over(self) -> bool:
        passed_s = time.monotonic() - self._began
        enough = self._plan.seconds is not None and passed_s >= self._plan.seconds
        return self._exhausted or enough or self._inside.stopped

    def take(self, most: int) -> list[int]:
        """Up to so many; none when the pace does not allow it yet."""
        if self.over or self._ahead:
            return []
        numbers = self._ticks.take(most)
        self._exhausted = len(numbers) < most
        self._made += len(numbers)
        return numbers

    @property
    def _ahead(self) -> bool:
        return self._plan.rate is not None and self._made > (time.monotonic() - self._began) * self._plan.rate


class Posts:
    """The load as requests; what was taken is written down."""

    def __init__(self, plan: Plan, load: Load, sent: Journal) -> None:
        self._plan = plan
        self._load = load
        self._sent = sent
        self._size = 1 if plan.via == "http" else plan.batch
        self.refused = 0
        self.first_refusal = ""

    @property
    def over(self) -> bool:
        return self._load.over or self.refused > 0  # what is refused once is so the next time

    def next(self) -> Request | None:
        numbers = self._load.take(self._size)
        if not numbers:
            return None
        return self._single(numbers[0]) if self._plan.via == "http" else self._batch(numbers)

    def answered(self, sent: Request, status: int, body: bytes) -> None:
        whole = self._plan.via == "http" or all(word in body for word in _WHOLE)
        if status in TAKEN and whole:
            self._sent.add_all(sent.about)
            return
        self.refused += len(sent.about)
        self.first_refusal = self.first_refusal or f"{status} {body[:300].decode(errors='replace')}"

    def _single(self, number: int) -> Request:
        path = "/ticks?replace=true" if self._plan.replace else "/ticks"
        return request(path, "application/json", text_of(number, self._plan.ids), (number,))

    def _batch(self, numbers: list[int]) -> Request:
        plan = self._plan
        body = lines_of(numbers, plan.ids, plan.target, named=plan.named)
        return request("/v1/tasks:batch?answers=errors", "application/x-ndjson", body, tuple(numbers))


async def post(order: Order, inside: Inside, sent: Journal) -> dict[str, Any]:
    load = Load(order.plan, inside)
    posts = Posts(order.plan, load, sent)
    most = order.plan.connections if order.plan.via == "http" else BATCHES_AT_ONCE * len(order.urls)
    await Road(order.urls, min(most, order.plan.connections), posts).run()
    return {"refused": posts.refused, "first_refusal": posts.first_refusal}


async def put(order: Order, inside: Inside, sent: Journal) -> dict[str, Any]:
    """Without the API: what an application does that has the client."""
    plan = order.plan
    async with Client(order.redis_url, namespace=order.namespace) as client:
        load = Load(plan, inside)
        while not load.over:
            numbers = load.take(plan.batch)
            if not numbers:
                await asyncio.sleep(0.002)
                continue
            tasks = [
                Task(
                    plan.target,
                    msgspec.Raw(text_of(number, plan.ids)),
                    number // plan.ids,
                    None,
                    id_of(number, plan.ids),
                )
                for number in numbers
            ]
            await _until_stored(client, tasks)
            sent.add_all(numbers)
    return {"refused": 0, "first_refusal": ""}


async def _until_stored(client: Client, tasks: list[Task]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await client.put_many(tasks)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return


def main() -> None:
    inside = Inside()
    order: Order = inside.order(Order)
    sent = Journal(Path(order.sent))
    inside.total = lambda: sent.count
    inside.ready()
    began = time.monotonic()
    work: Callable[..., Any] = put if order.plan.via == "client" else post
    try:
        figures = uvloop.run(work(order, inside, sent))
    except MainspringError as error:
        raise SystemExit(str(error)) from None
    finally:
        sent.close()
    inside.report(sent=sent.count, seconds=time.monotonic() - began, **figures)


if __name__ == "__main__":
    main()
