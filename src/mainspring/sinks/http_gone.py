"""410 Gone: a webhook that wants nothing more, where its target says that this disables it."""

from collections.abc import Awaitable, Callable
from typing import Final

from ..model.delivery import Delivery
from ..model.outcome import DROPPED, Dead, Outcome
from ..model.webhook import Webhook

GONE: Final = 410

Send = Callable[[Delivery], Awaitable[Outcome]]


class _Word:
    """What one webhook last said of itself, shared by all who came before it said so."""

    def __init__(self) -> None:
        self.gone: Dead | None = None


class Gone:
    """Sends nothing more of what already waits here for a webhook that is gone.

    What comes later is not its business: the outcome says that the target is disabled, and whoever hands out deliveries
    keeps to that, on all nodes, until somebody lifts it. Nothing here has to be lifted then.
    """

    def __init__(self) -> None:
        self._words: dict[Webhook, _Word] = {}

    def noticing(self, hook: Webhook, send: Send) -> Send:
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
