"""Which addresses webhooks may reach."""

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, ip_address

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.targets.url import AllowList, parse_web_url
from mainspring.sinks.http_network import AddressGuard, ForbiddenAddress, embedded, not_public


def guard(*allow: str, answers: Mapping[str, Sequence[str]] | None = None) -> AddressGuard:
    async def lookup(host: str, port: int) -> Sequence[str]:
        if answers is None or host not in answers:
            raise OSError("no such name")
        return answers[host]

    return AddressGuard(AllowList.parse(allow), lookup)


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("169.254.169.254", "a metadata service"),
        ("169.254.170.2", "a metadata service"),
        ("100.100.100.200", "a metadata service"),
        ("168.63.129.16", "a metadata service"),
        ("192.0.0.192", "a metadata service"),
        ("fd00:ec2::254", "a metadata service"),
        ("fd20:ce::254", "a metadata service"),
        ("127.0.0.1", "the loopback"),
        ("127.255.255.255", "the loopback"),
        ("::1", "the loopback"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("10.0.0.0", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.0.1", "private"),
        ("fc00::1", "private"),
        ("fec0::1", "private"),
        ("169.254.0.1", "link-local"),
        ("fe80::1", "link-local"),
        ("100.64.0.1", "behind a carrier's NAT"),
        ("100.127.255.255", "behind a carrier's NAT"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("ff02::1", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("192.0.2.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("198.51.100.1", "reserved"),
        ("203.0.113.1", "reserved"),
        ("2001:db8::1", "reserved"),
        ("3fff::1", "reserved"),
        ("100::1", "reserved"),
        ("4000::1", "reserved"),
        ("200::1", "reserved"),
        ("::ffff:8.8.8.8", "an IPv4 address inside an IPv6 one"),
        ("::ffff:0:8.8.8.8", "an IPv4 address inside an IPv6 one"),
        ("::8.8.8.8", "an IPv4 address inside an IPv6 one"),
        ("64:ff9b::8.8.8.8", "an IPv4 address inside an IPv6 one"),
        ("64:ff9b:1::1", "an IPv4 address inside an IPv6 one"),
        ("2002:808:808::1", "an IPv4 address inside an IPv6 one"),
        ("2001:0:1::1", "an IPv4 address inside an IPv6 one"),
    ],
)
def test_each_kind_of_address_that_is_not_public_has_a_name(address: str, what: str) -> None:
    assert not_public(ip_address(address)) == what


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.1",
        "172.15.255.255",
        "172.32.0.0",
        "223.255.255.255",
        "2606:4700::1111",
        "2a00:1450::1",
    ],
)
def test_public_addresses_are_fine(address: str) -> None:
    assert not_public(ip_address(address)) is None


@pytest.mark.parametrize(
    "address",
    [
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
    ],
)
def test_the_address_inside_is_found(address: str) -> None:
    assert embedded(ip_address(address)) == IPv4Address("127.0.0.1")


def test_allowing_the_outer_address_does_not_allow_the_inner_one() -> None:
    url = parse_web_url("http://[64:ff9b::10.0.0.1]/")
    with pytest.raises(ForbiddenAddress, match=r"carries 10.0.0.1, which is private.*--http-allow 10.0.0.1$"):
        guard("64:ff9b::/96").check_number(url)
    with pytest.raises(ForbiddenAddress, match=r"--http-allow 64:ff9b::a00:1,10.0.0.1$"):
        guard().check_number(url)
    guard("64:ff9b::/96", "10.0.0.0/8").check_number(url)
    guard("64:ff9b::/96").check_number(parse_web_url("http://[64:ff9b::8.8.8.8]/"))


@pytest.mark.parametrize("url", ["http://10.1.2.3/", "http://[fd00::1]/", "http://[::ffff:10.0.0.1]/"])
def test_the_refusal_prints_a_setting_that_allows_the_address(url: str) -> None:
    with pytest.raises(ForbiddenAddress) as caught:
        guard().check_number(parse_web_url(url))
    text = str(caught.value)
    [flag] = re.findall(r"--http-allow (\S+)$", text)
    [entries] = re.findall(r"http_allow = \[(.+)\]", text)
    assert [entry.strip('"') for entry in entries.split(", ")] == flag.split(",")
    assert f"MAINSPRING_HTTP_ALLOW={flag}," in text
    guard(*flag.split(",")).check_number(parse_web_url(url))


async def test_one_forbidden_answer_forbids_the_name() -> None:
    mixed = guard(answers={"a.example": ["8.8.8.8", "10.0.0.1"], "b.example": ["8.8.8.8"]})
    with pytest.raises(ForbiddenAddress, match=r"a.example \(10.0.0.1\) is private"):
        await mixed.resolve("a.example", 80)
    assert await mixed.resolve("b.example", 80) == ["8.8.8.8"]


async def test_a_name_without_addresses_fails_closed() -> None:
    nothing: list[dict[str, list[str]]] = [{}, {"a.example": []}]
    for answers in nothing:
        with pytest.raises(OSError, match="name"):
            await guard(answers=answers).resolve("a.example", 80)


async def test_an_allowed_name_may_lead_into_the_private_network() -> None:
    answers = {"hooks.internal": ["10.0.0.1"], "a.b.internal": ["10.0.0.2"], "internal": ["10.0.0.3"]}
    named = guard("hooks.internal", "*.b.internal", "*.internal", answers=answers)
    assert await named.resolve("hooks.internal", 80) == ["10.0.0.1"]
    assert await named.resolve("a.b.internal", 80) == ["10.0.0.2"]
    named.check_socket("10.0.0.1")
    for refused in ("10.0.0.9", "127.0.0.1"):
        with pytest.raises(ForbiddenAddress):
            named.check_socket(refused)
    with pytest.raises(ForbiddenAddress):
        await named.resolve("internal", 80)


@pytest.mark.parametrize("address", ["169.254.169.254", "169.254.1.1", "fe80::1%eth0", "::ffff:169.254.169.254"])
async def test_an_allowed_name_does_not_lead_to_the_machines_credentials(address: str) -> None:
    with pytest.raises(ForbiddenAddress):
        await guard("hooks.internal", answers={"hooks.internal": [address]}).resolve("hooks.internal", 80)


@pytest.mark.parametrize("entry", ["", "10.0.0.0/99", "10.0.0", "a b", "*", "http://a/", "::1/200", "*.*.a"])
def test_a_wrong_entry_is_refused(entry: str) -> None:
    with pytest.raises(InvalidInput):
        AllowList.parse([entry])
