"""`bench sinks --only queue` measures a worker beside a node process. No figure here depends on the machine's speed."""

import json

from typer.testing import CliRunner

from mainspring.cli.bench import app


def test_a_worker_is_measured_from_due_to_acknowledged_and_nothing_is_lost() -> None:
    result = CliRunner().invoke(app, ["sinks", "--only", "queue", "--tasks", "500", "--rounds", "1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(result.stdout)["queue"]
    assert (figures["tasks"], figures["lost"], figures["rate"]) == (500, 0, 500)
    assert figures["tasks_per_s"] > 0
    assert 0 <= figures["p50_ms"] <= figures["p99_ms"]
    assert figures["timer_p99_ms"] > 0, "no timer is exact"
