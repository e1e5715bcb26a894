"""The calls of a client that deal with many tasks at once: list and count."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from .model.choice import ListedState, QueueFilter, QueueState, TaskFilter
from .model.errors import InvalidInput
from .model.task import Count, Page
from .model.texts import check_text
from .model.times import When, instant_ms
from .store import query, queue_list
from .store.store import Store

P = TypeVar("P")

_FOREVER_MS: Final = 1 << 45


class Listings:
    """What Client can tell of all tasks together."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    async def list(
        self,
        *,
        after: When | None = None,
        before: When | None = None,
        state: ListedState | QueueState = "pending",
        target: str | None = None,
        lane: str | None = None,
        allowed: Sequence[str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """Tasks in due order, `limit` at a time; pass `page.next` as cursor for the next page.

        `target` and each of `allowed` (of which one must fit) is a whole target, or its beginning and `*`. With these a
        page looks through 20,000 tasks or a little more: it may be short, and still name a next one. Tasks that are
        held come before all others, as they were held. Tasks that are queued or running are in no order, and a page of
        them may hold some more.
        """
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
        if allowed is not None and (isinstance(allowed, (str, bytes)) or not isinstance(allowed, Sequence)):
            raise InvalidInput(
                f"allowed is a {type(allowed).__name__}; give a list of targets, or their beginnings and *"
            )
        for name, text in (("target", target), ("lane", lane), *(("allowed", one) for one in allowed or ())):
            if text is not None:
                check_text(text, name)
        from_ms, to_ms = _range(after, before)
        if state == "queued" or state == "running":
            where = QueueFilter(state, TaskFilter("pending", target, lane, allowed), from_ms, to_ms)
            in_queues = _cursor(queue_list.parse_place, cursor)
            return await queue_list.page(self.store, where, after=in_queues, limit=limit)
        if state not in ("pending", "fired"):
            raise InvalidInput(f"state {state!r} cannot be listed; use pending, fired, queued or running")
        place = _cursor(query.parse_place, cursor)
        if place is not None:
            from_ms = max(from_ms, place[0])
        chosen = TaskFilter(state, target, lane, allowed)
        await self.store.fresh_ms()
        return await query.page(self.store, from_ms=from_ms, to_ms=to_ms, after=place, limit=limit, where=chosen)

    async def count(self, *, after: When | None = None, before: When | None = None) -> Count:
        """How many tasks are pending, in all or due in a range (there the edges may be estimates)."""
        if after is None and before is None:
            return await query.count_all(self.store)
        chosen = _range(after, before)
        await self.store.fresh_ms()
        return await query.count_between(self.store, *chosen)


def _cursor(parse: Callable[[str], P], text: str | None) -> P | None:
    try:
        return None if text is None else parse(text)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"cursor {str(text)[:80]!r} is not one that list returned") from None


def _range(after: When | None, before: When | None) -> tuple[int, int]:
    from_ms = 0 if after is None else instant_ms(after, field="after")
    to_ms = _FOREVER_MS if before is None else instant_ms(before, field="before")
    if to_ms <= from_ms:
        raise InvalidInput("the range is empty: before must be later than after")
    return from_ms, to_ms
