"""Notices: messages about work that fails and recovers, the rules that cause them, and the channels they go to.

    for signal in signals_of(record, place, channel.late_ms):   # about a schedule, a receiver or a lane
        episode, notice = decide(episode, signal, channel)      # the state between two runs, and the notice to send

An episode begins with the first failure of a subject and ends with enough successes. Its id is the place of the run
that began it, so a decision that is repeated after a crash makes notices with the same ids.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from ipaddress import ip_address
from typing import Any, Final, Literal, NamedTuple, get_args
from urllib.parse import unquote, urlsplit

import msgspec

from .delivery import Response
from .errors import InvalidInput
from .explain import moment
from .ids import check_name, idh_of
from .limits import HORIZON_MS
from .run import FAILED_ENDS, RunRecord
from .targets.names import BEAT, receiver_of, shown_target
from .targets.webhook import WEBHOOK_SETTINGS, Webhook, read_webhook
from .task import Task, pattern_fits
from .text import Tables, check_known, escape
from .times import delay_ms, delay_text

NOTIFY: Final = "notify"
"""Scheme of the targets of notices: `notify:<channel>`, and `notify:<channel>/digest` for the message itself."""

NoticeKind = Literal["failed", "recovered", "dead", "missed", "late", "disabled", "no worker", "breaker"]
KINDS: Final[tuple[NoticeKind, ...]] = get_args(NoticeKind)

MAX_REASON_CHARS: Final = 500
MAX_BODY_BYTES: Final = 2_048
MAX_HEADERS: Final = 20
MAX_HEADER_CHARS: Final = 200


class Notice(msgspec.Struct, frozen=True, gc=False):
    """One notice, the payload of a task for `notify:<channel>`."""

    kind: NoticeKind
    subject: str
    """`schedule:nightly`, `beat:backup`, `lane:user-7`, or a receiver of tasks: `https://example.com`, `queue:mail`."""
    at_ms: int
    since_ms: int
    """When its episode began."""
    count: int = 1
    """Failures in a row so far."""
    task: str = ""
    """The id of the task whose run decided it."""
    lane: str | None = None
    target: str = ""
    attempt: int = 0
    due_ms: int = 0
    began_ms: int = 0
    ended_ms: int = 0
    by: str = ""
    reason: str = ""
    code: int | str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""
    """The beginning of the response, or of the output."""

    def with_response(self, response: Response) -> "Notice":
        """Add what the receiver answered, cut to a size that fits into a message."""
        body = response.body[:MAX_BODY_BYTES].decode("utf-8", "replace")
        headers = tuple((name[:MAX_HEADER_CHARS], value[:MAX_HEADER_CHARS]) for name, value in response.headers)
        return msgspec.structs.replace(self, headers=headers[:MAX_HEADERS], body=body)


class Taken(NamedTuple):
    """The notices of one digest."""

    counts: Mapping[NoticeKind, int]
    """All of them by kind."""
    notices: Sequence[Notice]
    """The first notices; if there are very many, the others are only counted."""
    fields: Sequence[bytes] = ()
    """Fields of the box in which they are stored."""


# -- signals ------------------------------------------------------------------------------------------------


class Signal(NamedTuple):
    """One fact about a subject: it failed, or it is well."""

    subject: str
    kind: NoticeKind
    """Kind of the notice if this is a failure."""
    bad: bool
    at_ms: int
    place: str
    """Where the fact is recorded: no two facts share a place, and reading it again gives the same one."""
    schedule: str | None = None
    target: str | None = None
    queue: str | None = None
    reason: str = ""
    record: RunRecord | None = None
    late_ms: int = 0
    """How late the run began; each channel decides whether that is too late."""
    lasts: bool = False
    """True for a state that is checked repeatedly, False for a run that has ended."""
    receiver: str = ""
    """The receiver of a schedule's run."""

    @property
    def everywhere(self) -> bool:
        """True if runs of the subject are recorded in all partitions, in no common order; otherwise in one
        partition."""
        return not self.subject.startswith(ONE_PLACE)

    @property
    def key(self) -> str:
        """Name of the episode: the lateness and the failures of a schedule are separate episodes."""
        return f"{_TRACKS.get(self.kind, self.kind)}|{self.subject}"


ONE_PLACE: Final = ("schedule:", "lane:")
"""Prefixes of subjects whose runs are all recorded in one partition."""
_TRACKS: Final[Mapping[NoticeKind, str]] = {"failed": "run", "missed": "run", "dead": "run"}
OURS: Final = f"{NOTIFY}:"
"""Prefix of targets that cause no notices: a notice that cannot be sent is no reason for another notice."""


def signals_of(record: RunRecord, place: str) -> Iterator[Signal]:
    """Yield the signals of a run."""
    if record.target.startswith(OURS):
        return
    receiver = f"queue:{record.queue}" if record.queue else receiver_of(record.target)
    schedule, at_ms = record.schedule, record.ended_ms

    def signal(subject: str, kind: NoticeKind, *, bad: bool, place: str = place, reason: str = "") -> Signal:
        about = (schedule, record.target, record.queue)
        of = receiver if subject.startswith("schedule:") else ""
        return Signal(subject, kind, bad, at_ms, place, *about, reason or record.reason, record, receiver=of)

    end, subject = record.end, receiver if schedule is None else f"schedule:{schedule}"
    if end == "retry" and not record.began_ms:
        return  # postponed: the receiver was not contacted
    if end == "done":
        yield signal(subject, "dead" if schedule is None else "failed", bad=False)
        if record.lane is not None:
            yield signal(f"lane:{record.lane}", "disabled", bad=False)
    elif end == "parked" and record.lane is not None:
        yield signal(f"lane:{record.lane}", "disabled", bad=True)
    elif schedule is None and end in ("dead", "timeout", "expired") and record.next_ms is None:
        yield signal(subject, "dead", bad=True)
    if schedule is not None and end in FAILED_ENDS:
        yield signal(subject, "missed" if end == "missed" else "failed", bad=True)
    if record.began_ms and record.attempt == 1:
        late_ms = max(0, record.began_ms - record.due_ms)
        shown_ms = late_ms if late_ms < 10_000 else late_ms // 1_000 * 1_000
        late = signal(subject, "late", bad=False, reason=f"it began {delay_text(shown_ms)} late")
        yield late._replace(late_ms=late_ms)


_LISTS: Final = ("kinds", "schedules", "targets", "queues", "namespaces")


# -- rules and decisions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """Which notices a channel gets. A signal must match each list that is given."""

    kinds: tuple[NoticeKind, ...] = KINDS
    schedules: tuple[str, ...] = ()
    """Names of schedules and beats, or their beginnings and `*`."""
    targets: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    after: int = 1
    """Failures in a row that cause a notice."""
    recover_after: int = 1
    """Runs in a row that must succeed to end an episode; a state ends at once."""
    remind: str = "never"
    """When an episode that lasts causes another notice: `never`, at `each` failure, or after a span such as `1h`."""
    late_ms: int | None = None
    """How late a run may begin; None means any lateness is fine."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise InvalidInput(
                f"kinds has {', '.join(map(repr, unknown)) or 'nothing'}; use some of {', '.join(KINDS)}"
            )
        for name, value in (("after", self.after), ("recover_after", self.recover_after)):
            if type(value) is not int or not 1 <= value <= MOST_IN_A_ROW:
                raise InvalidInput(f"{name} is {value!r}; give a whole number from 1 to {MOST_IN_A_ROW}")
        if "late" in self.kinds and self.kinds != KINDS and self.late_ms is None:
            raise InvalidInput('kinds has "late", but no span is given after which a run is late: late = "5m"')
        _ = self.remind_ms

    @property
    def remind_ms(self) -> int | None:
        """Shortest time between two notices of an episode; None for no reminders."""
        if self.remind == "never":
            return None
        try:
            return 0 if self.remind == "each" else delay_ms(self.remind)
        except InvalidInput:
            raise InvalidInput(f"remind is {self.remind!r}; use never, each, or a span such as 1h") from None

    @property
    def shown(self) -> str:
        """The rule in words, for listings."""
        parts = ["all" if self.kinds == KINDS else ",".join(self.kinds)]
        parts += [f"{name}={','.join(found)}" for name in _LISTS[1:] if (found := getattr(self, name))]
        for name in ("after", "recover_after", "remind"):
            if (value := getattr(self, name)) not in (1, "never"):
                parts.append(f"{name}={value}")
        return " ".join(parts if self.late_ms is None else [*parts, f"late={delay_text(self.late_ms)}"])

    def fits(self, signal: Signal) -> bool:
        """Return whether the channel gets notices about this signal."""
        return (
            (signal.kind in self.kinds or not signal.bad)
            and _fits(self.schedules, signal.schedule)
            and _fits(self.targets, signal.target)
            and _fits(self.queues, signal.queue)
        )


MOST_IN_A_ROW: Final = 1_000


def _fits(patterns: Sequence[str], name: str | None) -> bool:
    return not patterns or (name is not None and any(pattern_fits(one, name) for one in patterns))


class Episode(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A subject that fails, between its first failure and its recovery."""

    began: str
    """Place of the signal that began it."""
    since_ms: int
    failures: int = 0
    """Failures so far, without a recovery between them."""
    successes: int = 0
    """Successes since the last failure."""
    told_ms: int | None = None
    """When the last notice was sent; None if there was none."""
    last_ms: int = 0
    """When it last failed."""

    @property
    def of_runs(self) -> bool:
        """True if a run began it, False if a state did."""
        return "." in self.began


def decide(
    episode: Episode | None, signal: Signal, rule: Rule, *, mute: bool = False
) -> tuple[Episode | None, Notice | None]:
    """Return the episode after a signal that fits the rule, and the notice to send, if any; none if `mute`."""
    if not signal.bad:
        return _after_success(episode, signal, rule)
    if episode is not None and signal.kind == "dead" and signal.at_ms > episode.last_ms + QUIET_MS:
        episode = None  # for some targets only failures are recorded, so no success would end the episode
    before = episode or Episode(signal.place, signal.at_ms)
    count = before.failures + 1
    failing = msgspec.structs.replace(before, failures=count, successes=0, last_ms=max(signal.at_ms, before.last_ms))
    if before.told_ms is None:
        due = signal.lasts or count >= rule.after
    else:
        every_ms = rule.remind_ms if not signal.lasts or rule.remind_ms is None else max(rule.remind_ms, QUIET_MS)
        due = every_ms is not None and signal.at_ms >= before.told_ms + every_ms
    if due and not mute:
        return msgspec.structs.replace(failing, told_ms=signal.at_ms), _notice(signal, failing, signal.kind)
    if not signal.lasts:
        return failing, None
    # A state is checked repeatedly: a check that causes no notice is not a failure, and shows only that it lasts.
    seen_ms = signal.at_ms if signal.at_ms >= before.last_ms + SEEN_EVERY_MS else before.last_ms
    return msgspec.structs.replace(before, last_ms=seen_ms), None


SEEN_EVERY_MS: Final = 60_000
"""Interval at which the episode of a lasting state is updated."""
QUIET_MS: Final = 3_600_000
"""Dead tasks of one receiver belong to one episode if no more than this lies between them. Also the shortest time
between reminders of a lasting state."""


def _after_success(episode: Episode | None, signal: Signal, rule: Rule) -> tuple[Episode | None, Notice | None]:
    if episode is None or episode.told_ms is None:
        return None, None
    if signal.record is not None and signal.everywhere and signal.at_ms < episode.last_ms:
        return episode, None  # it ended before the failure, in another partition, and was read after it
    if not signal.lasts and episode.successes + 1 < rule.recover_after:
        return msgspec.structs.replace(episode, successes=episode.successes + 1), None
    return None, _notice(signal, episode, "recovered") if "recovered" in rule.kinds else None


def _notice(signal: Signal, episode: Episode, kind: NoticeKind) -> Notice:
    record = signal.record
    reason = _ENDED.get(signal.kind, "") if kind == "recovered" else escape(signal.reason)[:MAX_REASON_CHARS]
    about = (kind, signal.subject, signal.at_ms, episode.since_ms, episode.failures)
    if record is None:
        return Notice(*about, target=shown_target(signal.target or ""), reason=reason)
    return Notice(
        *about,
        task=record.task_id,
        lane=record.lane,
        target=shown_target(record.target),
        attempt=record.attempt,
        due_ms=record.due_ms,
        began_ms=record.began_ms,
        ended_ms=record.ended_ms,
        by=record.by,
        reason=reason,
        code=record.code,
    )


_ENDED: Final[Mapping[NoticeKind, str]] = {
    "late": "it begins in time again", "disabled": "it takes tasks again", "no worker": "a worker serves the queue",
    "breaker": "its circuit breaker has closed",
}  # fmt: skip
"""Reason of a recovery. Without a text it means that a run succeeded, or a beat came."""


class Decided(NamedTuple):
    """A notice to send, with the id of its task: a repeated decision gives the same id."""

    id: str
    channel: str
    notice: Notice
    run_id: str | None = None
    """The run that failed, if it was one."""


def notice_tasks(decided: Iterable[Decided]) -> list[Task]:
    """Return the tasks of notices."""
    return [Task(f"{NOTIFY}:{one.channel}", msgspec.to_builtins(one.notice), id=one.id) for one in decided]


MOST_EPISODES: Final = 100_000
"""Open episodes of a namespace; beyond it those that failed longest ago are forgotten, a tenth at a time."""


class Episodes:
    """The open episodes of all channels, and their changes. Healthy subjects have none."""

    def __init__(self, known: Mapping[str, Episode]) -> None:
        self.known = dict(known)
        """Episodes by channel, track and subject: `ops|run|schedule:nightly`."""
        self.changed: dict[str, Episode | None] = {}
        """Episodes changed since they were read; None for those that ended."""

    def take(self, signal: Signal, channels: "Channels") -> Iterator[Decided]:
        """Follow one signal; yield the notices it causes."""
        for channel in channels.values():
            if signal.kind == "late":
                if channel.rule.late_ms is None:
                    continue
                signal = signal._replace(bad=signal.late_ms > channel.rule.late_ms)  # for this channel
            if not channel.rule.fits(signal):
                continue
            key = f"{channel.name}|{signal.key}"
            before = self.known.get(key)
            # The receiver has its own notice: the few runs that try it meanwhile belong to other schedules each time.
            mute = bool(signal.receiver) and f"{channel.name}|breaker|{signal.receiver}" in self.known
            after, notice = decide(before, signal, channel.rule, mute=mute)
            if after != before:
                self.changed[key] = after
                if after is None:
                    del self.known[key]
                else:
                    self.known[key] = after
                    if len(self.known) > MOST_EPISODES:
                        self._forget_oldest()
            if notice is not None:
                run_id = signal.place if signal.bad and signal.record is not None else None
                yield Decided(notice_id(channel.name, signal, after or before, notice), channel.name, notice, run_id)

    def _forget_oldest(self) -> None:
        """Make room: receivers that fail once and are never called again would stay for ever."""
        for key in nsmallest(MOST_EPISODES // 10, self.known, key=lambda one: self.known[one].last_ms):
            del self.known[key]
            self.changed[key] = None


_MAX_SUBJECT_BYTES: Final = 128
"""Longer subjects are hashed: ids are limited, and have other parts."""


def notice_id(channel: str, signal: Signal, episode: Episode | None, notice: Notice) -> str:
    """Return `notice/<channel>/<subject>/<episode>/<kind>`, with the number of the failure for a reminder."""
    began = signal.place if episode is None else episode.began
    reminder = f"/{notice.count}" if notice.kind != "recovered" and notice.count > 1 else ""
    subject = notice.subject if len(notice.subject.encode()) <= _MAX_SUBJECT_BYTES else idh_of(notice.subject).hex()
    return f"notice/{channel}/{subject}/{began}/{notice.kind.replace(' ', '-')}{reminder}"


# -- channels --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class SmtpServer:
    """A mail server: `smtps://user:password@host:465` with TLS, or `smtp://…:587`, which switches to TLS (STARTTLS)."""

    host: str
    port: int
    tls: bool
    """TLS from the first byte; otherwise STARTTLS."""
    plain: bool = False
    """Without TLS: only for a server on this machine, and without a password."""
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> "SmtpServer":
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/") or parts.fragment:
            raise InvalidInput(
                "smtp is no address of a mail server; write smtps://user:password@host or smtp://host:587, with"
                " user and password percent-encoded"
            )
        try:
            port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            raise InvalidInput("smtp: the port is no number between 1 and 65535") from None
        if parts.query not in ("", "tls=never"):
            raise InvalidInput(f"smtp: ?{parts.query} is not known; the only choice is ?tls=never")
        plain = bool(parts.query)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if plain and (parts.scheme == "smtps" or password or not _is_local(parts.hostname)):
            raise InvalidInput("smtp: ?tls=never is for smtp:// to this machine, without a password; leave it out")
        if bool(user) != bool(password):
            raise InvalidInput("smtp: give both user and password, percent-encoded, or neither")
        return cls(parts.hostname, port, parts.scheme == "smtps", plain, user, password)

    @property
    def shown(self) -> str:
        return f"{'smtps' if self.tls else 'smtp'}://{self.host}:{self.port}"


_PORTS: Final = {"smtp": 587, "smtps": 465}


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class MailWay:
    """Mail to one address or several."""

    to: tuple[str, ...]
    server: SmtpServer
    sender: str
    ca_file: str | None = None
    """The authority that signed the server's certificate; None means those that the system trusts."""

    @property
    def shown(self) -> str:
        return f"mail to {', '.join(self.to)} through {self.server.shown}"


WebFormat = Literal["webhook", "slack", "teams", "discord"]
WEB_FORMATS: Final[tuple[WebFormat, ...]] = get_args(WebFormat)


@dataclass(frozen=True, slots=True)
class WebWay:
    """JSON to a URL: signed like any webhook, or in the form of a chat."""

    hook: Webhook
    format: WebFormat = "webhook"

    @property
    def shown(self) -> str:
        # The path of a chat's address is its password.
        return f"{self.format} at {self.hook.parsed.scheme}://{self.hook.parsed.authority}"


@dataclass(frozen=True, slots=True)
class AppriseWay:
    """Any service that the package `apprise` knows."""

    url: str = field(repr=False)

    @property
    def shown(self) -> str:
        return f"{self.url.partition('://')[0]} through apprise"


Way = MailWay | WebWay | AppriseWay


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel: the notices it gets, and how they are sent."""

    name: str
    way: Way
    rule: Rule = Rule()
    table: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The settings it was read from, secrets included."""


class Channels(Tables[Channel]):
    """Channels by name; immutable."""

    @classmethod
    def read(cls, tables: object) -> "Channels":
        """Read one table per channel, as in `[notify.<name>]`."""
        return cls.read_each("notify", tables, _channel)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the tables from which `read` makes these channels again, secrets included."""
        return {name: dict(one.table) for name, one in self.items()}

    def of(self, namespace: str) -> "Channels":
        """Return the channels for notices about a namespace."""
        return Channels({name: one for name, one in self.items() if _fits(one.rule.namespaces, namespace)})


_CHANNEL: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]+@[A-Za-z0-9.\[\]:-]+")
_RULE: Final = (*_LISTS, "after", "recover_after", "remind", "late")
_MAIL: Final = ("to", "smtp", "from", "ca_file")
_WEB: Final = ("format", *(name for name in WEBHOOK_SETTINGS if name not in ("method", "gone_disables", "result_ttl")))


def _channel(name: str, table: Mapping[str, Any]) -> Channel:
    if not _CHANNEL.fullmatch(str(name)):
        raise InvalidInput(f"the name of a channel is {name!r}; use 1 to 64 of A-Z a-z 0-9 . _ -")
    if ("to" in table) == ("url" in table):
        check_known(table, (*_MAIL, *_WEB, *_RULE), "a channel")
        raise InvalidInput('give one of to = "mail:you@example.com" (or an address of apprise) and url = "https://…"')
    rule = _rule({one: table[one] for one in _RULE if one in table})
    rest = {one: value for one, value in table.items() if one not in _RULE}
    if "url" in table:
        check_known(rest, _WEB, "a channel with url", f", {', '.join(_RULE)}")
        return Channel(name, _web_way(rest), rule, table)
    to = _text("to", table["to"])
    if not to.startswith("mail:"):
        check_known(rest, ("to",), "a channel of apprise", f", {', '.join(_RULE)}")
        if not re.match(r"[a-z][a-z0-9+.-]*://", to, re.IGNORECASE) or to.lower().startswith(("http://", "https://")):
            raise InvalidInput(
                'to is neither mail:<address> nor an address of apprise; give a web address as url = "…"'
            )
        return Channel(name, AppriseWay(to), rule, table)
    check_known(rest, _MAIL, "a channel with mail", f", {', '.join(_RULE)}")
    return Channel(name, _mail_way(rest), rule, table)


def _mail_way(table: Mapping[str, object]) -> MailWay:
    to = tuple(one.strip() for one in _text("to", table["to"]).removeprefix("mail:").split(","))
    if "smtp" not in table:
        raise InvalidInput('give the mail server too: smtp = "smtps://user:password@host", or smtp_file')
    sender = _text("from", table.get("from", to[0]))
    for address in (*to, sender):
        if not _ADDRESS.fullmatch(address):
            raise InvalidInput(f"{address!r} is no mail address; write it like ops@example.com, several with commas")
    ca_file = None if "ca_file" not in table else _text("ca_file", table["ca_file"])
    return MailWay(to, SmtpServer.parse(_text("smtp", table["smtp"])), sender, ca_file)


def _web_way(table: Mapping[str, object]) -> WebWay:
    hook = read_webhook({name: value for name, value in table.items() if name != "format"})
    form = table.get("format", "webhook")
    if form not in WEB_FORMATS:
        raise InvalidInput(f"format is {form!r}; use one of {', '.join(WEB_FORMATS)}")
    return WebWay(hook, next(one for one in WEB_FORMATS if one == form))


def _rule(table: Mapping[str, Any]) -> Rule:
    given: dict[str, Any] = {name: _texts(name, table[name]) for name in _LISTS if name in table}
    given |= {name: table[name] for name in ("after", "recover_after") if name in table}
    if "remind" in table:
        given["remind"] = _text("remind", table["remind"])
    if "late" in table:
        given["late_ms"] = delay_ms(_text("late", table["late"]), field="late")
    return Rule(**given)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected a text, not {value!r}")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidInput(f"{name}: expected a list of texts, not {value!r}")
    return tuple(_text(name, one) for one in value)


# -- beats -----------------------------------------------------------------------------------


class Expected(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """When the next beat of another program's job is expected: by a cron line, or a span after the last beat."""

    cron: str = ""
    every_ms: int = 0
    zone: str = "UTC"
    grace_ms: int = 60_000
    """How long after its time a beat may come."""

    @classmethod
    def make(
        cls, every: str | None = None, cron: str | None = None, timezone: str | None = None, grace: str | None = None
    ) -> "Expected | None":
        """Return the expectation in the fields of a request or of `[beats.<name>]`; None if they have none."""
        if every is None and cron is None:
            if timezone is not None or grace is not None:
                raise InvalidInput("timezone and grace need a cron line or an interval; give every or cron too")
            return None
        if every is not None and cron is not None:
            raise InvalidInput("both every and cron are given; give one of them")
        grace_ms = 60_000 if grace is None else delay_ms(grace, field="grace")
        every_ms = 0 if every is None else delay_ms(every, field="every")
        if cron is None and every_ms < 1_000:
            raise InvalidInput(f"every is {every!r}; give 1s or more")
        made = cls(cron or "", every_ms, timezone or "UTC", grace_ms)
        made.deadline_ms(0)
        return made

    @classmethod
    def read(cls, name: str, table: Mapping[str, object]) -> "Expected":
        """Read one `[beats.<name>]`."""
        check_beat(name)
        check_known(table, ("every", "cron", "timezone", "grace"), "a beat")
        made = cls.make(**{name: _text(name, value) for name, value in table.items()})
        if made is None:
            raise InvalidInput("it is never expected; give every or cron")
        return made

    def table(self) -> dict[str, str]:
        """Return the table from which `read` makes this again."""
        when = {"cron": self.cron} if self.cron else {"every": delay_text(self.every_ms)}
        return {**when, "timezone": self.zone, "grace": delay_text(self.grace_ms)}

    @property
    def shown(self) -> str:
        """The expectation in words, for listings."""
        when = f"cron {self.cron} {self.zone}" if self.cron else f"every {delay_text(self.every_ms)}"
        return f"{when}, grace {delay_text(self.grace_ms)}"

    def deadline_ms(self, last_ms: int) -> int:
        """Return until when the beat after the one at `last_ms` must come: within ten years, as for any task."""
        if not self.cron:
            return last_ms + min(self.every_ms + self.grace_ms, HORIZON_MS)
        from .schedule.recurrence import Recurrence  # slow to load, and most programs expect no beats

        next_ms = Recurrence.parse(self.cron, zone=self.zone).next_after(last_ms + EARLY_MS)
        if next_ms is None:
            raise InvalidInput(f"cron {self.cron!r} never comes")
        return min(next_ms + self.grace_ms, last_ms + HORIZON_MS)


EARLY_MS: Final = 5_000
"""A beat that comes so little before its time is of a clock that is fast: otherwise that time would be missed."""


class Beats(Tables[Expected]):
    """The beats of the settings by name; immutable."""

    @classmethod
    def read(cls, tables: object) -> "Beats":
        """Read one table per beat, as in `[beats.<name>]`."""
        return cls.read_each("beats", tables, Expected.read)

    def tables(self) -> dict[str, dict[str, str]]:
        """Return the tables from which `read` makes these beats again."""
        return {name: one.table() for name, one in self.items()}


def check_beat(name: object) -> str:
    """Return the name of a beat, or refuse it."""
    return check_name(name, "name", 128)


class Beat(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A job of another program, and when it must report again."""

    name: str
    expected: Expected
    deadline_ms: int
    """Until when the next beat must come."""
    last_ms: int = 0
    """When the last one came; 0 before the first."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        last_ms = self.last_ms or None
        return {"name": self.name, **self.expected.table(), "last_ms": last_ms, "deadline_ms": self.deadline_ms}

    @classmethod
    def from_dict(cls, answer: Mapping[str, Any]) -> "Beat":
        """Read a beat as the HTTP API sends it."""
        when = {name: answer[name] for name in ("every", "cron", "timezone", "grace") if answer.get(name) is not None}
        return cls(answer["name"], Expected.read(answer["name"], when), answer["deadline_ms"], answer["last_ms"] or 0)


def beat_signal(beat: Beat, now_ms: int) -> Signal:
    """Return the signal that a beat is missing, or not. Repeated checks report the same state until a beat comes."""
    subject, bad = f"{BEAT}:{beat.name}", now_ms > beat.deadline_ms
    reason = f"the last beat came at {moment(beat.last_ms)}" if beat.last_ms else "it never came"
    at_ms = now_ms if bad else beat.last_ms
    place = str(beat.deadline_ms)
    return Signal(subject, "missed", bad, at_ms, place, schedule=beat.name, reason=reason, lasts=True)
