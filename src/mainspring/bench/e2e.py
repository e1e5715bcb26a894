"""`bench e2e`: batches over HTTP in, Kafka out, at a steady rate, with all that belongs to it on this machine."""

import msgspec

from ..demo.plan import Plan
from ..demo.run import Second, ticks
from ..demo.stage import Where as DemoWhere
from ..model.errors import InvalidInput
from .ground import Where, ground
from .life import Progress

WITHIN_MS = 2_000


class E2eFigures(msgspec.Struct, frozen=True):
    tasks_per_s: float
    """Consumed a second, while the load was steady."""
    p50_ms: float | None
    p99_ms: float | None
    missing: int
    early: int
    duplicated: int
    tasks: int
    rate: float
    """What was asked for."""

    @property
    def sound(self) -> bool:
        return not (self.missing or self.early or self.duplicated)


async def e2e(
    where: Where, rate: float, seconds: float, schedulers: int, kafka_url: str | None, progress: Progress
) -> E2eFigures:
    if rate <= 0 or seconds <= 0:
        raise InvalidInput("--rate and --seconds must be more than 0")
    # What is posted in the first seconds comes due little by little: the load is steady from then on.
    posted_s = seconds + WITHIN_MS / 1000
    plan = Plan(
        within_ms=WITHIN_MS, rate=rate, seconds=posted_s, schedulers=schedulers, via="batch", named=False, lease_s=5.0
    )
    count = 0

    def tell(second: Second) -> None:
        nonlocal count
        count += second.consumed
        progress(f"e2e, {second.consumed:,} came in the last second", count, round(rate * posted_s))

    progress("e2e, starting the parts", 0, 1)
    async with ground(where) as place:
        await place.time.stop()
        found = await ticks(plan, DemoWhere(kafka_url, place.nearest_url, in_bulk=True), tell)
    return E2eFigures(
        tasks_per_s=round(found.consumed_per_s),
        p50_ms=found.p50_ms,
        p99_ms=found.p99_ms,
        missing=found.missing,
        early=found.early,
        duplicated=found.duplicated,
        tasks=found.consumed,
        rate=rate,
    )
