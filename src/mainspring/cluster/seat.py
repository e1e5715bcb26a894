"""A node's running membership: the loop that beats, and the channel on which the others call."""

from collections.abc import Callable

from ..engine.loop import Loop
from ..model.errors import ConfigError
from ..store.links import Subscription
from ..store.members import View
from ..store.store import Store
from .membership import Membership


class Seat:
    """Started before the engine, so that it knows what is planned for it; stopped around it."""

    def __init__(self, store: Store, membership: Membership, called: Callable[[], None]) -> None:
        self._store = store
        self._called = called
        self._subscription: Subscription | None = None
        self.joined = False
        """Registered, or perhaps so: the reply may have been lost. Then `stop` signs off."""
        self.membership = membership
        # After a failure it comes back within the lease: a short outage must not cost the membership.
        self.loop = Loop("membership", membership.step, max_backoff_s=min(2.0, membership.lease_s / 4))

    @property
    def view(self) -> View | None:
        """The cluster as of the last beat."""
        return self.membership.view

    async def start(self) -> None:
        """Take a place among the nodes. Raises ConfigError when a live node has the same id."""
        self.joined = True
        try:
            await self.membership.enter()
        except ConfigError:
            self.joined = False  # another has the id
            raise
        while await self.membership.step() == 0.0:
            pass
        self._subscription = await self._store.links.all()[0].subscribe(
            [self._store.keys.cluster], on_message=lambda _: self._wake(), on_connect=self._wake
        )
        self.loop.start()

    async def withdraw(self) -> None:
        """Tell the others that this node leaves; it stays registered until `stop`."""
        await self.membership.withdraw()

    async def stop(self) -> None:
        await self.loop.stop()
        if self._subscription is not None:
            await self._subscription.close()
        await self.membership.leave()

    def _wake(self) -> None:
        """Something changed: a node came or went, a plan was written, a partition was released."""
        self.loop.wake()
        self._called()
