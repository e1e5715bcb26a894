"""Notices on their way out: boxes, digests, mail, chats and webhooks, on real servers."""

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mainspring.model.delivery import DONE, Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.notice import Channels, Decided, Notice, Taken, notice_tasks
from mainspring.model.task import Task
from mainspring.node.notifier import NotifySink
from mainspring.sinks import notify
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.sinks.notify import Digest
from mainspring.store import notices as store_notices
from mainspring.store.notices import Notices
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.ticker import Ticker
from tests.support.mail_receiver import mail_server
from tests.support.web_receiver import Answer, Receiver, delivery, receiving

Tickers = Callable[..., Awaitable[Ticker]]
EVIL = "</pre><script>alert(1)</script> <!channel> @everyone *bold* `code` \x1b[2J\r\nBcc: x@y.z \u202egnp.exe"


def notice(subject: str = "schedule:nightly", kind: Any = "failed", **more: Any) -> Notice:
    return Notice(kind, subject, 1_800_000_000_000, 1_800_000_000_000, **more)


def decided(count: int, channel: str = "ops") -> list[Decided]:
    return [Decided(f"notice/{channel}/s{n}/1/failed", channel, notice(f"schedule:s{n}")) for n in range(count)]


@pytest.fixture
async def http() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    yield made
    await made.aclose()


async def ticking(tickers: Tickers, http: HttpSink, tables: object) -> Ticker:
    sink = NotifySink(Channels.read(tables), http, "shop")
    ticker = await tickers(sinks={"notify": sink})
    sink.notices = Notices(ticker.store)
    return ticker


def messages(receiver: Receiver) -> list[Any]:
    return [json.loads(request.body) for request in receiver.requests]


# -- boxes and digests ----------------------------------------------------------------------------------------


async def test_notices_of_some_seconds_are_one_message_and_later_ones_the_next(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        put = Notices(ticker.store).put
        first, second, third = notice_tasks(decided(3))
        await put([first])
        await ticker.advance(seconds=3)
        await put([second])
        assert receiver.requests == []
        await ticker.advance(seconds=6)
        [message] = messages(receiver)
        assert (message["title"], message["counts"]) == ("2 failed", {"failed": 2})
        assert [one["subject"] for one in message["notices"]] == ["schedule:s0", "schedule:s1"]
        await put([third])
        await ticker.advance(seconds=50)
        assert len(receiver.requests) == 1  # one message a minute
        await ticker.advance(seconds=10)
        assert messages(receiver)[1]["title"] == "schedule:s2 failed"
        await ticker.advance(minutes=10)
        assert len(receiver.requests) == 2
    assert not (await verify(store)).reported


async def test_a_storm_is_one_message_with_the_count_of_all(tickers: Tickers, store: Store, http: HttpSink) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        await Notices(ticker.store).put(notice_tasks(decided(2_000)))
        await ticker.advance(minutes=3)
        [message] = messages(receiver)
    assert message["counts"] == {"failed": 2_000}
    assert len(receiver.requests[0].body) < 20_000
    [left] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.box("ops"))])
    assert left[::2] == [b"last"]


async def test_a_breaker_comes_first_among_the_failures_that_it_explains(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        opened = Decided("notice/ops/x/1/breaker", "ops", notice("https://shop.example", "breaker"))
        await Notices(ticker.store).put(notice_tasks(decided(600)))
        await ticker.turn()
        await Notices(ticker.store).put(notice_tasks([opened]))
        await ticker.advance(minutes=2)
        [message] = messages(receiver)
    assert message["counts"] == {"failed": 600, "breaker": 1}
    assert [one["kind"] for one in message["notices"][:2]] == ["breaker", "failed"]


async def test_a_storm_that_lasts_some_seconds_is_still_one_message(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        for one in notice_tasks(decided(6)):
            await Notices(ticker.store).put([one])
            await ticker.advance(seconds=4)
        assert receiver.requests == []
        await ticker.advance(minutes=3)
        [message] = messages(receiver)
    assert message["counts"] == {"failed": 6}


async def test_a_storm_that_does_not_end_is_told_after_half_a_minute_and_then_once_a_minute(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        sent: list[int] = []
        for second, one in enumerate(notice_tasks(decided(140))):
            await Notices(ticker.store).put([one])
            await ticker.advance(seconds=1)
            sent += [second] * (len(receiver.requests) - len(sent))
        assert sent == [29, 89]
        await ticker.advance(minutes=3)
        assert sum(message["counts"]["failed"] for message in messages(receiver)) == 140


async def test_a_notice_that_is_delivered_again_counts_once_even_after_its_message_was_sent(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        notices = Notices(ticker.store)
        await notices.put(notice_tasks(decided(1)))
        await ticker.advance(seconds=10)
        [one] = decided(1)
        await notices.add("ops", [(one.id, one.notice)])  # its node died before the end was recorded
        [fresh] = decided(2)[1:]
        await notices.put(notice_tasks([fresh]))
        await ticker.advance(minutes=3)
        assert [message["title"] for message in messages(receiver)] == ["schedule:s0 failed", "schedule:s1 failed"]


class Dying(Notices):
    """Loses the answer of one call, as a node does that dies after the server has done it."""

    def __init__(self, store: Store, step: str) -> None:
        super().__init__(store)
        self.left = [step]

    def _die_after(self, step: str) -> None:
        if step in self.left:
            self.left.remove(step)
            raise Unavailable(f"died after {step}", sent=True)

    async def add(self, channel: str, notices: Sequence[tuple[str, Notice]]) -> int:
        due_ms = await super().add(channel, notices)
        self._die_after("add")
        return due_ms

    async def put(self, tasks: Sequence[Task], on_conflict: Any = "keep") -> None:
        await super().put(tasks, on_conflict)
        self._die_after("put")

    async def take(self, channel: str, window_ms: int) -> Taken | int:
        taken = await super().take(channel, window_ms)
        self._die_after("take")
        return taken

    async def sent(self, channel: str, taken: Taken) -> None:
        if "before sent" in self.left:
            self._die_after("before sent")
        await super().sent(channel, taken)
        self._die_after("sent")


@pytest.mark.parametrize("step", ["add", "put", "take", "before sent", "sent"])
async def test_a_node_that_dies_between_two_steps_loses_and_doubles_nothing(
    tickers: Tickers, store: Store, http: HttpSink, step: str
) -> None:
    with receiving() as receiver:
        channels = Channels.read({"ops": {"url": receiver.url}})
        sink = NotifySink(channels, http, "shop")
        ticker = await tickers(sinks={"notify": sink})
        sink.notices = dying = Dying(ticker.store, step)
        await Notices(ticker.store).put(notice_tasks(decided(2)))
        await ticker.advance(minutes=3)
        assert dying.left == []
        # A message that was sent twice has the same key and the same content: receivers drop the repeat.
        assert len({request.headers["idempotency-key"] for request in receiver.requests}) == 1
        assert {tuple(one["counts"].items()) for one in messages(receiver)} == {(("failed", 2),)}
        assert len({request.body for request in receiver.requests}) == 1
        assert len(receiver.requests) == (2 if step == "before sent" else 1)


async def test_a_channel_that_is_away_gets_the_same_message_later(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    answers = iter([Answer(503), Answer(500), Answer(200)])
    with receiving(lambda _: next(answers)) as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        await Notices(ticker.store).put(notice_tasks(decided(2)))
        await ticker.advance(minutes=5)
        assert len(receiver.requests) == 3
        assert len({(one.headers["idempotency-key"], one.body) for one in receiver.requests}) == 1


async def test_a_digest_that_was_cancelled_does_not_close_the_box_for_ever(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    with receiving() as receiver:
        ticker = await ticking(tickers, http, {"ops": {"url": receiver.url}})
        await Notices(ticker.store).put(notice_tasks(decided(1)))
        await ticker.turn()
        [digest] = (await ticker.client.list()).tasks
        assert await ticker.client.cancel(digest.id) == "cancelled"
        ticker.clock.advance(seconds=store_notices.UNSENT_MS // 1000 + 60)
        await Notices(ticker.store).put(notice_tasks(decided(2)[1:]))
        await ticker.advance(minutes=2)
        [message] = messages(receiver)
        assert message["title"] == "schedule:s1 failed"


async def test_a_channel_whose_package_is_missing_keeps_its_notices(
    tickers: Tickers, store: Store, http: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = {"ops": {"to": "mail:a@example.com", "smtp": "smtp://127.0.0.1:1?tls=never"}}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "aiosmtplib", None)
        ticker = await ticking(tickers, http, mail)
        await Notices(ticker.store).put(notice_tasks(decided(1)))
        await ticker.advance(minutes=1)
        [waiting] = (await ticker.client.list()).tasks
        told = await ticker.client.explain(waiting.id)
    assert "pip install 'mainspring[mail]'" in told.text


async def test_a_payload_that_is_no_notice_dies_and_an_unknown_channel_waits_for_a_node_that_knows_it(
    tickers: Tickers, store: Store, http: HttpSink
) -> None:
    ticker = await ticking(tickers, http, {"ops": {"url": "http://127.0.0.1:1/"}})
    await ticker.client.put("notify:ops", {"hello": 1})
    await ticker.client.put("notify:opps", msgspec.to_builtins(notice()), id="x")
    await ticker.turn()
    [dead_letter] = await list_dead(store)
    assert dead_letter.reason.startswith("the payload is no notice:")
    info = await ticker.client.get("x")
    assert info.errors == ("this node has no channel 'opps'; add [notify.opps] to its settings",)


# -- mail -----------------------------------------------------------------------------------------------------


def told(*notices: Notice) -> Digest:
    counts: dict[Any, int] = {}
    for one in notices:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return Digest("shop", "ops", Taken(counts, notices))


async def send(http: HttpSink, table: dict[str, Any], digest: Digest) -> Outcome:
    channels = Channels.read({"ops": table})
    return await notify.send(channels["ops"], digest, delivery("notify:ops/digest"), http)


FULL = Notice(
    "failed", "schedule:nightly", 1_800_000_000_950, 1_800_000_000_000 - 3_600_000, 3,
    reason="HTTP 500 Internal Server Error: sold out", code=500, task="nightly@2030-01-01T02:00:00Z", lane="user-7",
    target="https://shop.example/orders", attempt=2, due_ms=1_800_000_000_000, began_ms=1_800_000_000_050,
    ended_ms=1_800_000_000_950, by="node-1", headers=(("content-type", "text/plain"),), body="sold out <today>\nsorry",
)  # fmt: skip


@pytest.mark.parametrize(("tls", "password"), [("starttls", "p@ss/word"), ("tls", "secret"), ("starttls", "")])
async def test_a_mail_says_what_happened_in_text_and_in_html(
    http: HttpSink, tmp_path: Path, tls: str, password: str
) -> None:
    with mail_server(tmp_path, tls=tls, password=password) as box:
        url = box.url.replace(password, password.replace("@", "%40").replace("/", "%2F")) if password else box.url
        table = {"to": "mail:ops@example.com, boss@example.com", "from": "robot@example.com", "smtp": url}
        assert await send(http, {**table, "ca_file": box.ca_file}, told(FULL)) == DONE
        [mail], [envelope] = box.mails, box.envelopes
        assert box.logins == bool(password)
    assert envelope.rcpt_tos == ["ops@example.com", "boss@example.com"]
    assert (mail["Subject"], mail["From"], mail["To"]) == (
        "[shop] schedule:nightly failed", "robot@example.com", "ops@example.com, boss@example.com"
    )  # fmt: skip
    assert mail["Auto-Submitted"] == "auto-generated"
    text, html = mail.get_body(("plain",)), mail.get_body(("html",))
    assert text is not None
    assert html is not None
    assert text.get_content().splitlines() == [
        "  reason: HTTP 500 Internal Server Error: sold out",
        "  status: 500",
        "  failures in a row: 3",
        "  failing since: 2027-01-15T07:00:00.000Z",
        "  due: 2027-01-15T08:00:00.000Z",
        "  began: 2027-01-15T08:00:00.050Z",
        "  ended: 2027-01-15T08:00:00.950Z",
        "  took: 900 ms",
        "  task: nightly@2030-01-01T02:00:00Z",
        "  lane: user-7",
        "  attempt: 2",
        "  target: https://shop.example/orders",
        "  by: node-1",
        "",
        "content-type: text/plain",
        "",
        "sold out <today>",
        "sorry",
        "",
        "Mainspring, namespace shop, channel ops",
    ]
    page = html.get_content().replace("\r\n", "\n")
    assert ">status</th><td>500</td>" in page
    assert "sold out &lt;today&gt;\nsorry</pre>" in page


async def test_an_encoded_word_in_a_subject_is_not_decoded(http: HttpSink, tmp_path: Path) -> None:
    with mail_server(tmp_path, tls="never") as box:
        evil = told(notice("lane:=?utf-8?b?DQpCY2M6IGV2aWxAeC5jb20NCg0KYm9keQ==?="))
        assert await send(http, {"to": "mail:a@example.com", "smtp": box.url}, evil) == DONE
        [mail] = box.mails
    assert str(mail["Subject"]) == "[shop] lane:= ?utf-8?b?DQpCY2M6IGV2aWxAeC5jb20NCg0KYm9keQ== ?= failed"


async def test_a_repeated_mail_has_the_same_message_id(http: HttpSink, tmp_path: Path) -> None:
    with mail_server(tmp_path) as box:
        table = {"to": "mail:ops@example.com", "smtp": box.url, "ca_file": box.ca_file}
        for _ in range(2):
            assert await send(http, table, told(FULL)) == DONE
        assert len({mail["Message-ID"] for mail in box.mails}) == 1
        assert str(box.mails[0]["Message-ID"]).endswith("@example.com>")


async def test_mail_that_cannot_be_sent_now_is_tried_again(http: HttpSink, tmp_path: Path) -> None:
    with mail_server(tmp_path, password="right") as box:
        table = {"to": "mail:ops@example.com", "smtp": box.url, "ca_file": box.ca_file}
        box.answer = "451 later"
        busy = await send(http, table, told(FULL))
        assert isinstance(busy, Retry)
        assert "451" in busy.reason
        wrong = await send(http, {**table, "smtp": box.url.replace("right", "wrong")}, told(FULL))
        assert isinstance(wrong, Retry)
        assert "535" in wrong.reason
        assert "wrong" not in wrong.reason
        assert "check the user and the password" in wrong.reason
        stranger = await send(http, {key: table[key] for key in ("to", "smtp")}, told(FULL))
        assert isinstance(stranger, Retry)
        assert "certificate verify failed" in stranger.reason
        assert "as ca_file" in stranger.reason
        lost = await send(http, {**table, "ca_file": str(tmp_path / "lost.pem")}, told(FULL))
        assert isinstance(lost, Retry)
        assert lost.reason.startswith(f"ca_file {tmp_path / 'lost.pem'} cannot be used")
        box.answer, box.refused = "250 OK", {"gone@example.com"}
        table["to"] = "mail:gone@example.com,ops@example.com"
        assert await send(http, table, told(FULL)) == DONE  # one of two: the other is no reason to send it again
        table["to"] = "mail:gone@example.com"
        assert isinstance(await send(http, table, told(FULL)), Retry)
    closed = await send(http, table, told(FULL))
    assert isinstance(closed, Retry)


async def test_a_mail_server_that_offers_no_tls_gets_neither_password_nor_mail(http: HttpSink, tmp_path: Path) -> None:
    with mail_server(tmp_path, tls="never") as box:
        table = {"to": "mail:ops@example.com", "smtp": box.url.removesuffix("?tls=never")}
        assert isinstance(await send(http, table, told(FULL)), Retry)
        assert box.mails == []
        assert await send(http, {**table, "smtp": box.url}, told(FULL)) == DONE


# -- what came from tasks is shown as it is -------------------------------------------------------------------


async def test_text_of_tasks_can_neither_add_a_header_nor_markup_to_a_mail(http: HttpSink, tmp_path: Path) -> None:
    evil = notice(f"schedule:{EVIL}", reason=EVIL, body=EVIL, headers=((EVIL, EVIL),), target=EVIL)
    with mail_server(tmp_path, tls="never") as box:
        assert await send(http, {"to": "mail:a@example.com", "smtp": box.url}, told(evil)) == DONE
        assert await send(http, {"to": "mail:a@example.com", "smtp": box.url}, told(evil, evil)) == DONE
        for mail in box.mails:
            assert mail["Bcc"] is None
            html = mail.get_body(("html",))
            assert html is not None
            assert "<script" not in html.get_content()
            assert "\x1b" not in mail.as_string()
            assert "\u202e" not in html.get_content() + str(mail["Subject"])
            assert "\\u202egnp.exe" in html.get_content()


@pytest.mark.parametrize("form", ["slack", "teams", "discord", "webhook"])
async def test_text_of_tasks_is_no_markup_in_a_chat(http: HttpSink, form: str) -> None:
    evil = notice(f"schedule:{EVIL}", reason=EVIL, body=EVIL * 1_000)
    with receiving() as receiver:
        assert await send(http, {"url": receiver.url, "format": form}, told(evil, FULL)) == DONE
        [message] = messages(receiver)
        [request] = receiver.requests
        assert request.headers["content-type"] == "application/json"
    if form == "slack":
        assert message["text"] == "2 failed"
        assert {block["text"]["type"] for block in message["blocks"]} == {"plain_text"}
        assert all(len(block["text"]["text"]) <= 3_000 for block in message["blocks"])
    elif form == "teams":
        card = message["attachments"][0]["content"]
        assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
        assert len(request.body) < 28_000  # what Teams takes
    elif form == "discord":
        assert message["allowed_mentions"] == {"parse": []}
        [embed] = message["embeds"]
        assert embed["description"].count("`") == 6  # the two fences, and nothing that could end them
        assert len(embed["description"]) <= 4_096
    else:
        assert message["notices"][0]["reason"] == EVIL
        assert (message["type"], message["namespace"]) == ("mainspring.notices", "shop")


async def test_the_title_of_one_notice_is_escaped_for_each_chat(http: HttpSink) -> None:
    with receiving() as receiver:
        for form in ("slack", "discord"):
            await send(http, {"url": receiver.url, "format": form}, told(notice("schedule:<!channel> *a*")))
        slack, discord = messages(receiver)
    assert slack["text"] == "schedule:&lt;!channel&gt; *a* failed"
    assert discord["embeds"][0]["title"] == "schedule\\:\\<!channel\\> \\*a\\* failed"


@pytest.mark.parametrize("body", ["a\n" * 1_024, "\u5b57" * 682, "\x07" * 2_048, "`" * 2_048])
async def test_a_long_response_makes_no_message_that_a_chat_refuses(http: HttpSink, body: str) -> None:
    five = told(*(notice(f"schedule:s{n}", body=body, reason="\u5b57" * 500) for n in range(5)))
    with receiving() as receiver:
        for form in ("slack", "teams", "discord"):
            await send(http, {"url": receiver.url, "format": form}, five)
        slack, teams, discord = receiver.requests
    assert len(teams.body) < 28_000
    assert all(len(block["text"]["text"]) <= 3_000 for block in json.loads(slack.body)["blocks"])
    assert len(json.loads(discord.body)["embeds"][0]["description"]) <= 4_096


async def test_a_webhook_of_notices_is_signed_and_guarded_like_any_other(http: HttpSink) -> None:
    secret = "whsec_" + "a" * 32
    with receiving() as receiver:
        assert await send(http, {"url": receiver.url, "secrets": [secret]}, told(FULL)) == DONE
        assert receiver.requests[0].headers["webhook-signature"].startswith("v1,")
        guarded = HttpSink()
        outcome = await send(guarded, {"url": receiver.url}, told(FULL))
        await guarded.aclose()
    assert "webhooks go to public addresses only" in str(outcome)
    assert len(receiver.requests) == 1


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise asks for it on old Pythons
async def test_a_service_of_apprise_gets_title_and_text(http: HttpSink) -> None:
    with receiving() as receiver:
        url = receiver.url.replace("http://", "json://")
        assert await send(http, {"to": url}, told(FULL)) == DONE
        [message] = messages(receiver)
        assert message["title"] == "schedule:nightly failed"
        assert "sold out <today>" in message["message"]
        receiver.answer = lambda _: Answer(500)
        assert isinstance(await send(http, {"to": url}, told(FULL)), Retry)
    assert isinstance(await send(http, {"to": "nonsense://x"}, told(FULL)), Retry)


def test_many_subjects_are_listed_up_to_a_bound() -> None:
    digest = told(*(notice(f"schedule:s{n}") for n in range(100)), notice("schedule:s0"))
    assert digest.lines[0] == "schedule:s0 failed, 2 times"
    assert digest.lines[-1] == "and 80 more"
    assert len(digest.lines) == 21
    assert len(digest.text().splitlines()) < 60


def test_details_are_of_different_subjects_and_the_last_notice_of_each() -> None:
    digest = told(*(notice(reason=f"the {n}th time") for n in range(8)), notice("schedule:weekly"))
    assert [(one.subject, one.reason) for one in digest.shown] == [
        ("schedule:nightly", "the 7th time"),
        ("schedule:weekly", ""),
    ]
