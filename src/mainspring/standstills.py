"""The calls of a client that deal with what stands still: pauses."""

from abc import abstractmethod

from .model.errors import InvalidInput
from .model.pause import Mode, Pause, Scope
from .model.times import Delay, When, delay_ms, instant_ms
from .store import pauses
from .store.store import Store


class Standstills:
    """What Client can do about pauses. `target`, `queue` and `lane` say what is meant; none of them, everything."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    async def pause(
        self,
        *,
        target: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        mode: Mode = "hold",
        reason: str = "",
        who: str = "",
        until: When | None = None,
        for_: Delay | None = None,
    ) -> Pause:
        """Let nothing go out, until `resume`, `until` a time or `for_` so long.

        With mode "hold" tasks wait and go out afterwards, in order; with "drop" those that come due meanwhile become
        dead letters. A task that had begun when a node heard of the pause may still go out. Paused again, the new
        pause stands for the old.
        """
        if until is not None and for_ is not None:
            raise InvalidInput("give either until or for_")
        now_ms = await self.store.sample_clock()
        until_ms = instant_ms(until) if until is not None else now_ms + delay_ms(for_) if for_ is not None else None
        pause = Pause(Scope.of(target, queue, lane), mode, reason, who, now_ms, until_ms).check()
        await pauses.write_pause(self.store, pause)
        return pause

    async def resume(self, *, target: str | None = None, queue: str | None = None, lane: str | None = None) -> bool:
        """End a pause; False when there was none of exactly this."""
        return await pauses.remove_pause(self.store, Scope.of(target, queue, lane))

    async def pauses(self) -> list[Pause]:
        """What is paused, the oldest first."""
        now_ms = await self.store.sample_clock()
        found = [one for one in await pauses.read_pauses(self.store) if one.lasts(now_ms)]
        return sorted(found, key=lambda one: (one.since_ms, one.scope.text))
