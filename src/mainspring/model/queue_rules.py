"""Rules of queues, `[queue.<name>]`, and the weights with which workers serve them.

A rule sets how fast a queue is fed, how many of its jobs run, the retry policy, and what happens to a lane whose head
fails.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import InvalidInput
from .flow import Limit, Rate
from .lane import LanePolicy, read_lane_policy
from .retry import RetryPolicy, policy_table, read_retry
from .targets.names import check_queue
from .text import Tables, check_known

_SETTINGS: Final = ("rate", "concurrency", "retry", "lane_policy")


@dataclass(frozen=True, slots=True)
class QueueRule:
    limit: Limit = Limit()  # noqa: RUF009  # frozen
    """Rate at which tasks are handed to the queue, and the number of its jobs that run at once on all workers."""
    retry: RetryPolicy | None = None
    lane_policy: LanePolicy | None = None


class QueueRules(Tables[QueueRule]):
    """Rules by queue name; immutable."""

    def __init__(self, rules: Mapping[str, QueueRule] | None = None) -> None:
        super().__init__(rules)
        for name in self:
            check_queue(name)

    @classmethod
    def read(cls, tables: object) -> "QueueRules":
        """Return the rules in a table of tables, one per queue."""
        return cls.read_each("queue", tables, _read)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return tables from which `read` makes these rules again."""
        return {name: _table(rule) for name, rule in self.items()}

    def rates(self) -> dict[str, Limit]:
        """Return the rate limit of each receiver that has one."""
        return {f"queue:{name}": Limit(rule.limit.rate) for name, rule in self.items() if rule.limit.rate is not None}

    def slots(self) -> dict[str, Limit]:
        """Return the limit of jobs running at once, for each queue that has one."""
        return {name: Limit(concurrency=one.limit.concurrency) for name, one in self.items() if one.limit.concurrency}

    def retries(self) -> dict[str, RetryPolicy]:
        return {name: rule.retry for name, rule in self.items() if rule.retry is not None}

    def lane_policies(self) -> dict[str, LanePolicy]:
        return {name: rule.lane_policy for name, rule in self.items() if rule.lane_policy is not None}


def _read(_: str, table: Mapping[str, Any]) -> QueueRule:
    check_known(table, _SETTINGS, "a queue")
    concurrency = table.get("concurrency")
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise InvalidInput(f"concurrency: expected a whole number, not {concurrency!r}")
    rate = Rate.read(table["rate"]) if "rate" in table else None
    retry = read_retry(table["retry"]) if "retry" in table else None
    return QueueRule(Limit(rate, concurrency), retry, read_lane_policy(table))


def _table(rule: QueueRule) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if rule.limit.rate is not None:
        table["rate"] = str(rule.limit.rate)
    if rule.limit.concurrency is not None:
        table["concurrency"] = rule.limit.concurrency
    if rule.retry is not None:
        table["retry"] = policy_table(rule.retry)
    if rule.lane_policy is not None:
        table["lane_policy"] = str(rule.lane_policy)
    return table


MOST_WEIGHT: Final = 1_000
_PART: Final = re.compile(r"([^:]+)(?::(.*))?", re.DOTALL)


def parse_queues(text: str) -> dict[str, int]:
    """Return weights by name from `mail:3,reports:1`: in order of priority, weight 1 if none is given."""
    found: dict[str, int] = {}
    for part in (part.strip() for part in text.split(",")):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidInput(f"queues {text!r}: a name is missing; write them like mail:3,reports:1")
        name = check_queue(match[1].strip())
        weight = match[2]
        if weight is not None and not (weight.isascii() and weight.isdigit() and 1 <= int(weight) <= MOST_WEIGHT):
            raise InvalidInput(
                f"queues: the weight of {name} is {weight!r}; give a whole number from 1 to {MOST_WEIGHT}"
            )
        if name in found:
            raise InvalidInput(f"queues: {name} is named twice")
        found[name] = int(weight or 1)
    return found
