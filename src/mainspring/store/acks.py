"""What workers say of tasks of lanes, until the owner of the partition has settled them."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..model.errors import StoreError
from ..model.ids import IDH_BYTES
from .keys import Address
from .store import Group, Store
from .wire import Command

AT_ONCE: Final = 1_000


class Acks(NamedTuple):
    acks: dict[bytes, tuple[bytes, bytes]]
    """Packed address -> idh, how it ended (see `queue_end.decode_ack`)."""
    cursor: int
    """Where to go on; 0 when there are no others."""


async def read_acks(store: Store, cursors: Mapping[int, int]) -> list[Acks | StoreError]:
    """Some of each partition, from where its cursor stands: those that nobody awaits must not hide the others."""
    groups: list[Group] = []
    for p, cursor in cursors.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HSCAN", keys.acks, cursor, "COUNT", AT_ONCE)]))
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
        answers.append(Acks(found, int(cursor)))
    return answers


async def forget_acks(store: Store, known: Mapping[int, Sequence[bytes]]) -> StoreError | None:
    """Remove acks whose tasks are settled. One that is left over does no harm: no other task has its address."""
    groups: list[Group] = []
    for p, addresses in known.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HDEL", keys.acks, *addresses)]))
    return next((one for one in await store.run(groups) if isinstance(one, StoreError)), None)


async def sweep_acks(store: Store, partition: int) -> None:
    """Remove some of those whose slices are gone: a former owner had settled their tasks, and was over before it could
    forget them."""
    [answer] = await read_acks(store, {partition: 0})
    if isinstance(answer, StoreError):
        raise answer
    if not answer.acks:
        return
    keys = store.keys.partitions[partition]
    places = {raw: Address.unpack(partition, raw) for raw in answer.acks}
    asked: list[Command] = [("ZSCORE", keys.slices, place.slice.name) for place in places.values()]
    scores = await store.run_one(keys.slot, asked)
    # No slice has the incarnation of one that ever was: what is gone now stays so.
    gone = [
        raw for (raw, place), score in zip(places.items(), scores, strict=True)
        if score is None or float(score) != place.score
    ]  # fmt: skip
    if gone and (failure := await forget_acks(store, {partition: gone})) is not None:
        raise failure
