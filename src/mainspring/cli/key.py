"""`mainspring key`: API keys of a namespace. The text of a key is shown once, when it is made."""

import asyncio
import contextlib
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store, remote
from mainspring.cli.table import aligned
from mainspring.cli.witness import user
from mainspring.model.access import check_role, new_token
from mainspring.model.audit import Change
from mainspring.model.errors import NotFound
from mainspring.model.explain import moment
from mainspring.model.new_key import KeyOrder, KeyShown, make_key

if TYPE_CHECKING:
    from mainspring.cli.remote import Api
    from mainspring.config import Config
    from mainspring.store.store import Store

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Who or what it is for; shown in lists and in the audit trail.")] = "",
    role: Annotated[str, typer.Option(help="reader, submit-only, operator or admin.")] = "operator",
    expires: Annotated[str | None, typer.Option(help="A time, or a delay such as 90d; default never.")] = None,
    targets: Annotated[list[str] | None, typer.Option("--target", help="Only this; a * at its end is any.")] = None,
    reaches: Annotated[list[str] | None, typer.Option("--also", help="Another namespace to reach; * is all.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, at most.")] = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Make a key and print its text, this one time."""
    loaded = load(redis_url, data_dir, namespace, config)
    bound = None if targets is None else tuple(targets)
    order = KeyOrder(check_role(role), name, expires, tuple(reaches or ()), bound, rate)
    token, made = asyncio.run(_add(loaded, order))
    if json:
        print(msgspec.json.encode({"key": token, **made.fields}).decode())
        return
    print(token)
    print(f"key {made.id} ({made.name}, {made.role}); its text is shown only now, keep it safe", file=sys.stderr)


@app.command("list")
def list_(
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List the keys, the oldest first; never their texts."""
    keys = asyncio.run(_list(load(redis_url, data_dir, namespace, config)))
    if json:
        print(msgspec.json.encode(keys).decode())
        return
    rows = []
    for one in keys:
        bound = [f"until {moment(one.expires_ms)}"] if one.expires_ms is not None else []
        bound += [f"targets {', '.join(one.targets)}"] if one.targets is not None else []
        bound += [f"also {', '.join(one.also)}"] if one.also else []
        bound += [f"{one.rate:g} a second"] if one.rate is not None else []
        rows.append([one.id, one.role, one.name, "  ".join(bound)])
    for line in aligned(rows):
        print(line)
    if not keys:
        print("there are no keys; make one: mainspring key add --role admin", file=sys.stderr)


@app.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(help="Ids as `key list` shows them.")],
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Take keys away for good; nodes notice within two seconds. Exit code 1 if one of the ids is unknown."""
    names = asyncio.run(_revoke(load(redis_url, data_dir, namespace, config), ids))
    if json:
        outcomes = [{"id": key_id, "outcome": "unknown" if name is None else "revoked"} for key_id, name in names]
        print(msgspec.json.encode(outcomes).decode())
    for key_id, name in names:
        if name is None:
            print(f"{key_id}: there is no key with this id", file=sys.stderr)
        elif not json:
            print(f"{key_id} ({name}): revoked")
    if any(name is None for _, name in names):
        raise typer.Exit(1)


@app.command()
def generate() -> None:
    """Print the text of a key without storing it, for a file that MAINSPRING_API_KEY_FILE names."""
    print(new_token())


# -- inside: over an API, else on the server itself ------------------------------------------------------------


async def _add(config: "Config", order: KeyOrder) -> tuple[str, KeyShown]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            told = api.call("POST", "/v1/keys", body=msgspec.to_builtins(order))
            return told["key"], msgspec.convert(told, KeyShown)
    from mainspring.store.access import add_key, new_key_id

    token = new_token()
    async with opened_store(config) as store:
        made = make_key(order, key_id=new_key_id(), token=token, now_ms=store.clock.now_ms())
        await add_key(store, made)
        await _tell(store, config, "key.add", made.id, after=KeyShown.of(made).fields)
    return token, KeyShown.of(made)


async def _list(config: "Config") -> list[KeyShown]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return msgspec.convert(api.get("/v1/keys")["keys"], list[KeyShown])
    from mainspring.store.access import list_keys

    async with opened_store(config) as store:
        return [KeyShown.of(one) for one in await list_keys(store)]


async def _revoke(config: "Config", ids: list[str]) -> list[tuple[str, str | None]]:
    """Each id and the name of its key; None where there is none."""
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return [(key_id, _revoke_over(api, key_id)) for key_id in ids]
    async with opened_store(config) as store:
        return [(key_id, await _revoke_at(store, config, key_id)) for key_id in ids]


def _revoke_over(api: "Api", key_id: str) -> str | None:
    try:
        return str(api.delete("/v1/keys", key_id)["name"])
    except NotFound:
        return None


async def _revoke_at(store: "Store", config: "Config", key_id: str) -> str | None:
    from mainspring.store.access import revoke_key

    gone = await revoke_key(store, key_id)
    if gone is None:
        return None
    await _tell(store, config, "key.revoke", key_id, before=KeyShown.of(gone).fields)
    return gone.name


async def _tell(store: "Store", config: "Config", what: str, name: str, **changed: dict[str, Any]) -> None:
    from mainspring.store import audit

    who = f"{user()} (command line)"
    change = Change(who, what, name, socket.gethostname(), "", changed.get("before"), changed.get("after"))
    await audit.record(store, change, kept=config.audit_entries)
