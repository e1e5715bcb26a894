"""URLs that try to reach what is not public: by every way to write an address, and every way to disguise one."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

FORBIDDEN_V4 = (
    "127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "0.0.0.1", "10.0.0.1", "10.255.255.255", "172.16.0.1",
    "172.31.255.254", "192.168.0.1", "192.168.255.255", "169.254.169.254", "169.254.170.2", "169.254.1.1",
    "100.64.0.1", "100.100.100.200", "100.127.255.254", "192.0.0.192", "192.0.0.1", "192.0.2.1", "192.88.99.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1",
    "255.255.255.255", "168.63.129.16",
)  # fmt: skip

FORBIDDEN_V6 = (
    "::1", "::", "fe80::1", "fe80::a9fe:a9fe", "febf::1", "fec0::1", "fc00::1", "fd00::1", "fd00:ec2::254",
    "fd20:ce::254", "ff02::1", "ff0e::1", "100::1", "2001:db8::1", "3fff::1", "5f00::1", "2001:2::1", "4000::1",
    "8000::1", "64:ff9b:1::1",
)  # fmt: skip

TRICKS = (
    # who is the host?
    "http://example.com@{canary}/",
    "http://example.com:80@{canary}/",
    "http://user:pass@{canary}/",
    "http://@{canary}/",
    "http://:@{canary}/",
    "http://{canary}@example.com@{canary}/",
    "http://example.com%40{canary}/",
    "http://example.com%2540{canary}/",
    "http://example.com\\@{canary}/",
    "http://{canary}\\@example.com/",
    "http://{canary}\\.example.com/",
    "http://{canary}%2f@example.com/",
    "http://{canary}%23@example.com/",
    "http://{canary}#@example.com/",
    "http://{canary}?@example.com/",
    "http://{canary}/@example.com/",
    "http://{canary}&@example.com/",
    "http://{canary};@example.com/",
    "http://{canary} @example.com/",
    "http://{canary}\t@example.com/",
    "http://{canary}\n.example.com/",
    "http://{canary}\r\nHost:%20example.com/",
    "http://{canary}\x00.example.com/",
    "http://{canary}%00.example.com/",
    "http://{canary}%0d%0a.example.com/",
    "http://exa\tmple.com@{canary}/",
    " http://{canary}/",
    "http:// {canary}/",
    "http:/{canary}/",
    "http:{canary}/",
    "http:\\\\{canary}/",
    "http:////{canary}/",
    "http:///{canary}/",
    "//{canary}/",
    "HTTP://{canary}/",
    "hTTp://{canary}/",
    "https:http://{canary}/",
    "http+unix://{canary}/",
    "file://{canary}/etc/passwd",
    "gopher://{canary}/_",
    "dict://{canary}/",
    "ftp://{canary}/",
    "jar:http://{canary}!/",
    "url:http://{canary}/",
    "http://[{canary}]/",
    "http://[{canary}/",
    "http://{canary}]/",
    # ports
    "http://127.0.0.1:{port}:80/",
    "http://127.0.0.1:80:{port}/",
    "http://127.0.0.1: {port}/",
    "http://127.0.0.1:+{port}/",
    "http://127.0.0.1:-{port}/",
    "http://127.0.0.1:0{port}/",
    "http://127.0.0.1:{port}@example.com:{port}/",
    "http://127.0.0.1:{port}#:80/",
    "http://127.0.0.1:{port}?:80/",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:{port}.example.com/",
    # dots and cases
    "http://127.0.0.1.:{port}/",
    "http://127.0.0.1..:{port}/",
    "http://.127.0.0.1:{port}/",
    "http://127..0.0.1:{port}/",
    "http://127。0。0。1:{port}/",
    "http://127．0．0．1:{port}/",
    "http://127｡0｡0｡1:{port}/",
    "http://１２７.０.０.１:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://𝟏𝟐𝟕.𝟎.𝟎.𝟏:{port}/",
    "http://١٢٧.٠.٠.١:{port}/",
    "http://127%2e0%2e0%2e1:{port}/",
    "http://127%E3%80%820%E3%80%820%E3%80%821:{port}/",
    "http://%31%32%37.0.0.1:{port}/",
    "http://127.0.0.1%20:{port}/",
    "http://127.0.0.1\u00ad:{port}/",
    "http://127\u200b.0.0.1:{port}/",
    "http://127.0.0.\u20601:{port}/",
    # names of the loopback and of metadata services
    "http://localhost:{port}/",
    "http://LOCALHOST:{port}/",
    "http://LocalHost.:{port}/",
    "http://localhost.localdomain:{port}/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{port}/",
    "http://ｌｏｃａｌｈｏｓｔ:{port}/",
    "http://loca\u00adlhost:{port}/",
    "http://LOCALHOſT:{port}/",
    "http://localhost%00:{port}/",
    "http://loc%61lhost:{port}/",
    "http://ip6-localhost:{port}/",
    "http://127.0.0.1.nip.io:{port}/",
    "http://localtest.me:{port}/",
    "http://rebind.attacker.example:{port}/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://metadata/",
    "http://instance-data/latest/meta-data/",
    # IPv6 and its disguises
    "http://[::1]:{port}/",
    "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::FFFF:7F00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
    "http://[::1%25lo]:{port}/",
    "http://[::1%lo]:{port}/",
    "http://[fe80::1%25eth0]:{port}/",
    "http://[::1]]:{port}/",
    "http://[[::1]]:{port}/",
    "http://[::1].example.com:{port}/",
    "http://example.com[::1]:{port}/",
    "http://[v1.127.0.0.1]:{port}/",
    "http://[]:{port}/",
    "http://::1:{port}/",
    "http://[::１]:{port}/",
    "http://[::ffff:127.0.0.0x1]:{port}/",
    "http://[::ffff:0177.0.0.1]:{port}/",
    # nothing at all
    "http://",
    "http://:{port}/",
    "http://?x",
    "http://#x",
    "http://%/",
    "http://*:{port}/",
    "http://$HOST:{port}/",
    "http://{{127.0.0.1}}:{port}/",
    "http://127.0.0.1,example.com:{port}/",
    "http://127.0.0.1|example.com:{port}/",
)


def numbers(text: str) -> Iterator[str]:
    """One IPv4 address in the ways that C libraries read it."""
    address = IPv4Address(text)
    number, (a, b, c, d) = int(address), address.packed
    yield from (text, f"{text}.", str(number), hex(number), f"0X{number:X}", f"0{number:o}", f"0x{number:016x}")
    yield from (f"{a}.{b}.{c * 256 + d}", f"{a}.{b * 65536 + c * 256 + d}", f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}")
    yield from (f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"00{a:o}.{b}.{c}.{d}", f"{a}.0x{b:x}.0{c:o}.{d}", f"0{a}.{b}.{c}.{d}")


def carriers(text: str) -> Iterator[str]:
    """IPv6 addresses that carry an IPv4 one."""
    number = int(IPv4Address(text))
    yield from (f"::ffff:{text}", f"::ffff:0:{text}", f"::{text}", f"64:ff9b::{text}", f"64:ff9b:1::{text}")
    yield str(IPv6Address((0x2002 << 112) | (number << 80) | 1))
    yield str(IPv6Address((0x20010000 << 96) | (~number & 0xFFFFFFFF)))


def hostile_urls(port: int) -> list[str]:
    """All of them, with the port of a canary that must never be reached."""
    urls = [trick.format(canary=f"127.0.0.1:{port}", port=port) for trick in TRICKS]
    urls += [f"{scheme}://{text}:{port}/" for text in FORBIDDEN_V4 for scheme in ("http", "https")]
    urls += [f"http://[{text}]:{port}/" for text in FORBIDDEN_V6]
    for text in ("127.0.0.1", "0.0.0.0", "169.254.169.254", "10.0.0.1", "192.168.1.1", "172.17.0.1", "100.64.0.1"):
        urls += [f"http://{form}:{port}/" for form in numbers(text)]
        urls += [f"http://[{form}]:{port}/" for form in carriers(text)]
    return list(dict.fromkeys(urls))
