"""How far ahead an owner reads, and how often it looks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """How far ahead an owner reads."""

    tasks: int = 200_000
    bytes: int = 256 * 1024 * 1024
    horizon_ms: int = 5_000
    poll_ms: int = 250
    idle_poll_ms: int = 1_000
