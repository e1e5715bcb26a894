"""One webhook request: its headers and signature, sending it, and the meaning of its answer."""

import json
import logging
import random
import re
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Final

import aiohttp

from ..model.delivery import Dead, Delivery, Done, Outcome, Response, Retry
from ..model.targets.webhook import BODILESS, Basic, Bearer, Signer, Webhook
from ..model.text import clean
from .http_network import ForbiddenAddress
from .http_session import Sessions, failure_brief, failure_text, first_bytes, tls_context, url_for

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("mainspring.http")


LONGEST_WAIT_MS: Final = 3_600_000
"""Longest wait that a target may ask for; a longer one is cut to an hour."""

SPREAD: Final = 0.1
"""Requests with the same Retry-After are spread over a further tenth of it."""

_AGAIN: Final = frozenset({408, 425, 429})
_MOVED: Final = frozenset({301, 308})
_EXCERPT_CHARS: Final = 200
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ufffd]+")
MAX_HEADERS: Final = 50
MAX_HEADER_CHARS: Final = 500
_SECRET: Final = re.compile(r"(?i)set-cookie2?|(proxy-)?authorization|.*(token|secret|api-?key|password).*")
"""Headers of an answer whose values are not kept."""


def outcome_of(response: Response, now_s: float, keep_ms: int = 0) -> Outcome:
    """Judge an answer by its status. The answer of a success is kept for `keep_ms`."""
    status = response.status
    if 200 <= status < 300:
        return Done(response, keep_ms)
    brief, reason = _reason(response)
    if status in _AGAIN or not 300 <= status < 500 or (300 <= status < 400 and status not in _MOVED):
        return Retry(reason, retry_after_ms(header(response, "retry-after"), now_s), response=response, brief=brief)
    return Dead(reason, response=response, brief=brief)


def header(response: Response, name: str) -> str | None:
    return next((value for key, value in response.headers if key.lower() == name), None)


def kept_headers(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers without secrets, limited in number and length: a target must not fill our memory."""
    return tuple(
        [
            (clean(name[:MAX_HEADER_CHARS]), MASK if _SECRET.fullmatch(name) else clean(value[:MAX_HEADER_CHARS]))
            for name, value in islice(headers, MAX_HEADERS)
        ]
    )


def retry_after_ms(value: str | None, now_s: float) -> int | None:
    """Read seconds, or a date. None if the value is unusable: then the policy decides."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        wait_ms = min(int(text[:9]) * 1000, LONGEST_WAIT_MS)
    else:
        try:
            when = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        wait_ms = min(round(((when - datetime.fromtimestamp(now_s, UTC)).total_seconds()) * 1000), LONGEST_WAIT_MS)
    return wait_ms + int(wait_ms * random.uniform(0, SPREAD)) if wait_ms > 0 else None


def _reason(response: Response) -> tuple[str, str]:
    """Return the reasons for the log and for the dead letter. Only the latter has the target's text: it may echo
    data."""
    try:
        text = f"HTTP {response.status} {HTTPStatus(response.status).phrase}"
    except ValueError:
        text = f"HTTP {response.status}"
    if 300 <= response.status < 400:
        where = _plain(header(response, "location") or "nowhere")
        rule = "redirects are never followed; give the final address"
        return f"{text}: {rule}", f"{text} to {where}: {rule}"
    excerpt = _plain(response.body.decode("utf-8", "replace"))
    return text, f"{text}: {excerpt}" if excerpt else text


def _plain(text: str) -> str:
    """Return the text as one line for a log."""
    line = _BLANK.sub(" ", text[: 4 * _EXCERPT_CHARS]).strip()
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"


MASK: Final = "***"
_OPEN: Final = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent"}
)
"""Headers whose values are no secrets and commonly appear in responses."""

_SHORTEST: Final = 4
"""Shorter values would be found in every other word."""


class Secrets:
    """The secret values of a webhook, to be masked in texts."""

    def __init__(self, hook: Webhook) -> None:
        forms = {form for value in _values(hook) if len(value) >= _SHORTEST for form in _forms(value)}
        self.longest = max(map(len, forms), default=0)
        # Longest first: a value that contains another one must be masked completely.
        self._forms = sorted(forms, key=len, reverse=True)

    def out_of(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, MASK)
        return text

    def out_of_bytes(self, data: bytes) -> bytes:
        for form in self._forms:
            data = data.replace(form.encode(), MASK.encode())
        return data

    def out_of_headers(self, headers: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
        return ((self.out_of(name), self.out_of(value)) for name, value in headers) if self._forms else headers


def _values(hook: Webhook) -> Iterator[str]:
    sent = [value for name, value in hook.headers if name.lower() not in _OPEN]
    if hook.auth is not None:
        sent.append(hook.auth.header)
    for value in sent:
        yield value
        yield value.partition(" ")[2]  # a token without the word before it
    match hook.auth:
        case Basic(_, password):
            yield password
        case Bearer(token):
            yield token
    yield hook.parsed.path.partition("?")[2]
    yield from hook.secrets


def _forms(value: str) -> Iterator[str]:
    """Yield a value as sent and as escaped in JSON, where some encoders escape slashes too."""
    yield value
    quoted = json.dumps(value)[1:-1]
    yield quoted
    yield quoted.replace("/", "\\/")


USER_AGENT: Final = "Mainspring"
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"


class WebhookCaller:
    """Sends deliveries to one webhook. Everything they have in common is made once."""

    def __init__(self, sessions: Sessions, hook: Webhook, timeout_s: float, keep_ms: int, max_timeout_s: float) -> None:
        self._sessions = sessions
        self._keep_ms = keep_ms
        self._hook = hook
        self._url = url_for(hook.parsed)
        self._where = hook.parsed.host, hook.parsed.port
        self._max_timeout_s = max_timeout_s
        self._timeout_s = min(hook.timeout_s or timeout_s, max_timeout_s)
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
        """Return the headers of a delivery, equal in every attempt except for number and time."""
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
        """Make one attempt. Never raise because of what the target or the network does."""
        body = b"" if self._hook.method in BODILESS else delivery.payload
        began = time.monotonic()
        own_ms = delivery.body.timeout_ms
        timeout_s = self._timeout_s if own_ms is None else min(own_ms / 1000, self._max_timeout_s)
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
            reason = self._secrets.out_of(failure_text(error))
            outcome = Retry(reason, error=error.with_traceback(None), brief=failure_brief(error))
        else:
            outcome = outcome_of(response, time.time(), self._keep_ms)
        finally:
            self._sessions.give_back(kept)
        if log.isEnabledFor(logging.DEBUG):
            self._report(delivery, outcome, time.monotonic() - began)
        return outcome

    async def _kept(self, answer: aiohttp.ClientResponse, began: float) -> Response:
        """Return the part of an answer to keep. Read past the cut, so that a secret across it is found and masked."""
        most = self._hook.response_bytes
        start = self._secrets.out_of_bytes(await first_bytes(answer, most + self._secrets.longest if most else 0))
        headers = kept_headers(self._secrets.out_of_headers(answer.headers.items()))
        return Response(answer.status, headers, start[:most], round((time.monotonic() - began) * 1000))

    def _report(self, delivery: Delivery, outcome: Outcome, took_s: float) -> None:
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
    """Return an instant without its fraction; cached, because the tasks of one second share it."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
