"""`http://…` and `https://…`: webhooks."""

import logging
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from ..model.delivery import DROPPED, Dead, Delivery, Outcome, Retry
from ..model.errors import InvalidInput
from ..model.flow import Rate
from ..model.targets.url import AllowList
from ..model.targets.webhook import MAX_TIMEOUT_S, NEEDS, TIMEOUT_S, Webhook
from .http_limits import Hosts, Limits
from .http_network import AddressGuard, Lookup, SystemLookup

if TYPE_CHECKING:
    from .http_request import WebhookCaller
    from .http_session import Sessions

log = logging.getLogger("mainspring.http")


GONE: Final = 410

SendOne = Callable[[Delivery], Awaitable[Outcome]]


class _Word:
    """State of one webhook, shared by all deliveries that began before it changed."""

    def __init__(self) -> None:
        self.gone: Dead | None = None


class Gone:
    """Stops deliveries that already wait here for a webhook that is gone.

    Later deliveries are not its concern: the outcome says that the target is disabled, and nodes then pause the target
    until someone resumes it. Nothing here has to be reset then.
    """

    def __init__(self) -> None:
        self._words: dict[Webhook, _Word] = {}

    def noticing(self, hook: Webhook, send: SendOne) -> SendOne:
        word = self._words.setdefault(hook, _Word())

        async def send_unless_gone(delivery: Delivery) -> Outcome:
            if word.gone is not None:
                return word.gone
            outcome = await send(delivery)
            if not isinstance(outcome, Dead) or outcome.response is None or outcome.response.status != GONE:
                return outcome
            word.gone = Dead(f"{DROPPED}: {outcome.reason}")
            if self._words.get(hook) is word:
                del self._words[hook]
            return Dead(outcome.reason, outcome.response, disables=True)

        return send_unless_gone


_CALLERS: Final = 1024


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Defaults for webhooks without settings of their own."""

    timeout_s: float = TIMEOUT_S
    concurrency: int = 64
    """Concurrent requests to one host."""
    allow: tuple[str, ...] = ()
    """Networks, addresses and names that may be reached although they are not public."""
    room: int = 100_000
    """Tasks that may wait for their hosts, in total."""
    rate: Rate | None = None
    """Rate of requests to one host; None means no limit."""
    result_ttl_s: float = 3600.0
    """How long responses to successful requests are stored with their runs."""
    max_timeout_s: float = MAX_TIMEOUT_S
    """Longest time a request may take, whatever its task says."""


class HttpSink:
    """Sends payloads unchanged. Opens everything at the first delivery, including the import of aiohttp."""

    batch_tasks = 64
    """Small batches, so that sent tasks are soon marked done: a crash repeats few."""
    keeps_answers = True

    def __init__(self, options: HttpOptions = HttpOptions(), lookup: Lookup | None = None) -> None:  # noqa: B008
        self._options = options
        self._limits = Limits(options.concurrency, options.rate)
        self._system = SystemLookup()
        self._guard = AddressGuard(AllowList.parse(options.allow), lookup or self._system)
        self._sessions: Sessions | None = None
        self._hosts: Hosts | None = None
        self._callers: OrderedDict[Webhook, WebhookCaller] = OrderedDict()
        self._gone = Gone()
        self._said_missing = False
        # Look it up instead of importing it: the import is slow, and a node may never send a webhook.
        self._has_package = find_spec("aiohttp") is not None

    def missing(self, target: str) -> str | None:
        """Return what this node lacks for webhooks."""
        del target
        return None if self._has_package else NEEDS

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        try:
            hook = Webhook(batch[0].target)
        except InvalidInput as error:
            return [Dead(str(error))] * len(batch)
        return await self.deliver_to(hook, batch)

    async def deliver_to(self, hook: Webhook, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        """Deliver by the settings of a named target, whatever target the tasks name."""
        try:
            self._guard.check_number(hook.parsed)
            caller = self._caller(hook)
        except InvalidInput as error:
            return [Dead(str(error))] * len(batch)
        except (OSError, ssl.SSLError) as error:
            return [Retry(f"ca_file {hook.ca_file} cannot be used: {error}")] * len(batch)
        if caller is None or self._hosts is None:
            return [Retry(NEEDS)] * len(batch)
        send = self._gone.noticing(hook, caller.send) if hook.gone_disables else caller.send
        url = hook.parsed
        return await self._hosts.carry((url.host, url.port), self._limits, batch, send, self._own_limits(hook))

    def _own_limits(self, hook: Webhook) -> tuple[Hashable, Limits] | None:
        """Return the limits of a target that has its own; those of its host apply as well."""
        own, most = hook.limit, self._limits.concurrency
        return (hook, Limits(min(most, own.concurrency or most), own.rate)) if own else None

    async def aclose(self) -> None:
        hosts, self._hosts = self._hosts, None
        sessions, self._sessions = self._sessions, None
        self._callers.clear()
        if hosts is not None:
            await hosts.aclose()
        if sessions is not None:
            await sessions.close()
        self._system.close()

    def _caller(self, hook: Webhook) -> "WebhookCaller | None":
        caller = self._callers.get(hook)
        if caller is None:
            try:
                from .http_request import WebhookCaller
                from .http_session import Sessions, most_connections
            except ModuleNotFoundError as error:
                self._say_missing(error)
                return None
            if self._sessions is None:
                connections = most_connections()
                self._sessions = Sessions(self._guard, connections // 2)
                self._hosts = Hosts(room=self._options.room, connections=connections)
            ttl_s = self._options.result_ttl_s if hook.result_ttl_s is None else hook.result_ttl_s
            caller = self._callers[hook] = WebhookCaller(
                self._sessions, hook, self._options.timeout_s, round(ttl_s * 1000), self._options.max_timeout_s
            )
            if len(self._callers) > _CALLERS:
                self._callers.popitem(last=False)
        return caller

    def _say_missing(self, error: ModuleNotFoundError) -> None:
        if not self._said_missing:
            self._said_missing = True
            log.error("%s (%s)", NEEDS, error)
