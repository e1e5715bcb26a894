"""`/metrics`, for Prometheus."""

from typing import Final

from ..measures import everything
from ..model.metrics import render
from .asgi import Answer
from .call import Call
from .routes import Route

TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


async def get_metrics(call: Call) -> Answer:
    call.check_unbound()  # the names of queues, which are other tenants' too, are among the figures
    return Answer(200, render(await everything(call.node)).encode(), TEXT)


ROUTE: Final = Route(
    "GET", "/metrics", get_metrics, "read", "Figures for Prometheus.", answers={200: None}, media=("text/plain",),
    open_by="metrics_open",
)  # fmt: skip
