"""The messages of a channel: one digest as mail, as a webhook, for a chat, or for a service of apprise.

Each format is one small function of the digest, which escapes text that came from tasks; `send` chooses it.
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
from typing import Any, Final

import msgspec

from ..model.delivery import DONE, Delivery, DeliveryBatch, Outcome, Retry
from ..model.explain import moment
from ..model.notice import AppriseWay, Channel, MailWay, Notice, NoticeKind, Taken, WebFormat, WebWay
from ..model.text import describe, escape
from .http import HttpSink

log = logging.getLogger("mainspring.notices")


async def send(channel: Channel, digest: "Digest", delivery: Delivery, http: HttpSink) -> Outcome:
    """Send one message; its key lets the receiver recognise a repeat."""
    match channel.way:
        case WebWay(hook, form):
            payload = msgspec.json.encode(_FORMS[form](digest))
            body = msgspec.structs.replace(delivery.body, payload=payload, raw=False)
            once = DeliveryBatch([msgspec.structs.replace(delivery, body=body)], lambda _: None)
            [outcome] = await http.deliver_to(hook, once)
            return outcome
        case MailWay():
            return await _send_mail(channel.way, digest, delivery.idempotency_key)
        case AppriseWay(url):
            return await _send_by_apprise(url, digest)


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


# -- messages ---------------------------------------------------------------------------------------------------------

SHOWN: Final = 5
"""Notices of one message that are shown with their details."""
LISTED: Final = 20
"""Subjects that are listed with their counts."""

_VERBS: Final[Mapping[NoticeKind, str]] = {
    "failed": "failed", "recovered": "recovered", "dead": "with a dead task", "missed": "missed", "late": "late",
    "disabled": "stopped", "no worker": "without a worker", "breaker": "unavailable",
}  # fmt: skip


class Digest:
    """One message about some notices. Each format escapes text that came from tasks in its own way."""

    def __init__(self, namespace: str, channel: str, taken: Taken) -> None:
        self.namespace = escape(namespace)
        self.channel = channel
        self.counts = taken.counts
        self.notices = taken.notices
        self.total = sum(taken.counts.values())

    @property
    def title(self) -> str:
        if self.total == 1 and self.notices:
            return _head(self.notices[0], 100)
        return ", ".join(f"{count:,} {_VERBS[kind]}" for kind, count in self.counts.items())

    @property
    def lines(self) -> list[str]:
        """Subjects with the number of their notices, if there are several notices."""
        if self.total <= 1:
            return []
        tally = Counter(map(_head, self.notices))
        lines = [f"{head}, {count:,} times" if count > 1 else head for head, count in islice(tally.items(), LISTED)]
        rest = self.total - sum(count for _, count in islice(tally.items(), LISTED))
        return [*lines, f"and {rest:,} more"] if rest else lines

    @property
    def shown(self) -> Sequence[Notice]:
        """Those with details: of several about the same the last one, so that none crowds others out."""
        return list({(one.subject, one.kind): one for one in self.notices}.values())[:SHOWN]

    @property
    def _foot(self) -> str:
        return f"Mainspring, namespace {self.namespace}, channel {self.channel}"

    def text(self) -> str:
        """Return the whole message as plain text."""
        parts = ["\n".join(self.lines)] if self.lines else []
        for one in self.shown:
            head = [_head(one)] if self.lines else []  # of a single one it is the title
            parts.append("\n".join([*head, *(f"  {name}: {value}" for name, value in facts_of(one))]))
            if answer := _answer_lines(one):
                parts.append("\n".join(answer))
        return "\n\n".join([*parts, self._foot]) + "\n"

    def html(self) -> str:
        """Return the whole message as HTML, without pictures, links and scripts."""
        color = "#1b7f4b" if self.counts.keys() == {"recovered"} else "#b3261e"
        parts = [f'<h2 style="font-size:18px;border-left:5px solid {color};padding-left:10px">{_safe(self.title)}</h2>']
        if self.lines:
            parts.append("<ul>" + "".join(f"<li>{_safe(line)}</li>" for line in self.lines) + "</ul>")
        for one in self.shown:
            rows = "".join(f"<tr><th {_TH}>{name}</th><td>{_safe(value)}</td></tr>" for name, value in facts_of(one))
            head = f'<h3 style="font-size:15px">{_safe(_head(one))}</h3>' if self.lines else ""
            parts.append(f"{head}<table>{rows}</table>")
            if answer := _answer_lines(one):
                parts.append(f"<pre {_PRE}>{_safe(chr(10).join(answer))}</pre>")
        page = f"{''.join(parts)}<p><small>{_safe(self._foot)}</small></p>"
        # One long word in a reason must not make the whole mail wider than a phone.
        style = "font:14px/1.4 sans-serif;color:#222;overflow-wrap:anywhere"
        return f'<!doctype html><html><body style="{style}">{page}</body></html>'


_TH: Final = (
    'style="text-align:left;vertical-align:top;white-space:nowrap;padding-right:14px;font-weight:normal;color:#666"'
)
_PRE: Final = 'style="background:#f4f4f4;padding:8px;font-size:12px;white-space:pre-wrap"'


def _head(notice: Notice, most: int = 200) -> str:
    return f"{escape(notice.subject)[:most]} {_VERBS[notice.kind]}"


def _safe(text: str) -> str:
    return html_escape("\n".join(map(escape, text.split("\n"))))


def facts_of(notice: Notice) -> list[tuple[str, str]]:
    """Return the facts of a notice as names and values, one line each."""
    well, first = notice.kind == "recovered", notice.since_ms == notice.at_ms
    facts: list[tuple[str, object]] = [
        ("reason", notice.reason),
        ("status", notice.code),
        ("failures" if well else "failures in a row", notice.count if notice.count > 1 else None),
        ("failed since" if well else "failing since", None if first else moment(notice.since_ms)),
        ("due", moment(notice.due_ms) if notice.due_ms else None),
        ("began", moment(notice.began_ms) if notice.began_ms else None),
        ("ended" if notice.ended_ms else "seen", moment(notice.at_ms)),
        ("took", f"{notice.ended_ms - notice.began_ms} ms" if notice.began_ms else None),
        ("task", notice.task),
        ("lane", notice.lane),
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
_TEAMS_BYTES: Final = 20_000


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _as_slack(digest: Digest) -> dict[str, Any]:
    """Plain-text blocks, in which Slack finds no links, mentions or markup; the text is for notifications."""
    quoted = digest.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {
        "text": quoted,
        "mrkdwn": False,
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

    blocks, room = [block(digest.title, weight="Bolder", size="Medium")], _TEAMS_BYTES
    for line in filter(None, digest.text().splitlines()):
        blocks.append(block(line))
        room -= len(msgspec.json.encode(blocks[-1]))
        if room < 0:  # Teams takes 28 KB, and would refuse more each time
            blocks[-1] = block("…")
            break
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
        "body": blocks,
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
    """Return the mail of a digest. A repeat has the same Message-ID, so that it is shown once."""
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
        tls = None if server.plain else ssl.create_default_context(cafile=way.ca_file)
    except OSError as error:
        return Retry(f"ca_file {way.ca_file} cannot be used: {error}")
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
            tls_context=tls,
            timeout=SMTP_TIMEOUT_S,
        )
    except (aiosmtplib.SMTPException, OSError) as error:
        what = f"mail through {server.shown}: {describe(error)}"
        if isinstance(error, aiosmtplib.SMTPAuthenticationError):
            what += "; check the user and the password of smtp"
        elif "CERTIFICATE_VERIFY_FAILED" in what:
            what += "; check the host of smtp, or give the authority that signed the certificate as ca_file"
        return Retry(what, error=error.with_traceback(None))
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
