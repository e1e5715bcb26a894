"""Everything the API answers, in one list: the router, the OpenAPI document and the tests of access go by it."""

from typing import Final

from . import (
    batch,
    cluster,
    dead,
    doctor,
    handbook,
    keys,
    metrics,
    probes,
    queues,
    schedules,
    standstills,
    targets,
    tasks,
    trail,
)
from .routes import Route
from .ticks import TICK

WATCHED: Final[tuple[Route, ...]] = (*probes.ROUTES, metrics.ROUTE)
"""What a node without the role `api` answers too: whoever watches it must reach it."""

ROUTES: Final[tuple[Route, ...]] = (
    TICK,
    *tasks.ROUTES,
    batch.ROUTE,
    *dead.ROUTES,
    *schedules.ROUTES,
    *standstills.ROUTES,
    *queues.ROUTES,
    *targets.ROUTES,
    cluster.ROUTE,
    doctor.ROUTE,
    *keys.ROUTES,
    trail.ROUTE,
    *WATCHED,
    *handbook.ROUTES,
)

__all__ = ["ROUTES", "TICK", "WATCHED"]
