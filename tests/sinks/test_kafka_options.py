"""Kafka in the settings: servers, properties of the library, secrets."""

import sys
from pathlib import Path

import pytest

from mainspring.config.config import Config
from mainspring.model.delivery import Body, GivenDelivery, Retry
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.node.node import builtin_sinks
from mainspring.sinks.kafka import KafkaSink
from mainspring.sinks.kafka_options import OURS, KafkaOptions, Properties, parse_servers


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("kafka://localhost:9092", "localhost:9092"),
        ("a.example:9092,b.example:9093", "a.example:9092,b.example:9093"),
        ("kafka://[::1]:9092/", "[::1]:9092"),
        ("kafka://broker", "broker"),
    ],
)
def test_servers_are_read_with_and_without_the_scheme(url: str, servers: str) -> None:
    assert parse_servers(url) == servers


@pytest.mark.parametrize("url", ["", "kafka://", "http://a:9092", "a:9092,,b", "a:port", "a:70000", "a b:1"])
def test_servers_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="kafka_url"):
        Config(kafka_url=url)


def test_a_password_in_the_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match="password_file") as caught:
        Config(kafka_url="kafka://user:hunter2@host:9092")
    assert "hunter2" not in str(caught.value)


def test_properties_may_be_quoted_or_nested() -> None:
    quoted = Properties({"security.protocol": "SASL_SSL", "linger.ms": 5, "enable.ssl.certificate.verification": True})
    nested = Properties(
        {
            "security": {"protocol": "SASL_SSL"},
            "linger": {"ms": 5},
            "enable": {"ssl": {"certificate": {"verification": True}}},
        }
    )
    assert quoted == nested
    assert hash(quoted) == hash(nested)
    assert dict(quoted)["enable.ssl.certificate.verification"] == "true"


@pytest.mark.parametrize("name", sorted(OURS))
def test_properties_that_the_promises_rest_on_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be set"):
        Properties({name: "0"})


def test_the_promises_hold_with_any_defaults() -> None:
    told = KafkaOptions("kafka://a:1").for_library()
    assert (told["enable.idempotence"], told["acks"], told["bootstrap.servers"]) == ("true", "all", "a:1")


def test_a_secret_can_be_in_a_file_and_is_masked_when_shown(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    properties = Properties({"sasl.username": "me", "sasl.password_file": str(secret)})
    assert properties["sasl.password"] == "hunter2"
    shown = repr(Config(kafka_url="kafka://a:1", kafka=properties))
    assert "hunter2" not in shown
    assert "me" in shown
    with pytest.raises(InvalidInput, match="cannot read"):
        Properties({"sasl.password_file": str(tmp_path / "missing")})
    with pytest.raises(InvalidInput, match="given twice"):
        Properties({"sasl.password": "x", "sasl.password_file": str(secret)})


def test_the_table_of_a_file_and_the_environment_of_a_child_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mainspring.toml"
    file.write_text(
        'kafka_url = "kafka://a:9092"\nkafka_create_topics = true\nkafka_topic_partitions = 12\n'
        '[kafka]\nsecurity.protocol = "SASL_SSL"\n"sasl.password" = "hunter2"\n'
    )
    config = Config.load({"config": str(file)}, {})
    assert dict(config.kafka) == {"security.protocol": "SASL_SSL", "sasl.password": "hunter2"}
    assert (config.kafka_create_topics, config.kafka_topic_partitions) == (True, 12)
    assert Config.load({}, config.to_environ()) == config


@pytest.mark.parametrize("wrong", ['"text"', "[1]", "{", '{"a": [1]}'])
def test_properties_that_are_no_table_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="MAINSPRING_KAFKA"):
        Config.load({}, {"MAINSPRING_KAFKA": wrong})


async def test_without_a_broker_the_reason_names_the_setting() -> None:
    sink = builtin_sinks(Config())["kafka"]
    task = GivenDelivery(Body("kafka:ticks", b"1"), namespace="main", idh=bytes(16), due_ms=1)
    [outcome] = await sink.deliver([task])
    assert isinstance(outcome, Retry)
    assert "kafka_url" in outcome.reason


def test_an_error_about_a_missing_library_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ConfigError, match=r"mainspring\[kafka\]"):
        KafkaSink(KafkaOptions("kafka://a:1"))
