"""Where an API answers."""

import contextlib
from urllib.parse import SplitResult, urlsplit

from .errors import InvalidInput


def read_api_url(url: str) -> SplitResult:
    """The parts of an address; whatever it holds besides may be a secret, and is not repeated."""
    with contextlib.suppress(ValueError):  # a port that is none
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username or parts.password)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return parts
    raise InvalidInput("write https://host[:port][/path] and no more; the key goes into api_token")
