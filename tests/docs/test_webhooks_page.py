"""The statements of the page on webhooks hold."""

import base64
import re
import tomllib
from pathlib import Path

import pytest

from mainspring.config.config import Config
from mainspring.model.targets.named import Plain
from mainspring.model.targets.webhook import Basic, Bearer, Webhook, read_webhook
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "webhooks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def load(folder: Path, text: str) -> Config:
    file = folder / "mainspring.toml"
    file.write_text(text)
    return Config.load({"config": str(file)}, {})


def test_the_targets_on_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "secrets"
    folder.mkdir()
    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    for name, text in (("token", "t0ken"), ("signing", f"{secret}\n{secret}"), ("password", "hunter2")):
        (folder / name).write_text(text + "\n")
    config = load(tmp_path, blocks("toml")[0])
    orders, ledger = config.targets["orders"], config.targets["ledger"]
    assert isinstance(orders, Webhook)
    assert isinstance(ledger, Webhook)
    assert (orders.auth, orders.secrets, orders.timeout_s) == (Bearer("t0ken"), (secret, secret), 5.0)
    assert (ledger.auth, ledger.ca_file) == (Basic("mainspring", "hunter2"), "secrets/authority.pem")
    assert config.targets["lines"] == Plain("log:")
    assert config.http_timeout_s == 10.0


def test_the_allow_list_on_the_page_is_read(tmp_path: Path) -> None:
    text = blocks("toml")[1]
    assert load(tmp_path, text).http_allow == tuple(tomllib.loads(text)["http_allow"])


def test_every_setting_of_a_webhook_is_on_the_page() -> None:
    with pytest.raises(ValueError, match="; use ") as caught:
        read_webhook({"nothing": 1})
    for name in str(caught.value).partition("; use ")[2].split(", "):
        assert f"`{name}`" in PAGE, name
