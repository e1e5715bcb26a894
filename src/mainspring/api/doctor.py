"""`/v1/doctor`: what `mainspring doctor` finds, looked at from this node."""

import socket
from dataclasses import replace
from typing import Final

import msgspec

from ..checkup import checkup
from .asgi import Answer, answer
from .call import Call
from .problems import not_ready
from .routes import Route


class Checked(msgspec.Struct):
    """`server` is where; `status` is ok, warning, error, or unknown where the server does not let itself be asked."""

    server: str
    name: str
    status: str
    message: str


class Checkup(msgspec.Struct):
    checks: list[Checked]


async def get_doctor(call: Call) -> Answer:
    call.check_unbound()
    url, config = call.node.server_url, call.node.config
    if url is None:
        raise not_ready("the node is starting or stopping")
    if call.namespace != config.namespace:
        config = replace(config, namespace=call.namespace, partitions=None)
    async with call.app.examining:  # it looks through all keys of the namespace: one at a time is enough
        found = await checkup(config, url, here=f"node on {socket.gethostname()}")
    return answer(Checkup([Checked(one.where, one.check.name, one.check.status, one.check.message) for one in found]))


ROUTE: Final = Route(
    "GET", "/v1/doctor", get_doctor, "admin", "Check servers, rights, speed, clocks, data, nodes and Kafka.",
    answers={200: Checkup},
)  # fmt: skip
