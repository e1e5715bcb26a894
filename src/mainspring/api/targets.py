"""`/v1/targets`: the named targets this node knows. Their secrets are never told."""

from typing import Any, Final

import msgspec

from ..model.audit_views import MASK, bare
from .asgi import Answer, answer
from .call import Call, no_such
from .routes import Route

_TOLD: Final = frozenset({
    "address", "ca_file", "concurrency", "gone_disables", "method", "rate", "response_bytes", "result_ttl",
    "retry", "timeout", "url", "lane_policy",
})  # fmt: skip
"""Settings of a target that hold no secret; everything else is masked, whatever it may be."""


class TargetList(msgspec.Struct):
    """Name -> its settings, secrets masked."""

    targets: dict[str, dict[str, Any]]


async def list_targets(call: Call) -> Answer:
    return answer(TargetList(_seen(call)))


async def get_target(call: Call) -> Answer:
    name = call.params["name"]
    seen = _seen(call)
    if name not in seen:
        raise no_such("target", name)
    return answer(seen[name])


def _seen(call: Call) -> dict[str, dict[str, Any]]:
    tables = call.node.config.targets.tables()
    return {name: masked(table) for name, table in tables.items() if call.key.sees(f"target:{name}")}


def masked(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _shown(name, value) for name, value in table.items()}


def _shown(name: str, value: Any) -> Any:
    if name in ("url", "address"):
        return bare(str(value))
    if name in _TOLD:
        return value
    if isinstance(value, dict):
        return dict.fromkeys(value, MASK)
    return MASK


ROUTES: Final = (
    Route("GET", "/v1/targets", list_targets, "read", "List named targets.", answers={200: TargetList}),
    Route(
        "GET", "/v1/targets/{name}", get_target, "read", "Look at one named target.", answers={200: dict[str, Any]},
        problems=("not-found",),
    ),
)  # fmt: skip
