"""The API keys a node knows: those of its namespace, read anew every second, and those of its file."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..model.access import ApiKey, hash_of, is_token
from ..model.errors import ConfigError
from ..store.access import list_keys
from ..store.store import Store

FRESH_S: Final = 1.0
"""How long a revoked key may still open on a node that has just looked."""


_SETTING: Final = "api_key_file (MAINSPRING_API_KEY_FILE)"
_MAKE_ONE: Final = "Write a key into it: mainspring key generate"


class KeyRing:
    """Finds the key behind a text. The store is asked once a second at most, and only when somebody calls."""

    def __init__(self, namespace: str, file: Path | None, now: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._of_file = {} if file is None else {key.hash: key for key in _read(file)}
        self._stored: dict[str, ApiKey] = {}
        self._now = now
        self._fresh_until = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, store: Store, token: str) -> ApiKey | None:
        """None for a key that is unknown, revoked or over."""
        hashed = hash_of(token)
        if hashed not in self._of_file:
            await self._freshen(store)
        return self._known(hashed, store.clock.now_ms())

    def at_hand(self, token: str, now_ms: int) -> ApiKey | None:
        """The same by what was read within the last second; None also for one that has to be looked for."""
        hashed = hash_of(token)
        fresh = hashed in self._of_file or self._now() < self._fresh_until
        return self._known(hashed, now_ms) if fresh else None

    def _known(self, hashed: str, now_ms: int) -> ApiKey | None:
        key = self._of_file.get(hashed) or self._stored.get(hashed)
        return None if key is None or key.expired(now_ms) else key

    async def is_empty(self, store: Store) -> bool:
        """True when nobody could get in."""
        await self._freshen(store)
        now_ms = store.clock.now_ms()
        return not self._of_file and all(key.expired(now_ms) for key in self._stored.values())

    def forget(self) -> None:
        """Ask the store at the next call."""
        self._fresh_until = float("-inf")

    async def _freshen(self, store: Store) -> None:
        if self._now() < self._fresh_until:
            return
        async with self._lock:
            if self._now() >= self._fresh_until:
                self._stored = {key.hash: key for key in await list_keys(store)}
                self._fresh_until = self._now() + FRESH_S


def _read(file: Path) -> list[ApiKey]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {file}: {error.strerror}. {_MAKE_ONE}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{_SETTING}: {file} is no text in UTF-8. {_MAKE_ONE}") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{_SETTING}: {file} is empty, or holds comments only. {_MAKE_ONE}")
    if not all(map(is_token, tokens)):
        raise ConfigError(
            f"{_SETTING}: {file} must hold API keys, one a line: msk_ and at least 22 letters and digits. {_MAKE_ONE}"
        )
    return [_key(n, hash_of(one)) for n, one in enumerate(tokens, 1)]


def _key(number: int, hashed: str) -> ApiKey:
    """Its id is its own: rates and `Idempotency-Key`s go by it. Not by the line, where another may stand soon."""
    return ApiKey(f"file-{hashed[:10]}", f"key {number} of the file", "admin", hashed, 0)
