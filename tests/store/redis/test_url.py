"""Server URLs: every form is read right, every mistake is named, and no secret is ever shown."""

import pytest

from mainspring.model.errors import InvalidInput
from mainspring.store.redis.url import ClusterEndpoint, Endpoint, SentinelEndpoint, Tls, parse_url, safe_url


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://localhost", Endpoint()),
        ("redis://", Endpoint()),
        ("redis:///3", Endpoint(db=3)),
        ("redis://example.org:7000/2", Endpoint("example.org", 7000, db=2)),
        ("redis://example.org?db=2", Endpoint("example.org", db=2)),
        ("redis://[::1]:7000", Endpoint("::1", 7000)),
        ("redis://[fe80::1]", Endpoint("fe80::1")),
        ("redis://:secret@h", Endpoint("h", password="secret")),
        ("redis://ann:p%40ss%2F%3A%23@h:1/1", Endpoint("h", 1, user="ann", password="p@ss/:#", db=1)),
        ("redis://ann:a:b@h", Endpoint("h", user="ann", password="a:b")),
        ("rediss://h", Endpoint("h", tls=Tls())),
        (
            "rediss://h?ca=/etc/ca.pem&cert=c&key=k%20k",
            Endpoint("h", tls=Tls(ca="/etc/ca.pem", cert="c", key="k k")),
        ),
        ("unix:///run/a%20b@c.sock", Endpoint(path="/run/a b@c.sock")),
        (
            "unix:///run/s?user=ann&password=p%26x&db=4",
            Endpoint(path="/run/s", user="ann", password="p&x", db=4),
        ),
    ],
)
def test_a_single_server_url_is_read(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


def test_a_cluster_url_names_all_seeds_with_the_same_credentials() -> None:
    assert parse_url("rediss+cluster://ann:x@a:1,[::1]:2,c") == ClusterEndpoint(
        tuple(
            Endpoint(host, port, user="ann", password="x", tls=Tls())
            for host, port in (("a", 1), ("::1", 2), ("c", 6379))
        )
    )


def test_a_sentinel_url_keeps_the_sentinels_credentials_apart_from_the_servers() -> None:
    url = "redis+sentinel://ann:x@a:1,b/main%20one/5?sentinel_user=guard&sentinel_password=y"
    assert parse_url(url) == SentinelEndpoint(
        sentinels=(
            Endpoint("a", 1, user="guard", password="y"),
            Endpoint("b", 26379, user="guard", password="y"),
        ),
        master="main one",
        primary=Endpoint(user="ann", password="x", db=5),
    )


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:6379", "must start with one of"),
        ("http://hunter2@h", "must start with one of"),
        ("redis://h:0", "port"),
        ("redis://h:70000", "port"),
        ("redis://user:hunter2", "port"),
        ("redis://h/x", "database"),
        ("redis://h/-1", "database"),
        ("redis://a,b", "redis\\+cluster"),
        ("redis://::1", "IPv6"),
        (f"redis://{'a' * 64}.example", "invalid host name"),
        ("redis://a..b", "invalid host name"),
        ("redis+cluster://h,\0", "invalid host name"),
        ("redis://:\ud800@h", "surrogate"),
        ("unix:///run/a%00b", "NUL in the path"),
        ("redis://ann@h", "no password"),
        ("redis://ann:hun/ter2@h", "percent-encode"),
        ("redis://ann:hun?ter2@h", "percent-encode"),
        ("redis://ann:hun#ter2@h", "%23"),
        ("redis://h?ca=x", "rediss"),
        ("redis://h?pass=hunter2", "options"),
        ("rediss://h?verify=none", "options"),
        ("rediss://h?ca", "without a value"),
        ("unix://run/s", "three slashes"),
        ("unix:///", "three slashes"),
        ("redis+cluster://h/1", "only database 0"),
        ("redis+sentinel://h:1", "master's name"),
        ("redis+sentinel://h/m?sentinel_user=x", "sentinel_password"),
    ],
)
def test_a_wrong_url_is_explained_without_its_secret(url: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        parse_url(url)
    for secret in ("hunter2", "ter2"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://ann:hunter2@h:1/2", "redis://***@h:1/2"),
        ("redis://:hunter2@[::1]:1", "redis://***@[::1]:1"),
        ("redis://ann:hun/ter2@h", "redis://***@h"),
        ("redis://ann:hun@ter2@h", "redis://***@h"),
        ("redis://ann:hun?ter2@h", "redis://***@h"),
        ("redis://ann:hun#ter2@h", "redis://***@h"),
        ("redis://ann:hunter2", "redis://ann:***"),
        ("redis+cluster://x:hunter2@a:1,b:2", "redis+cluster://***@a:1,b:2"),
        ("unix:///run/s?password=hunter2&db=1", "unix:///run/s?password=***&db=1"),
        ("unix:///run/s?password=a&hunter2", "unix:///run/s?password=***&***"),
        ("redis+sentinel://h/m?sentinel_password=hunter2", "redis+sentinel://h/m?sentinel_password=***"),
        ("hunter2", "***"),
    ],
)
def test_a_url_in_a_log_has_no_secret(url: str, shown: str) -> None:
    assert safe_url(url) == shown


def test_a_printed_endpoint_has_no_secret() -> None:
    for url in (
        "redis://ann:hunter2@h",
        "redis+cluster://ann:hunter2@h",
        "redis+sentinel://ann:hunter2@h/m?sentinel_password=hunter2",
    ):
        assert "hunter2" not in repr(parse_url(url))
