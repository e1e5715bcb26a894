"""The calls of a client that deal with what stands still: pauses, and lanes behind a failed head."""

from abc import abstractmethod

from .model.errors import Conflict, InvalidInput
from .model.ids import check_name
from .model.lane import LaneAnswer, LaneInfo
from .model.pause import Mode, Pause, Scope
from .model.texts import check_text
from .model.times import Delay, When, check_horizon, delay_ms, instant_ms
from .store import lanes, pauses
from .store.find import Finder, Reference
from .store.intake import Intake
from .store.store import Store


class Standstills:
    """What Client can do about pauses and lanes. `target`, `queue` and `lane` say what is paused; none, everything."""

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @abstractmethod
    def _mover(self) -> tuple[Finder, Intake]: ...

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
        until_ms = now_ms + delay_ms(for_, field="for_") if for_ is not None else None
        if until is not None:
            until_ms = instant_ms(until, field="until")
            check_horizon(until_ms, now_ms, field="until")
        told = check_text(reason, "reason"), check_text(who, "who")
        pause = Pause(Scope.of(target, queue, lane), mode, *told, now_ms, until_ms).check()
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

    async def lanes(self) -> list[LaneInfo]:
        """Lanes that stand still or are just coming back, those that wait longest first."""
        return await lanes.read_lanes(self.store)

    async def lane(self, lane: str) -> LaneInfo:
        """How a lane stands: behind which head, since when, how many wait."""
        return await lanes.read_lane(self.store, check_name(lane, "lane"))

    async def lane_retry_head(self, lane: str) -> LaneAnswer:
        """Try the failed head now. If it goes through, its lane goes on; a parked one too. So it does if the head has
        expired, which is recorded then."""
        failed = await lanes.failed_head(self.store, check_name(lane, "lane"))
        if failed is None or failed.address is None or failed.found is None:
            return "no head"
        if failed.found.state == "fired":
            return "too late"
        finder, intake = self._mover()
        reference = Reference(None, failed.head.idh, failed.address.partition, False, failed.address)
        now_ms = await self.store.sample_clock()
        try:
            await finder.move(reference, intake, now_ms, now_ms, expired=True)
        except Conflict:
            return "too late"
        return "ok"

    async def lane_skip_head(self, lane: str, *, reason: str = "skipped by hand") -> LaneAnswer:
        """Give the failed head up: it goes to the dead letters, and its lane goes on."""
        failed, told = await lanes.failed_head(self.store, check_name(lane, "lane")), check_text(reason, "reason")
        return "no head" if failed is None else await lanes.skip_head(self.store, failed, told)

    async def lane_resume(self, lane: str) -> LaneAnswer:
        """Let a parked lane go on with its head, and end a pause of this lane."""
        resumed = await self.resume(lane=check_name(lane, "lane"))
        if (await self.lane(lane)).state != "parked":
            return "ok" if resumed else "no head"
        return await self.lane_retry_head(lane)
