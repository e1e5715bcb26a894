"""Settings of webhooks and named targets, and the secrets that are not shown."""

import base64
from pathlib import Path
from typing import Any

import pytest

from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Dead, Done, Response, Retry
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.flow import Limit, Rate
from mainspring.model.targets.named import Plain, Targets
from mainspring.model.targets.webhook import Basic, Bearer, Webhook, read_webhook, webhook_table

URL = "https://shop.example/hooks"
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
FULL: dict[str, Any] = {
    "url": URL,
    "method": "PUT",
    "headers": {"X-Shop": "1"},
    "timeout": "2s",
    "auth": {"user": "u", "password": "hunter2"},
    "ca_file": "/etc/shop.pem",
    "secrets": [SECRET],
    "response_bytes": 65536,
    "gone_disables": True,
    "concurrency": 4,
    "rate": 2.5,
}


def test_a_webhook_can_be_written_as_a_table_and_read_again() -> None:
    hook = read_webhook(FULL)
    assert hook == Webhook(
        url=URL,
        method="PUT",
        headers=(("X-Shop", "1"),),
        timeout_s=2.0,
        auth=Basic("u", "hunter2"),
        ca_file="/etc/shop.pem",
        secrets=(SECRET,),
        response_bytes=65536,
        gone_disables=True,
        concurrency=4,
        rate=2.5,
    )
    assert read_webhook(webhook_table(hook)) == hook
    plain = Webhook(URL, auth=Bearer("token"))
    assert read_webhook(webhook_table(plain)) == plain


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"url": "https://"}, "names no host"),
        ({"url": 5}, "url: expected a string"),
        ({"ulr": URL}, "ulr is not a setting of a webhook; use url"),
        ({"method": "post"}, "method is 'post'; use one of POST"),
        ({"timeout": 5}, "timeout: expected a duration"),
        ({"timeout": "11m"}, "timeout is 660"),
        ({"timeout": "0s"}, "timeout is 0"),
        ({"headers": ["a"]}, "headers: expected a table"),
        ({"headers": {"Host": "x"}}, "Host is set by Mainspring"),
        ({"headers": {"mainspring-id": "x"}}, "mainspring-id is set by Mainspring"),
        ({"headers": {"Webhook-Id": "x"}}, "Webhook-Id is set by Mainspring"),
        ({"headers": {"a b": "x"}}, "not a valid header name"),
        ({"headers": {"A": "x", "a": "y"}}, "a is given twice"),
        ({"headers": {"A": "x\r\nHost: y"}}, "printable ASCII"),
        ({"headers": {"A": "grüße"}}, "printable ASCII"),
        ({"headers": {"A": 1}}, "headers.A: expected a string"),
        ({"headers": {"Authorization": "x"}}, "keep one"),
        ({"auth": {"user": "u"}}, "give user and password, or bearer; not user"),
        ({"auth": {"user": "u:v", "password": "p"}}, "holds a colon"),
        ({"auth": {"bearer": "a b"}}, "bearer token is empty or holds spaces"),
        ({"url": "http://shop.example/"}, "for an https:// address only"),
        ({"ca_file": ""}, "give a file name"),
        ({"secrets": ["hunter2"]}, "must start with 'whsec_'"),
        ({"secrets": ["whsec_hunter2!"]}, "not base64"),
        ({"secrets": ["whsec_aHVudGVyMg=="]}, "has 7 bytes; the specification requires 24 to 64"),
        ({"secrets": 5}, "secrets: expected a list"),
        ({"response_bytes": 65537}, "response_bytes is 65537"),
        ({"response_bytes": "1"}, "expected a whole number"),
        ({"gone_disables": 1}, "expected true or false"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": 0}, "rate: 0 a second"),
        ({"rate": True}, "rate: True is not a rate"),
    ],
)
def test_a_wrong_webhook_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_webhook(FULL | change)
    assert reason in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("given", [50, 50.0, "50/s", "100/s burst 50", Rate(100, burst=50)])
def test_a_rate_may_be_a_number_a_text_or_a_rate_and_keeps_its_burst(given: Rate | float | str) -> None:
    made = Targets({"shop": Webhook(URL, rate=given)})
    expected = {"target:shop": Limit(Rate.read(given))}
    assert made.limits() == expected
    assert Targets.read(made.tables()).limits() == expected
    assert Targets.read({"shop": {"url": URL, "rate": given}}).limits() == expected


def test_a_value_that_is_no_rate_of_a_webhook_is_refused() -> None:
    for wrong in ("fast", True, 0, -1):
        with pytest.raises(InvalidInput, match="rate"):
            Webhook(URL, rate=wrong)


def test_a_webhook_and_an_address_have_the_same_limits() -> None:
    config = Config(
        targets=Targets.read(
            {
                "hook": {"url": URL, "rate": "100/s burst 50", "concurrency": 3},
                "topic": {"address": "kafka:ticks", "rate": "100/s burst 50", "concurrency": 3},
            }
        )
    )
    assert set(config.targets.limits().values()) == {Limit(Rate(100, burst=50), 3)}


def test_secrets_are_not_in_the_repr() -> None:
    hook = Webhook(URL + "?key=hunter2", headers=(("X-Key", "hunter2"),), auth=Basic("u", "hunter2"), secrets=(SECRET,))
    config = Config(targets=Targets({"shop": hook}))
    for shown in (repr(hook), repr(Bearer("hunter2")), repr(config)):
        assert "hunter2" not in shown
        assert SECRET not in shown
    assert "X-Key" in repr(hook)
    assert "shop" in repr(config)


def test_the_default_authorization_may_be_a_header() -> None:
    assert Webhook(URL, headers=(("Authorization", "Key x"),)).auth is None


# -- named targets ---------------------------------------------------------------------------------------------


def test_targets_are_read_from_tables_and_written_again() -> None:
    targets = Targets.read({"shop": FULL, "ticks": {"address": "kafka:ticks"}})
    assert targets["ticks"] == Plain("kafka:ticks")
    assert targets["shop"].address == URL
    assert Targets.read(targets.tables()) == targets
    assert hash(Targets.read(targets.tables())) == hash(targets)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"shop": 5}, "shop: expected a table"),
        ({"shop": {}}, "shop: give exactly one of url, address"),
        ({"shop": {"url": URL, "address": "log:"}}, "shop: give exactly one of url, address"),
        ({"shop": {"url": "x"}}, "shop: the address 'x'"),
        ({"shop": {"address": "nowhere"}}, "shop: target 'nowhere' has no known scheme"),
        ({"shop": {"address": "target:other"}}, "is another named target"),
        ({"shop": {"address": "queue:mail/send"}}, "shop: address 'queue:mail/send' is run by workers"),
        ({"shop": {"address": "command:backup"}}, "its rules under [queue.<name>] or [commands.<name>]"),
        ({"shop": {"address": "log:", "method": "GET"}}, "method is not a setting of a target with an address"),
        ({"a b": {"address": "log:"}}, "the name of a target is 'a b'"),
    ],
)
def test_a_wrong_target_is_refused_with_its_name(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Targets.read(tables)
    assert reason in str(caught.value)


# -- settings --------------------------------------------------------------------------------------------------


def settings_file(folder: Path, text: str) -> Config:
    file = folder / "mainspring.toml"
    file.write_text(text)
    return Config.load({"config": str(file)}, {})


def test_settings_of_webhooks_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    config = settings_file(tmp_path, 'http_allow = ["10.0.0.0/8", "hooks.internal"]\nhttp_timeout = "3s"\n')
    assert (config.http_allow, config.http_timeout_s) == (("10.0.0.0/8", "hooks.internal"), 3.0)
    environ = {"MAINSPRING_HTTP_ALLOW": "10.0.0.0/8, ::1", "MAINSPRING_HTTP_CONCURRENCY": "3"}
    config = Config.load({}, environ)
    assert (config.http_allow, config.http_concurrency) == (("10.0.0.0/8", "::1"), 3)
    assert Config.load({"http_allow": "192.168.1.1"}, environ).http_allow == ("192.168.1.1",)


def test_secrets_of_a_target_can_be_in_files(tmp_path: Path) -> None:
    (tmp_path / "signing").write_text(f"{SECRET}\n{SECRET}\n")
    (tmp_path / "token").write_text("hunter2\n")
    text = f'[targets.shop]\nurl = "{URL}"\nsecrets_file = "{tmp_path}/signing"\n'
    hook = settings_file(tmp_path, text + f'auth = {{ bearer_file = "{tmp_path}/token" }}\n').targets["shop"]
    assert hook == Webhook(URL, auth=Bearer("hunter2"), secrets=(SECRET, SECRET))


def test_the_settings_reach_another_process_by_its_environment(tmp_path: Path) -> None:
    config = Config(targets=Targets.read({"shop": FULL}), http_allow=("10.0.0.0/8", "hooks.internal"))
    assert Config.load({}, config.to_environ()) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('http_allow = ["10.0.0.1/8"]', "'10.0.0.1/8' is not a network: 10.0.0.1/8 has host bits set"),
        ('http_allow = ["a b"]', "'a b' is neither a network"),
        ("http_allow = 5", "expected a list of texts"),
        ('http_timeout = "0s"', "http_timeout_s is 0.0"),
        ('max_timeout = "10s"', "http_timeout is 15 s, and max_timeout 10 s"),
        ('max_timeout = "20s"\n[targets.a]\nurl = "https://a/"\ntimeout = "30s"', "timeout of [targets.a] is 30 s"),
        ("targets = 5", "expected a table of tables"),
        ('[targets.shop]\nurl = "x"', "targets: shop: the address 'x'"),
        ('[targets.shop]\nurl = "https://a.example/"\nsecrets_file = "/nowhere/s"', "shop.secrets_file: cannot read"),
        ('[targets.shop]\nurl = "https://a.example/"\nsecrets = []\nsecrets_file = "x"', "are both set"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_file(tmp_path, text)
    assert reason in str(caught.value)


def test_targets_in_the_environment_are_json() -> None:
    config = Config.load({}, {"MAINSPRING_TARGETS": '{"ticks": {"address": "log:"}}'})
    assert config.targets["ticks"] == Plain("log:")
    with pytest.raises(ConfigError, match="MAINSPRING_TARGETS: "):
        Config.load({}, {"MAINSPRING_TARGETS": "{"})


@pytest.mark.parametrize(
    ("config", "reached"),
    [
        (Config(), True),
        (Config(host="::1"), True),
        (Config(host="0.0.0.0"), False),
        (Config(redis_url="redis://localhost"), False),
        (Config(access="keys"), False),
        (Config(access="keys", http_allow=("127.0.0.0/8",)), True),
    ],
)
def test_only_a_node_that_serves_loopback_alone_may_reach_loopback(config: Config, reached: bool) -> None:
    assert ("127.0.0.0/8" in config.http_reach) == reached


# -- outcomes --------------------------------------------------------------------------------------------------


def test_a_kept_answer_changes_nothing_about_an_outcome() -> None:
    answer = Response(200, (("a", "b"),), b"ok", 3)
    assert [Done(answer), DONE, Done()].count(DONE) == 3
    assert Retry("x", response=answer) == Retry("x")
    assert Dead("x", response=answer) == Dead("x")
    assert Retry("x") != Retry("x", untried=True)
