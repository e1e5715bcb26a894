"""For tests of applications: a clock held by hand, a scheduler ticked by hand, real servers on free ports."""

from ..model.clock import ManualClock
from . import servers
from .ticker import Ticker

__all__ = ["ManualClock", "Ticker", "servers"]
