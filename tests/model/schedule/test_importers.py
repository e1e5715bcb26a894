"""Schedules of cron, Celery beat and RedBeat, read into ours."""

import json
import tomllib

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.ids import instant_text
from mainspring.model.schedule.importers import read_celery, read_crontab, read_redbeat, to_toml
from mainspring.node.schedule_file import read_table

CRONTAB = """
# m h dom mon dow command
MAILTO=root
0 3 * * * /usr/local/bin/backup --all
CRON_TZ = Europe/Berlin
@daily find /tmp -mtime +3 | xargs rm
30 4 1,15 * MON echo "a  b"
@reboot /bin/start
61 * * * * /bin/never
0 5 * * * /usr/local/bin/backup
nonsense
"""

BEAT = """
from celery import Celery
from celery.schedules import crontab
from datetime import timedelta

app = Celery()
app.conf.beat_schedule = {
    "add-every-30-seconds": {"task": "tasks.add", "schedule": 30.0, "kwargs": {"x": 1, "y": 2}},
    "monday": {
        "task": "tasks.report",
        "schedule": crontab(hour=7, minute=30, day_of_week=1),
        "options": {"queue": "reports"},
    },
    "often": {"task": "tasks.tick", "schedule": timedelta(minutes=5)},
    "places": {"task": "tasks.add", "schedule": crontab(minute="*/15"), "args": (16, 16)},
    "dawn": {"task": "tasks.sun", "schedule": solar("sunrise", -37.8, 144.9)},
}
"""


def test_entries_with_an_unknown_zone_are_left_out_and_the_rest_is_imported() -> None:
    found = read_crontab("CRON_TZ=Europe/Pariss\n0 3 * * * backup\nCRON_TZ=Europe/Paris\n0 4 * * * tidy")
    assert [one.name for one in found.definitions] == ["tidy"]
    assert list(found.commands) == ["tidy"]
    [problem] = found.problems
    assert problem.startswith("line 2: schedule 'backup': zone 'Europe/Pariss' is not in the time zone database")
    entries = {"": {"task": "t", "schedule": 5}, "hourly": {"task": "t", "schedule": 3600}}
    celery = read_celery(json.dumps(entries))
    assert [one.name for one in celery.definitions] == ["hourly"]
    assert len(celery.problems) == 1


def test_a_crontab_becomes_schedules_of_commands_that_have_to_be_registered() -> None:
    found = read_crontab(CRONTAB)
    assert [(one.name, one.specs, one.zone, one.target) for one in found.definitions] == [
        ("backup", ("0 3 * * *",), "UTC", "command:backup"),
        ("find-tmp--mtime-3-xargs-rm", ("@daily",), "Europe/Berlin", "command:find-tmp--mtime-3-xargs-rm"),
        ("echo-a-b", ("30 4 1,15 * MON",), "Europe/Berlin", "command:echo-a-b"),
        ("backup-2", ("0 5 * * *",), "Europe/Berlin", "command:backup-2"),
    ]
    assert found.commands["backup"] == ["/usr/local/bin/backup", "--all"]
    assert found.commands["find-tmp--mtime-3-xargs-rm"] == ["/bin/sh", "-c", "find /tmp -mtime +3 | xargs rm"]
    assert [problem.partition(":")[0] for problem in found.problems] == ["line 8", "line 9", "line 11"]
    assert "@reboot" in found.problems[0]
    assert "minute" in found.problems[1]


def test_lines_that_need_a_shell_go_to_the_shell_of_the_crontab() -> None:
    lines = ["LANG=C /bin/a -b", "exec /bin/a", "date +\\%F%some input", "cd /srv && ./run"]
    found = read_crontab("PATH=/usr/bin\nSHELL=/bin/bash\n" + "".join(f"0 3 * * * {line}\n" for line in lines))
    assert list(found.commands.values()) == [
        ["/bin/bash", "-c", "LANG=C /bin/a -b"], ["/bin/bash", "-c", "exec /bin/a"], ["/bin/bash", "-c", "date +%F"],
        ["/bin/bash", "-c", "cd /srv && ./run"],
    ]  # fmt: skip
    assert [problem.partition(":")[0] for problem in found.problems] == ["line 1", "date-F"], "its variables, its input"
    assert read_crontab("0 4 * * * %only input").problems == ["line 1: '0 4 * * * %only input' has no command"]


def test_a_system_crontab_names_users() -> None:
    found = read_crontab("17 * * * * root run-parts /etc/cron.hourly\n", system=True)
    assert found.commands == {"run-parts": ["run-parts", "/etc/cron.hourly"]}
    assert "ran as root" in found.problems[0]


def test_a_beat_schedule_is_read_from_python_without_running_it() -> None:
    found = read_celery(BEAT, zone="Europe/Paris")
    assert [(one.name, one.specs, one.zone, one.target) for one in found.definitions] == [
        ("add-every-30-seconds", ("@every 30000ms",), "UTC", "queue:celery/tasks.add"),
        ("monday", ("30 7 * * 1",), "Europe/Paris", "queue:reports/tasks.report"),
        ("often", ("@every 300000ms",), "UTC", "queue:celery/tasks.tick"),
        ("places", ("*/15 * * * *",), "Europe/Paris", "queue:celery/tasks.add"),
    ]
    assert json.loads(found.definitions[0].payload) == {"x": 1, "y": 2}
    assert json.loads(found.definitions[3].payload) == {"args": [16, 16]}
    assert [problem.partition(":")[0] for problem in found.problems] == ["places", "dawn"]


def test_a_beat_schedule_is_read_with_its_arithmetic_and_its_time_zone() -> None:
    found = read_celery(
        "timezone = 'Europe/London'\nbeat_schedule = {\n"
        " 5: {'task': 't', 'schedule': 60 * 5, 'options': {'expires': 1}},\n"
        " 'b': {'task': 't', 'schedule': crontab(hour={1, 2}, minute=0)},\n"
        " 'c': {'task': 't', 'schedule': timedelta(minutes=os.getpid())},\n"
        " 'd': {'task': 't', 'schedule': 5, 'kwargs': [1]}}",
        zone="Europe/Paris",
    )
    assert [(one.name, one.specs, one.zone) for one in found.definitions] == [
        ("5", ("@every 300000ms",), "UTC"), ("b", ("0 1,2 * * *",), "Europe/London"),
    ]  # fmt: skip
    assert [problem.partition(":")[0] for problem in found.problems] == ["5", "c", "d"]


def test_both_day_fields_of_celery_have_to_fit() -> None:
    found = read_celery(
        "app.conf.update(beat_schedule={'a': {'task': 't', 'schedule':"
        " crontab(hour=7, minute=30, day_of_month='1-7', day_of_week='monday')}})\n"
        "app.conf.beat_schedule['b'] = {'task': 't',"
        " 'schedule': crontab(day_of_week='sat,sunday', month_of_year='june')}"
    )
    assert found.problems == []
    first, second = found.definitions
    assert (second.name, second.specs) == ("b", ("* * * jun sat,sun",))
    start_ms = 1_794_787_200_000  # 2026-11-16
    runs = [instant_text(ms) for ms in first.next_runs(start_ms, 3)]
    assert runs == ["2026-12-07T07:30:00Z", "2027-01-04T07:30:00Z", "2027-02-01T07:30:00Z"]


@pytest.mark.parametrize(
    ("entry", "unread"),
    [
        ("{'task': 't', 'schedule': 5, 'kwargs': KW}", "KW"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {'a': [NAME]}}", "NAME"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {'at': now()}}", "now()"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {'span': timedelta(hours=1)}}", "timedelta(…)"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {**base, 'a': 1}}", "base"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {('a', 'b'): 1}}", "('a', 'b')"),
        ("{'task': 't', 'schedule': 5, 'kwargs': {'raw': b'bytes'}}", "b'bytes'"),
        ("{'task': 't', 'schedule': 5, 'args': ARGS}", "ARGS"),
        ("{'task': 't', 'schedule': 5, 'options': OPTIONS}", "OPTIONS"),
        ("{'task': 't', 'schedule': 5, 'options': {'queue': settings.QUEUE}}", "settings.QUEUE"),
        ("{'task': 't', 'schedule': 5, 'options': {**OPTIONS}}", "OPTIONS"),
        ("{'task': TASK, 'schedule': 5}", "TASK"),
        ("{'task': 't', 'schedule': crontab(minute=MINUTE)}", "MINUTE"),
        ("{**base, 'schedule': 5}", "base"),
        ("entry_of('t')", "entry_of('t')"),
    ],
)
def test_an_entry_that_cannot_be_read_whole_is_refused(entry: str, unread: str) -> None:
    found = read_celery(f"beat_schedule = {{'a': {entry}, 'b': {{'task': 't', 'schedule': 5}}}}")
    assert [one.name for one in found.definitions] == ["b"]
    advice = "write the value out there, or give JSON"
    assert found.problems == [f"a: {unread} cannot be read without running the file; {advice}"]


ONE = "{'task': 't', 'schedule': 5}"


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (f"app.conf.beat_schedule.update({{'b': {ONE}}}, c={ONE})", ["a", "b", "c"]),
        (f"app.conf.beat_schedule |= {{'b': {ONE}}}", ["a", "b"]),
        (f"app.conf.beat_schedule = {{'b': {ONE}}} | {{'c': {ONE}}}", ["b", "c"]),
        (f"app.conf.update({{'beat_schedule': {{'b': {ONE}}}}})", ["b"]),
        (f"app.conf.beat_schedule = {{**{{'b': {ONE}}}, 'c': {ONE}}}", ["b", "c"]),
        (f"app.conf.beat_schedule = dict(b={ONE})", ["b"]),
    ],
)
def test_later_additions_to_a_beat_schedule_are_read_too(more: str, names: list[str]) -> None:
    found = read_celery(f"app.conf.beat_schedule = {{'a': {ONE}}}\n{more}")
    assert ([one.name for one in found.definitions], found.problems) == (names, [])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("beat_schedule.update(others)", "left out: others"),
        ("beat_schedule.update(**others)", "left out: others"),
        ("beat_schedule |= others", "left out: others"),
        (f"beat_schedule[NAME] = {ONE}", "left out: NAME"),
        (f"beat_schedule['a', 'b'] = {ONE}", "left out: ('a', 'b')"),
        (f"beat_schedule.setdefault('b', {ONE})", "left out: beat_schedule.setdefault("),
        ("sender.add_periodic_task(10, test.s(), name='b')", "left out: sender.add_periodic_task("),
        ("timezone = TIME_ZONE", "timezone: TIME_ZONE"),
    ],
)
def test_entries_that_cannot_be_resolved_are_reported(more: str, told: str) -> None:
    found = read_celery(f"beat_schedule = {{'a': {ONE}}}\n{more}")
    assert [one.name for one in found.definitions] == ["a"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith(told)


@pytest.mark.parametrize(
    "change",
    ["beat_schedule['a']['kwargs'] = {}", "beat_schedule['a'].update(kwargs={})", "del beat_schedule['a']",
     "beat_schedule['a']['kwargs'] |= {'b': 1}"],
)  # fmt: skip
def test_an_entry_that_is_changed_afterwards_is_refused(change: str) -> None:
    found = read_celery(f"beat_schedule = {{'a': {ONE}}}\n{change}")
    assert found.definitions == []
    assert found.problems[0].startswith("a: ")


def test_a_beat_schedule_that_is_made_elsewhere_is_an_error() -> None:
    with pytest.raises(InvalidInput, match=r"beat_schedule: load\(\) cannot be read"):
        read_celery("beat_schedule = load()")


def test_ranges_of_celery_may_go_over_the_end() -> None:
    def spec(times: str) -> str:
        found = read_celery(f"beat_schedule = {{'a': {{'task': 't', 'schedule': crontab({times})}}}}")
        assert found.problems == []
        return found.definitions[0].specs[0]

    assert spec("minute=0, hour='22-2'") == "0 22-23,0-2 * * *"
    assert spec("minute=0, hour='9-17,22-4/2'") == "0 9-17,22,0,2,4 * * *"
    assert spec("minute='50-10', hour=0") == "50-59,0-10 0 * * *"
    assert spec("minute=0, hour=0, day_of_week='fri-mon'") == "0 0 * * 5-6,0-1"
    assert spec("minute=0, hour=0, day_of_week='saturday-sunday'") == "0 0 * * 6,0"
    assert spec("minute=0, hour=0, day_of_month='30-2', month_of_year='nov-feb'") == "0 0 30-31,1-2 11-12,1-2 *"
    assert spec("minute=0, hour=0, day_of_week='mon-fri'") == "0 0 * * mon-fri"


def test_fields_whose_order_differs_between_releases_of_celery_are_not_guessed() -> None:
    found = read_celery(
        "beat_schedule = {'both': {'task': 't', 'schedule': crontab(30, 7, '*', day_of_week='mon')},"
        " 'doubtful': {'task': 't', 'schedule': crontab(30, 7, 1)}}"
    )
    assert [(one.name, one.specs) for one in found.definitions] == [("both", ("30 7 * * mon",))]
    [problem] = found.problems
    assert problem.startswith("doubtful: crontab(…): releases of Celery differ")


def test_a_beat_schedule_is_read_from_json() -> None:
    entry = {"task": "t", "schedule": {"__type__": "crontab", "minute": "0", "hour": "*/2"}}
    found = read_celery(json.dumps({"beat_schedule": {"a": entry, "b": {"task": "t"}}}))
    assert [one.specs for one in found.definitions] == [("0 */2 * * *",)]
    assert len(found.problems) == 1


def test_redbeat_keys_become_schedules() -> None:
    crontab = {
        "__type__": "crontab",
        "minute": "5",
        "hour": "*",
        "day_of_week": "*",
        "day_of_month": "*",
        "month_of_year": "*",
    }
    interval = {"__type__": "interval", "every": 60, "relative": False}
    rows = {
        "redbeat:a": {"name": "a", "task": "t.a", "schedule": crontab, "kwargs": {"k": 1}, "enabled": True},
        "redbeat:b": {"name": "b", "task": "t.b", "schedule": interval, "options": {"queue": "q"}},
        "redbeat:off": {"name": "off", "task": "t.c", "schedule": interval, "enabled": False},
    }
    found = read_redbeat({key: json.dumps(row) for key, row in rows.items()} | {"redbeat::lock": "no json"})
    assert [(one.name, one.specs, one.target) for one in found.definitions] == [
        ("a", ("5 * * * *",), "queue:celery/t.a"),
        ("b", ("@every 60000ms",), "queue:q/t.b"),
    ]
    assert len(found.problems) == 2


def test_names_that_become_the_same_are_distinguished() -> None:
    found = read_celery(f"beat_schedule = {{'a@b': {ONE}, 'a-b': {ONE}}}")
    assert [one.name for one in found.definitions] == ["a-b", "a-b-2"]


def test_schedules_that_toml_cannot_express_are_left_out_and_reported() -> None:
    beat = {
        "null": {"task": "t", "schedule": 5, "kwargs": {"nothing": {"here": [None]}}},
        "marks": {"task": "t", "schedule": 5, "kwargs": {"text": '\x7f\\ "\n'}},
        "none": {"task": "t", "schedule": 5},
    }
    found = read_celery(json.dumps(beat))
    again = read_table(tomllib.loads(to_toml(found)), "a file", "")
    assert {one.name: json.loads(one.payload) for one in again} == {"marks": {"text": '\x7f\\ "\n'}, "none": None}
    assert [problem.partition(":")[0] for problem in found.problems] == ["null"]


def test_imported_schedules_can_be_written_as_a_file_and_read_again() -> None:
    for found in (read_crontab(CRONTAB), read_celery(BEAT)):
        again = read_table(tomllib.loads(to_toml(found)), "a file", "")
        assert [(one.name, one.specs, one.exclude, one.zone, one.target, one.payload) for one in again] == [
            (one.name, one.specs, one.exclude, one.zone, one.target, one.payload) for one in found.definitions
        ]
