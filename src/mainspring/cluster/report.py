"""The cluster as programs are told of it: the nodes, who leads, who owns what."""

from typing import Any

from ..store.members import Holding, Member, View


def holder(holding: Holding) -> str:
    """The node that holds a partition; empty when none does."""
    return holding.owner.rpartition("/")[0]


def report(view: View, holdings: list[Holding]) -> dict[str, Any]:
    return {
        "leader": view.leader,
        "term": view.term,
        "plan": view.version,
        "partitions": len(holdings),
        "without_owner": [number for number, one in enumerate(holdings) if not one.owner],
        "moving": [
            number
            for number, (planned, one) in enumerate(zip(view.owners, holdings, strict=True))
            if planned != holder(one)
        ],
        "nodes": [node_report(one, view, holdings) for one in oldest_first(view)],
    }


def oldest_first(view: View) -> list[Member]:
    return sorted(view.members.values(), key=lambda one: one.order)


def node_report(member: Member, view: View, holdings: list[Holding]) -> dict[str, Any]:
    about = member.about
    return {
        "id": member.id,
        "leader": member.id == view.leader,
        "order": member.order,
        "host": about.host,
        "pid": about.pid,
        "roles": about.roles,
        "version": about.version,
        "concurrency": about.concurrency,
        "started_ms": about.started_ms,
        "leaving": member.leaving,
        "lease_left_ms": member.left_ms,
        "partitions": [number for number, one in enumerate(holdings) if holder(one) == member.id],
        "planned": [number for number, node in enumerate(view.owners) if node == member.id],
        "look_ahead": about.look_ahead,
        "in_flight": about.in_flight,
        "lag_ms": about.lag_ms,
        "delivered": about.delivered,
    }
