"""Settings on which nodes, workers and clients of a namespace must agree. The namespace stores each as a text.

dedupe_window               how long a finished id is remembered: 3600000ms
max_payload_bytes           the largest payload: 65536
history_bytes               memory of the history of runs: 268435456
history_details_bytes       memory of the details of runs: 67108864
history_details_keep        how long details are kept: 604800000ms
queue.<name>.lane_policy    what happens to a lane of the queue whose head fails: park
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from .errors import ConfigError, InvalidInput
from .lane import LanePolicy
from .limits import MAX_PAYLOAD_BYTES
from .targets.names import check_queue
from .times import delay_ms

DEDUPE_WINDOW: Final = "dedupe_window"
MAX_PAYLOAD: Final = "max_payload_bytes"
HISTORY_BYTES: Final = "history_bytes"
HISTORY_DETAILS_BYTES: Final = "history_details_bytes"
HISTORY_DETAILS_KEEP: Final = "history_details_keep"
DEFAULTS: Final = {
    DEDUPE_WINDOW: "3600000ms",
    MAX_PAYLOAD: str(MAX_PAYLOAD_BYTES),
    HISTORY_BYTES: str(256 << 20),
    HISTORY_DETAILS_BYTES: str(64 << 20),
    HISTORY_DETAILS_KEEP: "604800000ms",
}
"""Values used if neither the namespace nor the process sets one. A node writes them into a new namespace."""

LONGEST_WINDOW_MS: Final = 366 * 86_400_000
LARGEST_PAYLOAD_BYTES: Final = 16 * 1024 * 1024
LARGEST_HISTORY_BYTES: Final = 1 << 50
_NUMBERS: Final = {
    MAX_PAYLOAD: (1, LARGEST_PAYLOAD_BYTES),
    HISTORY_BYTES: (0, LARGEST_HISTORY_BYTES),
    HISTORY_DETAILS_BYTES: (0, LARGEST_HISTORY_BYTES),
}
_SPANS: Final = (DEDUPE_WINDOW, HISTORY_DETAILS_KEEP)
_LANE_POLICY: Final = re.compile(r"queue\.(.+)\.lane_policy")


def lane_policy_of(queue: str) -> str:
    """Return the name under which the lane policy of a queue is stored."""
    return f"queue.{queue}.lane_policy"


def checked_setting(name: str, text: str) -> str:
    """Return the text in its stored form, so that equal values are equal texts; refuse unknown names and bad values."""
    if name in _SPANS:
        window_ms = delay_ms(text, field=name)
        if window_ms > LONGEST_WINDOW_MS:
            raise InvalidInput(f"{name} is {text!r}; give at most 366d")
        return f"{window_ms}ms"
    if name in _NUMBERS:
        low, high = _NUMBERS[name]
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise InvalidInput(f"{name} is {text!r}; give a whole number from {low} to {high}")
        return str(int(text))
    queue = _LANE_POLICY.fullmatch(name)
    if queue is None:
        raise InvalidInput(
            f"{name!r} is not a setting of a namespace; use {', '.join(DEFAULTS)} or queue.<name>.lane_policy"
        )
    check_queue(queue[1])
    return str(LanePolicy.parse(text))


class HistoryLimits(NamedTuple):
    """What the history of runs may take, in the whole namespace. 0 bytes keep nothing."""

    bytes: int
    details_bytes: int
    details_keep_ms: int


class SharedSettings:
    """The shared settings as one process knows them; `take` updates them from the namespace."""

    def __init__(self, said: Mapping[str, str] | None = None, fills: Mapping[str, str] | None = None) -> None:
        self._said = {name: checked_setting(name, text) for name, text in (said or {}).items()}
        self.fills = dict(fills or {})
        """What this process writes if the namespace has no value: nodes and workers fill in values, clients do not."""
        self.kept: dict[str, str] = {}
        """The namespace's values, as of the last read."""
        self.queue_lanes: dict[str, LanePolicy] = {}
        """Lane policy by queue. Updated in place, so that every holder sees the current values."""
        self._apply()

    def take(self, kept: Mapping[str, str]) -> None:
        """Use the namespace's values, even if this process was started with others.

        Skip values that cannot be read: a later version may store more.
        """
        readable: dict[str, str] = {}
        for name, text in kept.items():
            with contextlib.suppress(InvalidInput):
                readable[name] = checked_setting(name, text)
        if readable != self.kept:
            self.kept = readable
            self._apply()

    def _apply(self) -> None:
        found = DEFAULTS | self._said | self.kept
        self.dedupe_window_ms = delay_ms(found[DEDUPE_WINDOW], field=DEDUPE_WINDOW)
        self.max_payload_bytes = int(found[MAX_PAYLOAD])
        self.history = HistoryLimits(
            int(found[HISTORY_BYTES]),
            int(found[HISTORY_DETAILS_BYTES]),
            delay_ms(found[HISTORY_DETAILS_KEEP], field=HISTORY_DETAILS_KEEP),
        )
        lanes = {name[1]: text for key, text in found.items() if (name := _LANE_POLICY.fullmatch(key))}
        self.queue_lanes.clear()
        self.queue_lanes |= {queue: LanePolicy.parse(text) for queue, text in lanes.items()}

    def check(self, namespace: str) -> None:
        """Refuse to start with a value other than the namespace's."""
        for name, text in self._said.items():
            kept = self.kept.get(name, text)
            if kept != text:
                raise ConfigError(
                    f"{name} is {text!r} here and {kept!r} in namespace {namespace!r}; nodes, workers and clients must"
                    f" agree: leave it out here, or change it for all with `mainspring config set {name} {text!r}`"
                )
