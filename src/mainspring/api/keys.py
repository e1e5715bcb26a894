"""`/v1/keys`: administrators make, list and revoke API keys. No key gives away more than it has itself."""

from typing import Final

import msgspec

from ..model.access import ApiKey, new_token
from ..model.new_key import KeyOrder, KeyShown, make_key
from ..store.access import add_key, list_keys, new_key_id, revoke_key
from .asgi import Answer, answer
from .call import Call, no_such
from .gate import OPEN
from .problems import Problem
from .routes import Route


class KeyList(msgspec.Struct):
    keys: list[KeyShown]


class KeyMade(KeyShown, frozen=True, kw_only=True):
    """`key` is its text, which is in this answer and nowhere else."""

    key: str


class KeyRevoked(msgspec.Struct):
    id: str
    name: str
    outcome: str = "revoked"


async def list_api_keys(call: Call) -> Answer:
    call.check_unbound()
    return answer(KeyList([KeyShown.of(one) for one in await list_keys(call.client.store)]))


async def add_api_key(call: Call) -> Answer:
    _check_shown(call)
    _check_not_repeatable(call)
    store, token = call.client.store, new_token()
    made = make_key(call.body, key_id=new_key_id(), token=token, now_ms=store.clock.now_ms())
    _check_grant(call, made)
    await add_key(store, made)
    call.app.gate.ring.forget()
    shown = KeyShown.of(made).fields
    await call.audit("key.add", made.id, after=shown)
    return answer(KeyMade(**shown, key=token), 201)


async def revoke_api_key(call: Call) -> Answer:
    _check_shown(call)
    key_id = call.params["id"]
    gone = await revoke_key(call.client.store, key_id)
    if gone is None:
        raise no_such("key", key_id)
    call.app.gate.ring.forget()
    await call.audit("key.revoke", key_id, before=KeyShown.of(gone).fields)
    return answer(KeyRevoked(gone.id, gone.name))


def _check_shown(call: Call) -> None:
    """Where anybody on the machine is answered, nobody gets what opens the other nodes too."""
    call.check_unbound()
    if call.key is OPEN:
        raise Problem(
            "forbidden",
            "keys are made and revoked with an admin's key, or by `mainspring key` at the server itself"
            " (--redis-url or --data-dir)",
        )


def _check_not_repeatable(call: Call) -> None:
    """To repeat an answer it would have to be kept, and the key's text with it. Who asks for that must not get two."""
    if b"idempotency-key" in call.headers:
        raise Problem(
            "invalid",
            "Idempotency-Key: a key cannot be made repeatably, for its text is kept nowhere; leave the header out."
            " If an answer is lost, look for the key in GET /v1/keys, revoke it and make another",
        )


def _check_grant(call: Call, made: ApiKey) -> None:
    """A key that is limited cannot make itself one that is not."""
    giver = call.key
    if giver.expires_ms is not None and (made.expires_ms is None or made.expires_ms > giver.expires_ms):
        raise _more("lasts longer than this one does; give it `expires`")
    for namespace in made.namespaces:
        own = namespace in (call.namespace, call.node.config.namespace)
        if not own and not giver.reaches(namespace):
            raise _more(f"reaches the namespace {namespace[:80]!r}, which this one does not")
    limit, asked = (call.node.config.api_rate if one.rate is None else one.rate for one in (giver, made))
    if limit and not 0 < asked <= limit:
        raise _more(f"may come more often than {limit:g} times a second, as this one may; give it `rate`")


def _more(what: str) -> Problem:
    return Problem("forbidden", f"this key cannot make one that {what}")


ROUTES: Final = (
    Route("GET", "/v1/keys", list_api_keys, "admin", "API keys, the oldest first; never their texts.",
          answers={200: KeyList}),
    Route("POST", "/v1/keys", add_api_key, "admin",
          "Make an API key; its text is in this answer only. An Idempotency-Key is refused.",
          body=KeyOrder, answers={201: KeyMade}, problems=("too-large", "content-type", "out-of-memory")),
    Route("DELETE", "/v1/keys/{id}", revoke_api_key, "admin", "Take an API key away for good.",
          answers={200: KeyRevoked}),
)  # fmt: skip
