"""TLS against a real server: the right certificates work, every wrong one is refused with its reason."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mainspring.model.errors import ConfigError, InvalidInput, StoreError, Unavailable
from mainspring.store.redis.servers import LinkOptions, Servers
from mainspring.store.redis.url import Tls
from mainspring.testing.servers import Server, standalone
from tests.support.missing_parts import need_server


@pytest.fixture(scope="module", autouse=True)
def _a_server_that_speaks_tls() -> None:
    need_server("redis", tls=True)


class Authority:
    """A certificate authority with a folder for its files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, host: str, *, expired: bool = False) -> Tls:
        now = datetime.datetime.now(datetime.UTC)
        until = now - datetime.timedelta(days=1) if expired else now + datetime.timedelta(days=1)
        issued = self._ca.issue_cert(host, not_before=now - datetime.timedelta(days=2), not_after=until)
        name = f"{host}-{expired}"
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return Tls(self.ca, str(cert), str(key))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    with standalone("redis", tls=authority.issue("localhost")) as started:
        yield started


def options(tls: Tls) -> LinkOptions:
    return LinkOptions(connect_timeout_s=3, tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key)


async def test_the_right_certificates_work_from_options_and_from_the_url(server: Server, authority: Authority) -> None:
    mine = authority.issue("client")
    for url, chosen in (
        (server.url, options(mine)),
        (f"{server.url}?ca={mine.ca}&cert={mine.cert}&key={mine.key}", LinkOptions()),
    ):
        links = await Servers.connect(url, chosen)
        assert await links.for_slot(0).pipeline([("ECHO", "x" * 300_000)]) == [b"x" * 300_000]
        await links.aclose()


async def test_a_server_of_another_authority_is_refused(server: Server, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other").issue("client")
    with pytest.raises(Unavailable, match="certificate is not accepted") as caught:
        await Servers.connect(server.url, options(other))
    assert not caught.value.sent


async def test_without_our_authority_the_systems_do_not_vouch_for_the_server(server: Server) -> None:
    with pytest.raises(Unavailable, match="certificate is not accepted"):
        await Servers.connect(server.url)


async def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    with (
        standalone("redis", tls=authority.issue("localhost", expired=True)) as server,
        pytest.raises(Unavailable, match="expired"),
    ):
        await Servers.connect(server.url, options(authority.issue("client")))


async def test_a_certificate_for_another_host_is_refused(authority: Authority) -> None:
    with (
        standalone("redis", tls=authority.issue("elsewhere.example")) as server,
        pytest.raises(Unavailable, match="Hostname mismatch"),
    ):
        await Servers.connect(server.url, options(authority.issue("client")))


async def test_a_missing_client_certificate_is_refused(server: Server, authority: Authority) -> None:
    with pytest.raises(StoreError, match=r"(?i)certificate|closed|reset"):
        await Servers.connect(server.url, LinkOptions(tls_ca=authority.ca))


async def test_a_client_certificate_of_another_authority_is_refused(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other").issue("client")
    with pytest.raises(Unavailable):
        await Servers.connect(server.url, options(Tls(authority.ca, other.cert, other.key)))


async def test_plain_text_to_a_tls_port_fails_clearly(server: Server) -> None:
    with pytest.raises(Unavailable):
        await Servers.connect(f"redis://localhost:{server.port}", LinkOptions(connect_timeout_s=1))


async def test_files_that_cannot_be_read_are_a_setting_error(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        await Servers.connect(server.url, LinkOptions(tls_ca=str(tmp_path / "none.pem")))


async def test_a_key_without_its_certificate_is_a_mistake_not_ignored(server: Server, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="without cert"):
        await Servers.connect(server.url, LinkOptions(tls_ca=authority.ca, tls_key="client.key"))


async def test_a_key_with_a_passphrase_is_refused_without_a_prompt(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    """OpenSSL would ask on the terminal, and block the event loop until someone types."""
    secret = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    key = tmp_path / "locked.key"
    key.write_bytes(secret)
    with pytest.raises(ConfigError, match="encrypted with a passphrase"):
        await Servers.connect(server.url, LinkOptions(tls_ca=authority.ca, tls_cert=authority.ca, tls_key=str(key)))


async def test_certificates_for_a_plain_url_are_a_mistake_not_ignored(authority: Authority) -> None:
    with pytest.raises(InvalidInput, match="rediss"):
        await Servers.connect("redis://localhost", LinkOptions(tls_ca=authority.ca))
