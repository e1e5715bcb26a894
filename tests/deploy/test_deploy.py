"""The files in deploy/ fit together, and fit the code."""

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mainspring.config.config import Config
from mainspring.testing.servers import wait_until
from tests.support.missing_parts import gap
from tests.support.paths import ROOT
from tests.support.serving import ENVIRON, serving

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "mainspring.yaml").read_text())}
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
POD: dict[str, Any] = OBJECTS["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.timeout(600)
def test_the_tools_that_read_the_files_find_nothing_wrong() -> None:
    told = subprocess.run([ROOT / "tools/check-deploy"], capture_output=True, text=True, check=False, timeout=580)
    assert told.returncode in (0, 3), told.stderr + told.stdout
    if told.returncode == 3:
        gap(told.stderr.strip())


def test_files_whose_checker_is_not_there_are_named(tmp_path: Path) -> None:
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "tools").mkdir()
    alone = shutil.copy(ROOT / "tools/check-deploy", tmp_path / "tools")  # away from the uv of this tree
    env = ENVIRON | {"PATH": str(tmp_path)}
    told = subprocess.run([alone], capture_output=True, text=True, check=False, timeout=60, env=env)
    named = re.findall(r"not checked: deploy/([a-z]+)", told.stderr)
    assert (told.returncode, named) == (3, ["compose", "kubernetes", "systemd", "prometheus"])


def test_on_ci_a_gap_fails_and_elsewhere_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no promtool; on CI nothing is left out"):
        gap("no promtool")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no promtool"):
        gap("no promtool")


def test_nothing_that_ci_could_have_is_skipped_there() -> None:
    """A test that is skipped without `gap` would be hidden on CI too."""
    skipping = re.compile(r"pytest\.(?:mark\.)?skip(?:if)?\(")
    tests = ROOT / "tests"
    found = {str(path.relative_to(tests)) for path in tests.rglob("*.py") if skipping.search(path.read_text())}
    assert found == {
        "support/missing_parts.py",
        *(
            "store/embedded/test_embedded.py",
            "demo/test_demo_parts.py",
            "cli/test_start_time.py",
        ),  # what only Linux has
        *("chaos/test_cable.py", "chaos/test_network_partition.py"),  # need rights that containers seldom have
        "bench/test_peers.py",  # not collected on CI
        "docs/test_pages.py",  # figures that are still to be measured; fails on CI
        "tools/test_run_tests.py",  # in a program that is tested
    }


@pytest.mark.parametrize("program", ["redis-server", "kcat", "java", "mvn", "promtool", "systemd-analyze", "curl"])
def test_programs_without_which_ci_fails_are_fetched_before(program: str) -> None:
    fetched = re.search(r"^for part in (.+); do$", (ROOT / "tools" / "install-parts").read_text(), re.MULTILINE)
    assert fetched is not None
    assert program in [part.partition(":")[0] for part in fetched[1].split()]


@pytest.mark.parametrize("name", ["node-1", "node-2"])
def test_the_settings_of_the_containers_are_settings(name: str) -> None:
    config = Config.load({}, COMPOSE["services"][name]["environment"])
    assert (config.node_id, config.tick_target, config.kafka_url) == (name, "kafka:ticks", "kafka://kafka:9092")
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][name]["ports"])


def test_the_settings_of_the_pods_are_settings(tmp_path: Path) -> None:
    text = OBJECTS["ConfigMap"]["data"]["mainspring.toml"]
    assert tomllib.loads(text)
    (tmp_path / "mainspring.toml").write_text(text)
    (tmp_path / "redis-url").write_text(OBJECTS["Secret"]["stringData"]["redis-url"])
    env = {one["name"]: one["value"] for one in POD["containers"][0]["env"]}
    env |= {"MAINSPRING_CONFIG": str(tmp_path / "mainspring.toml")}
    env |= {"MAINSPRING_REDIS_URL_FILE": str(tmp_path / "redis-url")}
    config = Config.load({}, env)
    assert (config.host, config.metrics_open, config.needs_keys) == ("0.0.0.0", True, True)
    assert str(config.api_key_file) == "/run/secrets/mainspring/api-key"
    assert POD["terminationGracePeriodSeconds"] > config.shutdown_timeout_s + 5


def test_the_probes_ask_what_they_should() -> None:
    container = POD["containers"][0]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    # Liveness must not depend on the server: nodes would be killed for its outage.
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}


def test_systemd_waits_longer_than_a_clean_stop_takes() -> None:
    unit = (DEPLOY / "systemd" / "mainspring.service").read_text()
    found = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert found is not None
    assert int(found[1]) > Config().shutdown_timeout_s + 5


def test_everything_the_image_takes_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    paths = [path for line in copied for path in line.split()]
    assert "src" in paths
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in paths:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path, one) or path.startswith(f"{one}/") for one in let_in), path


def test_every_alert_has_its_paragraph_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    assert headings == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_every_metric_of_the_dashboard_and_the_alerts_is_documented() -> None:
    documented = set(re.findall(r"`((?:mainspring|process)_[a-z_]+)", (ROOT / "docs" / "metrics.md").read_text()))
    dashboard = json.loads((DEPLOY / "grafana" / "mainspring.json").read_text())
    used = " ".join(
        [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        + [rule["expr"] for rule in ALERTS]
    )
    named = {re.sub("_bucket$", "", name) for name in re.findall(r"\b(?:mainspring|process)_[a-z_]+", used)}
    assert named - documented == set()


def test_the_generator_posts_ticks_and_says_what_became_of_them(tmp_path: Path) -> None:
    with serving(tmp_path) as start:
        node = start()
        lines = tmp_path / "lines"
        with lines.open("wb") as out:
            command = [sys.executable, str(DEPLOY / "poc" / "generate.py"), node.url, "--rate", "100", "--within", "1"]
            generator = subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRON | {"PATH": os.environ["PATH"]})
        try:
            wait_until(
                lambda: (
                    re.search(
                        r"Generated ticks/s +[1-9].*Scheduled items/s +[1-9].*refused so far 0", lines.read_text()
                    )
                    is not None
                ),
                "ticks are generated and fired",
                timeout_s=60,
            )
        finally:
            generator.send_signal(signal.SIGTERM)
            generator.wait(60)
