"""Who we are to the server, asked anew for every connection: managed servers take tokens that end after minutes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from mainspring.model.errors import ConfigError, Unavailable
from mainspring.store.url import Endpoint

Login = tuple[str | None, str]
"""User (None: the default user) and password or token."""
CredentialProvider = Callable[[], Login | Awaitable[Login]]
"""Called at every (re)connect. A plain function runs in a thread, so it may ask over the network."""

_THREADS: Final = threading.BoundedSemaphore(256)
"""As many may be asked at one time; more are there only when they do not answer."""


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
    except (Exception, SystemExit) as error:  # whatever it raises: a token service that is away is a broken road
        raise Unavailable(
            f"{endpoint.address}: the credential provider failed: {type(error).__name__}: {error}", sent=False
        ) from error
    user, password = _checked(endpoint, answer)
    return replace(endpoint, user=user, password=password)


async def _ask(provider: CredentialProvider) -> object:
    answer = provider() if inspect.iscoroutinefunction(provider) else await _in_thread(provider)
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(provider: CredentialProvider) -> object:
    """In a thread of its own, for which nobody waits: one that never answers must not hold up a stop, or the end of the
    process, as a thread of the loop's executor would."""
    import asyncio

    if not _THREADS.acquire(blocking=False):
        raise TimeoutError
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
    context = copy_context()

    def tell(answer: object, error: BaseException | None) -> None:
        if not answered.done():
            answered.set_result((answer, error))

    def ask() -> None:
        answer: object = None
        failure: BaseException | None = None
        try:
            answer = context.run(provider)
        except BaseException as error:  # noqa: BLE001  # it is raised where the answer is waited for
            failure = error
        _THREADS.release()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, answer, failure)

    threading.Thread(target=ask, name="mainspring-credentials", daemon=True).start()
    answer, error = await answered
    if error is not None:
        raise error
    return answer


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
