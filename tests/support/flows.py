"""A flow without limits and pauses, for partitions by hand."""

from mainspring.engine.flow import Flow, FlowOptions
from mainspring.model.clock import ManualClock
from mainspring.roles import Loops


def open_flow() -> Flow:
    """Let every task leave."""
    return Flow(FlowOptions(), ManualClock(), Loops(1.0), {}, concurrency=100_000)
