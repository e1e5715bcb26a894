"""Which of several test processes gets what, and when: a file stays together, the long ones go first."""

import gc
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ON_ONE_BROKER = ("test_kafka_sink.py", "test_demo.py", "test_sink_contract.py", "test_bench_e2e.py", "test_poc.py")
"""Files that share a Kafka broker, so one process runs them all: a broker takes longer to start than to be used."""

LONG = (
    "test_chaos.py", *ON_ONE_BROKER, "test_state_machine.py", "test_bench.py", "test_serve.py", "test_spill.py",
    "test_supervisor.py", "test_engine.py", "test_bench_peers.py", "test_cron_oracle.py", "test_valves.py",
    "test_outage.py", "test_scheduler_life.py", "test_resharding.py", "test_worker_life.py", "test_links.py",
    "test_failover.py", "test_api_serve.py", "test_verify_live.py", "test_api_schema.py", "test_guides.py",
    "test_planted_bugs.py", "test_leader_and_followers.py", "test_worker_process.py", "test_commands.py",
    "test_node.py", "test_examples.py", "test_held_list.py", "test_cluster.py", "test_many_lanes.py",
    "test_schedule_processes.py", "test_queue_resharding.py", "test_network_partition.py", "test_embedded.py",
    "test_metrics_move.py", "test_doctor.py", "test_deploy.py", "test_schedule_commands.py",
    "test_bench_schedules.py", "test_bench_queue.py", "test_hand_over_on_a_bad_road.py", "test_bench_http.py",
    "test_schedule_preview.py",
)  # fmt: skip
"""Files that take long, the longest first: one of them at the very end would keep the others waiting for it. Those with
few tests above all, for the others go by how many they have."""

# How long an example takes says more about the machine than about what is tested.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has Ctrl-C ignored, also by the processes that tests send it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise under nohup


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0].rpartition("/")[2]


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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    tests = Counter(item.nodeid.split("::", 1)[0] for item in items)
    rank = {name: number for number, name in enumerate(LONG)}

    def place(item: pytest.Item) -> tuple[int, int, str]:
        path = item.nodeid.split("::", 1)[0]
        return rank.get(_file_of(path), len(rank)), -tests[path], path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Thousands of tests in memory: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
