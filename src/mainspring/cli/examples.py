"""What people type: shown at the end of a command's help. A test reads every line with the command it stands for."""

from typing import Any, Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "serve": (
        "mainspring serve",
        "mainspring serve --redis-url rediss://server:6379 --processes 4",
        "mainspring serve --host 0.0.0.0 --kafka-url kafka://broker:9092",
    ),
    "worker": (
        "mainspring worker myapp:scheduler",
        "mainspring worker myapp:scheduler --queues mail:3,reports:1 --concurrency 16",
    ),
    "task put": (
        "mainspring task put --in 30m --target https://example.com/hook --id order-42 '{\"order\": 42}'",
        "mainspring task put --at 2030-01-01T09:00:00Z --target kafka:orders --lane user-7 '\"hello\"'",
        "mainspring task put --target command:backup --timeout 2h --retry '3 base=1m'",
        "echo '[1, 2]' | mainspring task put --in 5s -",
    ),
    "task get": (
        "mainspring task get order-42",
        "mainspring task get order-42 --json --url https://scheduler.example.com",
    ),
    "task list": (
        "mainspring task list --target 'https://example.com/*' --limit 100",
        "mainspring task list --after 2030-01-01T00:00:00Z --before 2030-01-02T00:00:00Z --json",
    ),
    "task count": ("mainspring task count", "mainspring task count --before 2030-01-01T00:00:00Z"),
    "task cancel": ("mainspring task cancel order-42 order-43",),
    "task reschedule": ("mainspring task reschedule order-42 --in 1h",),
    "task explain": ("mainspring task explain order-42",),
    "task result": (
        "mainspring task result order-42",
        "mainspring task result order-42 --wait 10m --json",
    ),
    "schedule add": (
        "mainspring schedule add nightly --cron '0 2 * * *' --tz Europe/Paris --target command:backup",
        "mainspring schedule add poll --every 30s --target https://example.com/poll --overlap skip",
    ),
    "schedule list": ("mainspring schedule list", "mainspring schedule list --limit 0 --json"),
    "schedule show": ("mainspring schedule show nightly",),
    "schedule edit": ("mainspring schedule edit nightly --cron '0 3 * * *' --note 'after the import'",),
    "schedule diff": ("mainspring schedule diff nightly --cron '0 3 * * *'",),
    "schedule pause": ("mainspring schedule pause nightly --reason 'disk is full' --until 2h",),
    "schedule resume": ("mainspring schedule resume nightly",),
    "schedule trigger": ("mainspring schedule trigger nightly",),
    "schedule backfill": (
        "mainspring schedule backfill nightly --from 2030-01-01T00:00:00Z --to 2030-01-08T00:00:00Z --dry-run",
    ),
    "schedule preview": (
        "mainspring schedule preview '0 9 * * MON-FRI' --tz Asia/Tokyo --count 5",
        "mainspring schedule preview '@every 36h' --from 2030-01-01T00:00:00",
    ),
    "schedule remove": ("mainspring schedule remove nightly",),
    "schedule rollback": ("mainspring schedule rollback nightly", "mainspring schedule rollback nightly 3"),
    "schedule history": ("mainspring schedule history nightly",),
    "schedule import": (
        "mainspring schedule import /etc/crontab --system --dry-run",
        "mainspring schedule import beat.json --format celery --out schedules.toml",
    ),
    "schedule apply": ("mainspring schedule apply -f schedules.toml --prune --dry-run",),
    "schedule lint": ("mainspring schedule lint", "mainspring schedule lint -f schedules.toml"),
    "lane list": ("mainspring lane list",),
    "lane show": ("mainspring lane show user-7",),
    "lane retry-head": ("mainspring lane retry-head user-7",),
    "lane skip-head": ("mainspring lane skip-head user-7 --reason 'account closed'",),
    "lane resume": ("mainspring lane resume user-7",),
    "dead list": ("mainspring dead list", "mainspring dead list --target 'https://example.com/*' --reason timeout"),
    "dead show": ("mainspring dead show order-42",),
    "dead replay": (
        "mainspring dead replay order-42",
        "mainspring dead replay --target 'kafka:*' --rate 100 --dry-run",
    ),
    "dead drop": ("mainspring dead drop --died-before 2030-01-01T00:00:00Z --yes",),
    "dead export": ("mainspring dead export -o letters.ndjson",),
    "pause": ("mainspring pause --target 'kafka:*' --reason deploy --for 30m", "mainspring pause --all"),
    "resume": ("mainspring resume --target 'kafka:*'",),
    "pauses": ("mainspring pauses",),
    "cluster status": ("mainspring cluster status", "mainspring cluster status --watch"),
    "verify": ("mainspring verify --redis-url redis://server:6379", "mainspring verify --repair"),
    "doctor": ("mainspring doctor --redis-url redis://server:6379", "mainspring doctor --strict --json"),
    "acl": (
        "mainspring acl --namespace shop --password-file secret | redis-cli -u redis://admin@server",
        "mainspring acl --file >> users.acl",
    ),
    "config show": ("mainspring config show --changed",),
    "key add": ("mainspring key add shop --role submit-only --target 'kafka:orders*' --expires 90d",),
    "key list": ("mainspring key list",),
    "key revoke": ("mainspring key revoke k89371c4ea6",),
    "key generate": ("mainspring key generate > api-keys",),
    "audit": ("mainspring audit --limit 20", "mainspring audit --json --url https://scheduler.example.com"),
    "demo ticks": (
        "mainspring demo ticks --seconds 30",
        "mainspring demo ticks --kafka broker:9092 --rate 20000 --json",
    ),
    "bench http": ("mainspring bench http --json",),
    "bench e2e": ("mainspring bench e2e --rate 60000 --json",),
    "bench cycle": ("mainspring bench cycle --tasks 500000",),
    "bench compare": ("mainspring bench compare --tasks 300000 --ids",),
}


def with_examples(command: Any, name: str) -> Any:
    """Give a command, and those below it, the examples there are for them."""
    lines = EXAMPLES.get(name)
    if lines:
        note = f"{command.epilog}\n\n" if command.epilog else ""
        command.epilog = f"{note}Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)
    for below, one in getattr(command, "commands", {}).items():
        with_examples(one, f"{name} {below}")
    return command
