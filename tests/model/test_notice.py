"""Notices without a server: signals of runs, decisions about notices, and settings that cannot work."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest

from mainspring.model import notice
from mainspring.model.delivery import Response
from mainspring.model.errors import InvalidInput
from mainspring.model.notice import (
    Beat,
    Beats,
    Channels,
    Decided,
    Episode,
    Episodes,
    Expected,
    Notice,
    Rule,
    Signal,
    SmtpServer,
    beat_signal,
    decide,
    signals_of,
)
from mainspring.model.run import RunRecord

HOUR_MS = 3_600_000
T0_MS = 1_800_000_000_000


def run(end: Any = "done", at_ms: int = T0_MS, **more: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "idh": b"\1" * 16, "attempt": 1, "due_ms": at_ms - 200, "began_ms": at_ms - 100, "ended_ms": at_ms,
        "target": "https://shop.example/orders?key=secret", "by": "node-1", "id": "nightly@x", "planned_ms": at_ms,
    }  # fmt: skip
    return RunRecord(end=end, **(fields | more))


def channels(**table: Any) -> Channels:
    return Channels.read({"ops": {"url": "https://hooks.example/x", **table}})


def told(records: Iterable[RunRecord], some: Channels) -> list[Decided]:
    """Follow records one after the other."""
    episodes = Episodes({})
    return [
        one
        for place, record in enumerate(records)
        for signal in signals_of(record, str(place))
        for one in episodes.take(signal, some)
    ]


def kinds(found: Iterable[Decided]) -> list[str]:
    return [one.notice.kind for one in found]


def test_one_failure_and_one_recovery_cause_one_notice_each() -> None:
    ends = ["done", "retry", "retry", "dead", "done", "done", "dead"]
    found = told((run(end, T0_MS + at, reason="HTTP 500") for at, end in enumerate(ends)), channels())
    assert kinds(found) == ["failed", "recovered", "failed"]
    assert [one.id for one in found] == [
        "notice/ops/schedule:nightly/1/failed",
        "notice/ops/schedule:nightly/1/recovered",
        "notice/ops/schedule:nightly/6/failed",
    ]
    failed, recovered, _ = (one.notice for one in found)
    assert (failed.reason, failed.count, failed.target) == ("HTTP 500", 1, "https://shop.example/orders?…")
    assert (recovered.reason, recovered.count, recovered.since_ms) == ("", 3, T0_MS + 1)


def test_a_notice_names_the_task_with_its_lane() -> None:
    [one] = told([run("dead", lane="user-7")], channels())
    assert (one.notice.task, one.notice.lane) == ("nightly@x", "user-7")


def test_failures_cause_a_notice_from_the_set_number_on_and_fewer_cause_no_recovery() -> None:
    ends = ["dead", "dead", "done", "dead", "dead", "dead", "done"]
    found = told(map(run, ends), channels(after=3))
    assert kinds(found) == ["failed", "recovered"]
    assert found[0].notice.count == 3


def test_a_flapping_schedule_causes_one_notice_until_enough_runs_succeed() -> None:
    ends = ["dead", "done", "dead", "done", "done", "dead", "done", "done", "done"]
    assert kinds(told(map(run, ends), channels(recover_after=3))) == ["failed", "recovered"]


def test_every_failure_causes_a_notice_if_each_is_asked_for() -> None:
    found = told(map(run, ["dead", "dead", "done", "dead"]), channels(remind="each"))
    assert kinds(found) == ["failed", "failed", "recovered", "failed"]
    assert len({one.id for one in found}) == 4


def test_an_episode_causes_a_reminder_after_the_set_span_and_not_before() -> None:
    ages_min = (0, 30, 59, 60, 100, 121)
    found = told((run("dead", T0_MS + age * 60_000) for age in ages_min), channels(remind="1h"))
    assert [(one.notice.at_ms - T0_MS) // 60_000 for one in found] == [0, 60, 121]
    assert [one.notice.count for one in found] == [1, 4, 6]


def test_the_same_runs_read_again_make_notices_with_the_same_ids() -> None:
    runs = [run(end) for end in ("dead", "done", "lost", "dead", "done")]
    assert told(runs, channels()) == told(runs, channels())


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (run("missed", began_ms=0), ("missed", "schedule:nightly")),
        (run("lost"), ("failed", "schedule:nightly")),
        (run("dead", id="order-1", planned_ms=None), ("dead", "https://shop.example")),
        (run("expired", id=None, planned_ms=None, target="queue:mail/send", queue="mail"), ("dead", "queue:mail")),
        (run("parked", id=None, planned_ms=None, lane="user-7"), ("disabled", "lane:user-7")),
        (run("retry", began_ms=0), None),  # postponed, not tried
        (run("retry", id=None, planned_ms=None), None),  # a further attempt follows
        (run("cancelled"), None),
        (run("skipped"), None),
        (run("dead", target="notify:ops/digest", planned_ms=None), None),
    ],
)  # fmt: skip
def test_what_a_run_is_called(record: RunRecord, expected: tuple[str, str] | None) -> None:
    found = [(one.notice.kind, one.notice.subject) for one in told([record], channels())]
    assert found == ([] if expected is None else [expected])


def test_a_run_that_began_late_causes_a_notice_although_it_succeeded() -> None:
    some = channels(late="5s")
    late = run("done", due_ms=T0_MS - 7_000, began_ms=T0_MS)
    [one] = told([run("done"), late, late], some)
    assert (one.notice.kind, one.notice.reason) == ("late", "it began 7s late")
    assert told([run("done", due_ms=T0_MS - 27_684, began_ms=T0_MS)], some)[0].notice.reason == "it began 27s late"
    assert kinds(told([late, run("done")], some)) == ["late", "recovered"]
    assert told([late, run("dead")], some)[2].notice.reason == "it begins in time again", "though it fails"
    assert kinds(told([second_attempt(late)], some)) == []
    assert kinds(told([late], channels())) == []


def second_attempt(record: RunRecord) -> RunRecord:
    """Return a second attempt: its first was due long ago, and that says nothing about lateness."""
    return run("done", due_ms=record.due_ms, began_ms=record.began_ms, attempt=2)


def test_receivers_that_fail_once_and_are_never_called_again_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "MOST_EPISODES", 20)
    episodes = Episodes({})
    for number in range(100):
        dead = run("dead", T0_MS + number, planned_ms=None, target=f"kafka:topic-{number}")
        told_of = [one for signal in signals_of(dead, str(number)) for one in episodes.take(signal, channels())]
        assert [one.notice.subject for one in told_of] == [f"kafka:topic-{number}"]
    assert 0 < len(episodes.known) <= 20
    assert list(episodes.known)[-1].endswith("topic-99")
    stored = {name for name, one in episodes.changed.items() if one is not None}
    assert stored == set(episodes.known), "what is forgotten is removed from the server too"


def test_each_channel_says_what_is_late_for_it() -> None:
    some = Channels.read(
        {"strict": {"url": "https://a.example/", "late": "1s"}, "lax": {"url": "https://a.example/", "late": "1m"}}
    )
    late = run("done", due_ms=T0_MS - 7_000, began_ms=T0_MS)
    found = [one for signal in signals_of(late, "1") for one in Episodes({}).take(signal, some)]
    assert [one.channel for one in found] == ["strict"]


def test_dead_tasks_of_a_target_without_recorded_successes_cause_a_new_notice_after_a_quiet_hour() -> None:
    ages_min = (0, 30, 89, 150, 151)
    dead = (run("dead", T0_MS + age * 60_000, planned_ms=None, target="kafka:orders") for age in ages_min)
    found = told(dead, channels())
    assert [(one.notice.at_ms - T0_MS) // 60_000 for one in found] == [0, 150]
    assert len({one.id for one in found}) == 2


def test_a_lasting_state_causes_a_notice_at_once_and_a_reminder_an_hour_at_most() -> None:
    some, episodes = channels(after=3, remind="each"), Episodes({})
    found = []
    for at_ms in range(T0_MS, T0_MS + 3 * HOUR_MS, 10_000):
        state = Signal("queue:mail", "no worker", bad=True, at_ms=at_ms, place="x", queue="mail", lasts=True)
        found += list(episodes.take(state, some))
    assert [(one.notice.at_ms - T0_MS) / HOUR_MS for one in found] == [0, 1, 2]
    assert len({one.id for one in found}) == 3
    well = Signal("queue:mail", "no worker", bad=False, at_ms=T0_MS + 4 * HOUR_MS, place="y", queue="mail", lasts=True)
    assert kinds(episodes.take(well, some)) == ["recovered"]


@pytest.mark.parametrize(
    ("table", "fits"),
    [
        ({}, True),
        ({"kinds": ["recovered"]}, False),
        ({"schedules": ["night*"]}, True),
        ({"schedules": ["daily"]}, False),
        ({"targets": ["https://shop.example/*"], "schedules": ["nightly"]}, True),
        ({"targets": ["kafka:*"], "schedules": ["nightly"]}, False),
        ({"queues": ["mail"]}, False),
    ],
)
def test_a_rule_decides_which_channel_gets_a_notice(table: dict[str, Any], fits: bool) -> None:
    assert bool(told([run("dead")], channels(**table))) is fits


def test_a_channel_gets_notices_of_its_namespaces_only() -> None:
    some = channels(namespaces=["shop*"])
    assert list(some.of("shop-eu")) == ["ops"]
    assert list(some.of("main")) == []


def test_two_channels_have_episodes_of_their_own() -> None:
    some = Channels.read(
        {"all": {"url": "https://a.example/"}, "third": {"url": "https://b.example/", "after": 3}},
    )
    episodes = Episodes({})
    found = [
        (one.channel, one.notice.kind)
        for at, end in enumerate(("dead", "dead", "dead", "done"))
        for signal in signals_of(run(end), str(at))
        for one in episodes.take(signal, some)
    ]
    assert found == [("all", "failed"), ("third", "failed"), ("all", "recovered"), ("third", "recovered")]
    assert episodes.known == {}
    assert set(episodes.changed.values()) == {None}


def test_a_long_subject_makes_an_id_that_is_allowed() -> None:
    signal = Signal("kafka:" + "ü" * 300, "breaker", bad=True, at_ms=T0_MS, place="1-1")
    [one] = Episodes({}).take(signal, Channels.read({"c" * 64: {"url": "https://a.example/"}}))
    assert len(one.id.encode()) <= 256


def test_a_decision_needs_no_episode_that_was_known_before() -> None:
    good = Signal("queue:mail", "no worker", bad=False, at_ms=T0_MS, place="1")
    assert decide(None, good, Rule()) == (None, None)
    bad = good._replace(bad=True)
    assert decide(None, bad, Rule()) == (
        Episode("1", T0_MS, 1, 0, T0_MS, T0_MS),
        Notice("no worker", "queue:mail", T0_MS, T0_MS),
    )


def test_a_response_is_cut_to_what_fits_into_a_message() -> None:
    headers = tuple((f"x-{n}", "y") for n in range(100))
    notice = Notice("failed", "schedule:x", 1, 1).with_response(Response(500, headers, b"\xff" + b"a" * 100_000))
    assert len(notice.headers) == 20
    assert len(notice.body) == 2_048
    assert notice.body.startswith("\ufffda")


# -- settings -----------------------------------------------------------------------------------------------------

MAIL = {"to": "mail:ops@example.com", "smtp": "smtps://u:p%40ss@mx.example.com"}


def test_settings_are_read_and_written_back() -> None:
    tables = {
        "ops": {**MAIL, "kinds": ["failed", "no worker"], "remind": "24h", "after": 2, "late": "1m"},
        "chat": {"url": "https://hooks.slack.com/services/T/B/x", "format": "slack", "schedules": ["a*"]},
        "hook": {"url": "https://example.com/", "secrets": ["whsec_" + "a" * 32], "headers": {"X-Team": "ops"}},
        "other": {"to": "ntfy://topic"},
    }
    some = Channels.read(tables)
    assert Channels.read(some.tables()).tables() == tables
    assert "p@ss" not in repr(some["ops"])
    assert "p@ss" not in some["ops"].way.shown
    assert "services" not in some["chat"].way.shown
    assert some["ops"].rule == Rule(("failed", "no worker"), after=2, remind="24h", late_ms=60_000)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "give one of to"),
        ({"to": "mail:a@b.c", "url": "https://x.example/"}, "give one of to"),
        ({"too": "mail:a@b.c"}, "did you mean to"),
        ({"to": "ops@example.com"}, "neither mail:<address> nor an address of apprise"),
        ({"to": "https://example.com"}, 'give a web address as url = "…"'),
        ({"to": "mail:ops@example.com"}, "give the mail server too"),
        ({**MAIL, "to": "mail:ops"}, "'ops' is no mail address"),
        ({**MAIL, "to": "mail:a@b.c\r\nBcc: x@y.z"}, "is no mail address"),
        ({**MAIL, "to": "mail:bücher@example.com"}, "is no mail address"),
        ({**MAIL, "from": "me"}, "'me' is no mail address"),
        ({**MAIL, "smtp": "mx.example.com"}, "no address of a mail server"),
        ({**MAIL, "smtp": "smtp://mx.example.com:99999"}, "the port is no number"),
        ({**MAIL, "smtp": "smtp://user@mx.example.com"}, "both user and password"),
        ({**MAIL, "smtp": "smtp://mx.example.com?tls=never"}, "?tls=never is for smtp:// to this machine"),
        ({**MAIL, "smtp": "smtp://u:p@localhost?tls=never"}, "without a password"),
        ({**MAIL, "smtp": "smtp://localhost?tls=maybe"}, "the only choice is ?tls=never"),
        ({**MAIL, "secrets": "whsec_x"}, "secrets is not a setting of a channel with mail"),
        ({"url": "ftp://x.example/"}, "ftp"),
        ({"url": "https://x.example/", "format": "irc"}, "format is 'irc'"),
        ({"url": "https://x.example/", "method": "GET"}, "method is not a setting"),
        ({"to": "ntfy://x", "headers": {}}, "headers is not a setting of a channel of apprise"),
        ({**MAIL, "kinds": ["fail"]}, "'fail'"),
        ({**MAIL, "kinds": []}, "kinds has nothing"),
        ({**MAIL, "kinds": "failed"}, "expected a list of texts"),
        ({**MAIL, "kinds": ["late"]}, 'late = "5m"'),
        ({**MAIL, "after": 0}, "after is 0"),
        ({**MAIL, "after": True}, "after is True"),
        ({**MAIL, "recover_after": "3"}, "recover_after is '3'"),
        ({**MAIL, "remind": "often"}, "remind is 'often'; use never, each, or a span such as 1h"),
        ({**MAIL, "late": 5}, "expected a text"),
        ("mail:a@b.c", "expected a table"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_channel_and_what_to_do(table: object, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Channels.read({"ops": table})
    assert str(refused.value).startswith("ops: ")
    assert said in str(refused.value)
    assert "p@ss" not in str(refused.value)


def test_the_name_of_a_channel_is_checked() -> None:
    with pytest.raises(InvalidInput, match="the name of a channel is 'a/b'"):
        Channels.read({"a/b": MAIL})


def test_the_port_and_the_kind_of_tls_of_a_mail_server() -> None:
    assert SmtpServer.parse("smtps://u:p%2F@mx") == SmtpServer("mx", 465, True, False, "u", "p/")
    assert SmtpServer.parse("smtp://mx") == SmtpServer("mx", 587, False)
    assert SmtpServer.parse("smtp://127.0.0.1:25?tls=never") == SmtpServer("127.0.0.1", 25, False, True)


# -- beats ----------------------------------------------------------------------------------------------------------


def test_a_beat_is_missed_after_its_deadline_and_says_when_the_last_one_came() -> None:
    hourly = Expected.make(every="1h", grace="5m")
    assert hourly is not None
    beat = Beat("backup", hourly, hourly.deadline_ms(T0_MS), T0_MS)
    assert beat.deadline_ms == T0_MS + 65 * 60_000
    assert not beat_signal(beat, beat.deadline_ms).bad
    missed = beat_signal(beat, beat.deadline_ms + 1)
    assert (missed.bad, missed.kind, missed.subject) == (True, "missed", "beat:backup")
    assert missed.reason == "the last beat came at 2027-01-15T08:00:00.000Z"
    never = beat_signal(Beat("backup", hourly, hourly.deadline_ms(T0_MS)), T0_MS + 2 * HOUR_MS)
    assert never.reason == "it never came"


def test_a_beat_that_came_just_before_it_was_found_missing_ends_the_episode() -> None:
    hourly, episodes = Expected.make(every="1h", grace="5m"), Episodes({})
    assert hourly is not None
    some, now_ms = channels(), T0_MS + 2 * HOUR_MS
    assert kinds(episodes.take(beat_signal(Beat("backup", hourly, T0_MS), now_ms), some)) == ["missed"]
    came = Beat("backup", hourly, now_ms + HOUR_MS, last_ms=now_ms - 5)  # by a clock that is 5 ms behind
    assert kinds(episodes.take(beat_signal(came, now_ms + 10_000), some)) == ["recovered"]


def test_a_beat_is_read_from_what_the_api_shows() -> None:
    hourly = Expected.make(every="1h", grace="5m")
    assert hourly is not None
    for beat in (Beat("a", hourly, T0_MS, T0_MS - 1), Beat("b", hourly, T0_MS)):
        assert Beat.from_dict(beat.as_dict()) == beat


def read_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000)


def test_a_beat_is_expected_after_its_cron_line() -> None:
    nightly = Expected.make(cron="0 2 * * *", timezone="Europe/Paris", grace="10m")
    assert nightly is not None
    at_0203_ms = 1_800_061_380_000  # 2027-01-16 02:03 in Paris
    assert nightly.deadline_ms(at_0203_ms) == at_0203_ms + 24 * HOUR_MS + 7 * 60_000


def test_a_beat_by_a_clock_that_is_a_little_fast_counts_for_the_time_that_follows() -> None:
    nightly = Expected.make(cron="0 2 * * *", timezone="Europe/Paris", grace="10m")
    assert nightly is not None
    at_0200_ms = 1_800_061_200_000  # 2027-01-16 02:00 in Paris
    assert nightly.deadline_ms(at_0200_ms - 3_000) == at_0200_ms + 24 * HOUR_MS + 10 * 60_000
    assert nightly.deadline_ms(at_0200_ms - 60_000) == at_0200_ms + 10 * 60_000


@pytest.mark.parametrize(
    ("last", "deadline"),
    [
        ("2027-03-27T01:31Z", "2027-03-28T01:10Z"),  # 02:30 is skipped on the 28th: it is expected at 03:00
        ("2027-10-30T00:31Z", "2027-10-31T00:40Z"),  # of the two 02:30 it is the first
        ("2027-10-31T00:31Z", "2027-11-01T01:40Z"),
    ],
)
def test_a_beat_at_an_hour_that_clocks_skip_or_repeat_is_expected_once(last: str, deadline: str) -> None:
    nightly = Expected.make(cron="30 2 * * *", timezone="Europe/Paris", grace="10m")
    assert nightly is not None
    assert nightly.deadline_ms(read_ms(last)) == read_ms(deadline)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"every": "1h", "cron": "0 2 * * *"}, "both every and cron"),
        ({"every": "10ms"}, "give 1s or more"),
        ({"cron": "0 2 * *"}, "cron"),
        ({"cron": "0 0 30 2 *"}, "never"),
        ({"cron": "0 2 * * *", "timezone": "Mars/Base"}, "Mars/Base"),
        ({"grace": "5m"}, "give every or cron too"),
        ({"every": "soon"}, "every: 'soon' is not a delay"),
    ],
)
def test_an_expectation_that_cannot_work_is_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Expected.make(**fields)


def test_beats_of_the_settings_are_read_and_written_back() -> None:
    beats = Beats.read({"a": {"every": "1h"}, "b": {"cron": "0 2 * * *", "timezone": "Asia/Tokyo", "grace": "1m"}})
    assert dict(Beats.read(beats.tables())) == dict(beats)
    with pytest.raises(InvalidInput, match=r"a: evry is not a setting of a beat.*did you mean every"):
        Beats.read({"a": {"evry": "1h"}})
