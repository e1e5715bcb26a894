"""Which node shall own which partition: even by weight, and with few moves when a node comes or goes.

Every node has a seat count by its weight. It keeps what it has, up to that count; what is over, and what
belonged to nodes that are gone, goes to the node with a free seat that ranks highest for it (rendezvous hashing: each
pair of node and partition has a fixed rank, so all who plan from the same state plan the same).
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b


def assign(current: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    """The new owner of each partition. `current` names the present one, or "" where there is none."""
    if not weights:
        return list(current)
    seats = _seats(current, weights)
    owners = [""] * len(current)
    for node in sorted(weights):
        held = [number for number, owner in enumerate(current) if owner == node]
        for number in sorted(held, key=lambda one: _rank(node, one), reverse=True)[: seats[node]]:
            owners[number] = node
            seats[node] -= 1
    for number, owner in enumerate(owners):
        if not owner:
            node = max((one for one in weights if seats[one]), key=lambda one: (_rank(one, number), one))
            owners[number] = node
            seats[node] -= 1
    return owners


def _seats(current: Sequence[str], weights: Mapping[str, int]) -> dict[str, int]:
    """How many partitions each node gets: its share rounded down, and one more for those with the largest rest.

    Where the rests are equal the extra seats go to nodes that would otherwise have to give a partition away.
    """
    total = sum(weights.values())
    seats = {node: len(current) * weight // total for node, weight in weights.items()}
    rests = {node: len(current) * weight % total for node, weight in weights.items()}
    over = {node: current.count(node) > seats[node] for node in weights}
    extra = len(current) - sum(seats.values())
    for node in sorted(weights, key=lambda one: (-rests[one], not over[one], one))[:extra]:
        seats[node] += 1
    return seats


def _rank(node: str, partition: int) -> bytes:
    return blake2b(f"{partition}/{node}".encode(), digest_size=8).digest()
