"""A put that takes the place of a task changes it, and is told like every other change. All other puts are data."""

from collections.abc import Awaitable

from ..model.audit_views import of_replaced
from ..model.errors import NotConfirmed
from ..model.task import Handle, Task
from .call import Call


async def told(call: Call, task: Task, put: Awaitable[Handle]) -> Handle:
    """What a put came to. Whatever it replaced is in the audit trail before it is answered, confirmed or not."""
    try:
        handle = await put
    except NotConfirmed as error:
        for stored in error.handles or ():
            if stored is not None and stored.id == task.id:  # not what others put in the same write
                await _tell(call, task, stored)
        raise
    await _tell(call, task, handle)
    return handle


async def _tell(call: Call, task: Task, handle: Handle) -> None:
    views = of_replaced(handle, task.target, task.lane)
    if views is not None:
        await call.audit("task.replace", handle.id, *views)
