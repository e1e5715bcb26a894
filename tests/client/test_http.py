"""The client over HTTP has the calls of commands, and reports a lost or odd answer as what it is."""

import inspect
import re
import socket
import threading
from pathlib import Path

import pytest

from mainspring import cli
from mainspring.client.client import Client
from mainspring.client.dead_letters import DeadLetters
from mainspring.client.http import Api, RemoteClient, RemoteDeadLetters, RemoteSchedules
from mainspring.client.schedules import Schedules
from mainspring.model.errors import ConfigError, InvalidInput, MainspringError, NotConfirmed, Refused, Unavailable

SOURCES = [file.read_text() for file in Path(str(cli.__file__)).parent.glob("*.py") if "remote" not in file.name]


def called(pattern: str) -> set[str]:
    return {name for text in SOURCES for name in re.findall(pattern, text)}


def test_commands_call_nothing_that_only_one_of_the_clients_has() -> None:
    names = called(r"\bclient\.(\w+)\(")
    assert {"put", "cancel_many", "lane_resume", "pause"} <= names
    assert {name for name in names if not hasattr(RemoteClient, name)} == set()
    on_schedules = called(r"\bschedules\.(\w+)\(")
    assert {"add", "edit", "backfill", "rollback"} <= on_schedules
    assert {name for name in on_schedules if not hasattr(RemoteSchedules, name)} == set()
    on_dead = called(r"\bdead\.(\w+)\(")
    assert {"list", "get", "replay", "replay_many", "drop", "drop_many", "export", "count"} == on_dead
    assert {name for name in on_dead if not hasattr(RemoteDeadLetters, name)} == set()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(RemoteClient, Client), (RemoteSchedules, Schedules), (RemoteDeadLetters, DeadLetters)]
)
def test_calls_take_the_same_arguments(ours: type, theirs: type) -> None:
    for name, call in inspect.getmembers(ours, inspect.isfunction):
        if name.startswith("_"):
            continue
        mine = inspect.signature(call).parameters
        there = inspect.signature(getattr(theirs, name)).parameters
        named = [one for one in mine.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        for one in named:
            assert (there[one.name].kind, there[one.name].default) == (one.kind, one.default), (name, one.name)


def answering(reply: bytes) -> str:
    """The URL of a server that says this to the first who asks, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def problem(kind: str, status: int) -> bytes:
    body = b'{"type":"urn:mainspring:problem:%s","status":%d,"detail":"why"}' % (kind.encode(), status)
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (b"", Unavailable, "it may have been done"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", Unavailable, "it may have been done"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", Refused, "does not respond like Mainspring's API"),
        (b"HTTP/1.1 502 x\r\ncontent-length: 2\r\n\r\n[]", Refused, "status 502"),
        (problem("invalid", 400), InvalidInput, "why"),
        (problem("not-confirmed", 503), NotConfirmed, "why"),
        (problem("unauthenticated", 401), Refused, "MAINSPRING_API_TOKEN"),
        (problem("rate", 429), Refused, "why"),
        (problem("something-new", 499), Refused, "why"),
    ],
)
def test_the_reply_decides_the_error(reply: bytes, error: type[MainspringError], words: str) -> None:
    api = Api(answering(reply), namespace="main")
    with pytest.raises(error, match=words):
        api.post("/v1/tasks", target="log:")
    api.close()


@pytest.mark.parametrize(
    "url", ["http://", "https://me:secret@host", "http://host/?a=b", "http://host/#x", "http://host:port", "ftp://host"]
)
def test_an_address_that_cannot_be_one_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Api(url, namespace="main")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "secret", "msk_short", "msk_" + "x" * 30 + "\r\nx: y"])
def test_a_text_that_is_no_key_is_not_sent(token: str) -> None:
    with pytest.raises(ConfigError, match="not an API key"):
        Api("http://127.0.0.1:1", namespace="main", token=token)
