"""Schedules under the settings of a node: how long a run may take at worst, and likely mistakes.

What a schedule says itself is refused where it cannot work (`model/schedule/definition.py`). What it leaves to its
target, its queue or the node changes with their settings, so it is reported and nothing is refused. The settings are
those of the caller; over its API a node uses its own.
"""

import time
from typing import Final, NamedTuple

import msgspec

from ..config.config import Config
from ..model.delivery import Body
from ..model.retry import Policies, RetryPolicy, WorstCase, worst_case
from ..model.schedule.definition import Definition
from ..model.schedule.view import SAMPLE, Finding, ScheduleView, lint
from ..model.targets.named import SCHEME
from ..model.targets.names import HANDED_OFF, queue_of
from ..model.targets.webhook import Webhook, is_web

LOOK_S: Final = 0.5
"""Seconds that runs are searched for: some times are slow to find."""


class Performer(NamedTuple):
    """The handler or command that runs it on a worker, as far as that is known."""

    queue: str
    retry: RetryPolicy | None = None
    timeout_ms: int | None = None


class Terms(NamedTuple):
    """How runs of the schedule are attempted."""

    policy: RetryPolicy
    timeout_ms: int
    """Time limit of one attempt; 0 if none is set."""

    @property
    def worst_case(self) -> WorstCase:
        return worst_case(self.policy, self.timeout_ms)


def terms_of(definition: Definition, config: Config, performer: Performer | None = None) -> Terms:
    """Return its own terms, or those of the handler or command, the queue, the target, or the settings."""
    performer = performer or _performer_of(definition.target, config)
    policies = Policies(config.retry, config.targets.retries(), config.queue.retries())
    body = Body(definition.target, b"", retry=definition.retry)
    if performer is None:
        return Terms(policies.of(body), definition.timeout_ms or _webhook_ms(definition.target, config))
    policy = policies.of(body, performer.retry, performer.queue)
    return Terms(policy, definition.timeout_ms or performer.timeout_ms or 0)


def _performer_of(target: str, config: Config) -> Performer | None:
    scheme, _, name = target.partition(":")
    if scheme == "command" and name in config.commands:
        command = config.commands[name]
        return Performer(command.queue, command.retry, command.timeout_ms)
    return Performer(queue_of(target)) if scheme in HANDED_OFF else None


def _webhook_ms(target: str, config: Config) -> int:
    scheme, _, name = target.partition(":")
    spec = config.targets.get(name) if scheme == SCHEME else None
    if isinstance(spec, Webhook):
        return round((spec.timeout_s or config.http_timeout_s) * 1000)
    return round(config.http_timeout_s * 1000) if is_web(target if spec is None else spec.address) else 0


def findings_of(definition: Definition, now_ms: int, config: Config) -> list[Finding]:
    """Return likely mistakes in a schedule. Runs that may overlap may also last as long as they like."""
    terms = terms_of(definition, config)
    worst = None if definition.overlap == "allow" else terms.worst_case
    usual_attempt_ms = terms.timeout_ms if terms.policy == RetryPolicy() else None
    runs, _ = runs_ahead(definition, now_ms, SAMPLE, LOOK_S)
    return lint(definition.slots.recurrence, now_ms, worst=worst, usual_attempt_ms=usual_attempt_ms, runs=runs)


def runs_ahead(definition: Definition, now_ms: int, count: int, within_s: float) -> tuple[list[int], bool]:
    """Return the next planned times, and whether there may be more that were not found in time."""
    until_s = time.monotonic() + within_s
    most = count if definition.max_runs is None else min(count, definition.max_runs)
    found: list[int] = []
    after = definition.slots.after
    at_ms = after(now_ms)
    while at_ms is not None and len(found) < most and time.monotonic() < until_s:
        found.append(at_ms)
        at_ms = after(at_ms)
    return found, at_ms is not None and len(found) < most


def with_outlook(view: ScheduleView, now_ms: int, config: Config) -> ScheduleView:
    """Return the view with its outlook; an existing outlook is kept."""
    if view.worst_case is not None:
        return view
    definition = view.definition
    worst, found = terms_of(definition, config).worst_case, findings_of(definition, now_ms, config)
    return msgspec.structs.replace(view, worst_case=worst, findings=tuple(found))
