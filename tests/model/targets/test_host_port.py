"""Addresses to listen on."""

import pytest

from mainspring.config.config import Config
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.targets.url import HostPort


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9100", "127.0.0.1", 9100), ("[::1]:9100", "::1", 9100), ("worker.local:0", "worker.local", 0)],
)
def test_host_and_port_are_split_and_joined_again(text: str, host: str, port: int) -> None:
    found = HostPort.parse(text)
    assert (found.host, found.port) == (host, port)
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["9100", ":9100", "localhost", "localhost:", "localhost:65536", "localhost:x", "::1:9100"]
)
def test_a_text_that_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"not an address to listen on; .*9100"):
        HostPort.parse(text)
    with pytest.raises(ConfigError, match=r"not an address to listen on; .*9100"):
        Config(worker_listen=text)
