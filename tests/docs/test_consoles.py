"""Every command in the README and in the docs is typed, and answers as its page says."""

import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mainspring.testing.servers import wait_until
from tests.support.missing_parts import gap
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.reader import Reader, commands, reading

PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if blocks(page, "console") and page.parent.name != "decisions"
]
INDEX = "it installs from a package index"
PROMPT = "it is a prompt; test_the_tutorial_can_be_typed_as_it_is types its lines"
MEASURES = "it measures for minutes; tests/bench runs the same in short"
BROKER = "it needs a Kafka broker; tests/sinks has one"
CLUSTER = "it needs a cluster under load; tests/store/redis/test_resharding.py has one"
NOT_RUN = {
    ("README.md", "python3 -m venv"): INDEX,
    ("README.md", "make serve"): "it takes port 8000; tests/cli/test_serve.py runs what it runs",
    ("README.md", "make test"): "it runs this test",
    ("docs/benchmarks.md", "make bench"): MEASURES,
    ("docs/demo.md", "mainspring demo"): "it needs a Kafka broker; tests/demo has one",
    ("docs/deployment.md", "mainspring acl --namespace shop --password-file"): "it needs redis-cli",
    ("docs/deployment.md", "make "): "it needs Docker",
    ("docs/failover.md", "valkey-cli"): CLUSTER,
    ("docs/failover.md", "redis-cli"): CLUSTER,
    ("docs/guides/kafka-ticks.md", "tools/kafka/start"): BROKER,
    ("docs/guides/kafka-ticks.md", "kcat"): BROKER,
    ("docs/history.md", "mainspring run show"): "the id is of one run; tests/api/test_runs.py shows one by its id",
    ("docs/kafka.md", "tools/kafka/start"): BROKER,
    ("docs/kafka.md", "kcat"): BROKER,
    ("docs/operations.md", "mainspring verify --redis-url"): "it needs damaged data; tests/store/verify damages it",
    ("docs/tutorial.md", "python3 -m venv"): INDEX,
    ("docs/tutorial.md", "pip install"): INDEX,
    ("docs/tutorial.md", ".venv/bin/python -m asyncio"): PROMPT,
    ("docs/tutorial.md", "make serve"): "it takes port 8000; tests/cli/test_serve.py runs what it runs",
}
"""Commands that cannot be run here, by page and beginning, each with the reason."""


def config_set(**settings: str) -> str:
    words = ", ".join(f"{name.replace('_', '-')!r}: {value!r}" for name, value in settings.items())
    return f"""python -c "import redis; redis.Redis.from_url('redis://server').execute_command(
    'CONFIG', 'SET', *(part for pair in {{{words}}}.items() for part in pair))" """


FAILED = [
    "mainspring serve",
    "mainspring task put --target https://shop.example/hooks --retry '2 base=100ms' --id order-42 '{\"order\":42}'",
    "until mainspring dead list -o name | grep -q order-42; do :; done",
]
"""A node, and a task that has become a dead letter: pages look at the letter at once."""
JOBS = """cat > jobs.py <<'END'
from mainspring import Scheduler

scheduler = Scheduler()


@scheduler.handler(queue="mail")
def send() -> None: ...
END
"""
GIVEN: dict[str, list[str]] = {
    "docs/access.md": ["mainspring serve", "mainspring task put --after 30m --id reminder-7"],
    "docs/cli.md": [
        *FAILED,
        JOBS,
        "mainspring worker jobs:scheduler",
        "mainspring task put --target queue:mial/send --id 1",
        "mainspring key add me --role operator 2>/dev/null > .mainspring-key",
    ],
    "docs/dead-letters.md": FAILED,
    "docs/deployment.md": [config_set(appendonly="no", save="")],
    "docs/operations.md": [config_set(appendonly="no", save="3600 1", maxmemory_policy="allkeys-lru")],
    "docs/queues.md": ["""echo 'from jobs import scheduler' > shop.py""", JOBS],
    "docs/scheduler.md": [
        "mkdir secrets; echo redis://me:secret@db.example.com > secrets/redis",
        "printf '# Settings of the shop.\\n\\nlease = \"10s\"\\n' > mainspring.toml",
        "export MAINSPRING_REDIS_URL_FILE=secrets/redis",
    ],
    "docs/tutorial.md": ["mkdir .venv; ln -s $(dirname $(command -v mainspring)) .venv/bin"],
    "docs/webhooks.md": [
        "printf '[targets.orders]\\nurl = \"https://shop.example/gone\"\\ngone_disables = true\\n' > mainspring.toml",
        "mainspring serve --node-id pod-2",
        "mainspring task put --target target:orders 7",
    ],
    "docs/history.md": FAILED,
    "docs/http-api.md": ["mainspring serve"],
    "docs/lanes.md": [
        'printf \'[targets.ledger]\\nurl = "https://shop.example/book"\\nlane_policy = "park"\\n\' > mainspring.toml',
        "mainspring serve",
        "mainspring task put --target target:ledger --lane ledger-7 --id entry-7 7",
        "mainspring task put --target target:ledger --lane ledger-7 --id entry-8 8",
        "mainspring task put --target https://shop.example/valve --lane valve-2 --id open-2 --retry '9 base=1m' 0",
    ],
    "docs/notices.md": ["mainspring serve"],
    "docs/metrics.md": ["mainspring serve", "mainspring task put"],
}
"""Commands that a page takes for granted: typed before it."""


def unpaid_order_expires(reader: Reader) -> None:
    wait_until(lambda: '{"order": 43}' in reader.printed, "the unpaid order has expired", timeout_s=60)
    assert '{"order": 42}' not in reader.printed


def expired_order_cannot_be_paid(reader: Reader) -> None:
    assert "order 42 has expired" not in reader.printed
    late = urllib.request.Request(f"http://127.0.0.1:{reader.other}/orders/43/payment", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(late, timeout=60)
    refused.value.close()
    assert refused.value.code == 409


def receiver_was_called(reader: Reader) -> None:
    wait_until(lambda: "/poll main/poll%40" in reader.printed, "the receiver was called", timeout_s=60)


def worker_ran_the_command(reader: Reader) -> None:
    def done() -> bool:
        told = reader.run("mainspring task get backup-by-hand --data-dir data")
        return re.search(r"^state +(done|finished)", told, re.MULTILINE) is not None

    wait_until(done, "a worker has run the command", timeout_s=60)


def commands_of_the_crontab_ran(reader: Reader) -> None:
    wait_until((reader.folder / "src.tar").exists, "the worker has run the command", timeout_s=60)
    wait_until(
        lambda: "archive" in reader.run("mainspring schedule list -o name").split(),
        "the program has declared its schedule",
        timeout_s=60,
    )
    reader.type("mainspring schedule trigger archive")
    wait_until((reader.folder / "archive.tar").exists, "the program has run the command", timeout_s=60)


AFTERWARDS = {
    "commands-on-pods": worker_ran_the_command,
    "django": expired_order_cannot_be_paid,
    "fastapi": expired_order_cannot_be_paid,
    "flask": expired_order_cannot_be_paid,
    "from-crontab": commands_of_the_crontab_ran,
    "order-expiry": unpaid_order_expires,
    "recurring-http": receiver_was_called,
}
"""The purpose of a guide, checked at its end."""


@pytest.mark.timeout(300)  # a cron line of a page may be due only in a minute
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_answer_as_it_says(page: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        gap("curl is not installed")
    with reading(tmp_path) as reader:
        for command in GIVEN.get(page, ()):
            reader.type(command)
        reader.follow(page, tuple(start for name, start in NOT_RUN if name == page))
        AFTERWARDS.get(Path(page).stem, lambda _: None)(reader)
        reader.check_that_all_run()


@pytest.mark.parametrize(("page", "start"), NOT_RUN)
def test_a_command_that_is_not_run_is_still_on_its_page(page: str, start: str) -> None:
    typed = [command for code in blocks(ROOT / page, "console") for command, _ in commands(code)]
    assert any(command.startswith(start) for command in typed)
