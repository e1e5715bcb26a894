"""Records of handlers that run once for a task: begun, or done with its answer. They expire by themselves."""

from typing import TYPE_CHECKING

from ..model.job import Job

if TYPE_CHECKING:  # modules that declare handlers import this, and shall not wait for all that speaks to servers
    from .store import Store


async def begin(store: "Store", job: Job, mark: bytes, keep_ms: int) -> bytes | None:
    """Leave a mark, unless there is a record: then that is returned."""
    keys = store.keys.partitions[job.partition]
    command = ("SET", keys.once(job.idh, job.original_due_ms), mark, "NX", "GET", "PX", keep_ms)
    [found] = await store.run_one(keys.slot, [command])
    return found if found is None else bytes(found)


async def end(store: "Store", job: Job, record: bytes, keep_ms: int) -> None:
    keys = store.keys.partitions[job.partition]
    await store.run_one(keys.slot, [("SET", keys.once(job.idh, job.original_due_ms), record, "PX", keep_ms)])


async def forget(store: "Store", job: Job, mark: bytes) -> None:
    """Take back the mark of this run; what another has left there since stays."""
    keys = store.keys.partitions[job.partition]
    await store.call(job.partition, "once_forget", [keys.once(job.idh, job.original_due_ms)], [mark])
