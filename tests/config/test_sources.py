"""Every setting knows its source; secrets can be in a file, and are never shown."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from mainspring.api.auth import KeyRing
from mainspring.config.config import Config
from mainspring.config.settings import SECRETS, SETTINGS, read_sources
from mainspring.model.errors import ConfigError
from tests.support.serving import run

SECRET = "hunter2"
FILE = f"""# of the shop
namespace = "file"
redis_url = "redis://:{SECRET}@host"

[kafka]
"sasl.password" = "{SECRET}"

[targets.hook]
url = "https://example.com/"
auth = {{user = "u", password = "{SECRET}"}}

[commands.backup]
argv = ["backup"]
env = {{TOKEN = "{SECRET}"}}

[retry]
# how long
base = "2s"
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run("config", "show", *flags, cwd=folder, **environ)


def test_each_value_remembers_its_source(tmp_path: Path) -> None:
    (tmp_path / "mainspring.toml").write_text(FILE)
    given = read_sources({"port": "9000", "host": None}, {"MAINSPRING_NAMESPACE": "env", "REDIS_URL": "redis://b"})
    assert {name: one.where for name, one in given.items()} == {
        "namespace": "environment MAINSPRING_NAMESPACE",
        "redis_url": "environment REDIS_URL",
        "kafka": "mainspring.toml [kafka] line 5",
        "targets": "mainspring.toml [targets] line 8",
        "commands": "mainspring.toml [commands] line 12",
        "retry_base": "mainspring.toml line 18",
        "port": "flag --port",
    }


def test_config_show_prints_every_setting_its_source_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "mainspring.toml").write_text(FILE)
    ended = show(tmp_path, "--json", "--port", "9000", MAINSPRING_LEASE="9s")
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert set(shown) == set(SETTINGS)
    assert shown["port"] == {"value": 9000, "from": "flag --port"}
    assert shown["lease"] == {"value": "9s", "from": "environment MAINSPRING_LEASE"}
    assert shown["redis_url"] == {"value": "redis://***@host", "from": "mainspring.toml line 3"}
    assert shown["retry_base"] == {"value": "2s", "from": "mainspring.toml line 18"}
    assert shown["timezone"] == {"value": "UTC", "from": "default"}
    plain = show(tmp_path)
    assert SECRET not in ended.stdout + plain.stdout
    assert len(plain.stdout.splitlines()) == 1 + len(SETTINGS)
    assert len(show(tmp_path, "--changed").stdout.splitlines()) == 1 + 6


def test_config_show_refuses_what_is_no_setting(tmp_path: Path) -> None:
    ended = show(tmp_path, "--prot", "1")
    assert (ended.returncode, ended.stderr) == (2, "mainspring: option --prot is not a setting; did you mean port?\n")
    assert "needs a value" in show(tmp_path, "--port").stderr
    assert "is no option" in show(tmp_path, "port").stderr


@pytest.mark.parametrize("name", SECRETS)
def test_every_secret_can_be_in_a_file(tmp_path: Path, name: str) -> None:
    values = {
        "redis_url": f"redis://:{SECRET}@host",
        "api_token": SECRET,
        "kafka": json.dumps({"sasl.password": SECRET}),
        "targets": json.dumps({"hook": {"url": "https://example.com/", "auth": {"bearer": SECRET}}}),
        "notify": json.dumps({"ops": {"url": "https://example.com/", "auth": {"bearer": SECRET}}}),
        "watchdog_url": f"https://example.com/{SECRET}",
        "commands": json.dumps({"backup": {"argv": ["backup"], "env": {"TOKEN": SECRET}}}),
    }
    file = tmp_path / "secret"
    file.write_text(values[name] + "\n")
    variable = f"MAINSPRING_{name.upper()}"
    by_value = Config.load({}, {variable: values[name]})
    assert by_value != Config()
    assert Config.load({}, {variable + "_FILE": str(file)}) == by_value
    (tmp_path / "mainspring.toml").write_text(f'{name}_file = "{file}"\n')
    assert Config.load({}, {}) == by_value
    assert SECRET not in repr(by_value)
    with pytest.raises(ConfigError, match=f"{variable} and {variable}_FILE are both set"):
        Config.load({}, {variable: values[name], variable + "_FILE": str(file)})


WRONG_FILES = [
    ("missing", None, "cannot read {file}: No such file or directory; write the secret there"),
    ("empty", b"", "the file {file} is empty; write the secret into it"),
    ("blank", b" \n\n", "the file {file} is empty; write the secret into it"),
    ("no text", b"\xff\xfe", "cannot read {file}: it is no text in UTF-8"),
]


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(("content", "told"), [one[1:] for one in WRONG_FILES], ids=[one[0] for one in WRONG_FILES])
def test_an_error_about_a_missing_secret_names_the_variable_and_the_file(
    tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    variable = f"MAINSPRING_{name.upper()}_FILE"
    with pytest.raises(ConfigError, match=re.escape(f"{variable}: {told.format(file=file)}")):
        Config.load({}, {variable: str(file)})
    (tmp_path / "mainspring.toml").write_text(f'{name}_file = "{file}"\n')
    with pytest.raises(ConfigError, match=re.escape(f"mainspring.toml: {name}_file: {told.format(file=file)}")):
        Config.load({}, {})


def test_a_secret_in_the_home_of_an_unknown_user_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="MAINSPRING_KAFKA_FILE: cannot read '~no-such-user/kafka'"):
        Config.load({}, {"MAINSPRING_KAFKA_FILE": "~no-such-user/kafka"})


@pytest.mark.parametrize(("content", "told"), [(None, "cannot read"), ("", "is empty"), ("# none\n", "is empty")])
def test_an_error_about_an_empty_file_of_api_keys_names_its_variable(
    tmp_path: Path, content: str | None, told: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"MAINSPRING_API_KEY_FILE.*{told}.*mainspring key generate") as refused:
        KeyRing("main", file)
    assert str(file) in str(refused.value)


def test_an_unknown_zone_in_the_settings_is_refused() -> None:
    assert Config.load({"timezone": "Europe/Paris"}, {}).timezone == "Europe/Paris"
    with pytest.raises(ConfigError, match="Mars/Olympus"):
        Config(timezone="Mars/Olympus")


def test_a_credential_provider_is_named_or_given_and_never_shown() -> None:
    def login() -> tuple[None, str]:
        return None, SECRET

    given = Config(redis_url="redis://host", credentials=login)
    assert given.links.credentials is login
    assert "credentials" not in repr(given)
    assert "MAINSPRING_CREDENTIALS" not in given.to_environ()
    assert Config(credentials=login).links.credentials is None, "the embedded server has a password of its own"
    named = Config.load({"redis_url": "redis://host"}, {"MAINSPRING_CREDENTIALS": "getpass:getuser"})
    assert named.to_environ()["MAINSPRING_CREDENTIALS"] == "getpass:getuser"
    assert callable(named.links.credentials)
    for text, said in (
        ("tokens", "write module:function"),
        ("no_such_module:f", "cannot be loaded"),
        ("getpass:nothing", "cannot be loaded"),
        ("getpass:__name__", "is of type str, not a function"),
    ):
        with pytest.raises(ConfigError, match=said):
            _ = Config(redis_url="redis://host", credentials=text).links


@pytest.mark.parametrize(
    ("address", "secret", "value"),
    [
        ('api_url = "https://evil.example"', "MAINSPRING_API_TOKEN", "msk_0"),
        ('redis_url = "redis://evil"', "MAINSPRING_CREDENTIALS", "no.such.module:login"),
        ('kafka_url = "kafka://evil"', "MAINSPRING_KAFKA", '{"sasl.password": "secret"}'),
    ],
)
def test_a_secret_is_not_sent_to_an_address_that_the_folder_names(
    tmp_path: Path, address: str, secret: str, value: str
) -> None:
    (tmp_path / "mainspring.toml").write_text(f"{address}\n")
    name = address.partition(" ")[0]
    given = {secret: value}
    refused = run("task", "get", "x", cwd=tmp_path, **given)
    assert refused.returncode == 2
    for part in (
        f"{name} is from mainspring.toml line 1",
        f"environment {secret}",
        "--config mainspring.toml",
        f"MAINSPRING_{name.upper()}",
    ):
        assert part in refused.stderr
    assert (
        "only to the address"
        not in run("task", "get", "x", "--config", "mainspring.toml", cwd=tmp_path, **given).stderr
    )
    there = {f"MAINSPRING_{name.upper()}": address.partition('"')[2].rstrip('"').replace("evil", "127.0.0.1:1/")}
    assert "only to the address" not in run("task", "get", "x", cwd=tmp_path, **given, **there).stderr


def test_a_file_that_names_an_address_and_its_token_is_used(tmp_path: Path) -> None:
    (tmp_path / "mainspring.toml").write_text('api_url = "http://127.0.0.1:1"\napi_token = "msk_0"\n')
    assert "only to the address" not in run("task", "get", "x", cwd=tmp_path).stderr
