"""`mainspring key`: API keys of a namespace. The text of a key is shown once, when it is made."""

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load, opened_store
from mainspring.cli.witness import user
from mainspring.model.access import (
    ApiKey,
    check_key_name,
    check_namespaces,
    check_patterns,
    check_role,
    hash_of,
    new_token,
)
from mainspring.model.audit import Change
from mainspring.model.errors import InvalidInput
from mainspring.model.explain import moment
from mainspring.model.times import check_horizon, delay_ms, instant_ms

if TYPE_CHECKING:
    from mainspring.config import Config
    from mainspring.store.store import Store

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
T = TypeVar("T")


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
    token = new_token()

    async def work(store: "Store") -> ApiKey:
        from mainspring.store.access import add_key, new_key_id

        made = ApiKey(
            new_key_id(),
            check_key_name(name or role),
            check_role(role),
            hash_of(token),
            store.clock.now_ms(),
            _expires_ms(expires, store.clock.now_ms()),
            check_namespaces(reaches or ()),
            None if targets is None else check_patterns(targets),
            _checked_rate(rate),
        )
        await add_key(store, made)
        await _tell(store, loaded, "key.add", made.id, after=_shown(made))
        return made

    made = _with_store(loaded, work)
    if json:
        print(msgspec.json.encode({"key": token, **_shown(made)}).decode())
        return
    print(token)
    print(f"key {made.id} ({made.name}, {made.role}); its text is shown only now, keep it safe", file=sys.stderr)


@app.command("list")
def list_(
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List the keys, the oldest first; never their texts."""

    async def work(store: "Store") -> list[ApiKey]:
        from mainspring.store.access import list_keys

        return await list_keys(store)

    keys = _with_store(load(redis_url, data_dir, namespace, config), work)
    if json:
        print(msgspec.json.encode([_shown(one) for one in keys]).decode())
        return
    for one in keys:
        bound = [f"until {moment(one.expires_ms)}"] if one.expires_ms is not None else []
        bound += [f"targets {', '.join(one.targets)}"] if one.targets is not None else []
        bound += [f"also {', '.join(one.namespaces)}"] if one.namespaces else []
        bound += [f"{one.rate:g} a second"] if one.rate is not None else []
        print("  ".join([one.id, one.role.ljust(11), one.name, *bound]))
    if not keys:
        print("there are no keys; make one: mainspring key add --role admin", file=sys.stderr)


@app.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(help="Ids as `key list` shows them.")],
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """Take keys away for good; nodes notice within two seconds. Exit code 1 if one of the ids is unknown."""
    loaded = load(redis_url, data_dir, namespace, config)

    async def work(store: "Store") -> list[str]:
        from mainspring.store.access import revoke_key

        unknown = []
        for key_id in ids:
            gone = await revoke_key(store, key_id)
            if gone is None:
                unknown.append(key_id)
            else:
                await _tell(store, loaded, "key.revoke", key_id, before=_shown(gone))
                if not json:
                    print(f"{key_id} ({gone.name}): revoked")
        return unknown

    unknown = _with_store(loaded, work)
    if json:
        outcomes = [{"id": key_id, "outcome": "unknown" if key_id in unknown else "revoked"} for key_id in ids]
        print(msgspec.json.encode(outcomes).decode())
    for key_id in unknown:
        print(f"{key_id}: there is no key with this id", file=sys.stderr)
    if unknown:
        raise typer.Exit(1)


@app.command()
def generate() -> None:
    """Print the text of a key without storing it, for a file that MAINSPRING_API_KEY_FILE names."""
    print(new_token())


# -- inside ----------------------------------------------------------------------------------------------------


def _with_store(config: "Config", work: "Callable[[Store], Coroutine[Any, Any, T]]") -> T:
    async def run() -> T:
        async with opened_store(config) as store:
            return await work(store)

    return asyncio.run(run())


async def _tell(store: "Store", config: "Config", what: str, name: str, **changed: dict[str, Any]) -> None:
    from mainspring.store import audit

    who = f"{user()} (command line)"
    change = Change(who, what, name, socket.gethostname(), "", changed.get("before"), changed.get("after"))
    await audit.record(store, change, kept=config.audit_entries)


def _shown(key: ApiKey) -> dict[str, Any]:
    """All but the hash."""
    return {
        "id": key.id,
        "name": key.name,
        "role": key.role,
        "created_ms": key.created_ms,
        "expires_ms": key.expires_ms,
        "also": key.namespaces,
        "targets": key.targets,
        "rate": key.rate,
    }


def _expires_ms(text: str | None, now_ms: int) -> int | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        expires_ms = int(text)
    elif text[:4].isdigit() and "-" in text:
        expires_ms = instant_ms(text, field="expires")
    else:
        expires_ms = now_ms + delay_ms(text, field="expires")
    check_horizon(expires_ms, now_ms, field="expires")
    if expires_ms <= now_ms:
        raise InvalidInput(f"expires: {text} has passed; the key would open nothing")
    return expires_ms


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate <= 1e6:
        raise InvalidInput(f"rate is {rate:g}; give requests a second, up to 1,000,000")
    return rate
