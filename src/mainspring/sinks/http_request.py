"""One request: its headers, sending it, and what came of it."""

import logging
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import aiohttp

from ..model.delivery import Delivery
from ..model.outcome import Dead, Outcome, Response, Retry
from ..model.webhook import BODILESS, Webhook
from .http_answer import kept_headers, outcome_of
from .http_guard import ForbiddenAddress
from .http_secrets import Secrets
from .http_session import Sessions, failure_brief, failure_text, first_bytes, tls_context, url_for
from .http_signing import Signer

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("mainspring.http")

USER_AGENT: Final = "Mainspring"
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"


class Caller:
    """Sends deliveries to one webhook. What is the same for all of them is made once."""

    def __init__(self, sessions: Sessions, hook: Webhook, timeout_s: float, keep_ms: int) -> None:
        self._sessions = sessions
        self._keep_ms = keep_ms
        self._hook = hook
        self._url = url_for(hook.parsed)
        self._where = hook.parsed.host, hook.parsed.port
        self._timeout_s = hook.timeout_s or timeout_s
        self._timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._tls: ssl.SSLContext | bool = True if hook.ca_file is None else tls_context(hook.ca_file)
        self._signer = Signer(hook.secrets) if hook.secrets else None
        given = {name.lower(): value for name, value in hook.headers}
        self._has_type = "content-type" in given
        self._headers = {"user-agent": USER_AGENT} | given
        self._secrets = Secrets(hook)
        if hook.auth is not None:
            self._headers["authorization"] = hook.auth.header

    def headers(self, delivery: Delivery, body: bytes) -> dict[str, str]:
        """Everything that goes with a delivery, in every attempt alike but for its number and its time."""
        key = delivery.idempotency_key
        due_ms = delivery.original_due_ms
        headers = self._headers.copy()
        headers["Idempotency-Key"] = key
        headers["Mainspring-Id"] = key[key.index("/") + 1 : key.rindex("/")]  # its middle: the id, percent-encoded
        headers["Mainspring-Due"] = f"{_second(due_ms // 1000)}.{due_ms % 1000:03d}Z"
        headers["Mainspring-Attempt"] = str(delivery.attempt)
        if body and not self._has_type:
            headers["content-type"] = BYTES if delivery.body.raw else JSON
        if self._signer is not None:
            headers |= self._signer.headers(key, int(time.time()), body)
        return headers

    async def send(self, delivery: Delivery) -> Outcome:
        """One attempt. Nothing that a target or the road to it does raises an error here."""
        body = b"" if self._hook.method in BODILESS else delivery.payload
        began = time.monotonic()
        timeout_s = self._timeout_s if delivery.body.timeout_ms is None else delivery.body.timeout_ms / 1000
        session, kept = self._sessions.lend(*self._where)
        try:
            async with session.request(
                self._hook.method,
                self._url,
                data=body or None,
                headers=self.headers(delivery, body),
                allow_redirects=False,
                timeout=self._timeout if timeout_s == self._timeout_s else aiohttp.ClientTimeout(total=timeout_s),
                ssl=self._tls,
            ) as answer:
                response = await self._kept(answer, began)
        except ForbiddenAddress as error:
            outcome: Outcome = Dead(str(error))
        except TimeoutError as error:
            outcome = Retry(f"no answer within {timeout_s:g} s", error=error.with_traceback(None))
        except (aiohttp.ClientError, OSError) as error:
            told = self._secrets.out_of(failure_text(error))
            outcome = Retry(told, error=error.with_traceback(None), brief=failure_brief(error))
        else:
            outcome = outcome_of(response, time.time(), self._keep_ms)
        finally:
            self._sessions.give_back(kept)
        if log.isEnabledFor(logging.DEBUG):
            self._tell(delivery, outcome, time.monotonic() - began)
        return outcome

    async def _kept(self, answer: aiohttp.ClientResponse, began: float) -> Response:
        """What is kept of an answer. A secret that lies across the cut is read whole, so that it is found."""
        most = self._hook.response_bytes
        start = self._secrets.out_of_bytes(await first_bytes(answer, most + self._secrets.longest if most else 0))
        headers = kept_headers(self._secrets.out_of_headers(answer.headers.items()))
        return Response(answer.status, headers, start[:most], round((time.monotonic() - began) * 1000))

    def _tell(self, delivery: Delivery, outcome: Outcome, took_s: float) -> None:
        status = outcome.response.status if outcome.response else "no answer"
        shown = self._hook.parsed.shown
        log.debug(
            "%s %s: %s after %.0f ms, attempt %d of task %s%s",
            self._hook.method,
            shown,
            status,
            took_s * 1000,
            delivery.attempt,
            delivery.id,
            f": {outcome.brief or outcome.reason}" if isinstance(outcome, (Retry, Dead)) else "",
            extra={"task": delivery.id, "target": shown},
        )


@lru_cache(maxsize=4096)
def _second(epoch_s: int) -> str:
    """An instant without its fraction; tasks of one second share it."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
