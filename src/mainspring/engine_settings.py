"""What a node's settings say to its engine."""

from .config import Config
from .engine.engine import EngineOptions
from .engine.reach import Reach
from .engine.valves import FlowOptions


def engine_options(config: Config, name: str) -> EngineOptions:
    return EngineOptions(
        node=name,
        lease_s=config.lease_s,
        concurrency=config.concurrency,
        reach=Reach(config.look_ahead, config.look_ahead_bytes, int(config.horizon_s * 1000)),
        retry=config.retry,
        target_retries=config.targets.retries(),
        lane_policy=config.lane_policy,
        target_lanes=config.targets.lane_policies(),
        queue_lanes=config.queue.lane_policies(),
        error_handler=config.error_handler,
        flow=FlowOptions(
            config.breaker,
            config.targets.breakers(),
            {**config.targets.limits(), **config.queue.rates()},
            config.catch_up_rate,
            int(config.catch_up_after_s * 1000),
        ),
        command_queues={name: command.queue for name, command in config.commands.items()},
        dedupe_window_s=config.dedupe_window_s,
        audit_entries=config.audit_entries,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )
