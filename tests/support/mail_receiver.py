"""A mail server in a thread of its own, with TLS and passwords as real ones have them."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from mainspring.testing.servers import free_port


class Mailbox:
    """Keeps the mails it gets, and answers as set."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.envelopes: list[Envelope] = []
        self.answer = "250 OK"
        self.refused: set[str] = set()
        self.logins = 0
        self.url = ""
        self.ca_file = ""

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        if self.answer.startswith("250"):
            mail = message_from_bytes(envelope.content, policy=policy.default)
            assert isinstance(mail, EmailMessage)
            self.mails.append(mail)
            self.envelopes.append(envelope)
        return self.answer


class _Controller(Controller):
    """Knows its connections, so that none is open when its loop ends: Python would warn of that in a later test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connections: list[SMTP] = []

    def factory(self) -> Any:
        self.connections.append(connection := super().factory())  # type: ignore[no-untyped-call]
        return connection

    def stop(self, no_assert: bool = False) -> None:
        asyncio.run_coroutine_threadsafe(self._close_connections(), self.loop).result(30)
        super().stop(no_assert)

    async def _close_connections(self) -> None:
        for one in self.connections:
            if one.transport is not None:
                one.transport.close()
        for _ in range(3):  # turns of the loop in which sockets are closed, that below TLS too
            await asyncio.sleep(0)


@contextmanager
def mail_server(folder: Path, *, tls: str = "starttls", password: str = "") -> Iterator[Mailbox]:
    """Serve mail with `starttls`, TLS from the first byte (`tls`), or neither (`never`)."""
    box, authority = Mailbox(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    box.ca_file = str(folder / "ca.pem")
    authority.cert_pem.write_to_path(box.ca_file)

    more: dict[str, Any] = {}

    def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, login: Any) -> AuthResult:
        assert isinstance(login, LoginPassword)
        box.logins += 1
        right = login == LoginPassword(b"robot", password.encode())
        return AuthResult(success=right, handled=False)

    port = free_port()
    if password:
        # With TLS from the first byte aiosmtpd does not see that there is any.
        more = {"authenticator": authenticate, "auth_required": tls != "tls", "auth_require_tls": tls != "tls"}
    controller = _Controller(
        box,
        hostname="127.0.0.1",
        port=port,
        ssl_context=context if tls == "tls" else None,
        tls_context=context if tls == "starttls" else None,
        require_starttls=tls == "starttls",
        ready_timeout=30,
        **more,
    )
    controller.start()
    try:
        login = f"robot:{password}@" if password else ""
        box.url = f"{'smtps' if tls == 'tls' else 'smtp'}://{login}127.0.0.1:{port}"
        if tls == "never":
            box.url += "?tls=never"
        yield box
    finally:
        controller.stop()
