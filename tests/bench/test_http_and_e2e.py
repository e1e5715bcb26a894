"""`bench http` and `bench e2e` measure what they say. No figure here depends on how fast the machine is."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from mainspring.cli.bench import app
from mainspring.testing.kafka import Broker
from tests.support.kafka_topics import need_kafka


def bench(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_the_api_is_measured_beside_a_bare_application() -> None:
    figures = bench("http", "--seconds", "0.5", "--rounds", "1")
    assert min(figures["ticks_per_s"], figures["bare_per_s"], figures["batch_tasks_per_s"]) > 0
    assert figures["refused"] == 0


@pytest.mark.timeout(300)
def test_the_whole_path_is_measured_and_nothing_is_missing(kafka: Broker) -> None:
    assert_whole(bench("e2e", "--seconds", "1", "--rate", "1000", "--kafka", kafka.url))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_broker_it_starts_one_of_its_own() -> None:
    need_kafka()
    assert_whole(bench("e2e", "--seconds", "2", "--rate", "2000"))


def assert_whole(figures: dict[str, Any]) -> None:
    assert (figures["missing"], figures["early"], figures["duplicated"]) == (0, 0, 0)
    assert figures["tasks"] > 0
    assert figures["tasks_per_s"] > 0
    assert figures["p50_ms"] <= figures["p99_ms"]


@pytest.mark.parametrize("words", [("http", "--seconds", "0"), ("e2e", "--rate", "0"), ("e2e", "--seconds", "0")])
def test_wrong_options_are_refused_in_one_line(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
