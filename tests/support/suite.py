"""How the suite runs: on which server, in which order, and what it reports at the end."""

import gc
import json
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ON_ONE_BROKER: Final = (
    "tests/sinks/test_kafka.py", "tests/demo/test_demo.py", "tests/sinks/test_sink_contract.py",
    "tests/bench/test_http_and_e2e.py", "tests/demo/test_poc_consumer.py",
)  # fmt: skip
"""Files that share a Kafka broker, so one process runs them all: a broker takes longer to start than to be used."""

LONG: Final = (
    "tests/chaos/test_chaos.py", *ON_ONE_BROKER, "tests/simulation/test_state_machine.py", "tests/bench/test_bench.py",
    "tests/cli/test_serve.py", "tests/engine/test_holds.py", "tests/node/test_supervisor.py",
    "tests/engine/test_engine.py", "tests/bench/test_peers.py", "tests/model/schedule/test_cron_oracle.py",
    "tests/engine/test_flow.py", "tests/engine/test_outage.py", "tests/scheduler/test_running.py",
    "tests/store/redis/test_resharding.py", "tests/worker/test_lifecycle.py", "tests/store/redis/test_servers.py",
    "tests/store/redis/test_failover.py", "tests/api/test_serve.py", "tests/store/verify/test_verify_live.py",
    "tests/api/test_schema.py", "tests/docs/test_consoles.py", "tests/chaos/test_planted_bugs.py",
    "tests/scheduler/test_leader_and_followers.py", "tests/worker/test_process.py", "tests/worker/test_commands.py",
    "tests/node/test_node.py", "tests/docs/test_examples.py", "tests/store/tasks/test_held_pages.py",
    "tests/cluster/test_cluster.py", "tests/engine/test_many_lanes.py", "tests/scheduler/test_two_processes.py",
    "tests/worker/test_resharding.py", "tests/chaos/test_network_partition.py",
    "tests/store/embedded/test_embedded.py", "tests/node/test_metrics_move.py", "tests/node/test_doctor.py",
    "tests/deploy/test_deploy.py", "tests/scheduler/test_scheduled_commands.py", "tests/bench/test_schedules.py",
    "tests/bench/test_sinks_queue.py", "tests/cluster/test_hand_over_with_lost_calls.py",
    "tests/bench/test_sinks_webhooks.py", "tests/cli/test_schedule_preview.py",
)  # fmt: skip
"""Files that take long, the longest first: started last, one of them would keep the other processes waiting."""

SLOWEST: Final = 10

# How long an example takes says more about the machine than about what is tested.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has Ctrl-C ignored, also by the processes that tests send it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same under nohup


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-servers", action="store_true", help="run the data path on every kind of server, not on one")
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write what passed, failed and was skipped as JSON")


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


# -- which server: each test has one, and the tests take turns ----------------------------------------------------


def kind_of(item: pytest.Item) -> str | None:
    """Return the kind of server that a test is parametrized with, if any."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((str(params[name]) for name in ("fleet", "kind") if name in params), None)


def _without(kind: str, nodeid: str) -> str:
    test, _, params = nodeid.partition("[")
    parts = params.rstrip("]").split("-")
    parts.remove(kind)
    return f"{test} {parts}"


def on_one_server(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Keep one kind of server of each test, chosen by the test's name. Return what is kept and what is left out."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    names: dict[pytest.Item, tuple[str, str]] = {}
    for item in items:
        if kind := kind_of(item):
            name = _without(kind, item.nodeid)
            names[item] = name, kind
            kinds[name].append(kind)
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if item in names:
            name, kind = names[item]
            turn = kinds[name][crc32(name.encode()) % len(kinds[name])]
            (kept if kind == turn else left_out).append(item)
        else:
            kept.append(item)
    return kept, left_out


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = any("::" in argument for argument in config.args)
    if not (by_name or config.getoption("all_servers")):
        items[:], left_out = on_one_server(items)
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        _longest_first(items)


# -- which order: a file stays in one process, the long ones go first ---------------------------------------------


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]  # its package brings no types
    """Hands out files in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return "kafka" if _file_of(nodeid) in ON_ONE_BROKER else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would go by the number of tests alone
    return LongestFirst(config, log)


def _longest_first(items: list[pytest.Item]) -> None:
    tests = Counter(_file_of(item.nodeid) for item in items)
    rank = {name: number for number, name in enumerate(LONG)}

    def place(item: pytest.Item) -> tuple[int, int, str]:
        file = _file_of(item.nodeid)
        return rank.get(file, len(rank)), -tests[file], file

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Thousands of tests in memory: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


# -- what is reported: the slowest files, and the outcomes for `tools/run-tests` ----------------------------------


class Outcomes:
    """Seconds of each file and the outcome of each test, from the reports of all processes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: dict[str, str] = {}

    def add(self, report: pytest.TestReport) -> None:
        self.seconds[_file_of(report.nodeid)] += report.duration  # type: ignore[assignment]  # a Counter of floats
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def write(self, file: Path) -> None:
        passed = len(self.passed - self.failed.keys())
        file.write_text(json.dumps({"passed": passed, "skipped": len(self.skipped), "failed": self.failed}))


_outcomes: Final = Outcomes()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _outcomes.add(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if len(_outcomes.seconds) > SLOWEST:
        terminalreporter.section(f"the {SLOWEST} slowest files")
        for file, seconds in _outcomes.seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
    if file := config.getoption("outcomes"):
        _outcomes.write(file)
