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
from .http_session import failure_text, first_bytes, tls_context, url_for
from .http_signing import Signer

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("mainspring.http")

USER_AGENT: Final = "Mainspring"
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"


class Caller:
    """Sends deliveries to one webhook. What is the same for all of them is made once."""

    def __init__(self, session: aiohttp.ClientSession, hook: Webhook, timeout_s: float, keep_ms: int) -> None:
        self._session = session
        self._keep_ms = keep_ms
        self._hook = hook
        self._url = url_for(hook.parsed)
        self._timeout_s = hook.timeout_s or timeout_s
        self._timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._tls: ssl.SSLContext | bool = True if hook.ca_file is None else tls_context(hook.ca_file)
        self._signer = Signer(hook.secrets) if hook.secrets else None
        given = {name.lower(): value for name, value in hook.headers}
        self._has_type = "content-type" in given
        self._headers = {"user-agent": USER_AGENT} | given
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
        try:
            async with self._session.request(
                self._hook.method,
                self._url,
                data=body or None,
                headers=self.headers(delivery, body),
                allow_redirects=False,
                timeout=self._timeout if timeout_s == self._timeout_s else aiohttp.ClientTimeout(total=timeout_s),
                ssl=self._tls,
            ) as answer:
                start = await first_bytes(answer, self._hook.response_bytes)
                took_ms = round((time.monotonic() - began) * 1000)
                response = Response(answer.status, kept_headers(answer.headers.items()), start, took_ms)
        except ForbiddenAddress as error:
            outcome: Outcome = Dead(str(error))
        except TimeoutError as error:
            outcome = Retry(f"no answer within {timeout_s:g} s", error=error.with_traceback(None))
        except (aiohttp.ClientError, OSError) as error:
            outcome = Retry(failure_text(error), error=error.with_traceback(None))
        else:
            outcome = outcome_of(response, time.time(), self._keep_ms)
        if log.isEnabledFor(logging.DEBUG):
            self._tell(delivery, outcome, time.monotonic() - began)
        return outcome

    def _tell(self, delivery: Delivery, outcome: Outcome, took_s: float) -> None:
        status = outcome.response.status if outcome.response else "no answer"
        log.debug(
            "%s %s: %s after %.0f ms, attempt %d of task %s%s",
            self._hook.method,
            self._hook.parsed.shown,
            status,
            took_s * 1000,
            delivery.attempt,
            delivery.id,
            f": {outcome.reason}" if isinstance(outcome, (Retry, Dead)) else "",
        )


@lru_cache(maxsize=4096)
def _second(epoch_s: int) -> str:
    """An instant without its fraction; tasks of one second share it."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
