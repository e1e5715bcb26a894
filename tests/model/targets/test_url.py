"""Web addresses are read in one way only."""

from ipaddress import ip_address

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.targets.names import check_target
from mainspring.model.targets.url import parse_web_url


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("http://example.com", "http://example.com/"),
        ("https://example.com:443/a", "https://example.com/a"),
        ("https://Example.COM./a?b=c#d", "https://example.com/a?b=c"),
        ("http://example.com:8080?x=1", "http://example.com:8080/?x=1"),
        ("http://example.com:/x", "http://example.com/x"),
        ("http://192.0.2.1./x", "http://192.0.2.1/x"),
        ("http://[2001:DB8:0::1]:81/x", "http://[2001:db8::1]:81/x"),
        ("https://bücher.example/grüße?a=ä%20b", "https://xn--bcher-kva.example/gr%C3%BC%C3%9Fe?a=%C3%A4%20b"),
        ("https://a_b.example/[x]|{y}", "https://a_b.example/[x]|{y}"),
    ],
)
def test_an_address_has_one_form(text: str, same: str) -> None:
    parsed = parse_web_url(text)
    assert str(parsed) == same
    assert str(parse_web_url(same)) == same


@pytest.mark.parametrize(
    "text",
    [
        "https://u:SECRET@example.com/?token=SECRET",
        "https://example.com:0/x?token=SECRET",
        "https://example.com:0/x#SECRET",
        "https://example.com:0/x?token=a@SECRET",
        "https://u:SECRET?x@example.com/",
        "https://u:SECRET/x@example.com/",
        "HTTPS://u:SECRET@example.com/?token=SECRET",
        "ftp://example.com/?token=SECRET",
    ],
)
def test_secrets_are_not_in_the_refusal(text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        check_target(text)
    assert "SECRET" not in str(error.value)


def test_a_number_is_distinguished_from_a_name() -> None:
    assert parse_web_url("http://127.0.0.1/").address == ip_address("127.0.0.1")
    assert parse_web_url("http://[::1]/").address == ip_address("::1")
    assert parse_web_url("http://1.example/").address is None


def test_digits_of_other_scripts_are_digits() -> None:
    assert parse_web_url("http://１２７。０。０。１/").address == ip_address("127.0.0.1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ftp://example.com/", "must start with http"),
        ("HTTP://example.com/", "must start with http"),
        ("http:example.com", "must start with http"),
        ("http://", "names no host"),
        ("http:///path", "names no host"),
        ("http://./", "names no host"),
        ("http://:80/", "names no host"),
        ("http://user@example.com/", "user and password"),
        ("http://example.com@127.0.0.1/", "user and password"),
        ("http://exa mple.com/", "spaces"),
        ("http://example.com/a b", "spaces"),
        ("http://example.com\r\nHost: x/", "control"),
        ("http://example.com\\@127.0.0.1/", "backslashes"),
        ("http://example.com:0/", "port"),
        ("http://example.com:65536/", "port"),
        ("http://example.com:8o/", "port"),
        ("http://example.com:-1/", "port"),
        ("http://example.com:80:80/", "port"),
        ("http://example.com:٨٠/", "port"),
        ("http://2130706433/", "four decimal numbers"),
        ("http://0x7f000001/", "four decimal numbers"),
        ("http://0177.0.0.1/", "four decimal numbers"),
        ("http://127.1/", "four decimal numbers"),
        ("http://1.2.3.4.5/", "four decimal numbers"),
        ("http://example.0x/", "four decimal numbers"),
        ("http://256.1.1.1/", "four decimal numbers"),
        ("http://[::1/", "brackets"),
        ("http://[::1]x/", "brackets"),
        ("http://[fe80::1%25eth0]/", "zones"),
        ("http://[fe80::1%eth0]/", "zones"),
        ("http://[127.0.0.1]/", "invalid IPv6 address"),
        ("http://[]/", "invalid IPv6 address"),
        ("http://127%2e0.0.1/", "host name is invalid"),
        ("http://a..b/", "host name is invalid"),
        ("http://-a.example/", "host name is invalid"),
        ("http://a*b/", "host name is invalid"),
        ("http://" + "a" * 64 + ".example/", "host name is invalid"),
        ("http://" + "a." * 127 + "example/", "host name is invalid"),
        ("http://faß.example/", "two ways"),
        ("http://a\u200db.example/", "two ways"),
        ("http://example.com/\ud800", "surrogate"),
        ("http://\u2488.example/", "host name is invalid"),
    ],
)
def test_an_ambiguous_address_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_web_url(text)
    with pytest.raises(InvalidInput):
        check_target(text)


def test_a_password_is_not_repeated_in_the_refusal() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_web_url("http://user:hunter2@example.com/")
    assert "hunter2" not in str(caught.value)


def test_a_query_is_not_shown() -> None:
    assert parse_web_url("https://example.com/a?key=hunter2").shown == "https://example.com/a?…"
