"""`bench sparse`: what a pending task costs in memory when tasks are spread thinly over a year."""

import msgspec

from ..client import Client
from . import backlog
from .ground import Where, ground
from .life import Progress


class Sparse(msgspec.Struct, frozen=True):
    tasks: int
    bytes_per_pending_task: float
    put_per_s: float
    put_server_us: float
    pending: int
    """As the server counts them."""

    @property
    def sound(self) -> bool:
        return self.pending == self.tasks


async def sparse(where: Where, tasks: int, payload_bytes: int, progress: Progress) -> Sparse:
    async with ground(where) as place, Client(place.url, namespace=place.namespace) as client:
        before = await place.read()
        await backlog.add(
            client,
            range(tasks),
            backlog.over_a_year,
            payload_bytes=payload_bytes,
            progress=lambda done: progress("putting", done, tasks),
        )
        used = (await place.read()).since(before)
        pending = (await client.count()).pending
    return Sparse(
        tasks=tasks,
        bytes_per_pending_task=round(used.memory / tasks, 1),
        put_per_s=round(tasks / used.at_s),
        put_server_us=round(used.server_us / tasks, 3),
        pending=pending,
    )
