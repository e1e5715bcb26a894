"""Start-up checks of a server: settings that are fine, settings to change, and settings that cannot be read.

INFO answers most questions and is rarely forbidden. CONFIG, which managed services deny, is used only
for what INFO lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import hiredis

from mainspring.store.redis.servers import Primary, info_fields

CheckStatus = Literal["ok", "warning", "error", "unknown"]
OLDEST = (7, 0)
_CLOCK_APART_S = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One result: the setting that was checked, its state, and what to do."""

    name: str
    status: CheckStatus
    message: str


async def check_server(primary: Primary, *, now: Callable[[], float] = time.time) -> list[Check]:
    """Check version, role, eviction, persistence and clock of one primary."""
    info = await _info(primary)
    config = await _config(primary, info)
    return [
        _version(info),
        _role(info),
        _eviction(info, config),
        _persistence(info, config),
        await _clock(primary, now),
    ]


@dataclass(frozen=True, slots=True)
class _ServerFields:
    """Fields in a server's reply, or why there are none."""

    fields: Mapping[str, str]
    denied: str = ""


async def _info(primary: Primary) -> _ServerFields:
    reply = (await primary.pipeline([("INFO",)]))[0]
    if isinstance(reply, hiredis.ReplyError):
        return _ServerFields({}, f"the server refuses INFO ({reply})")
    return _ServerFields(info_fields(reply))


async def _config(primary: Primary, info: _ServerFields) -> _ServerFields:
    wanted = ["save"] if info.fields.get("aof_enabled") == "0" else []
    if "maxmemory_policy" not in info.fields:
        wanted.append("maxmemory-policy")
    if "aof_enabled" not in info.fields:
        wanted += ["appendonly", "save"]
    if not wanted:
        return _ServerFields({})
    replies = await primary.pipeline([("CONFIG", "GET", name) for name in wanted])
    fields: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            return _ServerFields({}, f"the server refuses CONFIG GET ({reply})")
        fields |= {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    return _ServerFields(fields)


def _unknown(name: str, *answers: _ServerFields) -> Check:
    why = "; ".join(answer.denied for answer in answers if answer.denied)
    return Check(name, "unknown", why or "the server does not report it")


def _version(info: _ServerFields) -> Check:
    # Valkey reports redis_version 7.2.4 for old clients, and its own version in another field.
    redis_version = info.fields.get("redis_version")
    if redis_version is None:
        return _unknown("version", info)
    valkey_version = info.fields.get("valkey_version")
    spoken = f"Valkey {valkey_version}" if valkey_version else f"Redis {redis_version}"
    if _numbers(redis_version) < OLDEST:
        return Check("version", "error", f"{spoken} is too old; Redis 7.0 or Valkey 7.2 or newer is needed")
    return Check("version", "ok", spoken)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _role(info: _ServerFields) -> Check:
    role = info.fields.get("role")
    if role is None:
        return _unknown("role", info)
    mode = "a cluster's primary" if info.fields.get("cluster_enabled") == "1" else "a primary"
    if role == "master":
        return Check("role", "ok", f"the server is {mode}")
    host, port = info.fields.get("master_host", "?"), info.fields.get("master_port", "?")
    return Check("role", "error", f"the server is a replica of {host}:{port}; name the primary in the URL")


def _eviction(info: _ServerFields, config: _ServerFields) -> Check:
    policy = info.fields.get("maxmemory_policy") or config.fields.get("maxmemory-policy")
    if policy is None:
        return _unknown("eviction", info, config)
    if policy == "noeviction":
        return Check("eviction", "ok", "noeviction: a full server refuses new tasks and keeps those it has")
    message = (
        f"maxmemory-policy is {policy}: a full server may evict tasks silently. "
        "Set: CONFIG SET maxmemory-policy noeviction"
    )
    return Check("eviction", "warning", message)


def _persistence(info: _ServerFields, config: _ServerFields) -> Check:
    aof = info.fields.get("aof_enabled") or {"yes": "1", "no": "0"}.get(config.fields.get("appendonly", ""))
    if aof == "1":
        return _aof_health(info)
    if aof is None:
        return _unknown("persistence", info, config)
    advice = "Set: CONFIG SET appendonly yes, CONFIG SET appendfsync everysec, and CONFIG REWRITE to keep it"
    save = config.fields.get("save")
    if save is None:
        return Check("persistence", "warning", f"no append-only file: a crash loses tasks. {advice}")
    if save:
        lost = f"only snapshots (save {save}): a crash loses the tasks put since the last one"
    else:
        lost = "nothing is written to disk: a crash or a restart loses every task"
    return Check("persistence", "warning", f"{lost}. {advice}")


def _aof_health(info: _ServerFields) -> Check:
    if info.fields.get("aof_last_write_status", "ok") != "ok":
        message = "the append-only file cannot be written (aof_last_write_status is not ok); check the disk"
        return Check("persistence", "warning", message)
    return Check("persistence", "ok", "the append-only file is on")


async def _clock(primary: Primary, now: Callable[[], float]) -> Check:
    before = now()
    reply: Any = (await primary.pipeline([("TIME",)]))[0]
    after = now()
    if isinstance(reply, hiredis.ReplyError):
        return Check("clock", "unknown", f"the server refuses TIME ({reply})")
    server = int(reply[0]) + int(reply[1]) / 1e6
    # The reply was made between `before` and `after`: only time outside that range is a difference.
    apart_s = server - min(max(server, before), after)
    if abs(apart_s) <= _CLOCK_APART_S:
        return Check("clock", "ok", f"within {_CLOCK_APART_S:g} s of this machine's")
    word = "ahead of" if apart_s > 0 else "behind"
    message = (
        f"the server's clock is {abs(apart_s):.1f} s {word} this machine's. The server's clock counts: tasks "
        "fire by it. Set both clocks by NTP"
    )
    return Check("clock", "warning", message)
