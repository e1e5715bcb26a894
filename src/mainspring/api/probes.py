"""`/livez`, `/readyz`, `/healthy`: for those who watch the process. They need no key."""

from typing import Final

import msgspec

from .asgi import Answer
from .call import Call
from .problems import not_ready
from .routes import Route

_WELL: Final = Answer(200, b'{"status":"ok"}')


class Well(msgspec.Struct):
    status: str


async def livez(call: Call) -> Answer:
    """The process answers: that is all."""
    del call
    return _WELL


async def readyz(call: Call) -> Answer:
    if not call.node.ready:
        raise not_ready("the node is starting or stopping")
    if not await call.node.reachable():
        raise not_ready("the server does not answer")
    return _WELL


async def healthy(call: Call) -> Answer:
    if not call.node.ready:
        raise not_ready("the node is starting or stopping")
    if not call.node.healthy:
        raise not_ready("the server does not answer, or an error holds up the engine; the log says more")
    return _WELL


ROUTES: Final = (
    Route("GET", "/livez", livez, None, "The process answers.", answers={200: Well}),
    Route("GET", "/readyz", readyz, None, "It is started, and the server answers now.", answers={200: Well}),
    Route("GET", "/healthy", healthy, None, "Every role's last step went well.", answers={200: Well}),
)
