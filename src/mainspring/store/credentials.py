"""Who we are to the server, asked anew for every connection: managed servers take tokens that end after minutes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from mainspring.model.errors import ConfigError, Unavailable
from mainspring.store.url import Endpoint

Login = tuple[str | None, str]
"""User (None: the default user) and password or token."""
CredentialProvider = Callable[[], Login | Awaitable[Login]]
"""Called at every (re)connect. A plain function runs in a thread, so it may ask over the network."""


async def signed(endpoint: Endpoint, provider: CredentialProvider | None, *, within_s: float) -> Endpoint:
    """The endpoint with the credentials of this moment; without a provider as it is."""
    if provider is None:
        return endpoint
    import asyncio  # here: settings name providers, and who only reads settings should not wait for it

    try:
        async with asyncio.timeout(within_s):
            answer = await _ask(provider)
    except TimeoutError:
        raise Unavailable(
            f"{endpoint.address}: the credential provider did not answer within {within_s:g} s", sent=False
        ) from None
    except Exception as error:  # whatever a provider raises: a token service that is away is a road that is broken
        raise Unavailable(
            f"{endpoint.address}: the credential provider failed: {type(error).__name__}: {error}", sent=False
        ) from error
    user, password = _checked(endpoint, answer)
    return replace(endpoint, user=user, password=password)


async def _ask(provider: CredentialProvider) -> object:
    import asyncio

    answer = provider() if inspect.iscoroutinefunction(provider) else await asyncio.to_thread(provider)
    return await answer if inspect.isawaitable(answer) else answer


def _checked(endpoint: Endpoint, answer: Any) -> Login:
    # The answer is never repeated in an error: half of it is a secret.
    good = isinstance(answer, tuple) and len(answer) == 2
    if not good or not isinstance(answer[1], str) or not (answer[0] is None or isinstance(answer[0], str)):
        raise ConfigError(
            f"{endpoint.address}: the credential provider must return (user or None, password), both texts"
        )
    return answer[0] or None, answer[1]


def provider_of(named: CredentialProvider | str | None) -> CredentialProvider | None:
    """A function, or the one that `module:function` names."""
    if named is None or callable(named):
        return named
    module, colon, attribute = named.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"credentials is {named!r}; write module:function, e.g. myapp.tokens:redis_login")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"credentials is {named!r}, which cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"credentials is {named!r}, which is a {type(found).__name__}, not a function")
    provider: CredentialProvider = found
    return provider
