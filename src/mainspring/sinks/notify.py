"""`notify:<channel>`, which gathers notices and sends them as one message, and `beat:<name>`, which watches for beats.

A notice is put into the box of its channel. The first one there makes a digest task, due some seconds later; when that
is due, it sends one message with everything in the box. Every step can be repeated: a notice counts once by its id, a
digest takes the same notices at each attempt, and its message has the same id each time.
"""

import hashlib
import logging
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from email.utils import formatdate
from html import escape as html_escape
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final, Protocol

import msgspec

from ..model.delivery import DONE, Dead, Delivery, DeliveryBatch, Outcome, Retry
from ..model.errors import InvalidInput, MainspringError
from ..model.explain import moment
from ..model.notice import (
    BEAT,
    NOTIFY,
    AppriseWay,
    BeatReport,
    BeatState,
    Channel,
    Channels,
    Expected,
    MailWay,
    Notice,
    NoticeKind,
    Taken,
    WebFormat,
    WebWay,
    after_report,
    notice_tasks,
)
from ..model.task import OnConflict, Task
from ..model.text import describe, escape
from .http import HttpSink

log = logging.getLogger("mainspring.notices")


class NoticeStore(Protocol):
    """What the sinks of this module need of the store. Each call may be repeated."""

    def now_ms(self) -> int: ...

    async def add(self, channel: str, notices: Sequence[tuple[str, Notice]]) -> int:
        """Put notices with their ids into the box, those that it has not had; return when its digest is due."""
        ...

    async def take(self, channel: str, window_ms: int) -> Taken:
        """Return the notices of the digest that is due at `window_ms`; later ones go to the next."""
        ...

    async def sent(self, channel: str, taken: Taken) -> None:
        """Remove what `take` returned."""
        ...

    async def put(self, tasks: Sequence[Task], on_conflict: OnConflict = "keep") -> None:
        """Put tasks that have ids."""
        ...

    async def read_beat(self, name: str) -> bytes | None: ...

    async def write_beat(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace the state of a beat; return False if it has changed since it was read."""
        ...


DIGEST: Final = "/digest"
DIGEST_RETRY: Final = "12 base=5s cap=10m"
_NOT_STARTED: Final = Retry("the node is starting or stopping", untried=True)


class NoticeSink:
    """What both sinks share: a store that is known only when the node has started."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.store: NoticeStore | None = None


class DigestRequest(msgspec.Struct, frozen=True):
    """The payload of a digest."""

    window_ms: int


class NotifySink(NoticeSink):
    """Gathers notices, and sends digests."""

    batch_tasks = 500

    def __init__(self, channels: Channels, http: HttpSink, namespace: str) -> None:
        super().__init__(channels)
        self._http = http
        self._namespace = namespace
        # Looked up once: every notice that comes due asks.
        self._lacks = {name: missing_for(one, http) for name, one in channels.items()}

    def missing(self, target: str) -> str | None:
        """Return the package that this node lacks for a channel; without a name, for any of them."""
        name = target.partition(":")[2].removesuffix(DIGEST)
        reasons = [self._lacks.get(name)] if name else self._lacks.values()
        return next((reason for reason in reasons if reason is not None), None)

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        name, is_digest = _read_target(batch[0].target)
        channel = self.channels.get(name)
        if channel is None:  # not dead: another node may know it, or this one after its next start
            return [Retry(f"this node has no channel {name!r}; add [notify.{name}] to its settings")] * len(batch)
        if self.store is None:
            return [_NOT_STARTED] * len(batch)
        try:
            if is_digest:
                return [await self._send_digest(channel, self.store, one) for one in batch]
            return await _gather(channel, self.store, batch)
        except MainspringError as error:
            return [Retry(str(error), error=error)] * len(batch)

    async def _send_digest(self, channel: Channel, store: NoticeStore, delivery: Delivery) -> Outcome:
        try:
            window_ms = msgspec.json.decode(delivery.payload, type=DigestRequest).window_ms
        except msgspec.MsgspecError as error:
            return Dead(f"the payload is no digest: {error}")
        taken = await store.take(channel.name, window_ms)
        if not taken.counts:
            return DONE  # an earlier attempt has sent it
        outcome = await self.send(channel, Digest(self._namespace, channel.name, taken), delivery)
        if not isinstance(outcome, Retry | Dead):
            await store.sent(channel.name, taken)
        return outcome

    async def send(self, channel: Channel, digest: "Digest", delivery: Delivery) -> Outcome:
        """Send one message; the key of the delivery tells repeats from new ones."""
        match channel.way:
            case WebWay(hook, form):
                payload = msgspec.json.encode(_FORMS[form](digest))
                body = msgspec.structs.replace(delivery.body, payload=payload, raw=False)
                [outcome] = await self._http.deliver_to(
                    hook, DeliveryBatch([msgspec.structs.replace(delivery, body=body)], lambda _: None)
                )
                return outcome
            case MailWay():
                return await _send_mail(channel.way, digest, delivery.idempotency_key)
            case AppriseWay(url):
                return await _send_by_apprise(url, digest)

    async def aclose(self) -> None:
        """Do nothing: whoever made the HTTP sink closes it."""


def _read_target(target: str) -> tuple[str, bool]:
    name = target.partition(":")[2]
    return name.removesuffix(DIGEST), name.endswith(DIGEST)


def missing_for(channel: Channel, http: HttpSink) -> str | None:
    """Return the package that this node lacks for a channel, and how to install it."""
    match channel.way:
        case WebWay():
            return http.missing(channel.way.hook.url)
        case MailWay():
            return None if find_spec("aiosmtplib") else _needs("a channel with mail", "aiosmtplib", "mail")
        case AppriseWay():
            return None if find_spec("apprise") else _needs("a channel of apprise", "apprise", "apprise")


def _needs(what: str, package: str, extra: str) -> str:
    return f"{what} needs the package {package} on this node: pip install 'mainspring[{extra}]'"


async def _gather(channel: Channel, store: NoticeStore, batch: Sequence[Delivery]) -> list[Outcome]:
    outcomes: list[Outcome] = [DONE] * len(batch)
    notices: list[tuple[str, Notice]] = []
    for at, one in enumerate(batch):
        try:
            notices.append((one.id, msgspec.json.decode(one.payload, type=Notice)))
        except msgspec.MsgspecError as error:
            outcomes[at] = Dead(f"the payload is no notice: {error}")
    if notices:
        due_ms = await store.add(channel.name, notices)
        # Also for notices that were there before: the digest may not have been put, and then nobody would send them.
        digest = Task(
            f"{NOTIFY}:{channel.name}{DIGEST}", msgspec.to_builtins(DigestRequest(due_ms)), at=due_ms,
            id=f"{NOTIFY}/{channel.name}/{due_ms}", retry=DIGEST_RETRY,
        )  # fmt: skip
        await store.put([digest])
    return outcomes


class BeatSink(NoticeSink):
    """Takes beats of other programs' jobs, and tells of those that do not come.

    The deadline of the next beat is a task of its own, and every beat moves it.
    """

    batch_tasks = 100

    def __init__(self, channels: Channels, expected: Mapping[str, Expected]) -> None:
        super().__init__(channels)
        self._expected = expected

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [await self._deliver_one(one) for one in batch]

    async def _deliver_one(self, delivery: Delivery) -> Outcome:
        name = delivery.target.partition(":")[2]
        if self.store is None:
            return _NOT_STARTED
        try:
            report = msgspec.json.decode(delivery.payload, type=BeatReport)
            while not await self._report(self.store, name, report):
                pass  # another beat came at the same time: what it has written counts
        except (InvalidInput, msgspec.MsgspecError) as error:
            return Dead(str(error))
        except MainspringError as error:
            return Retry(str(error), error=error)
        return DONE

    async def _report(self, store: NoticeStore, name: str, report: BeatReport) -> bool:
        """Notices first: repeated, they are the same tasks. The deadline last, and each time, whatever was done."""
        raw = await store.read_beat(name)
        state = None if raw is None else msgspec.msgpack.decode(raw, type=BeatState)
        known = self._expected.get(name)
        after, decided = after_report(name, state, report, known, self.channels, store.now_ms())
        await store.put(notice_tasks(decided))
        if not await store.write_beat(name, raw, msgspec.msgpack.encode(after)):
            return False
        watch = msgspec.to_builtins(BeatReport(deadline_ms=after.deadline_ms))
        task = Task(f"{BEAT}:{name}", watch, at=after.deadline_ms, id=f"{BEAT}/{name}")
        await store.put([task], "replace")
        return True

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""


# -- messages ---------------------------------------------------------------------------------------------------------

SHOWN: Final = 5
"""Notices of one message that are shown with their details."""
LISTED: Final = 20
"""Subjects that are listed with their counts."""

_VERBS: Final[Mapping[NoticeKind, str]] = {
    "failed": "failed", "recovered": "recovered", "dead": "dead", "missed": "missed", "late": "late",
    "disabled": "stopped", "no worker": "without a worker", "breaker": "unavailable",
}  # fmt: skip


class Digest:
    """One message about some notices; each form escapes what came from tasks in its own way."""

    def __init__(self, namespace: str, channel: str, taken: Taken) -> None:
        self.namespace = escape(namespace)
        self.channel = channel
        self.counts = taken.counts
        self.notices = taken.notices
        self.total = sum(taken.counts.values())

    @property
    def title(self) -> str:
        if self.total == 1 and self.notices:
            [one] = self.notices
            return f"{escape(one.subject)[:100]} {_VERBS[one.kind]}"
        return ", ".join(f"{count} {_VERBS[kind]}" for kind, count in self.counts.items())

    @property
    def lines(self) -> list[str]:
        """How often each subject is told of, if there are several notices."""
        if self.total <= 1:
            return []
        tally = Counter((one.subject, one.kind) for one in self.notices)
        lines = [
            f"{escape(subject)[:200]} {_VERBS[kind]}{f', {count} times' if count > 1 else ''}"
            for (subject, kind), count in islice(tally.items(), LISTED)
        ]
        rest = self.total - sum(count for _, count in islice(tally.items(), LISTED))
        return [*lines, f"and {rest} more"] if rest else lines

    @property
    def shown(self) -> Sequence[Notice]:
        return self.notices[:SHOWN]

    def text(self) -> str:
        """Return the whole message as plain text."""
        parts = ["\n".join(self.lines)] if self.lines else []
        for one in self.shown:
            head = f"{escape(one.subject)} {_VERBS[one.kind]}"
            facts = [f"  {name}: {value}" for name, value in facts_of(one)]
            parts.append("\n".join([head, *facts, *_answer_lines(one)]))
        return "\n\n".join([*parts, f"namespace {self.namespace}, channel {self.channel}"]) + "\n"

    def html(self) -> str:
        """Return the same as HTML, without pictures, links and scripts."""
        parts = [f"<h2>{html_escape(self.title)}</h2>"]
        if self.lines:
            parts.append("<ul>" + "".join(f"<li>{html_escape(line)}</li>" for line in self.lines) + "</ul>")
        for one in self.shown:
            rows = "".join(
                f"<tr><th align='left'>{html_escape(name)}</th><td>{html_escape(value)}</td></tr>"
                for name, value in facts_of(one)
            )
            parts.append(f"<h3>{html_escape(escape(one.subject))} {_VERBS[one.kind]}</h3><table>{rows}</table>")
            if answer := _answer_lines(one):
                parts.append(f"<pre>{html_escape(chr(10).join(answer))}</pre>")
        foot = html_escape(f"namespace {self.namespace}, channel {self.channel}")
        return f"<!doctype html><html><body>{''.join(parts)}<p><small>{foot}</small></p></body></html>"


def facts_of(notice: Notice) -> list[tuple[str, str]]:
    """Return what a notice says, name by name, on one line each."""
    took_ms = notice.ended_ms - notice.began_ms if notice.began_ms else None
    facts: list[tuple[str, object]] = [
        ("reason", notice.reason),
        ("status", notice.code),
        ("failures in a row", notice.count if notice.count > 1 else None),
        ("failing since", moment(notice.since_ms)),
        ("ended" if notice.ended_ms else "seen", moment(notice.at_ms)),
        ("due", moment(notice.due_ms) if notice.due_ms else None),
        ("began", moment(notice.began_ms) if notice.began_ms else None),
        ("took", None if took_ms is None else f"{took_ms} ms"),
        ("task", notice.task),
        ("attempt", notice.attempt or None),
        ("target", notice.target),
        ("by", notice.by),
    ]
    return [(name, escape(str(value))) for name, value in facts if value not in (None, "")]


def _answer_lines(notice: Notice) -> list[str]:
    """Return the head and the body of the response, safe to show."""
    head = [escape(f"{name}: {value}") for name, value in notice.headers]
    body = [escape(line) for line in notice.body.splitlines()]
    return [*head, *([""] if head and body else []), *body]


def _as_webhook(digest: Digest) -> dict[str, Any]:
    return {
        "type": "mainspring.notices", "title": digest.title, "namespace": digest.namespace, "channel": digest.channel,
        "counts": digest.counts, "notices": [msgspec.to_builtins(one) for one in digest.notices[:LISTED]],
    }  # fmt: skip


_SLACK_CHARS: Final = 2_900
_DISCORD_CHARS: Final = 3_900
_TEAMS_CHARS: Final = 15_000


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _as_slack(digest: Digest) -> dict[str, Any]:
    """Plain-text blocks, in which Slack finds no links, mentions or markup; the text is for notifications."""
    quoted = digest.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {
        "text": quoted,
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": _cut(digest.title, 150), "emoji": False}},
            {"type": "section", "text": {"type": "plain_text", "text": _cut(digest.text(), _SLACK_CHARS),
                                         "emoji": False}},
        ],
    }  # fmt: skip


def _as_teams(digest: Digest) -> dict[str, Any]:
    """An adaptive card of text runs, in which Teams finds no markup."""

    def block(text: str, **style: object) -> dict[str, Any]:
        return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}

    lines = _cut(digest.text(), _TEAMS_CHARS).splitlines()
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
        "body": [block(digest.title, weight="Bolder", size="Medium"), *(block(line) for line in lines if line)],
    }  # fmt: skip
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _as_discord(digest: Digest) -> dict[str, Any]:
    """A code block, in which Discord finds no markup, and no mentions anywhere."""
    inside = _cut(digest.text(), _DISCORD_CHARS).replace("`", "\u02cb")
    title = "".join(f"\\{one}" if one in _DISCORD_MARKS else one for one in _cut(digest.title, 120))
    return {"embeds": [{"title": title, "description": f"```\n{inside}\n```"}], "allowed_mentions": {"parse": []}}


_DISCORD_MARKS: Final = frozenset("\\*_~`|>#[]()<:@-")
_FORMS: Final[Mapping[WebFormat, Any]] = {
    "webhook": _as_webhook, "slack": _as_slack, "teams": _as_teams, "discord": _as_discord,
}  # fmt: skip


# -- mail and apprise --------------------------------------------------------------------------------

SMTP_TIMEOUT_S: Final = 30.0


def mail_of(way: MailWay, digest: Digest, key: str) -> EmailMessage:
    """Return the mail of a digest. A repeated one has the same Message-ID, so that it is shown once."""
    mail = EmailMessage()
    mail["From"] = way.sender
    mail["To"] = ", ".join(way.to)
    # `=?` begins an encoded word, which `email` and readers of mail decode: control characters could hide in it.
    mail["Subject"] = f"[{digest.namespace}] {_cut(digest.title, 200)}".replace("=?", "= ?")
    mail["Date"] = formatdate()
    domain = way.sender.rpartition("@")[2]
    mail["Message-ID"] = f"<{hashlib.sha256(key.encode()).hexdigest()[:40]}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"  # so that holiday answers stay away
    mail.set_content(digest.text())
    mail.add_alternative(digest.html(), subtype="html")
    return mail


async def _send_mail(way: MailWay, digest: Digest, key: str) -> Outcome:
    import aiosmtplib  # here: a node may never send mail

    server = way.server
    try:
        refused, _ = await aiosmtplib.send(
            mail_of(way, digest, key),
            recipients=list(way.to),
            hostname=server.host,
            port=server.port,
            username=server.user or None,
            password=server.password or None,
            use_tls=server.tls,
            start_tls=not server.tls and not server.plain,
            tls_context=None if server.plain else ssl.create_default_context(cafile=way.ca_file),
            timeout=SMTP_TIMEOUT_S,
        )
    except (aiosmtplib.SMTPException, OSError) as error:  # of OSError: no connection, or a certificate's file
        return Retry(f"mail through {server.shown}: {describe(error)}", error=error.with_traceback(None))
    for address, (code, why) in refused.items():
        log.error("mail to %s was refused: %s %s", address, code, escape(why))
    return DONE


async def _send_by_apprise(url: str, digest: Digest) -> Outcome:
    import apprise  # here: it is slow to load

    services = apprise.Apprise()
    if not services.add(url):
        return Retry("apprise does not accept the address of this channel; see the addresses that it knows")
    worked = await services.async_notify(
        body=digest.text(), title=digest.title, body_format=apprise.NotifyFormat.TEXT, interpret_escapes=False
    )
    return DONE if worked else Retry("apprise could not send the message; its log says why")
