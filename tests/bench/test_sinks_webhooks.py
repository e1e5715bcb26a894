"""`bench sinks` measures webhooks on a real receiver. No figure here depends on how fast the machine is."""

import json

from typer.testing import CliRunner

from mainspring.cli.bench import app


def test_webhooks_are_measured_beside_the_bare_library_and_none_is_lost() -> None:
    result = CliRunner().invoke(app, ["sinks", "--only", "http", "--tasks", "300", "--rounds", "1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(result.stdout)
    assert set(figures) == {"http"}
    assert figures["http"]["tasks"] == 300
    assert figures["http"]["lost"] == 0
    assert figures["http"]["tasks_per_s"] > 0
    assert figures["http"]["bare_per_s"] > 0


def test_an_unknown_kind_is_refused_with_those_that_exist() -> None:
    result = CliRunner().invoke(app, ["sinks", "--only", "fax"])
    assert result.exit_code == 2
    assert "--only fax: unknown; give " in result.output
