"""What workers say of tasks of lanes, until the owner of the partition has settled them."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..model.errors import StoreError
from ..model.ids import IDH_BYTES
from .store import Group, Store

AT_ONCE: Final = 1_000


class Acks(NamedTuple):
    acks: dict[bytes, tuple[bytes, bytes]]
    """Packed address -> idh, how it ended (see `queue_end.decode_ack`)."""
    more: bool
    """There are others."""


async def read_acks(store: Store, partitions: Sequence[int]) -> list[Acks | StoreError]:
    groups: list[Group] = []
    for p in partitions:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HSCAN", keys.acks, 0, "COUNT", AT_ONCE)]))
    answers: list[Acks | StoreError] = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            answers.append(result)
            continue
        cursor, flat = result[0]
        found = {
            address: (value[:IDH_BYTES], value[IDH_BYTES:])
            for address, value in zip(flat[::2], flat[1::2], strict=True)
        }
        answers.append(Acks(found, cursor != b"0"))
    return answers


async def forget_acks(store: Store, known: Mapping[int, Sequence[bytes]]) -> StoreError | None:
    """Remove acks whose tasks are settled. One that is left over does no harm: no other task has its address."""
    groups: list[Group] = []
    for p, addresses in known.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HDEL", keys.acks, *addresses)]))
    return next((one for one in await store.run(groups) if isinstance(one, StoreError)), None)
