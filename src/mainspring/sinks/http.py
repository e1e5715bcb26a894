"""`http://…` and `https://…`: webhooks."""

import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..model.allow import AllowList
from ..model.delivery import Delivery
from ..model.errors import InvalidInput
from ..model.outcome import Dead, Outcome, Retry
from ..model.webhook import Webhook
from .http_guard import ForbiddenAddress, Guard, Lookup
from .http_limits import Hosts, Limits
from .http_lookup import SystemLookup

if TYPE_CHECKING:
    import aiohttp

    from .http_request import Caller

log = logging.getLogger("mainspring.http")

_CALLERS: Final = 1024
_GONE: Final = 410
NEEDS: Final = "webhooks need the package aiohttp on this node: pip install 'mainspring[http]'"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where nothing else is said of a target."""

    timeout_s: float = 15.0
    concurrency: int = 64
    """Requests to one host at one time."""
    allow: tuple[str, ...] = ()
    """Networks, addresses and names to be reached although they are not public."""
    room: int = 100_000
    """Tasks that may wait for their hosts, all together."""
    rate: float | None = None
    """Requests a second to one host; None is as fast as it answers."""
    result_ttl_s: float = 3600.0
    """How long the answers to successful calls are kept with their runs."""


class HttpSink:
    """Sends payloads as they are. Everything is opened at the first delivery, aiohttp's import included."""

    batch_tasks = 64
    """Small batches, so that what was sent is soon marked done: a crash repeats little."""
    keeps_answers = True

    def __init__(self, options: HttpOptions = HttpOptions(), lookup: Lookup | None = None) -> None:  # noqa: B008
        self._options = options
        self._system = SystemLookup()
        self._guard = Guard(AllowList.parse(options.allow), lookup or self._system)
        self._session: aiohttp.ClientSession | None = None
        self._hosts: Hosts | None = None
        self._callers: OrderedDict[Webhook, Caller] = OrderedDict()
        self._gone: dict[Webhook, str] = {}
        self._said_missing = False

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        try:
            hook = Webhook(batch[0].target)
        except InvalidInput as error:
            return [Dead(str(error))] * len(batch)
        return await self.deliver_to(hook, batch)

    async def deliver_to(self, hook: Webhook, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        """Deliver as a named target says, whatever target the tasks name."""
        try:
            self._guard.check_number(hook.parsed)
            caller = self._caller(hook)
        except (ForbiddenAddress, InvalidInput) as error:
            return [Dead(str(error))] * len(batch)
        except (OSError, ssl.SSLError) as error:
            return [Retry(f"ca_file {hook.ca_file} cannot be used: {error}")] * len(batch)
        if caller is None or self._hosts is None:
            return [Retry(NEEDS)] * len(batch)
        send = self._noticing_gone(hook, caller.send) if hook.gone_disables else caller.send
        limits = Limits(hook.concurrency or self._options.concurrency, hook.rate or self._options.rate)
        url = hook.parsed
        return await self._hosts.carry((url.host, url.port, limits), limits, batch, send)

    async def aclose(self) -> None:
        hosts, self._hosts = self._hosts, None
        session, self._session = self._session, None
        self._callers.clear()
        if hosts is not None:
            await hosts.aclose()
        if session is not None:
            await session.close()
        self._system.close()

    def _caller(self, hook: Webhook) -> "Caller | None":
        caller = self._callers.get(hook)
        if caller is None:
            try:
                from .http_request import Caller
                from .http_session import most_connections, open_session
            except ModuleNotFoundError as error:
                self._say_missing(error)
                return None
            if self._session is None:
                self._session = open_session(self._guard)
                self._hosts = Hosts(room=self._options.room, connections=most_connections())
            ttl_s = self._options.result_ttl_s if hook.result_ttl_s is None else hook.result_ttl_s
            caller = self._callers[hook] = Caller(self._session, hook, self._options.timeout_s, round(ttl_s * 1000))
            if len(self._callers) > _CALLERS:
                self._callers.popitem(last=False)
        return caller

    def _say_missing(self, error: ModuleNotFoundError) -> None:
        if not self._said_missing:
            self._said_missing = True
            log.error("%s (%s)", NEEDS, error)

    def _noticing_gone(
        self, hook: Webhook, send: Callable[[Delivery], Awaitable[Outcome]]
    ) -> Callable[[Delivery], Awaitable[Outcome]]:
        async def send_unless_gone(delivery: Delivery) -> Outcome:
            if (since := self._gone.get(hook)) is not None:
                return Dead(f"the target is disabled: it answered 410 Gone at {since}; restart the node to try again")
            outcome = await send(delivery)
            if outcome.response is not None and outcome.response.status == _GONE and hook not in self._gone:
                self._gone[hook] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                log.warning("%s answered 410 Gone: disabled on this node until it starts again", hook.parsed.shown)
            return outcome

        return send_unless_gone
