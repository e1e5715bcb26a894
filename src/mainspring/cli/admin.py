"""Commands for operators: `mainspring cluster`, `key`, `acl` and `audit`."""

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from mainspring.cli.audited_client import user
from mainspring.cli.listing import CLEAR, EVERY_S, Instant, Listing, connected, listing, print_rows
from mainspring.cli.options import (
    Json,
    Namespace,
    Settings,
    load,
    new_app,
    new_group,
    opened_store,
    place_of,
    remote,
)
from mainspring.cli.output import aligned, print_json
from mainspring.cli.task import not_found, with_client
from mainspring.model.access import KeyOrder, KeyShown, Role, make_key, new_token
from mainspring.model.audit import AuditPage, Change
from mainspring.model.errors import InvalidInput, NotFound
from mainspring.model.explain import span, with_times
from mainspring.store.acl import acl_rules

if TYPE_CHECKING:
    from mainspring.client.client import Client
    from mainspring.client.http import Api
    from mainspring.config.config import Config
    from mainspring.store.store import Store


cluster_app = new_group()


@cluster_app.callback()
def _group() -> None:
    """Look at the nodes of a namespace."""


@cluster_app.command()
@connected
def status(
    config: "Config",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print again every two seconds, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Show every node: its partitions, what it holds ahead and in flight, and how far it is behind.

    Exit code 1 when a partition has no owner.
    """
    owned = asyncio.run(_status(config, watch=watch, json=json))
    if not owned:
        raise typer.Exit(1)


async def _status(config: "Config", *, watch: bool, json: bool) -> bool:
    async with _looking(config) as look:
        while True:
            about = await look()
            if json:
                print_json(about)
            else:
                if watch and sys.stdout.isatty():
                    print(CLEAR, end="")
                _print_nodes(about)
                sys.stdout.flush()
            if not watch:
                return not about["without_owner"]
            await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def _looking(config: "Config") -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Yield a function that reports on the cluster, from the server itself or from a node's API."""
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:

            async def ask() -> dict[str, Any]:
                return dict(api.get("/v1/cluster"))

            yield ask
        return
    from mainspring.cluster import report
    from mainspring.store import members

    async with opened_store(config) as store:

        async def look() -> dict[str, Any]:
            return report(*await members.look(store))

        yield look


_COLUMNS: Final = ("NODE", "HOST", "PID", "OWNS", "AHEAD", "IN FLIGHT", "LAG", "DELIVERED")


def _print_nodes(about: dict[str, Any]) -> None:
    rows = []
    for node in about["nodes"]:
        name = node["id"] + (" (leader)" if node["leader"] else "") + (" (leaving)" if node["leaving"] else "")
        owns, planned = len(node["partitions"]), len(node["planned"])
        rows.append((
            name, node["host"], str(node["pid"]), str(owns) if owns == planned else f"{owns} of {planned}",
            str(node["look_ahead"]), str(node["in_flight"]), span(node["lag_ms"]), str(node["delivered"]),
        ))  # fmt: skip
    if rows:
        print_rows(_COLUMNS, rows)
        print()
    print(f"{about['partitions']} partitions, plan {about['plan']}, term {about['term']}")
    for what, words in (("without_owner", "have no owner"), ("moving", "are not where the plan wants them")):
        if about[what]:
            print(f"{len(about[what])} {words}: {_listed(about[what])}")
    if not about["nodes"]:
        print("no node is running; start one: mainspring serve")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")


status_app = new_app()

FEW: Final = 5


@status_app.command("status")
@connected
def overview(config: "Config", json: Json = False) -> None:
    """Show one namespace on one screen: nodes, tasks, what is due next, what failed last.

    Exit code 1 when a partition has no owner, so that nothing of it is fired.
    """
    cluster = asyncio.run(_cluster(config))
    found = with_client(config, _overview)
    if json:
        print_json(found | {"cluster": with_times(cluster)})
    else:
        _print_overview(found, cluster, place_of(config))
    if cluster["without_owner"]:
        raise typer.Exit(1)


async def _cluster(config: "Config") -> dict[str, Any]:
    async with _looking(config) as look:
        return await look()


async def _overview(client: "Client") -> dict[str, Any]:
    return {
        "tasks": await client.count(),
        "dead_letters": await client.dead.count(),
        "schedules": len([view async for view in client.schedules.all()]),
        "pauses": [one.scope.text for one in await client.pauses()],
        "stalled_lanes": [one.lane for one in await client.lanes()],
        "next_due": (await client.list(limit=FEW)).tasks,
        "last_failures": [
            {"id": one.id, "died_ms": one.died_ms, "target": one.target, "reason": one.reason}
            for one in (await client.dead.list(limit=FEW)).letters
        ],
    }


def _dead(found: dict[str, Any]) -> str:
    if found["dead_letters"] is not None:
        return str(found["dead_letters"])
    listed = len(found["last_failures"])  # an API does not count them
    return f"{listed} or more" if listed == FEW else str(listed)


def _print_overview(found: dict[str, Any], cluster: dict[str, Any], place: str) -> None:
    count = found["tasks"]
    nodes = [node["id"] for node in cluster["nodes"]]
    facts = [
        ("looked at", place),
        ("nodes", f"{len(nodes)} running, {cluster['leader']} leads" if nodes else "none; start one: mainspring serve"),
        ("partitions", f"{cluster['partitions']}, {len(cluster['without_owner']) or 'none'} without an owner"),
        ("tasks", f"{'' if count.exact else 'about '}{count.pending} pending"),
        ("schedules", str(found["schedules"])),
        ("dead letters", _dead(found)),
    ]
    facts += [("paused", ", ".join(found["pauses"]))] if found["pauses"] else []
    if stalled := len(found["stalled_lanes"]):
        facts.append(("stalled", f"{stalled} {'lane' if stalled == 1 else 'lanes'}; mainspring lane list"))
    for line in aligned(facts):
        print(line)
    if found["next_due"]:
        print("\nNext due")
        print_rows(
            ("ID", "DUE", "TARGET"), [(one.id, Instant(one.due_ms), one.target or "") for one in found["next_due"]]
        )
    if found["last_failures"]:
        print("\nLast failures")
        rows = [
            (one["id"], Instant(one["died_ms"]), one["target"] or "(damaged)", one["reason"])
            for one in found["last_failures"]
        ]
        print_rows(("ID", "DIED", "TARGET", "REASON"), rows)


version_app = new_app()


@version_app.command("version")
def version() -> None:
    """Print the versions of Mainspring and of Python."""
    from platform import platform, python_version

    from mainspring import __version__

    print(f"mainspring {__version__}, Python {python_version()}, {platform(terse=True)}")


key_app = new_group()


@key_app.command()
@connected
def add(
    config: "Config",
    name: Annotated[str, typer.Argument(help="What it is for; shown in lists and in the audit trail.")] = "",
    role: Annotated[Role, typer.Option(help="What it may do.")] = "operator",
    expires: Annotated[str | None, typer.Option(help="A time, or a delay such as 90d; default never.")] = None,
    targets: Annotated[list[str] | None, typer.Option("--target", help="Only this; a * at its end is any.")] = None,
    reaches: Annotated[list[str] | None, typer.Option("--also", help="Another namespace to reach; * is all.")] = None,
    rate: Annotated[float | None, typer.Option(help="At most this many requests a second.")] = None,
    max_pending: Annotated[int | None, typer.Option(help="At most this many pending tasks; 0 is no limit.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="At most this many bytes of payloads of pending tasks.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Make a key and print its text, this one time."""
    bound = None if targets is None else tuple(targets)
    order = KeyOrder(role, name, expires, tuple(reaches or ()), bound, rate, max_pending, max_bytes)
    token, made = asyncio.run(_add(config, order))
    if json:
        print_json({"key": token, **made.fields})
        return
    print(token)
    print(f"key {made.id} ({made.name}, {made.role}); its text is shown only now, keep it safe", file=sys.stderr)


@key_app.command("list")
@listing
def list_(config: "Config") -> Listing:
    """List the keys, the oldest first; never their texts."""
    keys = asyncio.run(_list(config))
    return Listing(
        columns=("ID", "ROLE", "NAME", "EXPIRES", "LIMITED TO"),
        rows=[(one.id, one.role, one.name, Instant(one.expires_ms), _bounds(one)) for one in keys],
        value=keys,
        empty="there are no keys",
        hint="mainspring key add --role admin",
    )


def _bounds(key: KeyShown) -> str:
    bounds = [f"targets {', '.join(key.targets)}"] if key.targets is not None else []
    bounds += [f"also {', '.join(key.also)}"] if key.also else []
    bounds += [f"{key.rate:g} a second"] if key.rate is not None else []
    bounds += [f"{key.max_pending or 'any number of'} pending"] if key.max_pending is not None else []
    bounds += [f"{key.max_bytes or 'any number of'} bytes pending"] if key.max_bytes is not None else []
    return "; ".join(bounds)


@key_app.command()
@connected
def revoke(
    config: "Config",
    ids: Annotated[list[str], typer.Argument(help="Ids as `key list` shows them.")],
    json: Json = False,
) -> None:  # fmt: skip
    """Revoke keys for good; nodes notice within two seconds. Exit code 1 if one of the ids is unknown."""
    names = asyncio.run(_revoke(config, ids))
    if json:
        outcomes = [{"id": key_id, "outcome": "unknown" if name is None else "revoked"} for key_id, name in names]
        print(msgspec.json.encode(outcomes).decode())
    else:
        for key_id, name in names:
            print(f"{key_id}: unknown" if name is None else f"{key_id} ({name}): revoked")
    if unknown := [key_id for key_id, name in names if name is None]:
        raise not_found(config, f"there is no key {', '.join(map(repr, unknown))}")


@key_app.command()
def generate() -> None:
    """Print the text of a key without storing it, for a file that MAINSPRING_API_KEY_FILE names."""
    print(new_token())


# -- inside: over an API, else on the server itself ------------------------------------------------------------


async def _add(config: "Config", order: KeyOrder) -> tuple[str, KeyShown]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            about = api.call("POST", "/v1/keys", body=msgspec.to_builtins(order))
            return about["key"], msgspec.convert(about, KeyShown)
    from mainspring.store.access import add_key, new_key_id

    token = new_token()
    async with opened_store(config) as store:
        made = make_key(order, key_id=new_key_id(), token=token, now_ms=store.clock.now_ms())
        await add_key(store, made)
        await _record(store, config, "key.add", made.id, after=KeyShown.of(made).fields)
    return token, KeyShown.of(made)


async def _list(config: "Config") -> list[KeyShown]:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return msgspec.convert(api.get("/v1/keys")["keys"], list[KeyShown])
    from mainspring.store.access import list_keys

    async with opened_store(config) as store:
        return [KeyShown.of(one) for one in await list_keys(store)]


async def _revoke(config: "Config", ids: list[str]) -> list[tuple[str, str | None]]:
    """Revoke keys; return each id with the name of its key, or None if it is unknown."""
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
    await _record(store, config, "key.revoke", key_id, before=KeyShown.of(gone).fields)
    return gone.name


async def _record(store: "Store", config: "Config", what: str, name: str, **changed: dict[str, Any]) -> None:
    from mainspring.store import access

    who = f"{user()} (command line)"
    change = Change(who, what, name, socket.gethostname(), "", changed.get("before"), changed.get("after"))
    await access.record_change(store, change, kept=config.audit_entries)


acl_app = new_app()

_USER = re.compile(r"[A-Za-z0-9._-]{1,64}")


@acl_app.command()
def acl(
    user: Annotated[str, typer.Option(help="Name of the user.")] = "mainspring",
    namespace: Namespace = None,
    password_file: Annotated[Path | None, typer.Option(help="File with its password; printed as a hash.")] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Allow durability=disk; needs Redis 7.2 or Valkey.")] = False,
    file: Annotated[bool, typer.Option("--file", help="As a line of an ACL file.")] = False,
    config: Settings = None,
    json: Json = False,
) -> None:
    """Print the ACL line of a user that may do what Mainspring does in one namespace, and nothing else."""
    if not _USER.fullmatch(user):
        raise InvalidInput(f"user is {user!r}; use 1 to 64 of A-Z a-z 0-9 . _ -")
    settings = load(None, None, namespace, config)
    rules = acl_rules(settings.namespace, secret=_secret(password_file), disk=disk)
    if json:
        import msgspec

        print(msgspec.json.encode({"user": user, "rules": rules}).decode())
        return
    if file:
        print("user", user, *(rule for rule in rules if rule != "reset"))
    else:
        print("ACL SETUSER", user, *rules)
    if password_file is None:
        print("put a password in the place of PASSWORD, or name a file with --password-file", file=sys.stderr)


def _secret(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--password-file {file}: {error}") from None
    if not secret:
        raise InvalidInput(f"--password-file {file} is empty")
    return secret


audit_app = new_app()


@audit_app.command()
@listing
def audit(
    config: "Config",
    limit: Annotated[int, typer.Option(help="Changes of a page, up to 1000.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after the previous page.")] = None,
) -> Listing:
    """List the changes made through the API and by commands, the newest first."""
    page = asyncio.run(_page(config, limit, cursor))
    return Listing(
        columns=("AT", "CHANGE", "OF", "BY", "FROM", "DETAILS"),
        rows=[
            (
                Instant(one.at_ms),
                one.change.what,
                one.change.object,
                one.change.who,
                one.change.address,
                _describe(one.change),
            )
            for one in page.changes
        ],
        value=page,
        empty="no change by a command or over the API is recorded",
        more=None if page.next is None else f"--cursor {page.next}",
        named=2,
    )


async def _page(config: "Config", limit: int, cursor: str | None) -> AuditPage:
    if config.api_url is not None:
        with contextlib.closing(remote(config)) as api:
            return msgspec.convert(api.get("/v1/audit", limit=limit, cursor=cursor), AuditPage)
    from mainspring.store.access import read_audit

    async with opened_store(config) as store:
        return await read_audit(store, limit=limit, cursor=cursor)


def _describe(change: Change) -> str:
    """Return what changed, such as `due_ms: 1 -> 2`; empty fields are left out."""
    before, after = change.before or {}, change.after or {}
    steps = {name: [side[name] for side in (before, after) if name in side] for name in (*before, *after)}
    return ", ".join(
        f"{name}: {' -> '.join(map(_spoken, values))}"
        for name, values in steps.items()
        if any(value not in (None, []) for value in values)
    )


def _spoken(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
