"""Keys, what they are bound to, and rates: pure, with a clock in the test's hand."""

import pytest

from mainspring.api.admin import masked
from mainspring.api.asgi import Problem
from mainspring.api.auth import MOST_CLIENTS, Authenticator, Rates
from mainspring.config.config import Config
from mainspring.model.access import (
    RIGHTS,
    ROLES,
    ApiKey,
    check_namespaces,
    check_patterns,
    hash_of,
    is_token,
    new_token,
)
from mainspring.model.audit import bare
from mainspring.model.errors import ConfigError, InvalidInput


def bound(*targets: str) -> ApiKey:
    return ApiKey("k", "k", "operator", "", 0, targets=check_patterns(targets))


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(is_token(token) and len(token) == len("msk_") + 43 for token in tokens)  # 256 bits
    assert hash_of("msk_a") != hash_of("msk_b")


@pytest.mark.parametrize(
    "text", ["", "msk_", "msk_" + "x" * 21, "key_" + "x" * 43, "msk_" + "x" * 20 + " x", "msk_" + "ü" * 30]
)
def test_text_of_another_form_is_no_token(text: str) -> None:
    assert not is_token(text)


def test_every_role_has_its_rights_and_only_admins_have_all() -> None:
    assert set(ROLES) == {"reader", "submit-only", "operator", "admin"}
    assert [role for role in ROLES if "admin" in RIGHTS[role]] == ["admin"]
    assert RIGHTS["submit-only"] == {"submit"}
    assert RIGHTS["reader"] == {"read"}


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("kafka:orders", True),
        ("kafka:orders-eu", True),
        ("kafka:order", False),
        ("log:", True),
        ("log:x", False),
        ("https://a.example/in/x", True),
        ("https://a.example/in/", True),
        ("https://a.example/in", False),
        ("https://a.example/in/../out", False),
        ("https://a.example/in/%2E%2e/out", False),
        ("https://a.example/in/./x", False),
        ("https://a.example/in/x?up=/../", True),
        ("http://a.example/in/x", False),
        (None, False),
    ],
)
def test_a_key_sees_what_its_patterns_fit(target: str | None, seen: bool) -> None:
    assert bound("kafka:orders*", "log:", "https://a.example/in/*").sees(target) is seen
    assert ApiKey("k", "k", "reader", "", 0).sees(target) is True


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "*",
        "kafka",
        "kafka:*x",
        "smtp:*",
        "https://*",
        "https://a.example*",
        "https://a.example",
        "https://u@a.example/*",
    ],
)
def test_a_pattern_that_would_fit_more_than_is_meant_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInput):
        check_patterns([pattern])


def test_a_key_has_a_bounded_number_of_bindings() -> None:
    assert check_namespaces(["a", "*", "a"]) == ("a", "*")
    with pytest.raises(InvalidInput):
        check_namespaces(["x"] * 101)


# -- rates -----------------------------------------------------------------------------------------------------


def test_a_bucket_fills_with_time_and_says_when_to_come_again() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    for _ in range(5):
        rates.take("a", 0.5, 5)
    with pytest.raises(Problem) as caught:
        rates.take("a", 0.5, 5)
    assert (b"retry-after", b"2") in caught.value.headers
    rates.take("b", 0.5, 5)
    now[0] = 2.0
    rates.take("a", 0.5, 5)
    with pytest.raises(Problem):
        rates.take("a", 0.5, 5)
    now[0] = 1000.0
    for _ in range(5):
        rates.take("a", 0.5, 5)


def test_each_of_several_processes_lets_in_its_part_and_at_least_one() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0], processes=4)
    for _ in range(5):
        rates.take("a", 20, 20)
    with pytest.raises(Problem, match="more than 20 requests a second"):
        rates.take("a", 20, 20)
    now[0] = 0.2
    rates.take("a", 20, 20)
    with pytest.raises(Problem):
        rates.take("a", 20, 20)
    rates.take("b", 1, 1)


def test_buckets_do_not_grow_without_end() -> None:
    rates = Rates(lambda: 0.0)
    for n in range(MOST_CLIENTS + 100):
        rates.take(f"client {n}", 1, 1)
    with pytest.raises(Problem):
        rates.take(f"client {MOST_CLIENTS + 99}", 1, 1)
    rates.take("client 0", 1, 1)  # the one that was quiet for longest was forgotten


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "access", "needs"),
    [
        ("127.0.0.1", "auto", False),
        ("localhost", "auto", False),
        ("::1", "auto", False),
        ("0.0.0.0", "auto", True),
        ("::", "auto", True),
        ("192.0.2.1", "auto", True),
        ("example.com", "auto", True),
        ("127.0.0.1", "keys", True),
        ("0.0.0.0", "open", False),
    ],
)
def test_keys_are_needed_everywhere_but_on_loopback(host: str, access: str, needs: bool) -> None:
    config = Config(host=host, access=access)  # type: ignore[arg-type]
    assert config.needs_keys is needs
    authenticator = Authenticator(config)
    if needs:
        with pytest.raises(Problem, match="an API key is needed"):
            authenticator.without_key({})
    else:
        assert authenticator.without_key({}).role == "admin"


def test_ticks_go_to_kafka_where_there_is_one() -> None:
    assert Config().tick_target == "log:"
    assert Config(kafka_url="kafka://localhost:9092").tick_target == "kafka:ticks"
    assert Config(kafka_url="kafka://localhost:9092", tick_target="null:").tick_target == "null:"


def test_a_certificate_without_its_key_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="go together"):
        Config.load({}, {"MAINSPRING_API_TLS_CERT": "a.pem"})


def test_the_settings_of_the_api_travel_to_other_processes() -> None:
    given = {
        "MAINSPRING_ACCESS": "keys", "MAINSPRING_API_KEY_FILE": "keys.txt", "MAINSPRING_API_RATE": "2.5",
        "MAINSPRING_API_TIMEOUT": "3s", "MAINSPRING_METRICS_OPEN": "true", "MAINSPRING_AUDIT_ENTRIES": "7",
        "MAINSPRING_API_TLS_CERT": "a.pem", "MAINSPRING_API_TLS_KEY": "a.key", "MAINSPRING_API_JSON_DEPTH": "9",
        "MAINSPRING_API_BATCH_LINES": "11", "MAINSPRING_API_BATCH_BYTES": "2048", "MAINSPRING_API_BODY_BYTES": "4096",
        "MAINSPRING_API_CONNECTIONS": "5", "MAINSPRING_IDEMPOTENCY_WINDOW": "2h",
    }  # fmt: skip
    config = Config.load({}, given)
    assert Config.load({}, config.to_environ()) == config


# -- masks -----------------------------------------------------------------------------------------------------


def test_values_that_are_not_known_to_be_harmless_are_masked() -> None:
    table = {
        "url": "https://u:p@a.example/x?k=1#f",
        "method": "POST",
        "auth": {"bearer": "s"},
        "new_setting": "s",
        "secrets": ["s"],
    }
    assert masked(table) == {
        "url": "https://***@a.example/x?***", "method": "POST", "auth": {"bearer": "***"}, "new_setting": "***",
        "secrets": "***",
    }  # fmt: skip
    assert bare("kafka:orders") == "kafka:orders"
