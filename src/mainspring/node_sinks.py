"""The sinks of a node: one for each kind of target, from its settings."""

from collections.abc import Mapping

from .config import Config
from .sinks.base import Sink
from .sinks.http import HttpOptions, HttpSink
from .sinks.kafka import kafka_sink
from .sinks.kafka_options import KafkaOptions
from .sinks.log import LogSink
from .sinks.named import NamedSink
from .sinks.null import NullSink
from .sinks.plugins import plugin_sinks


def all_sinks(config: Config) -> Mapping[str, Sink]:
    """Ours and those of installed plug-ins, which may stand behind named targets too."""
    return builtin_sinks(config, plugin_sinks(config))


def builtin_sinks(config: Config, others: Mapping[str, Sink] | None = None) -> Mapping[str, Sink]:
    """Every kind of target we have. What a sink needs, it opens at its first delivery."""
    http = HttpSink(
        HttpOptions(
            config.http_timeout_s,
            config.http_concurrency,
            config.http_reach,
            room=config.concurrency,
            result_ttl_s=config.http_result_ttl_s,
            rate=config.http_rate,
        )
    )
    sinks: dict[str, Sink] = {**(others or {}), "log": LogSink(), "null": NullSink(), "http": http, "https": http}
    sinks["kafka"] = kafka_sink(kafka_options(config))
    return sinks | {"target": NamedSink(config.targets, sinks)}


def kafka_options(config: Config) -> KafkaOptions | None:
    if config.kafka_url is None:
        return None
    return KafkaOptions(
        config.kafka_url,
        config.kafka,
        create_topics=config.kafka_create_topics,
        partitions=config.kafka_topic_partitions,
        replication=config.kafka_topic_replication,
    )
