"""Credentials that come back: a receiver that echoes a request must not get them into what is kept of its answer."""

import json
from collections.abc import Iterable, Iterator
from typing import Final

from ..model.webhook import Basic, Bearer, Webhook

MASK: Final = "***"
_OPEN: Final = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent"}
)
"""Headers whose values say nothing, and stand in answers of their own accord."""

_SHORTEST: Final = 4
"""Shorter values would be found in every other word."""


class Secrets:
    """What a webhook is called with and nobody else should read."""

    def __init__(self, hook: Webhook) -> None:
        forms = {form for value in _values(hook) if len(value) >= _SHORTEST for form in _forms(value)}
        self.longest = max(map(len, forms), default=0)
        # The longest first: of a value that holds another one nothing shall remain.
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
    """As it was sent, and as it stands in JSON: some encoders mark slashes too."""
    yield value
    quoted = json.dumps(value)[1:-1]
    yield quoted
    yield quoted.replace("/", "\\/")
