"""Sources of settings, their precedence, and errors about wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from mainspring.cli.config import shown
from mainspring.config.config import Config
from mainspring.model.errors import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_any_source_the_defaults_hold() -> None:
    assert Config.load({}, {}) == Config()
    assert Config().redis_url is None


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "mainspring.toml").write_text('port = 1\nnamespace = "file"\nlease = "9s"\n')
    config = Config.load({"port": 3, "host": None}, {"MAINSPRING_PORT": "2", "MAINSPRING_NAMESPACE": "env"})
    assert (config.port, config.namespace, config.lease_s, config.host) == (3, "env", 9.0, "127.0.0.1")


def test_the_named_file_is_read_and_must_exist(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 7\n")
    assert Config.load({"config": other}, {}).port == 7
    assert Config.load({}, {"MAINSPRING_CONFIG": str(other)}).port == 7
    with pytest.raises(ConfigError, match="cannot read the settings"):
        Config.load({"config": tmp_path / "missing.toml"}, {})


def test_retry_is_a_table_in_the_file_and_flat_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "mainspring.toml").write_text('[retry]\nmax_attempts = 3\nbase = "2s"\n')
    retry = Config.load({}, {"MAINSPRING_RETRY_CAP": "1m", "MAINSPRING_RETRY_JITTER": "none"}).retry
    assert (retry.max_attempts, retry.base_ms, retry.cap_ms, retry.jitter) == (3, 2000, 60_000, "none")


def test_redis_url_is_accepted_but_our_own_name_comes_first() -> None:
    assert Config.load({}, {"REDIS_URL": "redis://a"}).redis_url == "redis://a"
    both = {"REDIS_URL": "redis://a", "MAINSPRING_REDIS_URL": "redis://b"}
    assert Config.load({}, both).redis_url == "redis://b"


def test_the_url_can_be_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("redis://:hunter2@host\n")
    environ = {"MAINSPRING_REDIS_URL_FILE": str(secret)}
    assert Config.load({}, environ).redis_url == "redis://:hunter2@host"
    with pytest.raises(ConfigError, match="both set"):
        Config.load({}, environ | {"MAINSPRING_REDIS_URL": "redis://x"})


def test_roles_come_from_every_source_in_one_order(tmp_path: Path) -> None:
    assert Config().roles == ("scheduler", "api")
    (tmp_path / "mainspring.toml").write_text('roles = ["api"]\n')
    assert Config.load({}, {}).roles == ("api",)
    assert Config.load({}, {"MAINSPRING_ROLES": "api, scheduler"}).roles == ("scheduler", "api")
    assert Config.load({"roles": "scheduler"}, {"MAINSPRING_ROLES": "api"}).roles == ("scheduler",)
    assert Config.load({}, Config(roles=("api",)).to_environ()).roles == ("api",)


@pytest.mark.parametrize(
    ("settings", "said", "near"),
    [
        ({"queue": {"mail": {"concurency": 3}}}, "concurency is not a setting of a queue", "concurrency"),
        ({"queue": {"mail": {"retry": "5 bse=1s"}}}, "bse is not a setting of a retry policy", "base"),
        ({"queue": {"mail": {"retry": {"retrys": 3}}}}, "retrys is not a setting of a retry policy", "retries"),
        ({"targets": {"hook": {"ulr": "https://example.com/"}}}, "ulr is not a setting of a target", "url"),
        ({"targets": {"hook": {"url": "https://example.com/", "timout": "1s"}}}, "timout is not a setting", "timeout"),
        ({"targets": {"hook": {"url": "https://example.com/", "breker": "off"}}}, "breker is not a setting", "breaker"),
        ({"targets": {"log": {"address": "log:", "retri": "3"}}}, "retri is not a setting of a target with", "retry"),
        ({"commands": {"backup": {"argv": ["a"], "timeut": "1s"}}}, "timeut is not a setting of a command", "timeout"),
        ({"breaker": {"failure_rte": 0.3}}, "failure_rte is not a setting of a breaker", "failure_rate"),
    ],
)
def test_a_name_that_no_table_has_is_named_with_the_one_that_was_meant(
    settings: dict[str, Any], said: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*; did you mean {near}\\?"):
        Config(**settings)


def test_a_token_in_the_address_of_ticks_is_neither_in_the_repr_nor_in_config_show() -> None:
    address = "https://example.com/ticks?token=hunter2"
    config = Config(tick_target=address)
    assert config.tick_target == address
    assert "tick_target='https://example.com/ticks?…'" in repr(config)
    assert shown(config, "tick_target") == "https://example.com/ticks?…"


def test_secrets_are_not_in_the_repr() -> None:
    shown = repr(Config(redis_url="redis://user:hunter2@host:6379"))
    assert "hunter2" not in shown
    assert "host:6379" in shown


def test_the_variables_kubernetes_sets_for_a_service_of_our_name_are_left_alone() -> None:
    links = {
        "MAINSPRING_PORT": "tcp://10.0.0.1:8000",
        "MAINSPRING_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "MAINSPRING_SERVICE_HOST": "10.0.0.1",
    }
    assert Config.load({}, links) == Config()


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({}, {"MAINSPRING_PRT": "1"}, "MAINSPRING_PRT is not a setting; did you mean MAINSPRING_PORT?"),
        ({"look_ahed": 1}, {}, "option --look-ahed is not a setting; did you mean look-ahead?"),
        ({}, {"MAINSPRING_ZZZ": "1"}, "MAINSPRING_ZZZ is not a setting"),
        ({}, {"MAINSPRING_PORT": "eighty"}, "MAINSPRING_PORT: expected a whole number, not 'eighty'"),
        ({"lease": "5"}, {}, "option --lease: duration: '5' is not a delay"),
        ({"lease": "0s"}, {}, "lease_s is 0.0; it must lie between 0.5 and 300"),
        ({"port": 70000}, {}, "port is 70000"),
        ({"redis_url": "http://x"}, {}, "must start with one of"),
        ({"namespace": ""}, {}, "namespace"),
        ({"tick_target": "nowhere"}, {}, "no known scheme"),
        ({"log_level": "loud"}, {}, "log_level is 'loud'; use one of debug"),
        ({}, {"MAINSPRING_NOTIFY": "{x"}, "MAINSPRING_NOTIFY: expected a table, or one as JSON in a text: JSON is mal"),
        ({}, {"MAINSPRING_TARGETS": "5"}, "MAINSPRING_TARGETS: expected a table of tables; write [targets.<name>]"),
        ({}, {"MAINSPRING_WATCHDOG_URL": "x"}, "MAINSPRING_WATCHDOG_URL: the address 'x' is not accepted"),
        ({}, {"MAINSPRING_RETRY_JITTER": "some"}, "retry: jitter is 'some'"),
        ({}, {"MAINSPRING_RETRY_MAX_ATTEMPTS": "0"}, "retry: max_attempts is 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(flags, environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "is not valid TOML"),
        ("prot = 1", "mainspring.toml: prot is not a setting; did you mean port?"),
        ("lease = 5", "expected a duration with its unit such as '5s', not 5"),
        ("port = true", "expected a whole number, not True"),
        ("retry = 3", "retry is a table"),
        ('data_dir = ""', "data_dir: it is empty; name a path"),
        ("[retry]\nbas = 1", "retry_bas is not a setting; did you mean retry_base?"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mainspring.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load({}, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": True}, "port: expected a whole number, not True"),
        ({"port": None}, "port: expected a whole number, not None"),
        ({"concurrency": 1.5}, "concurrency: expected a whole number"),
        ({"lease_s": "soon"}, "lease_s: .*'soon'"),
        ({"timezone": 5}, "timezone: expected a text"),
        ({"redis_url": 5}, "redis_url: expected a text"),
        ({"targets": {"a": "log:"}}, "targets: a: expected a table"),
        ({"commands": ["x"]}, "commands: expected a table"),
        ({"breaker": None}, "breaker: expected a table"),
        ({"retry": 5}, "retry is of type int; give a RetryPolicy"),
        ({"retry": "banana"}, "retry: "),
        ({"error_handler": "log"}, "error_handler is of type str; give a function"),
    ],
)
def test_settings_given_in_code_are_checked_like_a_file(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**given)


def test_texts_and_tables_given_in_code_are_read_like_those_of_a_file() -> None:
    said: dict[str, Any] = {
        "port": "9000", "lease_s": "10s", "data_dir": "data", "retry": "3 base=2s", "http_allow": "10.0.0.0/8",
        "kafka": {"sasl.password": "hunter2"}, "commands": {"backup": {"argv": ["backup"]}},
    }  # fmt: skip
    config = Config(**said)
    assert (config.port, config.lease_s, config.data_dir) == (9000, 10.0, Path("data"))
    assert (config.retry.max_attempts, config.retry.base_ms, config.http_allow) == (3, 2000, ("10.0.0.0/8",))
    assert config.commands["backup"].argv == ("backup",)
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize(
    "url", ["https://u:pw@host", "https://host/?token=pw", "ftp://host", "https://", "https://h:0"]
)
def test_an_api_url_is_only_an_address(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(api_url=url)
    assert "https://host[:port][/path]" in str(refused.value)
    assert "pw" not in str(refused.value)
